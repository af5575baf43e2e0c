"""Medusa heads for a trained Whisper: `viva train medusa --asr DIR --corpus DIR --out DIR`.

The trunk is frozen. At every place the heads learn what the trunk itself finds likely one, two, three … tokens on; with
them the model writes several tokens a pass, and the same text.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vivavoce.models.whisper.drafts import PLACES, WhisperHeads
from vivavoce.models.whisper.model import Whisper
from vivavoce.train.asr.checkpoint import Vocabulary
from vivavoce.train.asr.draft import DraftBatch, distillation, options, train_draft
from vivavoce.train.loop import Batch

FADING = 0.8  # what a place ahead counts, of the one before it: it is only reached if that one was right


class HeadsApprentice:
    """Heads that learn what the trunk will write."""

    peak_rate = 2e-3

    def __init__(self, model: Whisper, places: int = PLACES, begun: WhisperHeads | None = None) -> None:
        self.model = model
        self.module = self.heads = begun or WhisperHeads.beside(model.decoder, places)

    def loss(self, lesson: DraftBatch, batch: Batch) -> dict[str, Tensor]:
        """The divergence from the trunk at every place ahead, and how often the guess is the trunk's own."""
        decoder, places = self.model.decoder, lesson.counts.shape[1]
        row, place = lesson.knowing // places, lesson.knowing % places
        known = lesson.counts[row, place]  # the first place of a text is not: nothing was drawn from its state
        hidden = torch.where(known[:, None], lesson.hidden[row, place], self.heads.start)
        newest = decoder.embed_tokens(lesson.tokens[row, place + 1])
        states = self.heads(hidden, newest, lambda query: _look(query, lesson, row))
        total, scalars, weight = states.new_zeros((), dtype=torch.float32), {}, 1.0
        for index in range(self.heads.places):
            ahead = (place + index + 1).clamp(max=places - 1)
            counts = lesson.counts[row, ahead] & lesson.counts[row, place + 1] & (ahead == place + index + 1)
            taught = (lesson.chances[row, ahead], lesson.entropy[row, ahead], lesson.best[row, ahead])
            surprise, agreed = distillation(decoder.logits(states[:, index]), *taught, counts)
            total, weight = total + weight * surprise, weight * FADING
            scalars[f"agreed_{index + 1}"] = agreed
        return {"loss": total, **scalars}

    def save(self, folder: Path) -> None:
        """Write the heads in half precision."""
        kept = WhisperHeads.beside(self.model.decoder, self.heads.places)
        kept.load_state_dict(self.heads.state_dict())
        kept.half().save(folder, self.model.config)


def _look(query: Tensor, lesson: DraftBatch, row: Tensor) -> Tensor:
    """Every query at its row's window, through the last layer's memory.  # [knowing, place, head, head_dim]"""
    keys, values = lesson.memory.keys[-1][row], lesson.memory.values[-1][row]
    # Not by a fused attention: that would find gradients of keys and values too, which nobody learns.
    weights = query.transpose(1, 2).to(keys.dtype) @ keys.transpose(2, 3) * query.shape[-1] ** -0.5
    return (weights.softmax(-1).to(values.dtype) @ values).transpose(1, 2)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser: argparse.ArgumentParser = options("Train Medusa heads on a frozen Whisper.")
    parser.add_argument("--places", type=int, default=PLACES, help="tokens ahead that are guessed")
    given = parser.parse_args(arguments)

    def make(model: Whisper, vocabulary: Vocabulary) -> HeadsApprentice:
        like = model.decoder.embed_tokens.weight
        begun = None if given.init is None else WhisperHeads.load(given.init, model.config, like.device)
        return HeadsApprentice(model, given.places, begun and begun.requires_grad_(True))

    train_draft(given, make)


if __name__ == "__main__":
    main()
