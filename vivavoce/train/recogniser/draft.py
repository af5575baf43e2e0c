"""What drafts for a trained Whisper: `viva train draft --asr DIR --corpus DIR --out DIR [--layers 2 | --pieces]`.

A decoder of few layers, distilled from the model's own: it begins as some of the layers and learns what the whole
decoder finds likely. It hears through the model's encoder and shares its tables, so it adds little memory. With
`--pieces`, a few layers on the frozen encoder that guess the whole text at once, taught by CTC; they begin with the
head that the model itself was taught with, where it lies in the model's folder.
"""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor

from vivavoce.models.whisper import Whisper, WhisperDecoder
from vivavoce.models.whisper_draft import DraftLayers, distilled, load_decoder, save_decoder
from vivavoce.models.whisper_pieces import BLANK, PieceGuesser
from vivavoce.train.ctc import ctc_loss
from vivavoce.train.loop import Batch
from vivavoce.train.recogniser.asr import FEWEST_PIECES
from vivavoce.train.recogniser.draft_course import DraftBatch, distillation, options, train_draft
from vivavoce.train.recogniser.vocabulary import Vocabulary

LAYERS = 2
PIECE_LAYERS = 2


class DecoderApprentice:
    """A small decoder that learns to write as the whole one."""

    peak_rate = 1e-3

    def __init__(self, model: Whisper, layers: int = LAYERS, begun: WhisperDecoder | None = None) -> None:
        self.model = model
        self.decoder = begun or distilled(model.decoder, layers)
        self.module = DraftLayers(self.decoder).requires_grad_(True)

    def loss(self, lesson: DraftBatch, batch: Batch) -> dict[str, Tensor]:
        """The divergence from the model's chances, and how often both would write the same."""
        hidden = self.decoder(lesson.tokens, self.decoder.remember(lesson.states))
        surprise, agreed = distillation(
            self.decoder.logits(hidden), lesson.chances, lesson.entropy, lesson.best, lesson.counts
        )
        return {"loss": surprise, "agreed": agreed}

    def save(self, folder: Path) -> None:
        """Write the layers in half precision."""
        kept = distilled(self.model.decoder, len(self.decoder.stack))
        DraftLayers(kept).load_state_dict(self.module.state_dict())
        DraftLayers(kept).half()
        save_decoder(kept, folder, self.model.config)


class PiecesApprentice:
    """A few layers that learn to read the text off the encoder's states."""

    peak_rate = 2e-3

    def __init__(self, model: Whisper, text_ids: int, begun: PieceGuesser | None = None) -> None:
        self.model = model
        config = model.config
        guesser = PieceGuesser(config.d_model, text_ids, PIECE_LAYERS, config.encoder_attention_heads)
        if begun is not None and len(begun.layers) == PIECE_LAYERS:
            guesser.load_state_dict(begun.state_dict())
        elif begun is not None:  # fresh layers change nothing: it begins as good as the one the model learnt beside
            guesser.pieces.load_state_dict(begun.pieces.state_dict())
        self.module = self.guesser = guesser.to(model.decoder.embed_tokens.weight.device)

    def loss(self, lesson: DraftBatch, batch: Batch) -> dict[str, Tensor]:
        """CTC of the pieces that are said."""
        chances = self.guesser(lesson.states).float().log_softmax(-1)
        counts = batch["piece_counts"]
        frames = torch.full_like(counts, chances.shape[1])
        losses = ctc_loss(chances, batch["pieces"] + BLANK + 1, frames, counts)
        return {"loss": (losses / counts.clamp(min=FEWEST_PIECES)).mean()}

    def save(self, folder: Path) -> None:
        """Write the layers in half precision."""
        deepcopy(self.guesser).half().save(folder, self.model.config)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = options("Train a draft for a frozen Whisper.")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the small decoder")
    parser.add_argument("--pieces", action="store_true", help="layers that guess whole texts at once instead")
    given = parser.parse_args(arguments)

    def make(model: Whisper, vocabulary: Vocabulary) -> DecoderApprentice | PiecesApprentice:
        if given.pieces:
            folder = given.init or given.asr / PieceGuesser.kind
            begun = PieceGuesser.load(folder, model.config) if folder.is_dir() else None
            return PiecesApprentice(model, vocabulary.tokens.endoftext, begun)
        layers = min(given.layers, model.config.decoder_layers - 1)
        return DecoderApprentice(model, layers, None if given.init is None else load_decoder(given.init, model.decoder))

    train_draft(given, make)


if __name__ == "__main__":
    main()
