"""A SentencePiece model, written here byte by byte, is read and applied as SentencePiece does it."""

import struct

import pytest

from vivavoce.errors import CheckpointError
from vivavoce.models.tokenizers import SentencePieceTokenizer

NORMAL, UNKNOWN, CONTROL, SYMBOL, BYTE = 1, 2, 3, 4, 6
MAP = {"\n": " ", "\u3000": " ", "\u200b": "", "Ａ": "A", "e\u0301": "é", "ﬁ": "fi", "①": "1", "\t": " "}
SPECIAL = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<turn>", SYMBOL), ("<turn>>", SYMBOL)]
BEST_FIRST = ["▁t", "he", "▁the", "in", "ab", "bc", "abc", "▁a", "▁abc", "fi", "no", "▁no", "on", "中文"]
LETTERS = ["▁", "a", "b", "c", "e", "h", "i", "n", "t", "o", "f", "A", "é", "1", "中", "文"]
FIRST_BYTE = len(SPECIAL)
FIRST_JOINED = FIRST_BYTE + 256
FIRST_LETTER = FIRST_JOINED + len(BEST_FIRST)


def field(number: int, value: int | bytes) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def piece(text: str, score: float, kind: int) -> bytes:
    content = field(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score)
    return field(1, content + (field(3, kind) if kind != NORMAL else b""))


def double_array(values: dict[bytes, int]) -> list[int]:
    """A trie of these keys as SentencePiece stores it: children stand where the node's base, XORed by a byte, says."""
    units = [0] * 8192
    used, bases = {0}, set()

    def place(node: int, keys: dict[bytes, int]) -> None:
        firsts = {key[0] if key else 0 for key in keys}
        free = (base for base in range(1, 4096) if base not in bases)
        base = next(base for base in free if not {base ^ first for first in firsts} & used)
        bases.add(base)
        used.update(base ^ first for first in firsts)
        units[node] |= (node ^ base) << 10 | (0x100 if b"" in keys else 0)
        for first in firsts - {0}:
            units[base ^ first] = first
            place(base ^ first, {key[1:]: value for key, value in keys.items() if key[:1] == bytes([first])})
        if b"" in keys:
            units[base] = keys[b""] | 1 << 31

    place(0, values)
    return units


def character_map() -> bytes:
    strings, offsets = b"", {}
    for given, becomes in MAP.items():
        offsets[given.encode()] = len(strings)
        strings += becomes.encode() + b"\0"
    units = double_array(offsets)
    trie = struct.pack(f"<{len(units)}I", *units)
    return struct.pack("<I", len(trie)) + trie + strings


def model(kind: int = 2, normaliser: bytes = b"") -> bytes:
    pieces = [(text, 0.0, piece_kind) for text, piece_kind in SPECIAL]
    pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    pieces += [(text, -float(rank), NORMAL) for rank, text in enumerate(BEST_FIRST)]
    pieces += [(text, -100.0 - rank, NORMAL) for rank, text in enumerate(LETTERS)]
    written = b"".join(piece(*each) for each in pieces)
    return written + field(2, field(3, kind)) + field(3, field(2, character_map()) + normaliser)


def ids(*parts: str) -> list[int]:
    """The ids of pieces by name."""
    names = [text for text, _ in SPECIAL] + [f"<0x{byte:02X}>" for byte in range(256)] + BEST_FIRST + LETTERS
    return [names.index(part) for part in parts]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.model").write_bytes(model())
    return SentencePieceTokenizer.load(folder)


CASES = {
    "the": ["▁the"],  # by way of ▁t and he
    "abc": ["▁abc"],  # by way of ab, which is better than bc and ▁a
    "abch": ["▁abc", "h"],
    "bca": ["▁", "bc", "a"],
    "no no": ["▁no", "▁no"],
    "inon": ["▁", "in", "on"],
    "  the \n the\u3000": ["▁the", "▁the"],  # spaces collapse, also those that the map makes
    "Ａe\u0301": ["▁", "A", "é"],
    "e": ["▁", "e"],  # the beginning of a longer match
    "ﬁn": ["▁", "f", "in"],
    "ﬁ": ["▁", "fi"],
    "t\u200bhe": ["▁the"],
    "中文": ["▁", "中文"],
    "z": ["▁", "<0x7A>"],
    "🎉": ["▁", "<0xF0>", "<0x9F>", "<0x8E>", "<0x89>"],
    "": [],
    " \n\t ": [],
    "<turn>the": ["▁", "<turn>", "t", "he"],  # a symbol joins with nothing, and no space begins after it
    "a<turn>> no": ["▁a", "<turn>>", "▁no"],  # the longest symbol
    "<s>": ["▁", "<0x3C>", "<0x73>", "<0x3E>"],  # a control piece cannot be written
}


@pytest.mark.parametrize("text", CASES)
def test_text_becomes_the_expected_pieces(tokenizer, text):
    assert tokenizer.encode(text) == ids(*CASES[text])


def test_symbols_can_be_read_as_text(tokenizer):
    bytes_of = [f"<0x{byte:02X}>" for byte in b"<turn>"]
    spelled = [{"<0x74>": "t", "<0x6E>": "n"}.get(name, name) for name in bytes_of]
    assert tokenizer.encode("<turn>", symbols=False) == ids("▁", *spelled)
    assert tokenizer.encode("<turn>") == ids("▁", "<turn>")


def test_lone_surrogates_do_not_break_it(tokenizer):
    assert tokenizer.encode("a\ud800") == ids("▁a", "<0x3F>")


def test_settings_of_the_model_are_followed(tmp_path):
    file = tmp_path / "other.model"
    file.write_bytes(model(normaliser=field(3, 0) + field(4, 0)))  # no space before the first word, none collapsed
    assert SentencePieceTokenizer.load(file).encode("the  a") == ids("t", "he", "▁", "▁a")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "BPE kind"),
        (b"\x0a\xff", "not a SentencePiece model"),
        (b"not a model at all", "not a SentencePiece model"),
        (model()[:-1000], "not a SentencePiece model"),
        (model(kind=1), "BPE kind"),
    ],
)
def test_a_file_that_is_no_such_model_gets_one_line(tmp_path, content, says):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as caught:
        SentencePieceTokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_one_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.model does not exist"):
        SentencePieceTokenizer.load(tmp_path)
