"""The chunk mask against its definition, position by position."""

import pytest
import torch

from vivavoce.nn.attention import EMPTY, KeySpan, attention_bias, visible, visible_slots


def may_look(query, key, chunk, left_chunks, sink):
    """The definition: own chunk and before, within the left window or in the prefix that stays."""
    if key // chunk > query // chunk:
        return False
    return left_chunks is None or key < sink or key // chunk >= query // chunk - left_chunks


@pytest.mark.parametrize("left_chunks", [None, 0, 2])
def test_offline_mask_is_the_definition(left_chunks):
    span = KeySpan(torch.tensor([0]), 20, torch.tensor([6]))
    expected = [[may_look(query, key, 3, left_chunks, 6) for key in range(20)] for query in range(20)]
    assert visible(span, 3, left_chunks)[0].tolist() == expected


@pytest.mark.parametrize("left_chunks", [None, 1, 2])
def test_stream_mask_is_the_definition_where_slots_hold_something(left_chunks):
    starts, sinks = [9, 12, 6], [6, 3, 0]
    span = KeySpan(torch.tensor(starts), 6, torch.tensor(sinks), prefix_slots=6, window_slots=9)
    seen = visible(span, 3, left_chunks)
    for row, (start, sink) in enumerate(zip(starts, sinks, strict=True)):
        keys = [key if key < sink else EMPTY for key in range(6)]
        keys += [key if key >= sink else EMPTY for key in range(start - 9, start)]
        keys += list(range(start, start + 6))
        assert sorted(key for key in keys if key != EMPTY) == list(
            range(max(0, start + 6 - 15) if not sink else 0, start + 6)
        )
        for time in range(6):
            expected = [key != EMPTY and may_look(start + time, key, 3, left_chunks, sink) for key in keys]
            assert seen[row, time].tolist() == expected


def test_bias_is_zero_where_seen_and_minus_infinity_elsewhere():
    seen = torch.tensor([[[True, False, True]]])
    assert attention_bias(seen, torch.float16).tolist() == [[[[0, float("-inf"), 0]]]]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("left_chunks", [0, 1, 4])
@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_ranges_of_slots_are_the_mask(chunk, left_chunks, padded):
    random = torch.Generator().manual_seed(0)
    sinks = torch.randint(0, 6, (50,), generator=random) * chunk
    starts = sinks + torch.randint(0, 9, (50,), generator=random) * chunk
    time, slots, prefix_slots = 3 * chunk, left_chunks * chunk, int(sinks.max())
    ends = starts + torch.randint(1, 2 * time, (50,), generator=random) if padded else None
    span = KeySpan(starts, time, sinks, prefix_slots, slots, ends)
    first, end = visible_slots(span, chunk, left_chunks)
    slot = torch.arange(slots + time)
    in_range = (slot >= first[..., None]) & (slot < end[..., None])
    assert torch.equal(visible(span, chunk, left_chunks)[..., prefix_slots:], in_range)
