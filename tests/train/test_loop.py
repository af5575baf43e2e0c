"""The training loop: resumed runs, weight averages, budgets and the Muon optimiser."""

import json

import pytest
import torch
from torch import nn

from vivavoce.cpu_speed import is_bfloat16_fast
from vivavoce.errors import CheckpointError, InputError
from vivavoce.train.loop import Budget, Learner, TrainingRun, is_hidden_matrix, orthogonal, plot_curves, with_strides_of


def _learner(average: float | None = 0.9, by_muon: bool = False) -> Learner:
    torch.manual_seed(0)
    width = 16 if by_muon else 8
    hidden = [nn.Linear(width, width)] if by_muon else []
    model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.2), nn.Tanh(), *hidden, nn.Linear(width, 1))

    def loss(batch):
        return {"loss": (model(batch["x"]) - batch["y"]).square().mean()}

    return Learner({"model": model}, loss, 1e-2, average=average, orthogonal=by_muon)


def _run(folder, learner, steps, stop_at=None):
    training_run = TrainingRun(
        folder, {"it": learner}, Budget(steps, warmup=5), seed=3, log_every=10, report=lambda line: None
    )
    for step in training_run:
        x = torch.randn(32, 4, generator=step.generator())
        training_run.record(learner.step({"x": x, "y": x.sum(1, keepdim=True)}, step.rate_share))
        if stop_at is not None and step.number + 1 == stop_at:
            training_run.number += 1
            training_run.save()
            return


def _weights(learner):
    return torch.cat([p.detach().flatten() for p in learner.parameters] + [p.flatten() for p in learner.averaged])


@pytest.mark.parametrize("by_muon", [False, True])
def test_a_run_lowers_the_loss(tmp_path, by_muon):
    _run(tmp_path, _learner(by_muon=by_muon), 200)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.3 * losses[0]


def test_the_log_is_plotted(tmp_path):
    _run(tmp_path, _learner(), 20)
    assert plot_curves(tmp_path).stat().st_size > 1000


@pytest.mark.parametrize("by_muon", [False, True])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, by_muon):
    whole, broken = _learner(by_muon=by_muon), _learner(by_muon=by_muon)
    torch.manual_seed(1)
    _run(tmp_path / "whole", whole, 60)
    torch.manual_seed(1)
    _run(tmp_path / "broken", broken, 60, stop_at=25)
    again = _learner(by_muon=by_muon)
    torch.manual_seed(99)
    _run(tmp_path / "broken", again, 60)
    assert torch.equal(_weights(whole), _weights(again))


def test_a_foreign_state_is_refused(tmp_path):
    _run(tmp_path, _learner(), 5)
    other = nn.Linear(3, 3)
    with pytest.raises(CheckpointError, match="remove it to start again"):
        TrainingRun(tmp_path, {"it": Learner({"model": other}, lambda batch: {}, 1e-3)}, Budget(5))


def test_averages_trail_the_weights_and_swap_back():
    learner = _learner(average=0.5)
    averaged = learner.parameters[0].detach().clone()
    for taken in range(1, 30):
        learner.step({"x": torch.ones(2, 4), "y": torch.zeros(2, 1)}, 1.0)
        averaged += max(0.5, 9 / (9 + taken)) * (learner.parameters[0].detach() - averaged)
    now = learner.parameters[0].detach().clone()
    torch.testing.assert_close(learner.averaged[0], averaged)
    learner.swap_average()
    torch.testing.assert_close(learner.parameters[0].detach(), averaged)
    learner.swap_average()
    assert torch.equal(learner.parameters[0].detach(), now)


def test_the_rate_rises_and_falls_and_time_limits_a_run():
    budget = Budget(steps=1000, seconds=10.0, warmup=10)
    assert budget.rate_share(0, 0.0) < budget.rate_share(9, 0.0)
    assert budget.rate_share(500, 0.0) == pytest.approx(budget.rate_share(500, 5.0))
    assert budget.progress(10, 10.0) == 1.0
    assert budget.rate_share(1000, 0.0) == pytest.approx(0.02)


def test_modules_without_trainable_parameters_are_refused():
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(InputError, match="no parameter of the modules"):
        Learner({"model": frozen}, lambda batch: {}, 1e-3)


@pytest.mark.gpu
def test_a_captured_step_learns_as_an_eager_one_does():
    results = []
    for use_graph in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).cuda()

        def loss(batch, model=model):
            return {"loss": (model(batch["x"]) - batch["y"]).square().mean()}

        learner = Learner({"model": model}, loss, 1e-2, use_graph=use_graph, half=False, average=0.9)
        for number in range(20):
            x = torch.randn(32, 4, generator=torch.Generator().manual_seed(number)).cuda()
            learner.step({"x": x, "y": x.sum(1, keepdim=True)}, 1.0)
        results.append(_weights(learner).cpu())
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)


def test_muon_directions_are_orthogonal():
    matrices = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    for given in (matrices, matrices.mT.contiguous()):
        stretch = torch.linalg.svdvals(orthogonal(given))
        assert stretch.min() > 0.5 and stretch.max() < 1.3
        assert (orthogonal(given) * given).sum((1, 2)).min() > 0  # towards the matrix, not away from it


def test_muon_updates_only_hidden_matrices():
    table, vector, small = torch.zeros(64, 32), torch.zeros(32), torch.zeros(8, 32)
    assert is_hidden_matrix("layers.0.fc1.weight", table)
    taken = [is_hidden_matrix("embed_tokens.weight", table), is_hidden_matrix("text_lm_head.weight", table)]
    taken += [is_hidden_matrix("layers.0.norm.weight", vector), is_hidden_matrix("layers.0.gate.weight", small)]
    assert not any(taken)


def test_gradients_have_the_strides_of_their_parameters():
    books = nn.Parameter(torch.randn(3, 5, 4))
    x = torch.randn(3, 7, 4)
    (gradient,) = torch.autograd.grad(torch.einsum("bnd,bed->bne", x, books).square().sum(), books)
    assert gradient.stride() != books.stride()
    assert with_strides_of(books, gradient).stride() == books.stride()
    assert torch.equal(with_strides_of(books, gradient), gradient)


def test_a_cpu_trains_in_bfloat16_where_asked_and_where_it_is_fast():
    used = []
    layer = nn.Linear(8, 8)

    def loss(batch):
        used.append(layer(batch["x"]).dtype)
        return {"loss": nn.functional.mse_loss(layer(batch["x"]).float(), batch["x"])}

    x, figures = torch.randn(64, 8), []
    for half in (False, True):
        learner = Learner({"layer": layer}, loss, 1e-2, half_on_cpu=half)
        figures += [float(learner.step({"x": x}, 1.0)["loss"]) for _ in range(20)]
    assert used == [torch.float32] * 20 + [torch.bfloat16 if is_bfloat16_fast() else torch.float32] * 20
    assert figures[-1] < figures[20] < figures[0] and layer.weight.dtype == torch.float32
