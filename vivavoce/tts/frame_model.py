"""A text told by a model of frames: cut into parts, each part's frames made and decoded, its speed and pauses set.

What makes the frames and decodes them is left to who derives from it. Nothing here needs torch.
"""

import itertools
import os
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
from vivavoce.errors import InputError
from vivavoce.models.moss_tts_nano.prompt import Chunk, MossTTSNanoPrompt, chunks
from vivavoce.tts.interface import SpeakingStyle, SpeechSettings, StoredVoice, VoiceStore
from vivavoce.tts.text import cleaned, numbers_as_words

Samples = NDArray[np.float32]
Frame = tuple[int, ...]
State = TypeVar("State")
"""Where a codec's stream stands; a value."""
MAX_CHUNK_SECONDS, MAX_PARALLEL_CHUNK_SECONDS = 1.6, 0.32  # seconds of a chunk


def spare_cores() -> int:
    """Cores this process may use besides the one that makes frames."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return allowed - 1


def beside() -> Executor | None:
    """Where chunks can be decoded while frames are made; None where there is no core for it."""
    return ThreadPoolExecutor(spare_cores(), "viva-sound") if spare_cores() > 0 else None


class Decoder(Protocol[State]):
    """The next sound of a stream of frames, by whoever is best placed to make it."""

    def __call__(self, state: State, codes: list[Frame], lead: float = 0.0) -> tuple[Samples, State]:
        """The sound is needed in `lead` seconds.  # [channel, time]"""
        ...


@dataclass
class ChunkedPlayback(Generic[State]):
    """The codec's side of one stretch of speech."""

    decode: Decoder[State]
    state: State
    frame_seconds: float
    player: PlaybackClock
    clock: Callable[[], float]
    beside: Executor | None = None
    is_live: bool = True
    """Whether sound is wanted as soon as it is there; if not, the chunks are always the same ones."""

    def __post_init__(self) -> None:
        max_seconds = MAX_CHUNK_SECONDS if self.beside is None else MAX_PARALLEL_CHUNK_SECONDS
        self.policy = LeadPolicy(ChunkUnit(frame_seconds=self.frame_seconds), max_seconds=max_seconds)
        self.chunks = 0

    def sounds(self, frames: Iterator[Frame]) -> Iterator[Samples]:
        """The sound of frames, as they come.  # pieces [channel, time]"""
        waiting: list[Frame] = []
        under_way: Future[tuple[Samples, State]] | None = None
        for frame in frames:
            waiting.append(frame)
            if under_way is not None and (under_way.done() if self.is_live else self._due(len(waiting), False)):
                yield self._taken(under_way.result())
                under_way = None
            if under_way is None and (count := self._due(len(waiting), False)):
                codes, waiting = waiting[:count], waiting[count:]
                if self.beside is None or self.chunks == 0:
                    yield self._taken(self._decoded(codes, self._lead()))
                else:
                    under_way = self.beside.submit(self._decoded, codes, self._lead())
        if under_way is not None:
            yield self._taken(under_way.result())
        while count := self._due(len(waiting), True):
            codes, waiting = waiting[:count], waiting[count:]
            yield self._taken(self._decoded(codes, self._lead()))

    def _lead(self) -> float:
        return self.player.lead(self.clock())

    def _due(self, waiting: int, is_last: bool) -> int:
        """How many of the waiting frames are to be decoded now."""
        count = next_chunk(self.policy, waiting, is_last, self.chunks, self._lead()) if waiting else 0
        if count and self.is_live and self.beside is not None:  # the codec may be slower than the language model
            return min(waiting, round(MAX_CHUNK_SECONDS / self.frame_seconds))
        return count

    def _decoded(self, codes: list[Frame], lead: float) -> tuple[Samples, State]:
        return self.decode(self.state, codes, lead)

    def _taken(self, made: tuple[Samples, State]) -> Samples:
        sound, self.state = made
        self.chunks += 1
        return sound


Codes = tuple[Frame, ...]  # [frame, codebook]; none stand for the model's own voice


class SpokenPrefix(NamedTuple):
    """What stands before a text: a voice to sound like, or speech to go on from, with its words."""

    reference: Codes = ()
    words: str = ""
    said: Codes = ()


class Frames(Protocol):
    """Frames as they are made."""

    def __iter__(self) -> Iterator[Frame]: ...
    def __next__(self) -> Frame: ...
    def close(self) -> None:
        """Stop making them."""
        ...

    def needed_by(self, moment: float) -> None:
        """The next frame is needed by this moment of `time.monotonic`; unless set, at once."""
        ...


class CallerFrames:
    """Frames that are generated on the thread that reads them, which needs no deadline."""

    def __init__(self, frames: Generator[Frame, None, None]) -> None:
        self._frames = frames

    def __iter__(self) -> Iterator[Frame]:
        return self._frames

    def __next__(self) -> Frame:
        return next(self._frames)

    def close(self) -> None:
        """Stop making them."""
        self._frames.close()

    def needed_by(self, moment: float) -> None:
        """They are made when they are read."""


class Playback:
    """When a listener has played a text; without a clock nobody listens, and nothing is ever urgent."""

    def __init__(self, player: PlaybackClock, clock: Callable[[], float] | None) -> None:
        self.player, self.clock, self._is_live = player, clock or (lambda: 0.0), clock is not None

    @property
    def runs_dry(self) -> float:
        """The moment of `time.monotonic` by which more sound is needed."""
        return time.monotonic() + self.player.lead(self.clock()) if self._is_live else float("inf")


class FrameTTS(ABC):
    """Says texts. Who derives from it has a prompt, settings and a shelf."""

    prompt: MossTTSNanoPrompt
    settings: SpeechSettings
    voices: VoiceStore

    def warm_up(self) -> None:  # noqa: B027 - nothing is what most need
        """Do ahead what would make the first text slow."""

    def tuned_threads(self) -> AbstractContextManager[None]:
        """Threads of the process as this model wants them, for callers that own the process."""
        return nullcontext()

    @property
    @abstractmethod
    def rate(self) -> int:
        """Samples a second of what comes out."""

    @property
    @abstractmethod
    def channels(self) -> int:
        """Of what comes out."""

    @property
    @abstractmethod
    def mark(self) -> str:
        """Whose codes its voices have."""

    @property
    @abstractmethod
    def _parallel_parts(self) -> int:
        """Parts of a text that are worth making side by side."""

    @abstractmethod
    def _frames(self, text: str, before: SpokenPrefix, seed: int, greedy: bool) -> Frames:
        """The frames of a part, begun now."""

    @abstractmethod
    def _start_playback(self, player: PlaybackClock, clock: Callable[[], float], is_live: bool) -> ChunkedPlayback[Any]:
        """The codec before the first frame of a part."""

    @abstractmethod
    def _encode_reference(self, sound: Sound) -> list[list[int]]:
        """A recording as codes.  # [frame, codebook]"""

    def add_voice(self, name: str, sound: Sound, consent: str = "", text: str = "") -> StoredVoice:
        """Keep a voice on this machine under a name, from a recording of three to eight seconds and its words."""
        voice = StoredVoice(name, self._encode_reference(sound), self.mark, consent, text=text)
        return self.voices.add(voice, sound)

    @former_arguments(manner="style")
    def stream(
        self,
        text: str,
        voice: str | Sound | None = None,
        style: SpeakingStyle | None = None,
        clock: Callable[[], float] | None = time.monotonic,
    ) -> Iterator[Samples]:
        """The sound of a text, as it is made.  # pieces [channel, time]

        `voice` is a name, or a recording to sound like; none is the model's own. Leaving off half-way costs nothing.
        Without a clock nobody waits for the sound, and its last bits are the same each time.
        """
        style = style or SpeakingStyle()
        stretch = TimeStretch(self.rate, style.speed)
        parts = chunks(self.prepared(text, style.clean), self.prompt.count_tokens, self.settings.chunk_tokens)
        return self._stream(parts, self._before(voice, style), style, stretch, clock)

    @former_arguments(manner="style")
    def say(self, text: str, voice: str | Sound | None = None, style: SpeakingStyle | None = None) -> Sound:
        """The whole sound of a text."""
        pieces = list(self.stream(text, voice, style, clock=None))
        return Sound(np.concatenate(pieces, axis=1), self.rate)

    def prepared(self, text: str, clean: bool = True) -> str:
        """The text as the model gets it."""
        text = cleaned(text) if clean else text
        return numbers_as_words(text) if self.settings.spells_numbers else text

    def _stream(
        self,
        parts: list[Chunk],
        before: SpokenPrefix,
        style: SpeakingStyle,
        stretch: TimeStretch,
        live_clock: Callable[[], float] | None,
    ) -> Iterator[Samples]:
        playback, channels = Playback(PlaybackClock(), live_clock), self.channels
        under_way: deque[tuple[Chunk, Frames]] = deque()
        with closing(self._start_parts(parts, before, style, under_way, playback)) as started:
            for part, frames in started:
                sounding = self._start_playback(playback.player, playback.clock, live_clock is not None)
                state = stretch.initial_state(channels)
                for sound in sounding.sounds(frames):
                    stretched, state = stretch.step(state, sound)
                    yield from self._play(stretched, playback, under_way)
                silence = np.zeros((channels, round(part.pause * style.pause * self.rate)), np.float32)
                rest = np.concatenate([stretch.flush(state), silence], axis=1)
                yield from self._play(rest, playback, under_way)

    def _start_parts(
        self,
        parts: list[Chunk],
        before: SpokenPrefix,
        style: SpeakingStyle,
        under_way: deque[tuple[Chunk, Frames]],
        playback: "Playback",
    ) -> Generator[tuple[Chunk, Frames], None, None]:
        """The parts in order with their frames; where parts can be generated in parallel, the next ones are started."""
        coming = iter(enumerate(parts))
        try:
            while True:
                for number, part in itertools.islice(coming, self._parallel_parts - len(under_way)):
                    frames = self._frames(part.text, before, style.seed + number, style.greedy)
                    under_way.append((part, frames))
                    frames.needed_by(playback.runs_dry)
                if not under_way:
                    return
                yield under_way[0]
                under_way.popleft()[1].close()
        finally:
            for _, frames in under_way:
                frames.close()

    def _play(self, sound: Samples, playback: "Playback", under_way: deque[tuple[Chunk, Frames]]) -> Iterator[Samples]:
        """Hand a piece on, which gives the frames under way a later deadline."""
        if sound.shape[1]:
            playback.player.feed(playback.clock(), sound.shape[1] / self.rate)
            for _, frames in under_way:
                frames.needed_by(playback.runs_dry)
            yield sound

    def _before(self, voice: str | Sound | None, style: SpeakingStyle) -> SpokenPrefix:
        """What stands before each part."""
        if not style.continues:
            return SpokenPrefix(self._reference(voice))
        words = self.voices.get(voice).text.strip() if isinstance(voice, str) and voice in self.voices else ""
        if not words:
            raise InputError("to go on from a recording its words must be known: keep the voice with its --text")
        return SpokenPrefix(words=words + " ", said=self._reference(voice))

    def _reference(self, voice: str | Sound | None) -> Codes:
        """The codes of a voice; none for the model's own."""
        if isinstance(voice, Sound):
            codes = self._encode_reference(voice)
        else:
            codes = [] if voice is None or voice == self.settings.own_voice else self._stored_codes(voice)
        return tuple(tuple(frame) for frame in codes)

    def _stored_codes(self, name: str) -> list[list[int]]:
        """A kept voice's codes; those of another model's codec are made anew from its recording."""
        voice = self.voices.get(name)
        if voice.codes and voice.codec in ("", self.mark):
            return voice.codes
        recording = self.voices.recording(name)
        if recording is None:
            raise InputError(f"the voice {name!r} was made for another model and has no recording; add it anew")
        return self._encode_reference(recording)


Floats = NDArray[np.float32]
Words = NDArray[np.uint32]
LOW_32 = 0xFFFFFFFF
FIRST, SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
PLACE, CHANNEL, TOKEN = 0x9E3779B9, 0x85EBCA77, np.uint32(0xC2B2AE3D)
MIN_WAYS = 2  # to go on: speak, or stop


class ChannelSampling(Protocol):
    """How one channel is drawn, as the engine's `Sampling` says it."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...


class SequenceDraw:
    """Draws the channels of one reply's rows; it remembers what it drew, for penalties."""

    def __init__(self, samplings: Sequence[ChannelSampling], seed: int, entries: int) -> None:
        self.samplings = samplings
        self.generated = 0
        channels = len(samplings)
        self._is_greedy = all(sampling.temperature == 0 for sampling in samplings)
        self._penalties = np.ones((channels, entries), np.float32)  # what each id's logit is to be made less likely by
        self._seed = _mixed(_mixed(np.array([[seed & LOW_32]], np.uint32)) ^ np.uint32(seed >> 32 & LOW_32))
        numbers = np.arange(1, channels + 1, dtype=np.uint64) * np.uint64(CHANNEL)
        self._channels = numbers.astype(np.uint32)[:, None]
        self._ids = np.arange(max(entries, MIN_WAYS), dtype=np.uint32) * TOKEN
        self._noise: Floats = np.empty((channels, 0), np.float32)  # [channel, id], of the row that is drawn

    def start_row(self, position: int) -> None:
        """The next row will stand at this position of the sequence."""
        self.generated += 1
        if self._is_greedy:
            return
        state = _mixed(_mixed(self._seed + np.uint32(position * PLACE & LOW_32)) + self._channels)
        bits = _mixed(_mixed(state + self._ids) ^ state)
        uniform = ((bits >> np.uint32(8)).astype(np.float64) + 0.5) / 2**24
        self._noise = -np.log(-np.log(uniform)).astype(np.float32)

    def choose(self, channel: int, logits: Floats) -> int:
        """One of a few ways to go on, whatever was drawn before.  # [way]"""
        sampling = self.samplings[channel]
        if sampling.temperature == 0:
            return int(logits.argmax())
        scaled = logits / np.float32(sampling.temperature)
        noise = self._noise[channel]
        ids = _best(scaled, sampling.top_k)
        if ids is not None:
            scaled, noise = scaled[ids], noise[ids]
        drawn = _drawn(scaled, noise[: len(scaled)], sampling.top_p)
        return drawn if ids is None else int(ids[drawn])

    def sample(self, channel: int, logits: Floats) -> int:
        """An id of a codebook, those drawn before made less likely.  # [id]"""
        penalty = self.samplings[channel].repetition_penalty
        if penalty == 1.0:
            return self.choose(channel, logits)
        penalties = self._penalties[channel, : len(logits)]
        either = np.minimum if penalty > 1 else np.maximum  # of a positive and of a negative logit, what is meant
        drawn = self.choose(channel, either(logits * penalties, logits / penalties))
        penalties[drawn] = penalty
        return drawn


def _best(scaled: Floats, top_k: int) -> NDArray[np.int64] | None:
    """The ids of the `top_k` best, in any order; None for all."""
    count = len(scaled)
    return np.argpartition(scaled, count - top_k)[count - top_k :] if 0 < top_k < count else None


def _drawn(scores: Floats, noise: Floats, top_p: float) -> int:
    """The one that noise makes the best, of those before which less than `top_p` of all chances stand."""
    noisy = scores + noise
    if top_p >= 1.0:
        return int(noisy.argmax())
    chances = np.exp(scores - scores.max())
    threshold = top_p * chances.sum()
    while True:
        drawn = int(noisy.argmax())
        if chances[scores > scores[drawn]].sum() < threshold:
            return drawn
        noisy[drawn] = -np.inf


def _mixed(x: Words) -> Words:
    """`counter_noise.mixed`, where words wrap around by themselves."""
    x = (x ^ x >> np.uint32(16)) * FIRST
    x = (x ^ x >> np.uint32(15)) * SECOND
    return x ^ x >> np.uint32(16)
