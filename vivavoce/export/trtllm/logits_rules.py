"""What an engine's logits still need before an id is drawn: the mode of a reply, or a head's bias.

They have the shape of TensorRT-LLM's logits processors: called with a request's logits and the ids it has so far, they
change the logits in place, on the stream that the engine computes on.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vivavoce.models.moss_speech import MossSpeechConfig

NEVER = float("-inf")


@dataclass(frozen=True)
class ModeRule:
    """MOSS-Speech: in text mode only text ids may follow, in audio mode only codes up to the end of speech."""

    config: MossSpeechConfig

    def in_speech(self, ids: Sequence[int]) -> bool:
        """Whether what follows these joint ids is speech."""
        config, last = self.config, ids[-1]
        if last < config.vocab_size:
            return last == config.sosp_token_id
        return last - config.vocab_size not in (config.eosp_token_id, config.audio_pad_token_id)

    def __call__(self, request: int, logits: Tensor, ids: list[list[int]], stream: int | None, *_: Any) -> None:
        """Forbid the half that is not this reply's turn.  # logits [1, beam, joint id]"""
        text = self.config.vocab_size
        with _on(stream):
            for beam, so_far in enumerate(ids):
                row = logits[0, beam]
                if self.in_speech(so_far):
                    row[:text] = NEVER
                    row[text + self.config.eosp_token_id + 1 :] = NEVER
                else:
                    row[text:] = NEVER


@dataclass(frozen=True)
class BiasRule:
    """CosyVoice 2: the head's bias, for which an engine's head has no place."""

    bias: Tensor  # [speech id]

    def __call__(self, request: int, logits: Tensor, ids: list[list[int]], stream: int | None, *_: Any) -> None:
        """Add it.  # logits [1, beam, speech id]"""
        with _on(stream):
            logits[..., : len(self.bias)] += self.bias.to(logits)


def _on(stream: int | None) -> Any:
    """The stream of this handle; on a CPU there is none."""
    return nullcontext() if not stream else torch.cuda.stream(torch.cuda.ExternalStream(stream))
