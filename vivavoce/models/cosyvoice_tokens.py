"""CosyVoice's text tokens: Qwen2's byte-level BPE, and the tokens that were added to it for events and phonemes."""

import json
from pathlib import Path

from vivavoce.errors import CheckpointError, MissingDependencyError
from vivavoce.models.tokenizer import TextTokenizer

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
