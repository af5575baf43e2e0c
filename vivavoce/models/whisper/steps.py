"""The steps of a transcription: its options, what it asks of a model, and the segments that it yields."""

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from vivavoce.models.whisper.alignment import TimedWord
from vivavoce.models.whisper.config import Task
from vivavoce.models.whisper.decoding import Text
from vivavoce.models.whisper.model import WindowMemory

Padding = Literal["full", "trim"]


@dataclass(frozen=True)
class TranscriptionOptions:
    """Options of a transcription; None leaves the choice to the model's settings."""

    language: str | None = None
    task: Task = "transcribe"
    prompt: str | None = None
    """Text that precedes the recording as context: names, spellings, style."""
    prefix: str | None = None
    """Text that the first window begins with."""
    hotwords: tuple[str, ...] = ()
    word_times: bool = False
    timestamps: bool | None = None
    follow_earlier: bool = True
    padding: Padding = "full"
    temperatures: tuple[float, ...] | None = None
    max_silence: float | None = None
    """With word times: a doubtful segment after more seconds than this without a word is dropped as a hallucination."""
    seed: int = 0
    beams: int = 1
    """Beams at temperature 0; 1 is greedy."""
    languages: tuple[str, ...] = ()
    """Without a `language`: those that may be spoken, of which the likeliest is detected; empty: all."""
    guess: str = ""
    """What the first window probably says, as of a transcript of the sound so far. Serial greedy decoding verifies it
    in one pass; the transcript is the same without."""
    logprobs: bool = False
    """Whether segments have the log-probabilities of their tokens, which take one more pass a window."""


@dataclass(frozen=True)
class ScoredToken:
    """A token of a text and the logarithm of its probability."""

    text: str
    data: bytes
    """Its bytes; a token may be a part of a character."""
    logprob: float


@dataclass(frozen=True)
class TranscriptSegment:
    """Text with its times in seconds and its quality measures."""

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
    logprobs: tuple[ScoredToken, ...] = ()
    """Of the tokens of its text; empty where the options do not ask for them."""


@dataclass(frozen=True)
class EncodeWindow:
    """Request to encode a window.  # mel [1, mel, frame]"""

    mel: Tensor


@dataclass(frozen=True)
class WriteText:
    """Request to decode a text of a window."""

    memory: WindowMemory
    prompt: tuple[int, ...]
    options: TranscriptionOptions
    temperature: float
    best_of: int
    max_tokens: int
    is_started: bool = False
    """Whether the prompt ends inside the text, so that the first sampled token does not start it."""
    guess: tuple[int, ...] = ()
    """Tokens that probably come next."""

    @property
    def beams(self) -> int:
        """Beams at this temperature."""
        return self.options.beams if self.temperature == 0 else 1


@dataclass(frozen=True)
class DetectLanguage:
    """Request to detect the language of a window."""

    memory: WindowMemory
    languages: tuple[str, ...] = ()
    """The languages that may be spoken; empty: all of the model's."""

    def likeliest(self, probabilities: Mapping[str, float]) -> str:
        """The likeliest of them, by the probability of each language."""
        candidates = [language for language in self.languages if language in probabilities] or list(probabilities)
        return max(candidates, key=lambda language: probabilities[language])


Question = EncodeWindow | DetectLanguage | WriteText


Answer = WindowMemory | str | Text | None


TranscriptionSteps = Generator[Question | TranscriptSegment, Answer, None]


def run_steps(
    steps: TranscriptionSteps, answer: Callable[[Question], Answer], is_wanted: Callable[[], bool] = lambda: True
) -> Iterator[TranscriptSegment]:
    """The segments of a recording, with every request answered by `answer` on the calling thread."""
    sent: Answer = None
    while is_wanted():
        try:
            item = steps.send(sent)
        except StopIteration:
            return
        sent = None
        if isinstance(item, TranscriptSegment):
            yield item
        else:
            sent = answer(item)
