"""The draw: right distribution, right limits, and nothing but seed and place decides it."""

import pytest
import torch
from scipy import stats

from vivavoce.engine.sampling import (
    GREEDY,
    MAX_TOP_K,
    Generation,
    Sampling,
    SamplingTables,
    SlotDraw,
    gumbel_noise,
    keep_likely,
    penalise,
)
from vivavoce.errors import InputError

CPU = torch.device("cpu")


def draw_many(logits: torch.Tensor, sampling: Sampling, count: int, narrow: bool, seed: int = 3) -> torch.Tensor:
    """The ids drawn at `count` positions from the same logits."""
    tables = SamplingTables.allocate(1, (logits.shape[-1],), CPU)
    tables.settle(0, Generation(sampling, seed=seed))
    slots = torch.zeros(count, dtype=torch.long)
    draw = SlotDraw(tables, slots, torch.arange(count), slots, slots, narrow)
    return draw.sample(0, logits.expand(count, -1))


def test_the_noise_is_gumbel():
    noise = gumbel_noise(torch.tensor([5]), torch.tensor([9]), 1, torch.arange(100_000)[None])
    assert stats.kstest(noise[0].numpy(), "gumbel_r").pvalue > 0.01


def test_noise_of_neighbouring_seeds_positions_channels_and_ids_is_unrelated():
    ids = torch.arange(20_000)[None]
    base = gumbel_noise(torch.tensor([5]), torch.tensor([9]), 0, ids)
    others = [
        gumbel_noise(torch.tensor([6]), torch.tensor([9]), 0, ids),
        gumbel_noise(torch.tensor([5 + 2**32]), torch.tensor([9]), 0, ids),
        gumbel_noise(torch.tensor([5]), torch.tensor([10]), 0, ids),
        gumbel_noise(torch.tensor([5]), torch.tensor([9]), 1, ids),
        base.roll(1, dims=1),
    ]
    for other in others:
        assert abs(torch.corrcoef(torch.cat([base, other]))[0, 1]) < 0.03


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize(
    "sampling", [Sampling(1.0, 0, 1.0), Sampling(0.5, 0, 1.0), Sampling(1.3, 5, 1.0), Sampling(1.0, 6, 0.8)]
)
def test_ids_come_as_often_as_their_chances_say(sampling, narrow):
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.3, -1.0, -2.0, 1.5])
    ids = draw_many(logits, sampling, 20_000, narrow)
    order = logits.argsort(descending=True)
    kept = torch.zeros(8, dtype=torch.bool)
    chances = torch.zeros(8, dtype=torch.float64)
    limit = order[: sampling.top_k or 8]
    chances[limit] = (logits[limit].double() / sampling.temperature).softmax(0)
    before = 0.0
    for token in limit.tolist():
        kept[token] = before < sampling.top_p
        before += float(chances[token])
    chances = torch.where(kept, chances, 0.0) / chances[kept].sum()
    counts = torch.bincount(ids, minlength=8)
    assert (counts[~kept] == 0).all()
    assert stats.chisquare(counts[kept].numpy(), (chances[kept] * 20_000).numpy()).pvalue > 0.001


def test_draws_among_the_best_and_among_all_ids_agree():
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(temperature=0.9, top_k=MAX_TOP_K, top_p=0.97)
    assert torch.equal(draw_many(logits, sampling, 500, True), draw_many(logits, sampling, 500, False))


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = torch.zeros(300)
    logits[[250, 70, 120]] = 4.0
    assert draw_many(logits, GREEDY, 3, True).tolist() == [70, 70, 70]


def test_each_sequence_is_drawn_by_its_own_settings():
    tables = SamplingTables.allocate(3, (50,), CPU)
    tables.settle(0, Generation(GREEDY))
    tables.settle(1, Generation(Sampling(temperature=5.0, top_k=3, top_p=1.0), seed=1))
    tables.settle(2, Generation(Sampling(temperature=1.0, top_k=50, top_p=1e-6), seed=2))
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    best = logits.topk(3).indices
    seen = set()
    for position in range(200):
        slots = torch.tensor([2, 0, 1])
        draw = SlotDraw(tables, slots, torch.full((3,), position), slots, slots, True)
        tiny_p, greedy, top3 = draw.sample(0, logits.expand(3, -1)).tolist()
        assert greedy == tiny_p == best[0]
        seen.add(top3)
    assert seen == set(best.tolist())


def test_the_penalty_divides_positive_and_multiplies_negative_logits():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    seen = torch.tensor([[True, True, False, False]])
    assert penalise(logits, seen, torch.tensor([[2.0]])).tolist() == [[1.0, -4.0, 2.0, -2.0]]


def test_top_p_counts_only_what_top_k_left():
    scores = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    # Over the best two alone, chances are 4/7 and 3/7: 0.5 is reached by the first.
    assert keep_likely(scores, torch.tensor([[2]]), torch.tensor([[0.5]])).tolist() == [[True, False, False, False]]
    assert keep_likely(scores, torch.tensor([[0]]), torch.tensor([[0.5]])).tolist() == [[True, True, False, False]]


def test_history_is_exactly_the_rows():
    tables = SamplingTables.allocate(2, (10, 20), CPU)
    tables.note(torch.tensor([0, 0, 1]), torch.tensor([[1, 11], [2, 12], [3, 13]]))
    assert tables.seen[0].nonzero().tolist() == [[0, 1], [0, 2], [1, 3]]
    assert tables.seen[1].nonzero().tolist() == [[0, 11], [0, 12], [1, 13]]
    tables.store_rows(0, torch.tensor([[5, 15]]))
    assert tables.seen[0].nonzero().tolist() == [[0, 5], [1, 3]]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"repetition_penalty": 0},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(InputError, match=next(iter(settings))):
        Sampling(**settings)


def test_generation_limits_are_checked():
    with pytest.raises(InputError, match="max_new_rows"):
        Generation(max_new_rows=0)
    with pytest.raises(InputError, match="seed"):
        Generation(seed=-1)
    with pytest.raises(InputError, match="2 channels"):
        Generation((GREEDY,)).per_channel(2)
