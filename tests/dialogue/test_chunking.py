"""Chunk policies: what they wait for, how they grow, and what a simulated player makes of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vivavoce.audio.chunking import (
    REPLY_SECONDS,
    ChunkGapEstimate,
    ChunkUnit,
    FixedPolicy,
    LeadPolicy,
    next_chunk,
    simulate,
)
from vivavoce.audio.player import PlaybackClock
from vivavoce.errors import InputError

FLOW = ChunkUnit(frames=5, lookahead=3)


def steady(seconds: float):
    return lambda chunk, frames, is_last: seconds


def test_the_player_starts_when_its_buffer_is_full_and_counts_when_it_runs_dry():
    player = PlaybackClock(start_buffer=0.08)
    player.feed(1.0, 0.05)
    assert player.started is None
    player.feed(1.1, 0.05)
    assert player.started == 1.1
    assert player.lead(1.15) == pytest.approx(0.05)
    player.feed(1.3, 0.2)  # dry from 1.2 on
    assert (player.underruns, player.dry_seconds) == (1, pytest.approx(0.1))
    player.finish(1.4)
    player.advance(9.0)
    assert player.lead(9.0) == 0


def test_the_end_of_a_reply_is_played_even_if_it_never_filled_the_buffer():
    player = PlaybackClock(start_buffer=0.08)
    player.feed(0.5, 0.03)
    player.finish(0.6)
    assert player.started == 0.6
    assert player.underruns == 0


def test_time_does_not_go_back():
    player = PlaybackClock()
    player.advance(2.0)
    with pytest.raises(ValueError, match="went back"):
        player.advance(1.0)


def test_the_first_chunk_is_the_smallest_the_decoder_allows():
    policy = LeadPolicy(FLOW)
    assert [next_chunk(policy, waiting, False, 0, 0.0) for waiting in (4, 7, 8, 20)] == [0, 0, 5, 5]


def test_the_first_chunk_may_be_longer_where_that_costs_nothing():
    policy = LeadPolicy(ChunkUnit(5, 3), doubles=True, first_units=2)
    assert next_chunk(policy, 12, False, 0, 0.0) == 0 and next_chunk(policy, 13, False, 0, 0.0) == 10
    assert next_chunk(policy, 8, False, 1, 0.0) == 5


def test_chunks_grow_with_the_lead_and_stop_growing():
    policy = LeadPolicy(FLOW, share=0.5, max_seconds=1.6)
    assert [policy.wanted(3, lead) for lead in (0.0, 0.5, 0.8, 1.6, 2.4, 100.0)] == [5, 5, 5, 10, 15, 20]


def test_a_fixed_policy_is_rounded_up_to_whole_units():
    assert [FixedPolicy(FLOW, 1, 7).wanted(chunk, 9.0) for chunk in (0, 1, 2)] == [5, 10, 10]
    assert [FixedPolicy(ChunkUnit(), 2, 4).wanted(chunk, 0.0) for chunk in (0, 1, 2)] == [2, 4, 4]


def test_a_fast_decoder_never_underruns_and_a_slow_one_is_reported():
    good = simulate(LeadPolicy(FLOW), 200, 0.007, steady(0.03))
    assert good.underruns == 0
    assert good.first_sound == pytest.approx(8 * 0.007 + 0.03)
    slow = simulate(FixedPolicy(FLOW, 5, 5), 200, 0.007, steady(0.5))  # 0.4 s of sound in 0.5 s
    assert slow.underruns > 10
    assert slow.dry_seconds > 1


def test_the_end_of_a_reply_is_cut_like_the_rest():
    policy = FixedPolicy(FLOW, 5, 5)
    sizes = []
    waiting = 22
    while waiting:
        sizes.append(next_chunk(policy, waiting, True, len(sizes), 0.0))
        waiting -= sizes[-1]
    assert sizes == [5, 5, 5, 7]  # the last seven are no chunk and its look-ahead


def test_growing_chunks_need_fewer_passes_than_fixed_ones():
    growing = simulate(LeadPolicy(FLOW), 200, 0.007, steady(0.03))
    fixed = simulate(FixedPolicy(FLOW, 5, 5), 200, 0.007, steady(0.03))
    assert growing.chunks < fixed.chunks * 0.6
    assert growing.first_sound == fixed.first_sound


@given(
    frames=st.integers(1, 120),
    pace=st.floats(0.002, 0.2),
    seconds=st.floats(0.001, 0.3),
    unit=st.builds(ChunkUnit, st.integers(1, 8), st.integers(0, 4)),
    share=st.floats(0.1, 1.0),
)
def test_every_frame_is_decoded_exactly_once(frames, pace, seconds, unit, share):
    sizes = []

    def decode_time(chunk, size, is_last):
        sizes.append(size)
        return seconds

    report = simulate(LeadPolicy(unit, share), frames, pace, decode_time)
    assert sum(sizes) == frames
    assert report.chunks == len(sizes)
    assert all(size % unit.frames == 0 for size in sizes[:-1])
    assert sizes[-1] <= max(sizes[:-1], default=unit.frames) + int(1.6 / 0.08) + unit.lookahead + unit.frames
    assert report.first_sound >= pace


@pytest.mark.parametrize("make", [lambda: LeadPolicy(FLOW, share=0), lambda: FixedPolicy(FLOW, first=0)])
def test_policies_that_make_no_sense_are_refused(make):
    with pytest.raises(InputError):
        make()


def test_a_first_chunk_is_delayed_until_it_lasts_until_the_second():
    gap_estimate = ChunkGapEstimate(margin=0.0)
    gap_estimate.note(0.06, 1)
    assert gap_estimate.wait(0.06, 1) == 0 and gap_estimate.wait(0.3, 4) == 0
    assert gap_estimate.wait(0.02, 1) == pytest.approx(0.04), "what it lacks, and no more"
    assert gap_estimate.wait(0.2, 4) == pytest.approx(0.04)
    for _ in range(40):
        gap_estimate.note(0.16, 8)
    assert gap_estimate.wait(0.17, 8) == 0, "many together cost less each"


def test_waiting_frames_are_decoded_in_one_chunk_where_long_chunks_are_cheap():
    policy = LeadPolicy(ChunkUnit(5, 3), share=0.8, doubles=True, making=1.0)
    assert [next_chunk(policy, waiting, False, 1, 0.3) for waiting in (7, 8, 12, 13, 40)] == [0, 5, 5, 10, 10]
    assert [next_chunk(policy, waiting, False, 1, 1.1) for waiting in (12, 13, 22, 23, 60)] == [0, 10, 10, 20, 20]
    assert next_chunk(policy, 40, False, 0, 0.0) == 5, "a first sound is as short as can be"
    assert next_chunk(policy, 4, True, 3, 1.1) == 4


def test_with_batched_passes_many_replies_do_not_delay_a_first_chunk():
    gap_estimate = ChunkGapEstimate(margin=0.1, is_batched=True)
    gap_estimate.note(0.05, replies=1)
    assert gap_estimate.wait(0.24, replies=64) == 0
    gap_estimate.note(0.4, replies=64)
    assert gap_estimate.wait(0.24, replies=1) == pytest.approx(0.26)
    gap_estimate.note(0.05, replies=64)
    assert 0 < gap_estimate.wait(0.24, replies=64) < 0.26


def test_later_chunks_may_be_longer_than_the_lead_affords_where_short_ones_cost_too_much():
    policy = LeadPolicy(FLOW, share=1.0, max_seconds=0.8, min_later_units=2)
    assert [policy.wanted(chunks, 0.1) for chunks in (0, 1, 2)] == [5, 10, 10]


def test_the_cushion_lasts_until_the_next_chunk_and_is_limited():
    gap_estimate = ChunkGapEstimate()
    assert gap_estimate.cushion(0.8, 8) == pytest.approx(1.6), "nothing is known yet"
    gap_estimate.note(0.2, 4)
    few, many = gap_estimate.cushion(0.8, 4), gap_estimate.cushion(0.8, 8)
    assert gap_estimate.expected(4) < few < 0.8, "chunks come quickly: less than one of them is enough"
    assert gap_estimate.expected(8) < many < 1.6 and many > few
    slow = ChunkGapEstimate()
    slow.note(0.8, 1)
    assert slow.cushion(0.8, 1) == pytest.approx(0.9), "alone at most a chunk and an eighth of it"


def test_the_cushion_holds_what_a_reply_would_lack_where_decoding_is_slower_than_playback():
    gap_estimate = ChunkGapEstimate()
    gap_estimate.note(0.8, 8)
    assert gap_estimate.cushion(0.8, 16) == pytest.approx(2.05 + 0.5 * REPLY_SECONDS), "twice as slow as playback"
    assert gap_estimate.cushion(0.8, 32) == pytest.approx(4.0 + 0.75 * REPLY_SECONDS)
    assert gap_estimate.cushion(0.8, 8) == pytest.approx(1.05), "as fast as playback"


def test_gaps_alone_and_among_many_are_averaged_apart_from_the_replies():
    gap_estimate = ChunkGapEstimate(share=0.5)
    gap_estimate.note(0.3, 1)  # alone, nothing is shared
    gap_estimate.note(0.5, 9)
    assert gap_estimate.expected(5) == pytest.approx(0.4), "the mean gap among the mean number of replies"
    assert gap_estimate.expected(9) == pytest.approx(0.72), "not as long as nine gaps alone"
    assert gap_estimate.expected(0) == gap_estimate.expected(1) > 0
    batched = ChunkGapEstimate(is_batched=True)
    batched.note(0.3, 1)
    assert batched.expected(64) == batched.expected(1) == pytest.approx(0.3)


def test_an_unknown_gap_delays_nothing():
    assert ChunkGapEstimate(margin=0.1).wait(0.0, 8) == 0
    assert ChunkGapEstimate(margin=0.1, is_batched=True).wait(0.0, 8) == 0
