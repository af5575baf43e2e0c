"""What is wished of a transcript, what is given of it, and what must be done on the way through a sound.

The way is a generator: it asks for windows to be encoded, for their language and for texts, is sent the answers, and
gives segments. So one window at a time, many sounds in one engine and other people's engines go the same way.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from vivavoce.models.whisper import WindowMemory
from vivavoce.models.whisper_alignment import TimedWord
from vivavoce.models.whisper_decoding import Text
from vivavoce.models.whisper_tokens import Task

Padding = Literal["full", "trim"]


@dataclass(frozen=True)
class TranscriptionOptions:
    """What a caller wants of a transcript; what is None is the model's to decide."""

    language: str | None = None
    task: Task = "transcribe"
    prompt: str | None = None
    """Text that is taken to stand before the sound: names, spellings, style."""
    prefix: str | None = None
    """Text that the first window surely begins with."""
    hotwords: tuple[str, ...] = ()
    word_times: bool = False
    timestamps: bool | None = None
    follow_earlier: bool = True
    padding: Padding = "full"
    temperatures: tuple[float, ...] | None = None
    longest_silence: float | None = None
    """With word times: a doubtful segment beside so many seconds without a word is taken for imagined."""
    seed: int = 0
    beams: int = 1
    """Texts that are followed side by side at temperature 0; 1 is greedy."""


@dataclass(frozen=True)
class TranscriptSegment:
    """A stretch of text with its times in seconds and how far it can be trusted."""

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]
    temperature: float
    average_logprob: float
    compression: float
    no_speech: float
    words: tuple[TimedWord, ...] = ()
    language: str | None = None


@dataclass(frozen=True)
class EncodeWindow:
    """A window to be encoded.  # mel [1, mel, frame]"""

    mel: Tensor


@dataclass(frozen=True)
class WriteText:
    """A text to be written of a window."""

    memory: WindowMemory
    prompt: tuple[int, ...]
    wish: TranscriptionOptions
    temperature: float
    best_of: int
    most: int
    is_begun: bool = False
    """Whether the prompt ends with text, so that the first token is not the beginning of one."""

    @property
    def beams(self) -> int:
        """Texts that are followed side by side."""
        return self.wish.beams if self.temperature == 0 else 1


@dataclass(frozen=True)
class LanguageDetector:
    """A window whose language is to be told."""

    memory: WindowMemory


Question = EncodeWindow | LanguageDetector | WriteText
Answer = WindowMemory | str | Text | None
TranscriptionSteps = Generator[Question | TranscriptSegment, Answer, None]


def answered(going: TranscriptionSteps, answer: Callable[[Question], Answer]) -> Iterator[TranscriptSegment]:
    """The segments of a way through a sound, its questions answered one by one."""
    given: Answer = None
    while True:
        try:
            item = going.send(given)
        except StopIteration:
            return
        given = None
        if isinstance(item, TranscriptSegment):
            yield item
        else:
            given = answer(item)
