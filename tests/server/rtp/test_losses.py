"""Speech over a bad network, simulated: what is heard is compared with what is heard over a good one."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.server.rtp.network import Call, Network
from vivavoce.audio.io import Sound
from vivavoce.evaluation.scoring import DNSMOS
from vivavoce.server.rtp.codecs import G722Decoder
from vivavoce.server.rtp.concealment import PitchConcealment

RECORDINGS = Path(__file__).parents[2] / "data" / "english"
NAMES = ("agent-newlocation", "all-circuits-busy-now", "cannot-complete-as-dialed")
RATE = 16_000


@pytest.fixture(scope="module")
def speech():
    return np.concatenate([G722Decoder().decode((RECORDINGS / f"{name}.g722").read_bytes()) for name in NAMES])


def over(network, speech, codec="PCMU", repeats=1):
    call = Call(codec, network)
    for _ in range(repeats):
        call.queue.write(speech)
    return call, call.run(repeats * len(speech) / RATE + 0.5)


def band_levels(samples, size=512, hop=160):
    """Levels in dB of 16 bands of the telephone band, every 10 ms."""
    windows = np.lib.stride_tricks.sliding_window_view(samples, size)[::hop] * np.hanning(size)
    power = np.abs(np.fft.rfft(windows)) ** 2
    edges = (np.geomspace(200, 3_400, 17) * size / RATE).astype(int)
    return 10 * np.log10(np.stack([power[:, a : b + 1].mean(1) for a, b in pairwise(edges)], 1) + 1e-4)


def spectral_distance(clean, other, size=512):
    """Root mean square difference of band levels while there is speech, in dB.

    Each second is aligned for itself: playout skips and repeats silent frames.
    """
    pieces = [aligned(clean, other, begin) for begin in range(0, len(clean) - RATE, RATE)]
    first, second = (np.concatenate([band_levels(each, size) for each in side]) for side in zip(*pieces, strict=True))
    speaking = first.mean(1) > first.mean(1).max() - 35
    return float(np.sqrt(np.mean((first - second)[speaking] ** 2)))


def aligned(clean, other, begin, reach=RATE // 5):
    """A second of one sound, and what is most like it at that time of the other."""
    piece = clean[begin : begin + RATE]
    around = np.pad(other, (reach, RATE + reach))[begin : begin + RATE + 2 * reach]
    lag = int(np.argmax(np.correlate(around, piece, "valid")))
    return piece, around[lag : lag + RATE]


@pytest.mark.parametrize("codec", ["PCMU", "G722", pytest.param("opus", marks=pytest.mark.full)])
def test_five_percent_loss_and_60_ms_of_jitter_change_little(speech, codec):
    _, clean = over(Network(), speech, codec)
    call, heard = over(Network(loss=0.05, jitter=0.06), speech, codec)
    assert len(heard) / RATE == pytest.approx(len(clean) / RATE, abs=0.1)
    assert spectral_distance(clean, heard) < 4.0
    assert 10 * np.log10(np.mean(heard**2) / np.mean(clean**2)) == pytest.approx(0, abs=0.5)
    lost = call.receiver.source.statistics.lost
    assert lost > 10
    assert call.receiver.playout.concealed_seconds < 0.02 * (lost + call.receiver.playout.buffer.late + 5)


@pytest.mark.full
def test_five_percent_loss_and_60_ms_of_jitter_cost_at_most_0_3_of_opinion_score(speech):
    scorer = DNSMOS()
    _, clean = over(Network(), speech)
    _, heard = over(Network(loss=0.05, jitter=0.06), speech)
    scores = [scorer.overall(Sound(samples[None], RATE)) for samples in (clean, heard)]
    assert scores[1] > scores[0] - 0.3


def test_concealment_is_better_than_silence(speech):
    _, clean = over(Network(), speech)
    network = Network(lost=set(range(10, 400, 12)))
    _, heard = over(network, speech)
    call = Call("PCMU", network)
    call.receiver.playout._decoder.conceal = lambda count: np.zeros(count, np.float32)
    call.queue.write(speech)
    with_silence = call.run(len(speech) / RATE + 0.5)
    assert spectral_distance(clean, heard, 256) < 0.6 * spectral_distance(clean, with_silence, 256)


def test_reordered_and_duplicated_packets_change_nothing(speech):
    _, clean = over(Network(delay=0.0), speech)
    call = Call("PCMU", Network(delay=0.0, duplication=0.5))
    call.queue.write(speech)
    held = []

    def swap_some(number, packet):
        """Every tenth packet comes after the next one."""
        if number % 10 == 4:
            held.append(packet)
            return []
        return [packet, held.pop()] if held else [packet]

    heard = call.run(len(speech) / RATE + 0.5, swap_some)
    assert call.dropped.other_source > 50  # the duplicates
    np.testing.assert_array_equal(heard, clean)


@pytest.mark.parametrize("drift", [0.002, pytest.param(-0.002, marks=pytest.mark.full)])
def test_a_sender_with_another_clock_is_followed(speech, drift):
    call, _ = over(Network(drift=drift), speech, repeats=4)  # which makes 62 ms
    assert call.receiver.playout.concealed_seconds < 0.1
    assert abs(call.excess[-1]) < 0.05


def test_on_a_calm_network_the_delay_at_the_start_is_given_up(speech):
    call, _ = over(Network(delay=0.0), speech)
    assert 0 <= call.excess[-1] <= 0.02
    assert call.receiver.playout.concealed_seconds == 0


def test_silence_takes_back_the_delay_of_a_stall(speech):
    call, _ = over(Network(stalls={2.0: 0.3}), speech)
    assert max(call.excess) > 0.1
    assert call.excess[-1] < 0.05
    assert call.receiver.playout.concealed_seconds < 0.2
    assert call.receiver.source.statistics.lost == call.receiver.playout.buffer.late == 0


@pytest.mark.parametrize("rate", [8_000, 16_000])
def test_a_lost_frame_of_a_vowel_is_continued_at_its_pitch(rate):
    time = np.arange(rate) / rate
    vowel = sum(np.sin(2 * np.pi * 130 * harmonic * time) / harmonic for harmonic in range(1, 9)).astype(np.float32) / 4
    concealment, frame = PitchConcealment(rate), rate // 50
    concealment.received(vowel[: 10 * frame])
    made = concealment.lost(frame // 2)
    true = vowel[10 * frame : 10 * frame + frame // 2]
    assert np.corrcoef(made, true)[0, 1] > 0.95
    rest = concealment.lost(4 * frame)
    assert not rest[-frame:].any()  # silent after 60 ms
    joined = concealment.received(vowel[15 * frame : 20 * frame])
    np.testing.assert_array_equal(joined[frame:], vowel[16 * frame : 20 * frame])
