"""Options, segments and settings of transcripts, and the questions that the transcription generator asks.

`WhisperTranscriber.hear` is a generator: it asks for windows to be encoded, for their language and for texts, is sent
the answers, and yields segments. So one window at a time, many recordings in one engine and CTranslate2 share it.
"""

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from vivavoce.errors import CheckpointError
from vivavoce.models.whisper.alignment import TimedWord
from vivavoce.models.whisper.config import SECONDS_PER_TIMESTAMP, Task, WhisperConfig, WhisperTokens
from vivavoce.models.whisper.decoding import Text
from vivavoce.models.whisper.model import WindowMemory

Padding = Literal["full", "trim"]


@dataclass(frozen=True)
class TranscriptionOptions:
    """What a caller asks for; the model decides what is None."""

    language: str | None = None
    task: Task = "transcribe"
    prompt: str | None = None
    """Text that is taken to precede the recording: names, spellings, style."""
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


@dataclass(frozen=True)
class TranscriptSegment:
    """Text with its times in seconds and what it can be trusted by."""

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
    """A text to be decoded of a window."""

    memory: WindowMemory
    prompt: tuple[int, ...]
    options: TranscriptionOptions
    temperature: float
    best_of: int
    max_tokens: int
    is_started: bool = False
    """Whether the prompt ends within the text, so that the first token is not the first of it."""

    @property
    def beams(self) -> int:
        """Beams at this temperature."""
        return self.options.beams if self.temperature == 0 else 1


@dataclass(frozen=True)
class LanguageDetector:
    """A window whose language is to be detected."""

    memory: WindowMemory


Question = EncodeWindow | LanguageDetector | WriteText
Answer = WindowMemory | str | Text | None
TranscriptionSteps = Generator[Question | TranscriptSegment, Answer, None]


def answered(steps: TranscriptionSteps, answer: Callable[[Question], Answer]) -> Iterator[TranscriptSegment]:
    """The segments of a recording, with every question answered at once."""
    given: Answer = None
    while True:
        try:
            item = steps.send(given)
        except StopIteration:
            return
        given = None
        if isinstance(item, TranscriptSegment):
            yield item
        else:
            given = answer(item)


WindowFill = Literal["zeros", "silence"]
MULTILINGUAL = 51865  # the smallest published vocabulary with many languages
NON_SPEECH = (  # brackets, notes and other symbols that are not spoken, in the multilingual vocabularies
    *(1, 2, 7, 8, 9, 10, 14, 25, 26, 27, 28, 29, 31, 58, 59, 60, 61, 62, 63, 90, 91, 92, 93, 359, 503, 522, 542, 873),
    *(893, 902, 918, 922, 931, 1350, 1853, 1982, 2460, 2627, 3246, 3253, 3268, 3536, 3846, 3961, 4183, 4667, 6585),
    *(6647, 7273, 9061, 9383, 10428, 10929, 11938, 12033, 12331, 12562, 13793, 14157, 14635, 15265, 15618, 16553),
    *(16604, 18362, 18956, 20075, 21675, 22520, 26130, 26161, 26435, 28279, 29464, 31650, 32302, 32470, 36865, 42863),
    *(47425, 49870, 50254),
)
BLANK = 220  # a lone space, in every published vocabulary
LARGE_V2_HEADS = (  # also Breeze-ASR-25's
    *((10, 12), (13, 17), (16, 11), (16, 12), (16, 13), (17, 15), (17, 16), (18, 4), (18, 11), (18, 19), (19, 11)),
    *((21, 2), (21, 3), (22, 3), (22, 9), (22, 12), (23, 5), (23, 7), (23, 13), (25, 5), (26, 1), (26, 12), (27, 15)),
)
LARGE_V3_HEADS = ((7, 0), (10, 17), (12, 18), (13, 12), (16, 1), (17, 14), (19, 11), (21, 4), (24, 1), (25, 6))
TURBO_HEADS = ((2, 4), (2, 11), (3, 3), (3, 6), (3, 11), (3, 14))
KNOWN_HEADS = {(51865, 32, 1280): LARGE_V2_HEADS, (51866, 32, 1280): LARGE_V3_HEADS, (51866, 4, 1280): TURBO_HEADS}


@dataclass(frozen=True)
class WhisperSettings:
    """Decoding settings of a model. Defaults are OpenAI's; None switches a threshold off."""

    suppressed: tuple[int, ...] = ()
    suppressed_at_start: tuple[int, ...] = ()
    alignment_heads: tuple[tuple[int, int], ...] = ()
    latest_start: float | None = 1.0
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    best_of: int = 5
    max_compression: float | None = 2.4
    min_logprob: float | None = -1.0
    no_speech: float | None = 0.6
    likely_text_is_speech: bool = True
    """Whether a text above `least_logprob` is kept although the model detects no speech."""
    forget_prompt_above: float = 0.5
    writes_times: bool = True
    """Whether timestamps are asked for; a model fine-tuned without them is worse with them."""
    untimed_up_to: float = 0.0
    """Recordings up to so many seconds have no timestamps, unless the caller asks for them."""
    language: str | None = None
    """The language where the caller names none; None: it is detected."""
    min_window_seconds: float = 1.0
    """Of trimmed windows."""
    window_fill: WindowFill = "zeros"
    """What fills up the last window: zeros in the normalised log-mel, or silence."""
    hotword_bonus: float = 2.0

    @classmethod
    def read(cls, folder: str | Path, config: WhisperConfig, tokens: WhisperTokens) -> "WhisperSettings":
        """The `generation_config.json` of a folder over the defaults of the published size."""
        file = Path(folder) / "generation_config.json"
        published = cls.of_size(config, tokens)
        if not file.is_file():
            return published
        try:
            values: dict[str, Any] = json.loads(file.read_text(encoding="utf8"))
        except ValueError as error:
            raise CheckpointError(f"{file} is not JSON ({error}); fetch it again") from error
        return published.updated(values)

    @classmethod
    def of_size(cls, config: WhisperConfig, tokens: WhisperTokens) -> "WhisperSettings":
        """The settings of the published model of these sizes."""
        is_published = config.vocab_size >= MULTILINGUAL
        half = range(config.decoder_layers // 2, config.decoder_layers)
        all_heads = tuple((layer, head) for layer in half for head in range(config.decoder_attention_heads))
        shape = (config.vocab_size, config.decoder_layers, config.d_model)
        return cls(
            suppressed=(*(NON_SPEECH if is_published else ()), *tokens.specials),
            suppressed_at_start=(*((BLANK,) if is_published else ()), tokens.endoftext),
            alignment_heads=KNOWN_HEADS.get(shape, all_heads),
        )

    def updated(self, values: Mapping[str, Any]) -> "WhisperSettings":
        """These settings with the values of a generation config, by its names."""
        given = values.get
        heads, latest = given("alignment_heads"), given("max_initial_timestamp_index")
        never, not_first = given("suppress_tokens"), given("begin_suppress_tokens")
        return replace(
            self,
            suppressed=self.suppressed if never is None else tuple(never),
            suppressed_at_start=self.suppressed_at_start if not_first is None else tuple(not_first),
            alignment_heads=tuple((layer, head) for layer, head in heads) if heads else self.alignment_heads,
            latest_start=self.latest_start if latest is None else latest * SECONDS_PER_TIMESTAMP,
            max_compression=given("compression_ratio_threshold", self.max_compression),
            min_logprob=given("logprob_threshold", self.min_logprob),
            no_speech=given("no_speech_threshold", self.no_speech),
            likely_text_is_speech=given("likely_text_is_speech", self.likely_text_is_speech),
            writes_times=given("writes_timestamps", self.writes_times),
            untimed_up_to=given("untimed_up_to", self.untimed_up_to),
            language=given("default_language", self.language),
            min_window_seconds=given("shortest_window", self.min_window_seconds),
            window_fill=given("window_fill", self.window_fill),
        )
