"""Layer sensitivity, mixed precision within a budget, and fine-tuning."""

import pytest
import torch

from tests.quant.checkpoints import write
from vivavoce.errors import CapacityError, InputError
from vivavoce.models.checkpoint import Checkpoint
from vivavoce.quant.calibration import mixture, plot_costs, roundable, scan
from vivavoce.quant.convert import Findings, quantise_folder
from vivavoce.quant.policy import METHODS, policy_for
from vivavoce.quant.qat import FineTuning, fine_tune
from vivavoce.quant.run import QuantizeOptions, quantize
from vivavoce.quant.speech_sets import project_set, scene_set
from vivavoce.quant.subjects import SUBJECTS


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    folder = write("whisper", tmp_path_factory.mktemp("whisper"))
    subject = SUBJECTS["whisper"]
    return folder, subject, subject.load(folder), subject.examples(folder, project_set().items[:2])


def test_layers_are_sorted_by_sensitivity(whisper, tmp_path):
    folder, subject, _, examples = whisper
    model = subject.load(folder)
    with torch.no_grad():
        model.encoder.layers[0].fc2.weight[:, 0] *= (
            40  # one column that decides everything and leaves the rest no steps
        )
    layers = roundable(model, policy_for(folder).parts[0])
    costs = scan(subject, model, layers, examples, "int4")
    assert len(costs) == len(layers) == 32
    assert "layers.0.fc2" in costs[0].layer and costs[0].divergence > 3 * costs[5].divergence
    plot_costs(costs, tmp_path / "costs.png")
    assert (tmp_path / "costs.png").stat().st_size > 5000


def test_scanning_leaves_the_model_as_it_was(whisper):
    folder, subject, model, examples = whisper
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scan(subject, model, roundable(model, policy_for(folder).parts[0])[:3], examples[:1], "int4")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_larger_budget_is_kept_and_brings_the_model_nearer(whisper):
    folder, subject, model, examples = whisper
    layers = roundable(model, policy_for(folder).parts[0])
    whole = sum(layer.bytes_as(None) for layer in layers)
    found = [mixture(subject, model, layers, examples, 0, budget=int(whole * share)) for share in (0.3, 0.5, 1.0)]
    assert [each.bytes <= whole * share for each, share in zip(found, (0.3, 0.5, 1.0), strict=True)] == [True] * 3
    assert found[0].near.divergence > found[1].near.divergence > found[2].near.divergence == 0
    assert set(found[1].schemes.values()) > {"int8"}
    with pytest.raises(CapacityError, match="even at 4 bits"):
        mixture(subject, model, layers, examples, 0, budget=100)
    with pytest.raises(InputError, match="not both or neither"):
        mixture(subject, model, layers, examples, 0)


def test_the_maximum_drop_is_not_exceeded(whisper, tmp_path):
    folder, subject, model, examples = whisper
    layers = roundable(model, policy_for(folder).parts[0])
    found = mixture(subject, model, layers, examples, 0, max_drop=0.03)
    assert found.near.drop <= 0.03
    assert found.bytes < sum(layer.bytes_as(None) for layer in layers)
    quantise_folder(
        folder, tmp_path / "out", METHODS["int4-weight"], policy_for(folder), Findings(schemes=found.schemes)
    )
    kept = {name: read().scheme for name, read in Checkpoint(tmp_path / "out").quantised.items()}
    wanted = {f"model.{name.removeprefix('lm:')}": scheme for name, scheme in found.schemes.items() if scheme}
    assert kept == wanted


@pytest.mark.parametrize("kind", ["whisper", "moss_tts_nano"])
def test_fine_tuning_brings_the_rounded_model_nearer_to_float(kind, tmp_path):
    folder = write(kind, tmp_path / "source")
    subject, policy = SUBJECTS[kind], policy_for(folder)
    items = project_set().items[:3] if kind == "whisper" else scene_set().items[:4]
    examples = subject.examples(folder, items)
    tuned = fine_tune(kind, folder, policy.parts[0], examples, examples, FineTuning(steps=50, rate=5e-4))
    assert tuned.after.divergence < 0.8 * tuned.before.divergence
    findings = Findings(tuned=tuned.weights, training=tuned.training)
    manifest = quantise_folder(folder, tmp_path / "out", METHODS["qat"], policy, findings)
    assert manifest.training["steps"] == 50
    exact = SUBJECTS[kind].load(folder)
    written = SUBJECTS[kind].load(tmp_path / "out")
    norms = [name for name, _ in exact.named_parameters() if "norm" in name or "ln_" in name]
    assert norms
    for name in norms:
        assert torch.equal(exact.get_parameter(name), written.get_parameter(name))


def test_a_budget_goes_through_the_whole_command(tmp_path):
    folder = write("moss_tts_nano", tmp_path / "source")
    manifest = quantize(str(folder), "int4-weight", tmp_path / "out", QuantizeOptions(max_drop=0.2, items=1))
    assert manifest.policy["mixed"] and manifest.calibration["near"]["agreement"] >= 0.8
    assert manifest.calibration["items"] == 1 and len(manifest.calibration["sha256"]) == 64
    with pytest.raises(InputError, match="needs --method int4-weight"):
        quantize(str(folder), "int8-dynamic", tmp_path / "again", QuantizeOptions(budget=10**9))
    with pytest.raises(InputError, match="has no part vocoder"):
        quantize(str(folder), "fp16", tmp_path / "again", QuantizeOptions(parts=["vocoder"]))


def test_what_cannot_be_fine_tuned_says_why(tmp_path):
    folder = write("cosyvoice", tmp_path)
    with pytest.raises(InputError, match="no gradient"):
        fine_tune("cosyvoice", folder, policy_for(folder).parts[0], [], [])
    with pytest.raises(InputError, match="nothing to fine-tune"):
        fine_tune("whisper", folder, policy_for(folder).parts[0], [], [])
