"""Whisper's encoder as the engine runs it: on CUDA, full windows a few at a time replay a captured graph.

A window alone is bound by launches; from a handful on, by arithmetic, and there is nothing to gain.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vivavoce.models.whisper import WhisperEncoder
from vivavoce.nn.graphed import Graphed
from vivavoce.nn.whisper_layer import WhisperAttention, WhisperLayer

MOST_GRAPHED = 2


class WindowEncoder:
    """States of windows.  # [window, mel, frame] → [window, frame / 2, d_model]"""

    def __init__(self, encoder: WhisperEncoder) -> None:
        self.encoder = encoder
        self._graphed = Graphed[int](self._encode)

    def __call__(self, mel: Tensor) -> Tensor:
        """The encoder's states."""
        mel = mel.to(self.encoder.conv1.weight.dtype)
        if mel.is_cuda and mel.shape[0] <= MOST_GRAPHED and mel.shape[2] == self.encoder.config.window_frames:
            return self._graphed(mel.shape[0], [mel])[0]
        states: Tensor = self.encoder(mel)
        return states

    def _encode(self, windows: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (self.encoder(tensors[0]),)


def narrow(encoder: WhisperEncoder) -> None:
    """Let an encoder compute in bfloat16, all but its last norm; its states stay as wide as they were.

    Query, key and value are one product from here on. A quantised encoder has products of its own and is left alone.
    """
    layers = [layer for layer in encoder.layers if isinstance(layer, WhisperLayer)]
    if not all(isinstance(layer.self_attn.q_proj, nn.Linear) for layer in layers):
        return
    width = encoder.layer_norm.weight.dtype
    encoder.to(torch.bfloat16)
    encoder.layer_norm.to(width)
    for layer in layers:
        _pack(layer.self_attn)


def _pack(attention: WhisperAttention) -> None:
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    like = attention.q_proj.bias.detach()
    packed = nn.Linear(parts[0].in_features, 3 * len(like), dtype=like.dtype, device=like.device)
    packed.weight.data = torch.cat([part.weight.detach() for part in parts])
    packed.bias.data = torch.cat([torch.zeros_like(like) if part.bias is None else part.bias for part in parts])
    for part, weight in zip(parts, packed.weight.detach().chunk(3), strict=True):
        part.weight.data = weight
    attention.packed = packed.requires_grad_(False)
