"""The audio front end of many conversations at once: the windows that `AudioFrontEnd` gives each of them.

Chunks are handled in rounds, one of each conversation; in a round all conversations are resampled together, then the
first window of each goes through echo cancellation, noise suppression, level and voice activity together, then the
second. Samples are joined and cut as bytes, which is quicker than numpy for as few as there are in a window.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vivavoce.audio.batched_echo import BatchedEchoGuard
from vivavoce.audio.batched_resample import BatchedResampler
from vivavoce.audio.batched_vad import BatchedActivity, batched_activity
from vivavoce.audio.denoise import DELAY, DELAY_MS, DenoisedStreams, NoiseSuppressor
from vivavoce.audio.echo import EchoGuard
from vivavoce.audio.level import SILENCE_DBFS
from vivavoce.audio.resample import LiveResampler, LiveResamplerState
from vivavoce.audio.rows import FEW, Rows
from vivavoce.audio.vad import RATE, WINDOW, VoiceActivity
from vivavoce.dialogue.capture_clock import CaptureClock
from vivavoce.dialogue.front_end import BLOCK, SETTLED_WINDOWS, AudioWindow, EchoRemover, SilenceDetector
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.output_timeline import OutputTimeline
from vivavoce.nn.modules import scripted

WINDOW_BYTES = WINDOW * 4
MAX_UNHEARD = WINDOW + DELAY  # samples after the last window
BLOCK_MS = BLOCK * 1000 // RATE
Indices = NDArray[np.intp]


class BatchedEchoRemover(Protocol):
    """An `EchoRemover` of many streams; each has a row from `join` to `leave`."""

    def join(self) -> int:
        """The row of a new stream."""
        ...

    def leave(self, row: int) -> None:
        """Release the row of a stream that has ended."""
        ...

    def step(self, rows: Indices, microphone: Samples, reference: Samples) -> tuple[Samples, NDArray[np.float64]]:
        """The microphones' sound without echo, and the share of echo.  # [row], [row, 512] twice → [row, 512], [row]"""
        ...


class InputChunk(NamedTuple):
    """Samples of the user's audio and their capture time."""

    samples: Samples
    now: float


class NoiseChange(NamedTuple):
    """Noise is suppressed from here on, by a strength from 0 to 1; None: not at all."""

    strength: float | None


TimelineCall = Callable[[OutputTimeline], None]
Operation = InputChunk | NoiseChange | TimelineCall
"""What a conversation gives its front end: audio, a change of noise suppression, or one of what is played."""


class HeardChunk(NamedTuple):
    """The windows that a chunk completes, and the milliseconds of silence after the last of them."""

    windows: list[AudioWindow]
    quiet_ms: int


@dataclass
class BatchedStream:
    """One conversation in a `FrontEndBatch`."""

    resampler: BatchedResampler
    timeline_resampler: BatchedResampler
    resampled: LiveResamplerState
    timeline: OutputTimeline
    row: int
    activity_row: int
    echo_row: int | None
    noise_row: int | None = None
    noise_strength: float = 0.0
    late: bytes = b""  # samples that the suppression of noise has not given back
    held: bytes = b""  # samples at 16 kHz, less than a window
    heard: int = 0  # samples at 16 kHz
    silent_windows: int = 0  # consecutive
    skipped: bytes | None = None  # the last window not passed to the detector
    capture: CaptureClock = field(default_factory=CaptureClock)


class FrontEndBatch:
    """Front ends of many conversations. Not thread-safe."""

    def __init__(self, activity: VoiceActivity, echo: EchoRemover | None) -> None:
        self._activity: BatchedActivity = batched_activity(activity)
        self._echo: BatchedEchoRemover | None = None
        if echo is not None:
            self._echo = BatchedEchoGuard(echo) if isinstance(echo, EchoGuard) else EchoOneByOne(echo)
        self._denoised: DenoisedStreams | None = None
        self._resamplers: dict[tuple[int, int], tuple[LiveResampler, BatchedResampler]] = {}
        self._rows = Rows()
        self._silence = BatchedSilenceDetector(self._rows)

    def join(self, input_rate: int, output_rate: int) -> BatchedStream:
        """The stream of a new conversation."""
        resampler, batched = self._resampler(input_rate)
        return BatchedStream(
            batched,
            self._resampler(output_rate)[1],
            resampler.initial_state(),
            OutputTimeline(output_rate, RATE),
            self._rows.take(),
            self._activity.join(),
            None if self._echo is None else self._echo.join(),
        )

    def leave(self, stream: BatchedStream) -> None:
        """Release what belongs to a conversation that has ended."""
        self._rows.release(stream.row)
        self._activity.leave(stream.activity_row)
        if self._echo is not None and stream.echo_row is not None:
            self._echo.leave(stream.echo_row)
        self._reduce_noise(stream, None)

    def process(self, work: Sequence[tuple[BatchedStream, Sequence[Operation]]]) -> list[list[HeardChunk]]:
        """Apply the operations of each stream in their order; its chunks as they were heard."""
        heard: list[list[HeardChunk]] = [[] for _ in work]
        remaining = [(number, stream, deque(operations)) for number, (stream, operations) in enumerate(work)]
        with torch.inference_mode():
            while remaining:
                turn = [(number, stream, self._next_chunk(stream, queue)) for number, stream, queue in remaining]
                chunks = [(number, stream, chunk) for number, stream, chunk in turn if chunk is not None]
                results = self._round([(stream, chunk) for _, stream, chunk in chunks]) if chunks else []
                for (number, _, _), result in zip(chunks, results, strict=True):
                    heard[number].append(result)
                remaining = [each for each in remaining if each[2]]
        return heard

    def _next_chunk(self, stream: BatchedStream, operations: deque[Operation]) -> InputChunk | None:
        """Apply operations up to the next chunk."""
        while operations:
            operation = operations.popleft()
            if isinstance(operation, InputChunk):
                return operation
            if isinstance(operation, NoiseChange):
                self._reduce_noise(stream, operation.strength)
            else:
                operation(stream.timeline)
        return None

    def _reduce_noise(self, stream: BatchedStream, strength: float | None) -> None:
        if strength is not None:
            self._denoised = self._denoised or DenoisedStreams(NoiseSuppressor())
            stream.noise_row = self._denoised.join() if stream.noise_row is None else stream.noise_row
            stream.noise_strength = strength
        elif self._denoised is not None and stream.noise_row is not None:
            self._denoised.leave(stream.noise_row)
            stream.noise_row, stream.late = None, b""

    def _resampler(self, rate: int) -> tuple[LiveResampler, BatchedResampler]:
        if (rate, RATE) not in self._resamplers:
            resampler = LiveResampler(rate, RATE)
            self._resamplers[rate, RATE] = resampler, BatchedResampler(resampler)
        return self._resamplers[rate, RATE]

    def _round(self, chunks: list[tuple[BatchedStream, InputChunk]]) -> list[HeardChunk]:
        """One chunk of each of some streams."""
        self._resample(chunks)
        windows: list[list[AudioWindow]] = [[] for _ in chunks]
        ready = [number for number, (stream, _) in enumerate(chunks) if len(stream.held) >= WINDOW_BYTES]
        while ready:
            streams = [chunks[number][0] for number in ready]
            for number, window in zip(ready, self._windows(streams), strict=True):
                windows[number].append(window)
            ready = [number for number in ready if len(chunks[number][0].held) >= WINDOW_BYTES]
        unheard = [stream.late + stream.held for stream, _ in chunks]
        quiet = self._silence.trailing_ms([stream.row for stream, _ in chunks], unheard)
        return [HeardChunk(*each) for each in zip(windows, quiet, strict=True)]

    def _resample(self, chunks: list[tuple[BatchedStream, InputChunk]]) -> None:
        alike: dict[BatchedResampler, list[tuple[BatchedStream, InputChunk]]] = defaultdict(list)
        for stream, chunk in chunks:
            alike[stream.resampler].append((stream, chunk))
        for resampler, some in alike.items():
            states, samples = [stream.resampled for stream, _ in some], [chunk.samples for _, chunk in some]
            sounds, states = resampler.step(states, samples)
            for (stream, chunk), sound, state in zip(some, sounds, states, strict=True):
                stream.resampled = state
                stream.held += sound.tobytes()
                stream.capture.note(chunk.now, (stream.heard + len(stream.held) // 4) / RATE)

    def _windows(self, streams: list[BatchedStream]) -> list[AudioWindow]:
        """The next window of each stream."""
        pieces = [stream.held[:WINDOW_BYTES] for stream in streams]
        for stream in streams:
            stream.held = stream.held[WINDOW_BYTES:]
        samples = _joined(pieces)
        shares = [0.0] * len(streams)
        began = [stream.capture.moment(stream.heard / RATE) for stream in streams]
        if self._echo is not None:
            rows = np.array([stream.echo_row for stream in streams], np.intp)
            samples, echo = self._echo.step(rows, samples, self._references(streams, began))
            shares, pieces = echo.tolist(), [row.tobytes() for row in samples]
        for stream in streams:
            stream.heard += WINDOW
        speech = pieces
        if self._denoised is not None and any(stream.noise_row is not None for stream in streams):
            samples, speech, pieces = _without_noise(self._denoised, streams, samples, pieces)
        levels, is_silent, quiet = self._silence.step([stream.row for stream in streams], samples)
        probabilities = self._speech_probabilities(streams, speech, is_silent)
        late = [0 if stream.noise_row is None else DELAY_MS for stream in streams]
        ended = [began_at + WINDOW / RATE - late_ms / 1e3 for began_at, late_ms in zip(began, late, strict=True)]
        return [
            AudioWindow(np.frombuffer(piece, np.float32), *rest)
            for piece, *rest in zip(pieces, probabilities, levels, shares, quiet, ended, late, strict=True)
        ]

    def _references(self, streams: list[BatchedStream], moments: list[float]) -> Samples:
        """What was played while the next windows were captured."""
        alike: dict[BatchedResampler, list[OutputTimeline]] = defaultdict(list)
        for stream in streams:
            alike[stream.timeline_resampler].append(stream.timeline)
        for resampler, timelines in alike.items():
            OutputTimeline.catch_up_many(timelines, resampler)
        return _joined(
            [
                stream.timeline.read_stored(moment, WINDOW).tobytes()
                for stream, moment in zip(streams, moments, strict=True)
            ]
        )

    def _speech_probabilities(
        self, streams: list[BatchedStream], pieces: list[bytes], is_silent: list[bool]
    ) -> list[float]:
        """Probabilities of speech. In long silence the detector is not run, which saves most of its cost."""
        asked, caught_up = [], []
        for number, stream in enumerate(streams):
            stream.silent_windows = stream.silent_windows + 1 if is_silent[number] else 0
            if stream.silent_windows > SETTLED_WINDOWS:
                stream.skipped = pieces[number]
                continue
            asked.append(number)
            if stream.skipped is not None:  # the detector needs the window before speech as context
                caught_up.append(number)
        if caught_up:
            rows = np.array([streams[number].activity_row for number in caught_up], np.intp)
            self._activity.step(rows, _joined([streams[number].skipped or b"" for number in caught_up]))
            for number in caught_up:
                streams[number].skipped = None
        probabilities = [0.0] * len(streams)
        if asked:
            rows = np.array([streams[number].activity_row for number in asked], np.intp)
            answers = self._activity.step(rows, _joined([pieces[number] for number in asked])).tolist()
            for number, probability in zip(asked, answers, strict=True):
                probabilities[number] = 0.0 if is_silent[number] else probability
        return probabilities


class BatchedSilenceDetector:
    """`SilenceDetector` of many streams."""

    def __init__(self, rows: Rows) -> None:
        initial = SilenceDetector()
        self._floor = rows.array((), np.float64, initial.floor_db)
        self._peak = rows.array((), np.float64, initial.peak_db)
        self._kernel: Any = scripted(BlockPower(BLOCK))

    def step(self, rows: list[int], samples: Samples) -> tuple[list[float], list[bool], list[int]]:
        """The levels of windows, whether they are silence, and the milliseconds of silence at their ends."""
        limits = SilenceDetector
        power = self._power(samples)
        level = np.maximum(10.0 * np.log10(np.maximum(power.mean(axis=1), 1e-60)), SILENCE_DBFS)
        self._peak[rows] = np.maximum(np.maximum(level, self._peak[rows] - limits.FORGET_DB), limits.SOFTEST_PEAK_DB)
        self._floor[rows] = np.minimum(level, self._floor[rows] + limits.RISE_DB)
        limit = self._limit(rows)
        return level.tolist(), (level < limit).tolist(), (_quiet_blocks(power, limit) * BLOCK_MS).tolist()

    def trailing_ms(self, rows: list[int], held: list[bytes]) -> list[int]:
        """Milliseconds of silence after the last window of each row; 0 where there is any sound."""
        lengths = np.array([len(each) // 4 for each in held])
        samples = _joined([each.rjust(MAX_UNHEARD * 4, b"\0") for each in held], MAX_UNHEARD)
        power = self._power(samples)
        quiet = np.minimum(_quiet_blocks(power, self._limit(rows)), lengths // BLOCK)
        return np.where(quiet * BLOCK > lengths - BLOCK, quiet * BLOCK_MS, 0).tolist()

    def _power(self, samples: Samples) -> NDArray[np.float64]:
        """Mean power of each block.  # [stream, time] → [stream, block]"""
        if len(samples) < FEW:
            return np.square(samples, dtype=np.float64).reshape(len(samples), -1, BLOCK).mean(axis=2)
        power: NDArray[np.float64] = self._kernel(torch.from_numpy(samples)).numpy()
        return power

    def _limit(self, rows: list[int]) -> NDArray[np.float64]:
        """The levels below which sound counts as silence."""
        limits = SilenceDetector
        peak, floor = self._peak[rows], self._floor[rows]
        room = np.minimum(peak - limits.UNDER_PEAK_DB, np.maximum(floor, -75.0) + limits.OVER_FLOOR_DB)
        return np.maximum(room, peak - limits.SURELY_UNDER_PEAK_DB)


class BlockPower(nn.Module):
    """The mean power of each short block of windows."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block: int = block

    def forward(self, samples: Tensor) -> Tensor:
        """# [stream, time] → [stream, block]"""
        return samples.double().square_().unflatten(1, [-1, self.block]).mean(2)


class EchoOneByOne:
    """Any echo remover, stream by stream."""

    def __init__(self, echo: EchoRemover) -> None:
        self._echo = echo
        self._rows = Rows()
        self._states: dict[int, Any] = {}

    def join(self) -> int:
        """The row of a new stream."""
        row = self._rows.take()
        self._states[row] = self._echo.initial_state()
        return row

    def leave(self, row: int) -> None:
        """Release the row of a stream that has ended."""
        del self._states[row]
        self._rows.release(row)

    def step(self, rows: Indices, microphone: Samples, reference: Samples) -> tuple[Samples, NDArray[np.float64]]:
        """The microphones' sound without echo, and the share of echo.  # [row], [row, 512] twice → [row, 512], [row]"""
        output, shares = np.empty_like(microphone), np.zeros(len(rows))
        for number, row in enumerate(rows.tolist()):
            output[number], shares[number], self._states[row] = self._echo.step(
                self._states[row], microphone[number], reference[number]
            )
        return output, shares


def _without_noise(
    denoised: DenoisedStreams, streams: list[BatchedStream], samples: Samples, pieces: list[bytes]
) -> tuple[Samples, list[bytes], list[bytes]]:
    """Windows for detectors, as array and as bytes, and those for models, noise suppressed where it is to be."""
    chosen = [number for number, stream in enumerate(streams) if stream.noise_row is not None]
    rows = [row for stream in streams if (row := stream.noise_row) is not None]
    found = denoised.step(rows, samples[chosen], [streams[number].noise_strength for number in chosen])
    samples, speech, mixed = samples.copy(), list(pieces), list(pieces)
    samples[chosen] = found.speech
    for number, voice, sound in zip(chosen, found.speech, found.mixed, strict=True):
        streams[number].late = pieces[number][-DELAY * 4 :]
        speech[number], mixed[number] = voice.tobytes(), sound.tobytes()
    return samples, speech, mixed


def _joined(windows: list[bytes], size: int = WINDOW) -> Samples:
    """# [stream, size]"""
    return np.frombuffer(bytearray().join(windows), np.float32).reshape(-1, size)


def _quiet_blocks(power: NDArray[np.float64], limit: NDArray[np.float64]) -> NDArray[np.intp]:
    """The number of successive blocks under the limit at the end of each row."""
    is_loud = (power >= 10.0 ** (limit[:, None] / 10))[:, ::-1]
    return np.where(is_loud.any(axis=1), is_loud.argmax(axis=1), power.shape[1])
