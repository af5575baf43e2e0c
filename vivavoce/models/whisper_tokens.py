"""The special tokens of a Whisper vocabulary: what stands where, and the prompt that asks for a transcript."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.tokenizer import TextTokenizer

Task = Literal["transcribe", "translate"]

SECONDS_PER_TIMESTAMP = 0.02
PUBLISHED_TEXT_IDS = 50257  # of GPT-2's and of the multilingual BPE; English-only models have one less
PUBLISHED_TIMESTAMPS = 1501
LANGUAGES = (  # in the order of their ids
    *("en", "zh", "de", "es", "ru", "ko", "fr", "ja", "pt", "tr", "pl", "ca", "nl", "ar"),
    *("sv", "it", "id", "hi", "fi", "vi", "he", "uk", "el", "ms", "cs", "ro", "da", "hu"),
    *("ta", "no", "th", "ur", "hr", "bg", "lt", "la", "mi", "ml", "cy", "sk", "te", "fa"),
    *("lv", "bn", "sr", "az", "sl", "kn", "et", "mk", "br", "eu", "is", "hy", "ne", "mn"),
    *("bs", "kk", "sq", "sw", "gl", "mr", "pa", "si", "km", "sn", "yo", "so", "af", "oc"),
    *("ka", "be", "tg", "sd", "gu", "am", "yi", "lo", "uz", "fo", "ht", "ps", "tk", "nn"),
    *("mt", "sa", "lb", "my", "bo", "tl", "mg", "as", "tt", "haw", "ln", "ha", "ba", "jw"),
    *("su", "yue"),
)
AFTER_LANGUAGES = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
OTHER_NAMES = {"nospeech": ("nocaptions",)}


@dataclass(frozen=True)
class WhisperTokens:
    """Ids of the special tokens; everything below `endoftext` is text, everything from `timestamps` on is a time."""

    endoftext: int
    startoftranscript: int
    languages: dict[str, int]
    translate: int
    transcribe: int
    startoflm: int
    startofprev: int
    nospeech: int
    notimestamps: int
    is_multilingual: bool = True

    @property
    def timestamps(self) -> int:
        """The id of <|0.00|>."""
        return self.notimestamps + 1

    @property
    def specials(self) -> tuple[int, ...]:
        """Ids no transcript contains: those of prompts alone."""
        fixed = (self.startoftranscript, self.translate, self.transcribe, self.startoflm)
        return (*fixed, self.startofprev, self.nospeech)

    @classmethod
    def in_order(cls, endoftext: int, languages: Sequence[str], is_multilingual: bool = True) -> "WhisperTokens":
        """The ids that follow from Whisper's order of special tokens."""
        first = endoftext + 2
        after = {name: first + len(languages) + index for index, name in enumerate(AFTER_LANGUAGES)}
        by_language = {language: first + index for index, language in enumerate(languages)}
        return cls(endoftext, endoftext + 1, by_language, **after, is_multilingual=is_multilingual)

    @classmethod
    def of_vocabulary(cls, size: int) -> "WhisperTokens":
        """The ids of a published vocabulary: English-only (51864), 99 languages (51865) or 100 (51866)."""
        languages = size - PUBLISHED_TEXT_IDS - 2 - len(AFTER_LANGUAGES) - PUBLISHED_TIMESTAMPS
        if size == 51864:
            return cls.in_order(PUBLISHED_TEXT_IDS - 1, LANGUAGES[:99], is_multilingual=False)
        if not 99 <= languages <= len(LANGUAGES):
            raise CheckpointError(f"a vocabulary of {size} is not a published Whisper's; its tokenizer.json is needed")
        return cls.in_order(PUBLISHED_TEXT_IDS, LANGUAGES[:languages])

    @classmethod
    def of_tokenizer(cls, tokenizer: TextTokenizer, vocabulary: int) -> "WhisperTokens":
        """The ids that a tokenizer gives to <|startoftranscript|> and its like."""
        found = {name: _special(tokenizer, name) for name in ("endoftext", "startoftranscript", *AFTER_LANGUAGES)}
        by_language = {code: id_ for code in LANGUAGES if (id_ := tokenizer.id_of(f"<|{code}|>")) is not None}
        return cls(languages=by_language, is_multilingual=vocabulary != 51864, **found)

    def is_timestamp(self, token: int) -> bool:
        """Whether a token is a time."""
        return token >= self.timestamps

    def seconds(self, token: int) -> float:
        """The time a timestamp token says."""
        return (token - self.timestamps) * SECONDS_PER_TIMESTAMP

    def timestamp(self, seconds: float) -> int:
        """The token of a time."""
        return self.timestamps + round(seconds / SECONDS_PER_TIMESTAMP)

    def prompt(
        self,
        language: str | None = None,
        task: Task = "transcribe",
        timestamps: bool = False,
        earlier: Sequence[int] = (),
    ) -> list[int]:
        """What the decoder is given: [earlier text], start, language, task, and whether times are wanted."""
        ids = [self.startofprev, *earlier] if earlier else []
        ids.append(self.startoftranscript)
        if self.is_multilingual:
            if language not in self.languages:
                known = ", ".join(list(self.languages)[:12]) + (" …" if len(self.languages) > 12 else "")
                raise InputError(f"language {language!r} is not one this model writes; it knows {known}")
            ids += [self.languages[language], self.translate if task == "translate" else self.transcribe]
        return ids if timestamps else [*ids, self.notimestamps]


def _special(tokenizer: TextTokenizer, name: str) -> int:
    for spelling in (name, *OTHER_NAMES.get(name, ())):
        found = tokenizer.id_of(f"<|{spelling}|>")
        if found is not None:
            return found
    raise CheckpointError(f"the tokenizer has no <|{name}|>; it is not a Whisper's")
