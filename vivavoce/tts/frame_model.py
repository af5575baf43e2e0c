"""TTS with models that generate frames of codec codes: splitting a text, decoding in chunks, speed and pauses.

`FrameTTS` is the base of `NanoTTS` (torch) and `OnnxTTS`, which generate and decode the frames; `SequenceSampler`
samples codes in NumPy. Nothing here imports torch.
"""

import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from vivavoce._deprecated import former_arguments
from vivavoce.audio.chunking import ChunkUnit, LeadPolicy, next_chunk
from vivavoce.audio.io import Sound
from vivavoce.audio.player import PlaybackClock
from vivavoce.audio.stretch import TimeStretch
from vivavoce.cores import usable_cores
from vivavoce.errors import InputError
from vivavoce.models.moss_tts_nano.prompt import Chunk, MossTTSNanoPrompt, chunks
from vivavoce.runtime.event_loop import await_reader
from vivavoce.tts.interface import SpeakingStyle, SpeechSettings, StoredVoice, VoiceStore
from vivavoce.tts.text import cleaned, numbers_as_words

Samples = NDArray[np.float32]
Frame = tuple[int, ...]
State = TypeVar("State")
"""The state of a codec's decoder stream, an immutable value."""
MAX_CHUNK_SECONDS, MAX_PARALLEL_CHUNK_SECONDS = 1.6, 0.32


def spare_cores() -> int:
    """Cores this process may use besides the one that generates frames."""
    return usable_cores() - 1


def decoding_executor() -> Executor | None:
    """Threads that decode chunks while frames are generated; None if there is no spare core."""
    return ThreadPoolExecutor(spare_cores(), "viva-sound") if spare_cores() > 0 else None


class Decoder(Protocol[State]):
    """Decodes the next frames of a codec stream."""

    def __call__(self, state: State, codes: list[Frame], lead: float = 0.0) -> tuple[Samples, State]:
        """Decode frames; the audio is needed in `lead` seconds.  # [channel, time]"""
        ...


@dataclass
class ChunkedPlayback(Generic[State]):
    """Decodes the frames of one part in chunks whose size grows with the lead over playback."""

    decode: Decoder[State]
    state: State
    frame_seconds: float
    player: PlaybackClock
    clock: Callable[[], float]
    executor: Executor | None = None
    is_live: bool = True
    """Whether audio is played while it is generated; if not, the chunk sizes do not depend on timing."""

    def __post_init__(self) -> None:
        max_seconds = MAX_CHUNK_SECONDS if self.executor is None else MAX_PARALLEL_CHUNK_SECONDS
        self.policy = LeadPolicy(ChunkUnit(frame_seconds=self.frame_seconds), max_seconds=max_seconds)
        self.chunks = 0

    def sounds(self, frames: Iterator[Frame]) -> Iterator[Samples]:
        """The audio of frames, chunk by chunk.  # pieces [channel, time]"""
        waiting: list[Frame] = []
        pending: Future[tuple[Samples, State]] | None = None
        for frame in frames:
            await_reader()
            waiting.append(frame)
            if pending is not None and (pending.done() if self.is_live else self._frames_due(len(waiting), False)):
                yield self._accept(pending.result())
                pending = None
            if pending is None and (count := self._frames_due(len(waiting), False)):
                codes, waiting = waiting[:count], waiting[count:]
                if self.executor is None or self.chunks == 0:
                    yield self._accept(self._decode_chunk(codes, self._lead()))
                else:
                    pending = self.executor.submit(self._decode_chunk, codes, self._lead())
        if pending is not None:
            yield self._accept(pending.result())
        while count := self._frames_due(len(waiting), True):
            codes, waiting = waiting[:count], waiting[count:]
            yield self._accept(self._decode_chunk(codes, self._lead()))

    def _lead(self) -> float:
        return self.player.lead(self.clock())

    def _frames_due(self, waiting: int, is_last: bool) -> int:
        """The number of waiting frames to decode now."""
        count = next_chunk(self.policy, waiting, is_last, self.chunks, self._lead()) if waiting else 0
        if count and self.is_live and self.executor is not None:  # the codec may be slower than the language model
            return min(waiting, round(MAX_CHUNK_SECONDS / self.frame_seconds))
        return count

    def _decode_chunk(self, codes: list[Frame], lead: float) -> tuple[Samples, State]:
        return self.decode(self.state, codes, lead)

    def _accept(self, decoded: tuple[Samples, State]) -> Samples:
        sound, self.state = decoded
        self.chunks += 1
        return sound


Codes = tuple[Frame, ...]  # [frame, codebook]; empty: the model's default voice


class SpokenPrefix(NamedTuple):
    """The prompt before a text: the codes of a reference voice, or speech to continue and its transcript."""

    reference: Codes = ()
    transcript: str = ""
    speech: Codes = ()


class Frames(Protocol):
    """An iterator of generated frames."""

    def __iter__(self) -> Iterator[Frame]: ...
    def __next__(self) -> Frame: ...
    def close(self) -> None:
        """Stop generating."""
        ...

    def needed_by(self, moment: float) -> None:
        """Set the deadline of the next frame, by `time.monotonic`; the default is immediately."""
        ...


class CallerFrames:
    """Frames that are generated on the thread that reads them; deadlines have no effect."""

    def __init__(self, frames: Generator[Frame, None, None]) -> None:
        self._frames = frames

    def __iter__(self) -> Iterator[Frame]:
        return self._frames

    def __next__(self) -> Frame:
        return next(self._frames)

    def close(self) -> None:
        """Stop generating."""
        self._frames.close()

    def needed_by(self, moment: float) -> None:
        """Ignored: frames are generated when they are read."""


class Playback:
    """The playback of one text; without a clock nothing is played, and there are no deadlines."""

    def __init__(self, player: PlaybackClock, clock: Callable[[], float] | None) -> None:
        self.player, self.clock, self._is_live = player, clock or (lambda: 0.0), clock is not None

    @property
    def deadline(self) -> float:
        """The time of `time.monotonic` at which playback runs out of audio."""
        return time.monotonic() + self.player.lead(self.clock()) if self._is_live else float("inf")


class FrameTTS(ABC):
    """Text to speech by a model of frames. Subclasses set `prompt`, `settings` and `voices`."""

    prompt: MossTTSNanoPrompt
    settings: SpeechSettings
    voices: VoiceStore

    def warm_up(self) -> None:  # noqa: B027 - a hook; most subclasses need none
        """Do the one-time work that would delay the first text."""

    def tuned_threads(self) -> AbstractContextManager[None]:
        """Set the process's thread counts to what is fastest for this model; for callers that own the process."""
        return nullcontext()

    @property
    @abstractmethod
    def rate(self) -> int:
        """Sample rate of the output in Hz."""

    @property
    @abstractmethod
    def channels(self) -> int:
        """Channels of the output."""

    @property
    @abstractmethod
    def frame_rate(self) -> float:
        """Frames of codes a second."""

    @property
    def languages(self) -> Sequence[str]:
        """Codes of the languages it was trained on; empty: not known."""
        return self.settings.languages

    def count_tokens(self, text: str) -> int:
        """The tokens of a text."""
        return self.prompt.count_tokens(text)

    @property
    @abstractmethod
    def codec_id(self) -> str:
        """Identifies the codec; stored with the codes of a voice."""

    @property
    @abstractmethod
    def _parallel_parts(self) -> int:
        """How many parts of a text are generated in parallel."""

    @abstractmethod
    def _frames(self, text: str, prefix: SpokenPrefix, seed: int, greedy: bool) -> Frames:
        """Start generating the frames of a part."""

    @abstractmethod
    def _start_playback(self, player: PlaybackClock, clock: Callable[[], float], is_live: bool) -> ChunkedPlayback[Any]:
        """A codec stream for a part."""

    @abstractmethod
    def _encode_reference(self, sound: Sound) -> list[list[int]]:
        """Encode a recording.  # [frame, codebook]"""

    def add_voice(self, name: str, sound: Sound, consent: str = "", text: str = "") -> StoredVoice:
        """Store a voice by name, from a recording of three to eight seconds and, if known, its transcript."""
        voice = StoredVoice(name, self._encode_reference(sound), self.codec_id, consent, text=text)
        return self.voices.add(voice, sound)

    @former_arguments(manner="style")
    def stream(
        self,
        text: str,
        voice: str | Sound | None = None,
        style: SpeakingStyle | None = None,
        clock: Callable[[], float] | None = time.monotonic,
    ) -> Iterator[Samples]:
        """Speak a text, and yield audio while it is generated.  # pieces [channel, time]

        `voice` is the name of a voice or a recording of one; None is the model's default. Closing the iterator stops
        the generation. Without a clock there are no deadlines, and the result is the same bit for bit each time.
        """
        style = style or SpeakingStyle()
        stretch = TimeStretch(self.rate, style.speed)
        parts = chunks(self.prepare_text(text, style.clean), self.prompt.count_tokens, self.settings.chunk_tokens)
        return self._stream(parts, self._prefix(voice, style), style, stretch, clock)

    @former_arguments(manner="style")
    def say(self, text: str, voice: str | Sound | None = None, style: SpeakingStyle | None = None) -> Sound:
        """Speak a text, and return all of its audio."""
        pieces = list(self.stream(text, voice, style, clock=None))
        return Sound(np.concatenate(pieces, axis=1), self.rate)

    def prepare_text(self, text: str, clean: bool = True) -> str:
        """The text as it is given to the model."""
        text = cleaned(text) if clean else text
        return numbers_as_words(text) if self.settings.spells_numbers else text

    def _stream(
        self,
        parts: list[Chunk],
        prefix: SpokenPrefix,
        style: SpeakingStyle,
        stretch: TimeStretch,
        live_clock: Callable[[], float] | None,
    ) -> Iterator[Samples]:
        playback, channels = Playback(PlaybackClock(), live_clock), self.channels
        pending: deque[tuple[Chunk, Frames]] = deque()
        with closing(self._start_parts(parts, prefix, style, pending, playback)) as started:
            for part, frames in started:
                sounding = self._start_playback(playback.player, playback.clock, live_clock is not None)
                state = stretch.initial_state(channels)
                for sound in sounding.sounds(frames):
                    stretched, state = stretch.step(state, sound)
                    yield from self._emit(stretched, playback, pending)
                silence = np.zeros((channels, round(part.pause * style.pause * self.rate)), np.float32)
                rest = np.concatenate([stretch.flush(state), silence], axis=1)
                yield from self._emit(rest, playback, pending)

    def _start_parts(
        self,
        parts: list[Chunk],
        prefix: SpokenPrefix,
        style: SpeakingStyle,
        pending: deque[tuple[Chunk, Frames]],
        playback: "Playback",
    ) -> Generator[tuple[Chunk, Frames], None, None]:
        """Yield the parts in order with their frames, and start up to `_parallel_parts` of them ahead."""
        remaining = iter(enumerate(parts))
        try:
            while True:
                for number, part in itertools.islice(remaining, self._parallel_parts - len(pending)):
                    frames = self._frames(part.text, prefix, style.seed + number, style.greedy)
                    pending.append((part, frames))
                    frames.needed_by(playback.deadline)
                if not pending:
                    return
                yield pending[0]
                pending.popleft()[1].close()
        finally:
            for _, frames in pending:
                frames.close()

    def _emit(self, sound: Samples, playback: "Playback", pending: deque[tuple[Chunk, Frames]]) -> Iterator[Samples]:
        """Yield a piece, and move the deadlines of the frames that are being generated."""
        if sound.shape[1]:
            playback.player.feed(playback.clock(), sound.shape[1] / self.rate)
            for _, frames in pending:
                frames.needed_by(playback.deadline)
            yield sound

    def _prefix(self, voice: str | Sound | None, style: SpeakingStyle) -> SpokenPrefix:
        """The prompt before each part."""
        if not style.continues:
            return SpokenPrefix(self._reference(voice))
        transcript = self.voices.get(voice).text.strip() if isinstance(voice, str) and voice in self.voices else ""
        if not transcript:
            raise InputError("continuing a recording needs its transcript: add the voice with --text")
        return SpokenPrefix(transcript=transcript + " ", speech=self._reference(voice))

    def _reference(self, voice: str | Sound | None) -> Codes:
        """The codes of a voice; empty for the model's default."""
        if isinstance(voice, Sound):
            codes = self._encode_reference(voice)
        else:
            codes = [] if voice is None or voice == self.settings.own_voice else self._stored_codes(voice)
        return tuple(tuple(frame) for frame in codes)

    def _stored_codes(self, name: str) -> list[list[int]]:
        """The codes of a stored voice; its recording is encoded again if they are of another codec."""
        voice = self.voices.get(name)
        if voice.codes and voice.codec in ("", self.codec_id):
            return voice.codes
        recording = self.voices.recording(name)
        if recording is None:
            raise InputError(f"the voice {name!r} was made for another model and has no recording; add it again")
        return self._encode_reference(recording)


Floats = NDArray[np.float32]
Words = NDArray[np.uint32]
LOW_32 = 0xFFFFFFFF
FIRST, SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
POSITION, CHANNEL, TOKEN = 0x9E3779B9, 0x85EBCA77, np.uint32(0xC2B2AE3D)
MIN_CHOICES = 2  # continue or stop


class ChannelSampling(Protocol):
    """The sampling settings of one channel; the engine's `Sampling` has them."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...


class SequenceSampler:
    """Samples the rows of one sequence with the engine's settings and noise, in NumPy; tracks ids for penalties."""

    def __init__(self, samplings: Sequence[ChannelSampling], seed: int, entries: int) -> None:
        self.samplings = samplings
        self.generated = 0
        channels = len(samplings)
        self._is_greedy = all(sampling.temperature == 0 for sampling in samplings)
        self._penalties = np.ones((channels, entries), np.float32)  # of each id, 1 until it is sampled
        self._seed = _mix(_mix(np.array([[seed & LOW_32]], np.uint32)) ^ np.uint32(seed >> 32 & LOW_32))
        numbers = np.arange(1, channels + 1, dtype=np.uint64) * np.uint64(CHANNEL)
        self._channels = numbers.astype(np.uint32)[:, None]
        self._ids = np.arange(max(entries, MIN_CHOICES), dtype=np.uint32) * TOKEN
        self._noise: Floats = np.empty((channels, 0), np.float32)  # [channel, id], of the current row

    def start_row(self, position: int) -> None:
        """Start the row at this position of the sequence, on which its noise depends."""
        self.generated += 1
        if self._is_greedy:
            return
        state = _mix(_mix(self._seed + np.uint32(position * POSITION & LOW_32)) + self._channels)
        bits = _mix(_mix(state + self._ids) ^ state)
        uniform = ((bits >> np.uint32(8)).astype(np.float64) + 0.5) / 2**24
        self._noise = -np.log(-np.log(uniform)).astype(np.float32)

    def choose(self, channel: int, logits: Floats) -> int:
        """Sample one of some options, without a repetition penalty.  # [option]"""
        sampling = self.samplings[channel]
        if sampling.temperature == 0:
            return int(logits.argmax())
        scaled = logits / np.float32(sampling.temperature)
        noise = self._noise[channel]
        ids = _top_ids(scaled, sampling.top_k)
        if ids is not None:
            scaled, noise = scaled[ids], noise[ids]
        chosen = _sample_index(scaled, noise[: len(scaled)], sampling.top_p)
        return chosen if ids is None else int(ids[chosen])

    def sample(self, channel: int, logits: Floats) -> int:
        """Sample an id of a codebook, with the repetition penalty.  # [id]"""
        penalty = self.samplings[channel].repetition_penalty
        if penalty == 1.0:
            return self.choose(channel, logits)
        penalties = self._penalties[channel, : len(logits)]
        penalise = np.minimum if penalty > 1 else np.maximum  # right for positive and for negative logits
        chosen = self.choose(channel, penalise(logits * penalties, logits / penalties))
        penalties[chosen] = penalty
        return chosen


def _top_ids(scaled: Floats, top_k: int) -> NDArray[np.int64] | None:
    """The ids of the `top_k` highest scores, in any order; None for all."""
    count = len(scaled)
    return np.argpartition(scaled, count - top_k)[count - top_k :] if 0 < top_k < count else None


def _sample_index(scores: Floats, noise: Floats, top_p: float) -> int:
    """The index with the highest noisy score in the nucleus of probability `top_p`."""
    noisy = scores + noise
    if top_p >= 1.0:
        return int(noisy.argmax())
    probabilities = np.exp(scores - scores.max())
    threshold = top_p * probabilities.sum()
    while True:
        chosen = int(noisy.argmax())
        if probabilities[scores > scores[chosen]].sum() < threshold:
            return chosen
        noisy[chosen] = -np.inf


def _mix(x: Words) -> Words:
    """`counter_noise.mixed` for unsigned 32-bit words, whose products wrap around."""
    x = (x ^ x >> np.uint32(16)) * FIRST
    x = (x ^ x >> np.uint32(15)) * SECOND
    return x ^ x >> np.uint32(16)
