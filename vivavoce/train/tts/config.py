"""Configurations of `mini-tts` and of tiny models for tests, and its SentencePiece tokenizer."""

import struct
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path

from vivavoce.errors import InputError
from vivavoce.models.moss_audio_tokenizer.config import MossAudioTokenizerConfig, QuantizerConfig, StageConfig
from vivavoce.models.moss_tts_nano.prompt import (
    ASSISTANT_ROLE,
    NO_REFERENCE,
    OTHER_FIELDS,
    REFERENCE_FIELD,
    USER_END,
    USER_ROLE,
    MossTTSNanoConfig,
)
from vivavoce.models.tokenizers import BPE, SPACE, SentencePieceTokenizer

RATE = 16_000  # the rate of the training voices


def _encoder_stage(inputs: int, layers: int, seconds: float) -> StageConfig:
    return StageConfig(inputs, 128, layers, seconds, d_model=128, num_heads=4, dim_feedforward=512)


def _decoder_stage(inputs: int, outputs: int, layers: int, seconds: float) -> StageConfig:
    return StageConfig(inputs, outputs, layers, seconds, d_model=192, num_heads=6, dim_feedforward=768)


# Stages at 200, 100 and 50 positions a second; a frame of 80 ms is 16, 8 and 4 of them.
CODEC = MossAudioTokenizerConfig(
    sample_rate=RATE,
    channels=1,
    encoder=(80, _encoder_stage(80, 1, 0.64), 2, _encoder_stage(256, 1, 1.28), 2, _encoder_stage(256, 2, 2.56), 4),
    decoder=(
        4,
        _decoder_stage(128, 384, 2, 2.56),
        2,
        _decoder_stage(192, 384, 1, 1.28),
        2,
        _decoder_stage(192, 80, 3, 0.64),
        80,
    ),
    quantizer=QuantizerConfig(512, 64, 512, num_quantizers=8, codebook_size=512, codebook_dim=8),
)
LM = MossTTSNanoConfig(
    vocab_size=384,
    hidden_size=256,
    intermediate_size=384,
    num_layers=4,
    num_heads=4,
    max_positions=2048,
    n_vq=8,
    audio_vocab_size=512,
    audio_pad_token_id=512,
    local_transformer_layers=1,
)


def _tiny(inputs: int, outputs: int) -> StageConfig:
    return StageConfig(inputs, outputs, 1, 0.32, d_model=16, num_heads=2, dim_feedforward=32)


TINY_CODEC = MossAudioTokenizerConfig(
    sample_rate=RATE,
    channels=1,
    encoder=(80, _tiny(80, 16), 4, _tiny(64, 16), 4),
    decoder=(4, _tiny(16, 64), 4, _tiny(16, 80), 80),
    quantizer=QuantizerConfig(64, 24, 64, num_quantizers=8, codebook_size=32, codebook_dim=4),
)
TINY_LM = MossTTSNanoConfig(
    vocab_size=384,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    max_positions=2048,
    n_vq=8,
    audio_vocab_size=32,
    audio_pad_token_id=32,
)


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SIGNS = ("<s>", "</s>", "<pad>", "<turn>", "</turn>", "<sound>", "</sound>", "<voice>", "<speech>")  # ids 1 to 9
LETTERS = f"{SPACE}abcdefghijklmnopqrstuvwxyz0123456789.,?!'-:;"
FOLDED = (range(0x21, 0x250), range(0x1E00, 0x1F00), range(0x2000, 0x2070), range(0xFF01, 0xFF5F))
SPACES = ("\n", "\t", "\r", "\u00a0", "\u3000", "\u2028", "\u2009")
SAID_ALIKE = {"‘": "'", "’": "'", "“": "", "”": "", '"': "", "–": "-", "—": ", ", "…": ".", "\u200b": "", "\u00ad": ""}


def write_tokenizer(folder: str | Path, entries: int) -> SentencePieceTokenizer:
    """Write `tokenizer.model` for a vocabulary of at most so many entries, and read it back."""
    pieces = tokenizer_pieces()
    if len(pieces) > entries:
        raise InputError(f"the tokenizer has {len(pieces)} pieces, more than the {entries} the model has room for")
    file = Path(folder) / "tokenizer.model"
    written = b"".join(_field(1, _piece(*piece)) for piece in pieces)
    trainer = _field(3, BPE) + _field(35, 1)  # model type, and byte fallback
    normaliser = _field(1, b"mini") + _field(2, _character_map(folded_characters()))
    file.write_bytes(written + _field(2, trainer) + _field(3, normaliser))
    return SentencePieceTokenizer.load(file)


def tokenizer_pieces() -> list[tuple[str, float, int]]:
    """Text, score and type of every piece, in the order of their ids."""
    template = " ".join([USER_ROLE, REFERENCE_FIELD, NO_REFERENCE, OTHER_FIELDS, USER_END, ASSISTANT_ROLE])
    words = dict.fromkeys(word for word in template.split() if word not in LETTERS)
    return [
        ("<unk>", 0.0, UNKNOWN),
        *((sign, 0.0, CONTROL) for sign in SIGNS),
        *((word, 0.0, USER_DEFINED) for word in words),
        *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
        *((letter, -float(rank), NORMAL) for rank, letter in enumerate(LETTERS)),
    ]


def folded_characters() -> dict[str, str]:
    """Normalisation map of characters."""
    folded = dict.fromkeys(SPACES, " ") | SAID_ALIKE
    for code in (code for block in FOLDED for code in block):
        character = chr(code)
        plain = unicodedata.normalize("NFKD", character.casefold())
        plain = "".join(SAID_ALIKE.get(each, each) for each in plain if not unicodedata.combining(each))
        if character not in folded and plain != character and plain.isascii() and plain.isprintable():
            folded[character] = plain
    return folded


def _piece(text: str, score: float, kind: int) -> bytes:
    return _field(1, text.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", score) + _field(3, kind)


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    low = b""
    while value >= 0x80:
        low += bytes([value & 0x7F | 0x80])
        value >>= 7
    return low + bytes([value])


def _character_map(folded: Mapping[str, str]) -> bytes:
    """A double-array trie from UTF-8 sequences to offsets in a string of replacements."""
    strings, offsets = b"", {}
    for character, plain in folded.items():
        offsets[character.encode()] = len(strings)
        strings += plain.encode() + b"\0"
    trie = _double_array(offsets)
    units = struct.pack(f"<{len(trie)}I", *trie)
    return struct.pack("<I", len(units)) + units + strings


def _double_array(values: Mapping[bytes, int]) -> list[int]:
    """Units of the trie: a child is at its parent's base XOR its byte; values are at byte 0."""
    units: dict[int, int] = {0: 0}
    bases: set[int] = set()
    waiting: list[tuple[int, Mapping[bytes, int]]] = [(0, values)]
    while waiting:
        node, below = waiting.pop()
        heads = {key[0] if key else 0 for key in below}
        base = _free_base(heads, units, bases)
        bases.add(base)
        units[node] |= (node ^ base) << 10
        for head in heads:
            if head == 0:
                units[node] |= 1 << 8
                units[base] = below[b""] | 1 << 31
                continue
            units[base ^ head] = head
            waiting.append((base ^ head, {key[1:]: value for key, value in below.items() if key[:1] == bytes([head])}))
    size = (max(units) // 256 + 1) * 256  # readers look up any byte at a base
    return [units.get(index, 0) for index in range(size)]


def _free_base(heads: Iterable[int], units: Mapping[int, int], bases: set[int]) -> int:
    heads = list(heads)
    base = 1
    while base in bases or any(base ^ head in units for head in heads):
        base += 1
    return base
