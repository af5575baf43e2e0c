"""What stands before a text, by what is wanted: a voice and its words, a voice alone, or an instruction."""

from collections.abc import Sequence
from dataclasses import dataclass

from vivavoce.errors import InputError, shown
from vivavoce.models.cosyvoice_lm import FEWEST_CODES, MOST_CODES, CosyVoiceLM
from vivavoce.models.cosyvoice_tokens import END_OF_PROMPT
from vivavoce.models.interface import Row
from vivavoce.models.tokenizer import TextTokenizer

SYSTEM = "You are a helpful assistant."  # of version 3


@dataclass(frozen=True)
class PromptPrefix:
    """Text ids before the text, and the speech codes after it that belong to them."""

    text: tuple[int, ...] = ()
    codes: tuple[int, ...] = ()


class CosyVoicePrompt:
    """Prompts of one version."""

    def __init__(self, lm: CosyVoiceLM, tokenizer: TextTokenizer) -> None:
        self.lm, self.tokenizer = lm, tokenizer
        self.version = lm.config.version

    def zero_shot(self, transcript: str, codes: Sequence[int]) -> PromptPrefix:
        """To go on in the voice of a reference that said this."""
        words = self.tokenizer.encode(transcript)
        check_transcript(transcript, len(words), len(codes))
        return PromptPrefix((*self._opening(), *words), tuple(codes))

    def cross_lingual(self) -> PromptPrefix:
        """To speak any language: the reference's words and codes are left out, its sound is not."""
        return PromptPrefix(self._opening())

    def instructed(self, instruction: str) -> PromptPrefix:
        """To speak as told."""
        if not instruction.strip() or END_OF_PROMPT in instruction:
            raise InputError(f"an instruction is a sentence without {END_OF_PROMPT}, not {instruction!r}")
        return PromptPrefix(self._opening(instruction.strip()))

    def text(self, text: str) -> list[int]:
        """The ids of what is to be said."""
        return self.tokenizer.encode(text)

    def rows(self, before: PromptPrefix, text: Sequence[int]) -> list[Row]:
        """The rows of a whole text that the language model replies to."""
        return self.lm.prompt(text, before.text, before.codes)

    def _opening(self, instruction: str = "") -> tuple[int, ...]:
        """What begins a prompt: in version 3 always a system's line, in version 2 an instruction or nothing."""
        if self.version == 2:
            written = instruction + END_OF_PROMPT if instruction else ""
        else:
            written = f"{SYSTEM} {instruction}".rstrip() + END_OF_PROMPT
        return tuple(self.tokenizer.encode(written)) if written else ()


def check_transcript(transcript: str, tokens: int, codes: int) -> None:
    """Raise if a reference of so many codes cannot have said so many tokens: then the words are not its own."""
    if not tokens:
        raise InputError("the transcript of the reference is empty; give its words, or none to go by its sound alone")
    if not FEWEST_CODES * tokens <= codes <= MOST_CODES * tokens:
        raise InputError(
            f"the reference has {codes / 25:.1f} s, too {'short' if codes < FEWEST_CODES * tokens else 'long'} for the "
            f"{tokens} tokens of {shown(transcript)}; give the words that are said in it, all of them"
        )
