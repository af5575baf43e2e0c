"""Whisper's tokenizer, also from byte-pair ranks: OpenAI's files hold none; the vocabulary's size tells which it is."""

import base64
from itertools import pairwise
from pathlib import Path
from typing import Any

from vivavoce.errors import CheckpointError
from vivavoce.models.tokenizers import TextTokenizer, byte_letters
from vivavoce.models.whisper.config import ENGLISH_ONLY, WhisperTokens

LETTERS = byte_letters()
ENGLISH_RANKS, MULTILINGUAL_RANKS = "gpt2.tiktoken", "multilingual.tiktoken"


def ranks_name(vocabulary: int) -> str:
    """The file of byte-pair ranks that belongs to a vocabulary of this size."""
    return ENGLISH_RANKS if vocabulary == ENGLISH_ONLY else MULTILINGUAL_RANKS


def load_tokenizer(folder: Path, vocabulary: int) -> tuple[TextTokenizer, WhisperTokens]:
    """The tokenizer of a folder, from `tokenizer.json` or from byte-pair ranks, and its special tokens."""
    ranks = folder / ranks_name(vocabulary)
    if (folder / "tokenizer.json").is_file() or not ranks.is_file():
        tokenizer = TextTokenizer.load(folder)
        return tokenizer, WhisperTokens.of_tokenizer(tokenizer, vocabulary)
    tokens = WhisperTokens.of_vocabulary(vocabulary)
    return tokenizer_of_ranks(ranks, tokens), tokens


def tokenizer_of_ranks(file: Path, tokens: WhisperTokens) -> TextTokenizer:
    """GPT-2's kind of tokenizer: byte pairs are joined in the order of their ranks."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    ranks = read_ranks(file)
    vocabulary = {_spelled(text): rank for text, rank in ranks.items()}
    merges = merges_of_ranks(ranks)
    model: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    names = [name for name, _ in sorted(tokens.by_name().items(), key=lambda pair: pair[1])]
    model.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    if model.token_to_id(names[0]) != tokens.endoftext:
        raise CheckpointError(f"{file} has {len(ranks)} ranks, not the {tokens.endoftext} of this model's vocabulary")
    return TextTokenizer(model)


def read_ranks(file: Path) -> dict[bytes, int]:
    """Byte sequences and their ranks, in order."""
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        return {base64.b64decode(text): int(rank) for text, rank in lines}
    except ValueError as error:
        raise CheckpointError(f"{file} is not a list of byte-pair ranks ({error}); fetch it again") from error


def merges_of_ranks(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """The pair that each sequence of several bytes is joined from, in the order of ranks and in printable letters."""
    return [(_spelled(left), _spelled(right)) for left, right in _merges(ranks)]


def _spelled(text: bytes) -> str:
    return "".join(LETTERS[byte] for byte in text)


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    merges = []
    for text, rank in ranks.items():
        if len(text) > 1:
            splits = [(text[:at], text[at:]) for at in range(1, len(text))]
            pairs = [(left, right) for left, right in splits if left in ranks and right in ranks]
            merges.append(pairs[0] if len(pairs) == 1 else _last_pair(text, rank, ranks))
    return merges


def _last_pair(text: bytes, rank: int, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that are left before the last merge."""
    parts = [text[index : index + 1] for index in range(len(text))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
        first = min(range(len(joined)), key=joined.__getitem__)
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts[0], parts[1]
