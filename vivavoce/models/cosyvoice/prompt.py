"""What stands before a text, by what is wanted: a voice and its words, a voice alone, or an instruction."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vivavoce.errors import CheckpointError, InputError, MissingDependencyError, shown
from vivavoce.models.cosyvoice.lm import FEWEST_CODES, MOST_CODES, NO_CODE, CosyVoiceLM, CosyVoiceLMConfig
from vivavoce.models.interface import Row
from vivavoce.models.tokenizers import TextTokenizer

TOKENIZER_FOLDER = "CosyVoice-BlankEN"
END_OF_PROMPT = "<|endofprompt|>"
EVENTS = (
    *("[breath]", "<strong>", "</strong>", "[noise]", "[laughter]", "[cough]", "[clucking]", "[accent]"),
    *("[quick_breath]", "<laughter>", "</laughter>", "[hissing]", "[sigh]", "[vocalized-noise]", "[lipsmack]", "[mn]"),
)
END_OF_SYSTEM = "<|endofsystem|>"
ARPABET = """
    AA AA0 AA1 AA2 AE AE0 AE1 AE2 AH AH0 AH1 AH2 AO AO0 AO1 AO2 AW AW0 AW1 AW2 AY AY0 AY1 AY2 B CH D DH EH EH0 EH1
    EH2 ER ER0 ER1 ER2 EY EY0 EY1 EY2 F G HH IH IH0 IH1 IH2 IY IY0 IY1 IY2 JH K L M N NG OW OW0 OW1 OW2 OY OY0 OY1
    OY2 P R S SH T TH UH UH0 UH1 UH2 UW UW0 UW1 UW2 V W Y Z ZH
"""
PINYIN = """
    a ai an ang ao b c ch d e ei en eng f g h i ian in ing iu ià iàn iàng iào iá ián iáng iáo iè ié iòng ióng iù iú
    iā iān iāng iāo iē iě iōng iū iǎ iǎn iǎng iǎo iǒng iǔ j k l m n o ong ou p q r s sh t u uang ue un uo uà uài uàn
    uàng uá uái uán uáng uè ué uì uí uò uó uā uāi uān uāng uē uě uī uō uǎ uǎi uǎn uǎng uǐ uǒ vè w x y z zh à ài àn
    àng ào á ái án áng áo è èi èn èng èr é éi én éng ér ì ìn ìng í ín íng ò òng òu ó óng óu ù ùn ú ún ā āi ān āng āo
    ē ēi ēn ēng ě ěi ěn ěng ěr ī īn īng ō ōng ōu ū ūn ǎ ǎi ǎn ǎng ǎo ǐ ǐn ǐng ǒ ǒng ǒu ǔ ǔn ǘ ǚ ǜ
"""
PHONEMES = tuple(f"[{phoneme}]" for phoneme in (ARPABET + PINYIN).split())
ADDED = {2: (END_OF_PROMPT, *EVENTS), 3: (END_OF_PROMPT, *EVENTS, END_OF_SYSTEM, *PHONEMES)}
"""By version, in the order of their ids."""

# Where Qwen2 cuts a text before it merges bytes: contractions, words with what stands before them, single digits, marks
# with the line ends behind them, line ends, and spaces.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load_tokenizer(folder: str | Path, version: int) -> TextTokenizer:
    """The tokenizer of a model's folder, with the tokens of its version behind Qwen2's own."""
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    except ImportError as error:
        raise MissingDependencyError("text needs the tokenizers package: pip install tokenizers") from error
    folder = Path(folder) / TOKENIZER_FOLDER
    files = [folder / name for name in ("vocab.json", "merges.txt", "tokenizer_config.json")]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(f"{folder} lacks {', '.join(absent)}; fetch the model again")
    try:
        backend = Tokenizer(models.BPE.from_file(str(files[0]), str(files[1])))
        own = json.loads(files[2].read_text(encoding="utf8"))["added_tokens_decoder"]
        own_tokens = [own[number]["content"] for number in sorted(own, key=int)]
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{folder} does not hold Qwen2's tokenizer ({error}); fetch the model again") from error
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in (*own_tokens, *ADDED[version])])
    return TextTokenizer(backend)


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


TEXT_TOKENS, SPEECH_CODES = 5, 15  # of one round


@dataclass(frozen=True)
class InterleaveRequest:
    """What the model reads next, and how many codes it makes then; None: as many as it likes, up to `most`."""

    rows: tuple[Row, ...]
    codes: int | None
    most: int


class Interleave:
    """The rounds of one reply. Text is given as it comes; `ask` says what to do with it."""

    def __init__(self, config: CosyVoiceLMConfig, before: PromptPrefix) -> None:
        self._config = config
        opening = 0
        if config.version == 3:  # what stands before the transcript is read at once
            opening = len(before.text) - tuple(reversed(before.text)).index(config.end_of_prompt)
        self._rows: list[Row] = [config.start, *self._written(before.text[:opening])]
        self._text = list(before.text[opening:])
        self._reference = list(before.codes)
        self._due = -len(before.codes) % SPEECH_CODES  # codes that the reference leaves its last round short of
        self._given = self._made = 0
        self._is_ended = self._is_over = False

    def give(self, text: Sequence[int]) -> None:
        """More of the text."""
        if self._is_ended:
            raise InputError("the text was ended; begin a new one")
        if any(not 0 <= token < self._config.vocab_size for token in text):
            raise InputError(
                f"text ids go from {min(text)} to {max(text)}; this model has 0…{self._config.vocab_size - 1}"
            )
        self._text += text
        self._given += len(text)

    def end(self) -> None:
        """There is no more text."""
        if not self._given:
            raise InputError("there is no text to say; give at least one token")
        self._is_ended = True

    def ask(self) -> InterleaveRequest | None:
        """The next round; None: more text is needed first, or everything was asked for."""
        if self._is_over:
            return None
        while self._reference and len(self._text) >= TEXT_TOKENS:
            self._read_round()
        if self._reference and not self._is_ended:
            return None
        if not self._reference and self._due == 0 and len(self._text) >= TEXT_TOKENS:
            self._read_round()
            self._due = SPEECH_CODES
        if self._due and not self._reference:
            return self._asked(self._due)
        return self._last() if self._is_ended else None

    def _last(self) -> InterleaveRequest:
        self._is_over = True
        self._rows += [*self._written(self._text), self._config.task, *self._spoken(self._reference)]
        self._text, self._reference = [], []
        return self._asked(None)

    def _asked(self, codes: int | None) -> InterleaveRequest:
        rows, self._rows, self._due = tuple(self._rows), [], 0
        most = max(1, MOST_CODES * self._given - self._made)
        self._made += codes or 0
        return InterleaveRequest(rows, codes, most)

    def _read_round(self) -> None:
        """Five tokens of text, and the reference's codes of the same round if there are any."""
        self._rows += [*self._written(self._text[:TEXT_TOKENS]), *self._spoken(self._reference[:SPEECH_CODES])]
        del self._text[:TEXT_TOKENS], self._reference[:SPEECH_CODES]

    def _written(self, text: Sequence[int]) -> list[Row]:
        return [(token, NO_CODE) for token in text]

    def _spoken(self, codes: Sequence[int]) -> list[Row]:
        return [(self._config.speech_mark, code) for code in codes]
