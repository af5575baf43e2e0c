"""Medusa heads for a trained Whisper: `viva train medusa --asr DIR --corpus DIR --out DIR`.

The trunk is frozen. At every place the heads learn what the trunk itself finds likely one, two, three … tokens on; with
them the model writes several tokens a pass, and the same text.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.models.whisper import Whisper
from vivavoce.models.whisper_heads import PLACES, WhisperHeads
from vivavoce.train.loop import Batch
from vivavoce.train.recogniser.draft_course import Lesson, distillation, options, train_draft
from vivavoce.train.recogniser.vocabulary import Vocabulary

FADING = 0.8  # what a place ahead counts, of the one before it: it is only reached if that one was right


class HeadsApprentice:
    """Heads that learn what the trunk will write."""

    peak_rate = 2e-3

    def __init__(self, model: Whisper, places: int = PLACES) -> None:
        self.model = model
        self.module = self.heads = WhisperHeads.beside(model.decoder, places)

    def loss(self, lesson: Lesson, batch: Batch) -> dict[str, Tensor]:
        """The divergence from the trunk at every place ahead, and how often the guess is the trunk's own."""
        decoder = self.model.decoder
        newest = decoder.embed_tokens(lesson.tokens[:, 1:])
        states = self.heads(lesson.hidden[:, :-1], newest, lambda query: _look(query, lesson))
        total, scalars, weight = states.new_zeros((), dtype=torch.float32), {}, 1.0
        for place in range(self.heads.places):
            chances, counts = lesson.shifted(place + 1)
            logits = decoder.logits(states[:, : chances.shape[1], place])
            surprise, agreed = distillation(logits, chances, counts)
            total, weight = total + weight * surprise, weight * FADING
            scalars[f"agreed_{place + 1}"] = agreed
        return {"loss": total, **scalars}

    def save(self, folder: Path) -> None:
        """Write the heads in half precision."""
        kept = WhisperHeads.beside(self.model.decoder, self.heads.places)
        kept.load_state_dict(self.heads.state_dict())
        kept.half().save(folder, self.model.config)


def _look(query: Tensor, lesson: Lesson) -> Tensor:
    """Every query at its row's window, through the last layer's memory.  # [row, time, place, head, head_dim]"""
    keys, values = lesson.memory.keys[-1], lesson.memory.values[-1]
    flat = query.flatten(1, 2).transpose(1, 2).to(keys.dtype)
    mixed = functional.scaled_dot_product_attention(flat, keys, values)
    return mixed.transpose(1, 2).unflatten(1, query.shape[1:3])


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser: argparse.ArgumentParser = options("Train Medusa heads on a frozen Whisper.")
    parser.add_argument("--places", type=int, default=PLACES, help="tokens ahead that are guessed")
    given = parser.parse_args(arguments)

    def make(model: Whisper, vocabulary: Vocabulary) -> HeadsApprentice:
        return HeadsApprentice(model, given.places)

    train_draft(given, make)


if __name__ == "__main__":
    main()
