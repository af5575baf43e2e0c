"""A small byte-level BPE for the miniature's domain, with the special tokens of the published tokenizer."""

from collections.abc import Iterable
from typing import Any

from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.minis.untrained import SPECIAL_TOKENS

PAD, TURN_START, TURN_END, SPEECH_START, MODALITY_PAD = SPECIAL_TOKENS
SPARE = 8 - len(SPECIAL_TOKENS)  # rows of the embedding beyond the last special token


def train_tokenizer(sentences: Iterable[str], entries: int) -> Any:
    """A `tokenizers.Tokenizer` of so many entries in all, special tokens last; the same sentences give the same one."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise MissingDependencyError("a tokenizer needs the tokenizers package: pip install tokenizers") from error
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if entries < len(alphabet) + len(SPECIAL_TOKENS):
        raise InputError(
            f"a byte-level vocabulary has {len(alphabet) + len(SPECIAL_TOKENS)} entries or more, not {entries}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries - len(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    tokenizer.train_from_iterator(sorted(sentences), trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer
