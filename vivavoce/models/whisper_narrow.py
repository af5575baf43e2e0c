"""Whisper's encoder in bfloat16, for CPUs that multiply it several times as fast as float32."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.models.whisper import Whisper, WhisperDecoder, WhisperEncoder
from vivavoce.models.whisper_pieces import PieceGuesser
from vivavoce.nn.reordered_linear import ReorderedConv1d, ReorderedGelu, ReorderedLinear, ReorderedSum
from vivavoce.nn.scripted import scripted
from vivavoce.nn.whisper_layer import WhisperLayer


class NarrowLayer(nn.Module):
    """A `WhisperLayer` over whole windows."""

    def __init__(self, layer: WhisperLayer) -> None:
        super().__init__()
        attention = layer.self_attn
        self.packed = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = ReorderedSum(attention.out_proj.weight, attention.out_proj.bias)
        self.inner = ReorderedGelu(layer.fc1.weight, layer.fc1.bias)
        self.outer = ReorderedSum(layer.fc2.weight, layer.fc2.bias)
        self.norm, self.last_norm = layer.self_attn_layer_norm, layer.final_layer_norm
        self.heads = attention.heads

    def forward(self, x: Tensor) -> Tensor:
        """# [window, position, d_model] bfloat16 → the same"""
        windows, positions = x.size(0), x.size(1)
        made = self.packed(self.norm(x)).view(windows, positions, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(made[0], made[1], made[2])
        x = self.out(mixed.transpose(1, 2).reshape(x.size()), x)
        out: Tensor = self.outer(self.inner(self.last_norm(x)), x)
        return out


class NarrowEncoder(nn.Module):
    """All of a `WhisperEncoder` but its last norm, which stays as wide as it was."""

    def __init__(self, encoder: WhisperEncoder) -> None:
        super().__init__()
        self.conv1, self.conv2 = ReorderedConv1d(encoder.conv1), ReorderedConv1d(encoder.conv2)
        self.places = encoder.embed_positions.weight.detach()
        self.layers = nn.ModuleList(NarrowLayer(layer) for layer in encoder.layers if isinstance(layer, WhisperLayer))
        self.norm = encoder.layer_norm

    def forward(self, mel: Tensor) -> Tensor:
        """# [window, mel, frame] → [window, frame / 2, d_model]"""
        x = self.conv2(self.conv1(mel.to(self.places.dtype).transpose(1, 2)))
        x = x + self.places[: x.size(1)]
        for layer in self.layers:
            x = layer(x)
        states: Tensor = self.norm(x.to(self.norm.weight.dtype))
        return states


def narrow(model: Whisper) -> None:
    """Let an encoder compute in bfloat16, and what the decoder remembers of its states.

    A quantised encoder has products of its own and is left alone.
    """
    encoder = model.encoder
    if not all(isinstance(layer.fc1, nn.Linear) for layer in encoder.layers if isinstance(layer, WhisperLayer)):
        return
    width = encoder.layer_norm.weight.dtype
    encoder.to(torch.bfloat16)
    encoder.layer_norm.to(width)
    encoder.twin = scripted(NarrowEncoder(encoder))
    with torch.inference_mode():
        for _ in range(3):  # what TorchScript does in its first calls takes as long as ten of them
            encoder.twin(torch.zeros(1, model.config.num_mel_bins, min(100, model.config.window_frames)))
    remember_narrowly(model.decoder)


def is_narrow(model: Whisper) -> bool:
    """Whether `narrow` was done to it."""
    return model.encoder.twin is not None


def remember_narrowly(decoder: WhisperDecoder) -> None:
    """Let a decoder make keys and values of windows, for all its layers, by one product of bfloat16."""
    attentions = [layer.encoder_attn for layer in decoder.stack]
    decoder.remembering = joined([part for one in attentions for part in (one.k_proj, one.v_proj)])


def narrow_pieces(guesser: PieceGuesser) -> None:
    """Let a guesser of whole texts, which was loaded in bfloat16, compute in it without delay."""
    layers = [layer for layer in guesser.layers if isinstance(layer, WhisperLayer)]
    guesser.layers = nn.ModuleList(scripted(NarrowLayer(layer)) for layer in layers)


def joined(parts: Sequence[nn.Linear]) -> ReorderedLinear:
    """Projections of the same input as one."""
    biases: list[Tensor] = [
        part.weight.new_zeros(part.out_features) if part.bias is None else part.bias for part in parts
    ]
    return ReorderedLinear(torch.cat([part.weight.detach() for part in parts]), torch.cat(biases))
