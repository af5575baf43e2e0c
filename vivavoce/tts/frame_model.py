"""TTS with models that generate frames of codec codes: splitting a text, its voice, deadlines, speed and pauses.

`FrameTTS` is the base of `NanoTTS` (torch) and `OnnxTTS`, which generate and decode the frames. Nothing here imports
torch.
"""

import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np

from vivavoce._deprecated import former_arguments
from vivavoce.audio.io import Sound
from vivavoce.audio.player import PlaybackClock
from vivavoce.audio.stretch import TimeStretch
from vivavoce.errors import InputError
from vivavoce.models.moss_tts_nano.prompt import Chunk, MossTTSNanoPrompt, chunks
from vivavoce.tts.chunked_decoding import ChunkedPlayback, Frame, Samples
from vivavoce.tts.interface import SpeakingStyle, SpeechSettings, StoredVoice, VoiceStore
from vivavoce.tts.text import cleaned, numbers_as_words

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
