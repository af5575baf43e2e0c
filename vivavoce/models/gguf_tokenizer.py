"""The tokenizer of a GGUF file: byte-level BPE with the pre-tokenizer that the file names, or SentencePiece."""

import re
from typing import Any

from vivavoce.errors import CheckpointError, MissingDependencyError
from vivavoce.models.chat_template import CHATML, ChatTokenizer, Tokenizer
from vivavoce.models.gguf import GGUF
from vivavoce.models.tokenizers import SPACE, Normaliser, SentencePieceTokenizer, TextTokenizer

CONTROL, USER_DEFINED, UNUSED, BYTE = 3, 4, 5, 6  # kinds of tokens
KEY = "tokenizer.ggml"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {  # name of the pre-tokenizer → how text is split into words
    "qwen2": rf"{WORDS}\p{{N}}{REST}",
    "deepseek-r1-qwen": rf"{WORDS}\p{{N}}{REST}",
    "llama-bpe": rf"{WORDS}\p{{N}}{{1,3}}{REST}",
}
COMPOSED = ("qwen2", "deepseek-r1-qwen")  # text is normalised to NFC
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")  # GPT-2's words, and every digit one
PLAIN = ("gpt-2", "default", "olmo", "mpt", "phi-2")


def read_tokenizer(stored: GGUF) -> ChatTokenizer:
    """The tokenizer of a file, with the chat template and the special tokens that the file names."""
    settings = stored.settings
    kind = settings.get(f"{KEY}.model")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(f"{stored.path} has a {kind!r} vocabulary; byte-level BPE and SentencePiece can be read")
    tokens: list[str] = settings[f"{KEY}.tokens"]
    tokenizer = TextTokenizer(_byte_level_bpe(stored)) if kind == "gpt2" else SpecialTokenSplitter(stored)
    named = {name: settings.get(f"{KEY}.{name}_token_id") for name in ("bos", "eos")}
    special = {f"{name}_token": tokens[id] for name, id in named.items() if id is not None and id < len(tokens)}
    adds_begin = settings.get(f"{KEY}.add_bos_token", kind == "llama") and "bos_token" in special
    template = settings.get("tokenizer.chat_template", CHATML)
    if template is CHATML and tokenizer.id_of("<|im_start|>") is None:
        raise CheckpointError(f"{stored.path} has no chat template; take a file of an instruction-tuned model")
    return ChatTokenizer(tokenizer, template, special, special["bos_token"] if adds_begin else "")


def _byte_level_bpe(stored: GGUF) -> Any:
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    except ImportError as error:
        raise MissingDependencyError("text needs the tokenizers package: pip install tokenizers") from error
    settings = stored.settings
    name = settings.get(f"{KEY}.pre", "default")
    tokens: list[str] = settings[f"{KEY}.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in settings.get(f"{KEY}.merges", [])]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name == "llama-bpe"))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{stored.path} has a damaged vocabulary ({error}); fetch it again") from error
    tokenizer.pre_tokenizer = _pre_tokenizer(stored, name)
    tokenizer.decoder = decoders.ByteLevel()
    if name in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    kinds = settings[f"{KEY}.token_type"]
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in added if k == CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in added if k == USER_DEFINED])
    return tokenizer


def _pre_tokenizer(stored: GGUF, name: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if name in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[name]), "isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, as_bytes])
    by_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_words])
    if name in PLAIN:
        return by_words
    known = ", ".join([*SPLITS, *SINGLE_DIGITS, *PLAIN])
    raise CheckpointError(f"{stored.path} names the pre-tokenizer {name!r}, which is not among {known}")


class SpecialTokenSplitter(Tokenizer):
    """A SentencePiece vocabulary; special tokens are recognised in text, and the text between them is encoded."""

    def __init__(self, stored: GGUF) -> None:
        settings = stored.settings
        self._tokens: list[str] = settings[f"{KEY}.tokens"]
        self._kinds: list[int] = settings[f"{KEY}.token_type"]
        scores: list[float] = settings[f"{KEY}.scores"]
        has_prefix = settings.get(f"{KEY}.add_space_prefix", True)
        normaliser = Normaliser(adds_dummy_prefix=has_prefix, collapses_spaces=False)
        pieces = list(zip(self._tokens, scores, self._kinds, strict=True))
        self._pieces = SentencePieceTokenizer(pieces, normaliser)
        self._strips_prefix = has_prefix
        self._ids = {token: id for id, token in enumerate(self._tokens)}
        special = [token for token, kind in zip(self._tokens, self._kinds, strict=True) if kind == CONTROL]
        self._special = frozenset(special)
        by_length = sorted(special, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, by_length))})") if special else None

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        parts = [text] if self._split is None else self._split.split(text)
        return [id for part in parts if part for id in self._part_ids(part)]

    def decode(self, ids: list[int]) -> str:
        """The text of ids, special tokens left out."""
        text = b"".join(self._bytes(id) for id in ids).decode("utf8", "replace")
        return text.removeprefix(" ") if self._strips_prefix else text

    def id_of(self, token: str) -> int | None:
        """The id of a token, or None."""
        return self._ids.get(token)

    def _part_ids(self, part: str) -> list[int]:
        return [self._ids[part]] if part in self._special else self._pieces.encode(part)

    def _bytes(self, id: int) -> bytes:
        kind, token = self._kinds[id], self._tokens[id]
        if kind in (CONTROL, UNUSED):
            return b""
        return bytes([int(token[3:-1], 16)]) if kind == BYTE else token.replace(SPACE, " ").encode()
