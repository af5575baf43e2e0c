"""Many conversations together get the windows that each gets alone."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from scipy.signal import fftconvolve

from tests.dialogue.voices import silence, talk
from vivavoce.audio.echo import EchoGuard
from vivavoce.audio.resample import resample
from vivavoce.audio.vad import RATE, EnergyActivity, voice_activity
from vivavoce.dialogue.front_end import AudioFrontEnd, AudioWindow
from vivavoce.dialogue.front_end_batch import FrontEndBatch, HeardChunk, InputChunk, NoiseChange
from vivavoce.dialogue.output_timeline import OutputTimeline

OUTPUT_RATE = 24_000
SECONDS = 7.0


def sounds(rate: int, seed: int, echo: float) -> tuple[np.ndarray, np.ndarray]:
    """A microphone's signal at its rate, and the output whose echo is in it."""
    noise = np.random.default_rng(seed)
    length = round(SECONDS * RATE)
    played, user = np.zeros(length), np.zeros(length)
    parts = ((played, 1.0, 2.0), (played, 5.0, 1.5), (user, 0.2, 0.7), (user, 2.2, 0.6))
    for number, (place, begin, count) in enumerate(parts):
        part = talk(count, seed=seed + number, level_dbfs=-22)
        start = round((begin + noise.uniform(0, 0.3)) * RATE)
        place[start : start + len(part)] += part[: length - start]
    tail = noise.standard_normal(2000) * np.exp(-np.arange(2000) / 300)
    path = np.concatenate([np.zeros(noise.integers(200, 3000)), [3.0], tail])
    microphone = user + echo * fftconvolve(played, path)[:length] + silence(SECONDS)[:length]
    return resample(microphone.astype("f"), RATE, rate), resample(played.astype("f"), RATE, OUTPUT_RATE)


@dataclass
class Alone:
    """A conversation by the plain code, and the same operations for the batch."""

    rate: int
    seed: int
    echo: float = 0.0
    detectors: tuple = ()
    begins: int = 0
    denoised: tuple[int, int] | None = None
    """The samples at which the suppression of noise begins and ends."""
    taken: int = 0
    heard: list[HeardChunk] = field(default_factory=list)
    batched: list[HeardChunk] = field(default_factory=list)

    def __post_init__(self):
        activity, echo = self.detectors
        self.timeline = OutputTimeline(OUTPUT_RATE, RATE)
        self.front_end = AudioFrontEnd(self.rate, activity, echo, self.timeline.read)
        self.microphone, self.played = sounds(self.rate, self.seed, self.echo)
        self.noise = np.random.default_rng(self.seed)
        self.sent, self.denoises = 0.0, False

    def operations(self) -> list:
        """What comes in one tick: none, one or several chunks of any size, and what is played meanwhile."""
        operations: list = []
        for _ in range(self.noise.integers(0, 3)):
            chunk = self.microphone[self.taken : self.taken + self.noise.integers(1, self.rate // 15)]
            if not len(chunk):
                break
            self.taken += len(chunk)
            now = self.taken / self.rate + self.noise.uniform(0, 0.02)
            if (
                self.denoised is not None
                and (between := self.denoised[0] <= self.taken < self.denoised[1]) != self.denoises
            ):
                self.denoises = between
                operations.append(NoiseChange(0.8 if between else None))
            if self.noise.uniform() < 0.03:
                operations.append(_Call("set_gain", now, float(self.noise.choice([0.25, 1.0]))))
            if self.noise.uniform() < 0.01:
                operations.append(_Call("stop", now))
            while self.sent < now + 0.3:
                piece = self.played[round(self.sent * OUTPUT_RATE) :][: self.noise.integers(400, 6000)]
                if not len(piece):
                    break
                if piece.any():
                    operations.append(_Call("play", self.sent, piece, now))
                self.sent += len(piece) / OUTPUT_RATE
            operations.append(InputChunk(chunk, now))
        for operation in operations:
            if isinstance(operation, InputChunk):
                self.heard.append(HeardChunk(self.front_end.hear(*operation), self.front_end.quiet_ms))
            elif isinstance(operation, NoiseChange):
                self.front_end.reduce_noise(operation.strength)
            else:
                operation(self.timeline)
        return operations

    @property
    def is_over(self) -> bool:
        return self.taken >= len(self.microphone)


class _Call:
    def __init__(self, name, *arguments):
        self.name, self.arguments = name, arguments

    def __call__(self, timeline):
        getattr(timeline, self.name)(*self.arguments)


def process(batch: FrontEndBatch, conversations: list[Alone]) -> None:
    """Run all of them; each joins when its time has come and leaves when its sound is over."""
    streams: dict[int, object] = {}
    tick = 0
    while not all(each.is_over for each in conversations):
        for number, each in enumerate(conversations):
            if each.begins == tick:
                streams[number] = batch.join(each.rate, OUTPUT_RATE)
        work = [(number, conversations[number].operations()) for number in streams]
        results = batch.process([(streams[number], operations) for number, operations in work])
        for (number, _), heard in zip(work, results, strict=True):
            conversations[number].batched += heard
            if conversations[number].is_over:
                batch.leave(streams.pop(number))
        tick += 1


def windows(heard: list[HeardChunk]) -> list[AudioWindow]:
    return [window for chunk in heard for window in chunk.windows]


def compare(each: Alone) -> None:
    assert [len(chunk.windows) for chunk in each.batched] == [len(chunk.windows) for chunk in each.heard]
    assert [chunk.quiet_ms for chunk in each.batched] == [chunk.quiet_ms for chunk in each.heard]
    alone, together = windows(each.heard), windows(each.batched)
    assert [window.quiet_ms for window in together] == [window.quiet_ms for window in alone]
    for first, second in zip(alone, together, strict=True):
        np.testing.assert_allclose(second.samples, first.samples, atol=2e-5)
        assert second.probability == pytest.approx(first.probability, abs=2e-3)
        assert second.echo == pytest.approx(first.echo, abs=2e-3)
        assert second.level_db == pytest.approx(first.level_db, abs=0.05)
        assert (second.ended_at, second.late_ms) == pytest.approx((first.ended_at, first.late_ms))


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.full
def test_conversations_of_any_rate_that_come_and_go_are_heard_as_alone(guarded):
    detectors = voice_activity(), EchoGuard() if guarded else None
    cases = [(24_000, 0.05, 0), (24_000, 0.0, 3), (48_000, 0.03, 0), (8_000, 0.05, 20), (16_000, 0.02, 7)]
    cases += [(44_100, 0.04, 1), (24_000, 0.08, 60)]
    conversations = [Alone(rate, seed, echo, detectors, begins) for seed, (rate, echo, begins) in enumerate(cases)]
    process(FrontEndBatch(*detectors), conversations)
    for each in conversations:
        compare(each)
    found = [window.echo for each in conversations for window in windows(each.heard)]
    assert (max(found) > 0.9) == guarded, "the echo was removed where there is a guard"
    assert any(window.probability > 0.9 for each in conversations for window in windows(each.heard))


def test_noise_is_suppressed_for_some_and_for_a_while_as_alone():
    detectors = voice_activity(), EchoGuard()
    spans = ((0, 10**6), None, (16_000, 70_000), (8_000, 10**6))
    conversations = [Alone(16_000, seed, 0.05, detectors, 2 * seed, denoised) for seed, denoised in enumerate(spans)]
    process(FrontEndBatch(*detectors), conversations)
    for each in conversations:
        compare(each)
    late = [{window.late_ms for window in windows(each.heard)} for each in conversations]
    assert late == [{16}, {0}, {0, 16}, {0, 16}]


def test_rows_of_those_who_left_are_used_again_from_the_beginning():
    detectors = voice_activity(), EchoGuard()
    batch = FrontEndBatch(*detectors)
    for seed in range(2):
        conversation = Alone(16_000, seed, 0.05, detectors)
        process(batch, [conversation])
        compare(conversation)


def test_detectors_that_cannot_be_batched_run_one_by_one():
    class Halving:
        def initial_state(self):
            return 1.0

        def step(self, state, microphone, reference):
            return microphone * np.float32(state), 1 - state, 0.5 + state / 2

    detectors = EnergyActivity(), Halving()
    conversations = [Alone(16_000, seed, 0.0, detectors, begins) for seed, begins in ((0, 0), (1, 2))]
    process(FrontEndBatch(*detectors), conversations)
    for each in conversations:
        compare(each)
