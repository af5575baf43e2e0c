"""Cut a published English Whisper to the size of a miniature, to be fine-tuned: shorter windows, fewer word pieces.

Byte pairs are learnt in the order of their frequency, so the first merges of the published vocabulary are a vocabulary
of their own, whose pieces have the same ids and embeddings. Special tokens and timestamps keep their embeddings.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from vivavoce.errors import InputError
from vivavoce.hub import resolve
from vivavoce.models.whisper.config import AFTER_LANGUAGES, ENGLISH_ONLY, WhisperTokens
from vivavoce.models.whisper.model import Whisper
from vivavoce.models.whisper.vocabulary import ENGLISH_RANKS, merges_of_ranks, read_ranks
from vivavoce.train.asr import LANGUAGE, Vocabulary, save_whisper

MERGES, SECONDS, TARGET_POSITIONS = 6_000, 10.0, 192


def first_merges(ranks: Path, merges: int, window_seconds: float) -> Vocabulary:
    """The vocabulary of the most frequent merges of a published one."""
    all_ranks = read_ranks(ranks)
    kept = {text: rank for text, rank in all_ranks.items() if rank < 256 + merges}
    return Vocabulary(merges_of_ranks(kept), window_seconds)


@torch.no_grad()
def pruned(source: Whisper, vocabulary: Vocabulary, target_positions: int = TARGET_POSITIONS) -> Whisper:
    """The model with the window and the pieces of a vocabulary, both prefixes of its own."""
    config = source.config
    if config.vocab_size != ENGLISH_ONLY:
        raise InputError("only an English Whisper can be pruned: whisper-tiny.en, or one with its vocabulary")
    if vocabulary.window_seconds > config.window_seconds:
        raise InputError(
            f"a window of {vocabulary.window_seconds} s is longer than the model's {config.window_seconds} s"
        )
    model = Whisper(
        replace(
            config,
            max_source_positions=round(vocabulary.window_seconds * config.max_source_positions / config.window_seconds),
            max_target_positions=target_positions,
            vocab_size=vocabulary.size,
        )
    )
    chosen = {"decoder.embed_tokens.weight": _published_ids(vocabulary)}
    own, theirs = model.state_dict(), source.state_dict()
    for name, tensor in own.items():
        published = theirs[name][chosen[name]] if name in chosen else theirs[name]
        tensor.copy_(published[tuple(slice(size) for size in tensor.shape)])
    return model.eval()


def _published_ids(vocabulary: Vocabulary) -> Tensor:
    """The published id of every id of the vocabulary."""
    published, own = WhisperTokens.of_vocabulary(ENGLISH_ONLY), vocabulary.tokens
    ids = torch.arange(vocabulary.size)
    for name in ("endoftext", "startoftranscript", *AFTER_LANGUAGES):
        ids[getattr(own, name)] = getattr(published, name)
    ids[own.languages[LANGUAGE]] = published.languages[LANGUAGE]
    ids[own.timestamps :] += published.timestamps - own.timestamps
    return ids


def main(arguments: Sequence[str] | None = None) -> None:
    """`viva train prune-asr --out DIR`: a checkpoint for `viva train asr --init DIR --fine-tune`."""
    parser = argparse.ArgumentParser(description="Cut a published English Whisper to the size of a miniature.")
    parser.add_argument("--model", default="whisper-tiny.en", help="name or folder; default: whisper-tiny.en")
    parser.add_argument("--vocabulary", default="whisper-vocabulary", help="name or folder of the byte-pair ranks")
    parser.add_argument("--merges", type=int, default=MERGES, help=f"byte pairs that are kept; default: {MERGES}")
    parser.add_argument("--window", type=float, default=SECONDS, help=f"seconds of a window; default: {SECONDS}")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    vocabulary = first_merges(resolve(options.vocabulary) / ENGLISH_RANKS, options.merges, options.window)
    model = pruned(Whisper.load(resolve(options.model)), vocabulary)
    save_whisper(model, vocabulary, options.out)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count / 1e6:.1f} M parameters, vocabulary {vocabulary.size}, in {options.out}")


if __name__ == "__main__":
    main()
