"""A text told by a model of frames: cut into parts, each part's frames made and decoded, its speed and pauses set.

What makes the frames and decodes them is left to who derives from it. Nothing here needs torch.
"""

import itertools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np

from vivavoce.audio.sound import Sound
from vivavoce.audio.time_stretch import TimeStretch
from vivavoce.dialogue.player import SimulatedPlayer
from vivavoce.errors import InputError
from vivavoce.models.moss_tts_nano_prompt import MossTTSNanoPrompt
from vivavoce.models.moss_tts_nano_text import Chunk, chunks
from vivavoce.speech.cleaning import cleaned
from vivavoce.speech.interface import SpeakingStyle
from vivavoce.speech.numbers import numbers_as_words
from vivavoce.speech.settings import SpeechSettings
from vivavoce.speech.sounding import ChunkedPlayback, Frame, Samples
from vivavoce.speech.voices import StoredVoice, VoiceStore

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


class FrameTTS(ABC):
    """Says texts. Who derives from it has a prompt, settings and a shelf."""

    prompt: MossTTSNanoPrompt
    settings: SpeechSettings
    shelf: VoiceStore

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
    def _at_once(self) -> int:
        """Parts of a text that are worth making side by side."""

    @abstractmethod
    def _frames(self, text: str, before: SpokenPrefix, seed: int, greedy: bool) -> Frames:
        """The frames of a part, begun now."""

    @abstractmethod
    def _sounding(self, player: SimulatedPlayer, clock: Callable[[], float], is_live: bool) -> ChunkedPlayback[Any]:
        """The codec before the first frame of a part."""

    @abstractmethod
    def _codes_of(self, sound: Sound) -> list[list[int]]:
        """A recording as codes.  # [frame, codebook]"""

    def add_voice(self, name: str, sound: Sound, consent: str = "", text: str = "") -> StoredVoice:
        """Keep a voice on this machine under a name, from a recording of three to eight seconds and its words."""
        voice = StoredVoice(name, self._codes_of(sound), self.mark, consent, text=text)
        return self.shelf.add(voice, sound)

    def stream(
        self,
        text: str,
        voice: str | Sound | None = None,
        manner: SpeakingStyle | None = None,
        clock: Callable[[], float] | None = time.monotonic,
    ) -> Iterator[Samples]:
        """The sound of a text, as it is made.  # pieces [channel, time]

        `voice` is a name, or a recording to sound like; none is the model's own. Leaving off half-way costs nothing.
        Without a clock nobody waits for the sound, and its last bits are the same each time.
        """
        manner = manner or SpeakingStyle()
        stretch = TimeStretch(self.rate, manner.speed)
        parts = chunks(self.prepared(text, manner.clean), self.prompt.count_tokens, self.settings.chunk_tokens)
        return self._stream(parts, self._before(voice, manner), manner, stretch, clock)

    def say(self, text: str, voice: str | Sound | None = None, manner: SpeakingStyle | None = None) -> Sound:
        """The whole sound of a text."""
        pieces = list(self.stream(text, voice, manner, clock=None))
        return Sound(np.concatenate(pieces, axis=1), self.rate)

    def prepared(self, text: str, clean: bool = True) -> str:
        """The text as the model gets it."""
        text = cleaned(text) if clean else text
        return numbers_as_words(text) if self.settings.spells_numbers else text

    def _stream(
        self,
        parts: list[Chunk],
        before: SpokenPrefix,
        manner: SpeakingStyle,
        stretch: TimeStretch,
        live_clock: Callable[[], float] | None,
    ) -> Iterator[Samples]:
        player, channels, clock = SimulatedPlayer(), self.channels, live_clock or (lambda: 0.0)
        with closing(self._begun(parts, before, manner)) as begun:
            for part, frames in begun:
                sounding = self._sounding(player, clock, live_clock is not None)
                state = stretch.initial_state(channels)
                for sound in sounding.sounds(frames):
                    stretched, state = stretch.step(state, sound)
                    yield from self._heard(stretched, player, clock)
                silence = np.zeros((channels, round(part.pause * manner.pause * self.rate)), np.float32)
                yield from self._heard(np.concatenate([stretch.flush(state), silence], axis=1), player, clock)

    def _begun(
        self, parts: list[Chunk], before: SpokenPrefix, manner: SpeakingStyle
    ) -> Generator[tuple[Chunk, Frames], None, None]:
        """The parts in order with their frames; where parts can be made side by side, the next ones are begun too."""
        under_way: deque[tuple[Chunk, Frames]] = deque()
        coming = iter(enumerate(parts))
        try:
            while True:
                for number, part in itertools.islice(coming, self._at_once - len(under_way)):
                    under_way.append((part, self._frames(part.text, before, manner.seed + number, manner.greedy)))
                if not under_way:
                    return
                yield under_way[0]
                under_way.popleft()[1].close()
        finally:
            for _, frames in under_way:
                frames.close()

    def _heard(self, sound: Samples, player: SimulatedPlayer, clock: Callable[[], float]) -> Iterator[Samples]:
        """Hand a piece on, and let the imagined player have it."""
        if sound.shape[1]:
            player.feed(clock(), sound.shape[1] / self.rate)
            yield sound

    def _before(self, voice: str | Sound | None, manner: SpeakingStyle) -> SpokenPrefix:
        """What stands before each part."""
        if not manner.continues:
            return SpokenPrefix(self._reference(voice))
        words = self.shelf.get(voice).text.strip() if isinstance(voice, str) and voice in self.shelf else ""
        if not words:
            raise InputError("to go on from a recording its words must be known: keep the voice with its --text")
        return SpokenPrefix(words=words + " ", said=self._reference(voice))

    def _reference(self, voice: str | Sound | None) -> Codes:
        """The codes of a voice; none for the model's own."""
        if isinstance(voice, Sound):
            codes = self._codes_of(voice)
        else:
            codes = [] if voice is None or voice == self.settings.own_voice else self._kept_codes(voice)
        return tuple(tuple(frame) for frame in codes)

    def _kept_codes(self, name: str) -> list[list[int]]:
        """A kept voice's codes; those of another model's codec are made anew from its recording."""
        voice = self.shelf.get(name)
        if voice.codes and voice.codec in ("", self.mark):
            return voice.codes
        recording = self.shelf.recording(name)
        if recording is None:
            raise InputError(f"the voice {name!r} was made for another model and has no recording; add it anew")
        return self._codes_of(recording)
