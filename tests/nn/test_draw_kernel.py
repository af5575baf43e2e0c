"""The draw kernel against the plain draw on the CPU: the same id, whatever the settings and the vocabulary."""

import pytest
import torch

from vivavoce.engine.sampling import GREEDY, Generation, Sampling, SamplingTables, SlotDraw

pytestmark = pytest.mark.gpu
SETTINGS = [
    Generation(Sampling(0.7, 20, 0.95, 1.3), seed=5),
    Generation(GREEDY, seed=1),
    Generation(Sampling(1.5, 64, 1.0), seed=2**62 + 7),
    Generation(Sampling(1.0, 1, 0.5, 2.0), seed=9),
    Generation(Sampling(2.0, 50, 0.3, 0.8), seed=3),
]


def drawers(vocabulary: int, device: str) -> SlotDraw:
    generator = torch.Generator().manual_seed(vocabulary)
    tables = SamplingTables.allocate(len(SETTINGS), (vocabulary, vocabulary), torch.device(device))
    for slot, generation in enumerate(SETTINGS):
        tables.settle(slot, generation)
        ids = torch.randint(vocabulary, (300, 2), generator=generator)
        tables.store_rows(slot, ids.to(device))
    slots = torch.arange(200, device=device) % len(SETTINGS)
    return SlotDraw(tables, slots, torch.arange(200, device=device) * 7, slots, slots, fits_top_k_kernel=True)


@pytest.mark.parametrize("vocabulary", [2500, 16385, 151680])
@pytest.mark.parametrize("channel", [0, 1])
def test_the_drawn_ids_are_those_of_the_plain_draw(vocabulary, channel):
    logits = 3 * torch.randn(200, vocabulary, generator=torch.Generator().manual_seed(channel))
    plain, fast = drawers(vocabulary, "cpu"), drawers(vocabulary, "cuda")
    expected = plain.sample(channel, logits)
    assert (fast.sample(channel, logits.cuda()).cpu() == expected).float().mean() >= 0.99  # a sum's last digit may tip
    expected = plain.choose(channel, logits, top_p_of_all=True)
    assert (fast.choose(channel, logits.cuda(), top_p_of_all=True).cpu() == expected).float().mean() >= 0.99


def test_among_equals_the_lowest_ids_are_kept():
    logits = torch.zeros(200, 5000)
    logits[:, 1000:1030] = 8.0
    drawn = drawers(5000, "cuda").choose(0, logits.cuda()).cpu()
    assert drawn[1::5].eq(1000).all()  # greedy
    assert drawn[0::5].ge(1000).all()
    assert drawn[0::5].lt(1020).all()
