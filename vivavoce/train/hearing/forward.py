"""The speech encoder while it learns: dropout, and rows whose positions start anywhere, as in a long turn."""

import math
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.models.speech_encoder import CONV_STRIDE, SpeechEncoder, SpeechEncoderConfig
from vivavoce.nn.sinusoids import sinusoids
from vivavoce.nn.whisper_layer import WhisperLayer
from vivavoce.train.hearing.lattice import Lattice


def new_encoder(config: SpeechEncoderConfig, lattice: Lattice) -> SpeechEncoder:
    """An ear that has heard nothing: positions are sinusoids and, as the codebook, are not learned."""
    encoder = SpeechEncoder(config)
    depth = 2 * len(encoder.layers)
    with torch.no_grad():
        encoder.embed_positions.weight.copy_(sinusoids(config.max_source_positions, config.d_model))
        # Learned positions would be known only as far as sentences reach. Here they must not drown the sound, nor the
        # numbers that choose the code.
        encoder.embed_positions.weight.mul_(0.3)
        encoder.embed_positions.weight[:, : lattice.dimensions] = 0.0
        encoder.codebook.weight.copy_(lattice.codebook(config.d_model))
        for layer in cast(Iterable[WhisperLayer], encoder.layers):
            for projection in (layer.self_attn.out_proj, layer.fc2):
                projection.weight.div_(math.sqrt(depth / 4))
    encoder.embed_positions.requires_grad_(False)
    encoder.codebook.requires_grad_(False)
    return encoder


def features(encoder: SpeechEncoder, mel: Tensor, starts: Tensor, dropout: float) -> Tensor:
    """`encoder.features` with the positions of each row beginning at `starts`.  # [batch, code, d_model]"""
    x = functional.gelu(encoder.conv1(mel))
    x = functional.gelu(encoder.conv2(x)).transpose(1, 2)
    places = starts[:, None] + torch.arange(x.shape[1], device=x.device)
    x = x + functional.embedding(places, encoder.embed_positions.weight)
    for layer in encoder.layers:
        assert isinstance(layer, WhisperLayer)
        x = layer_forward(layer, x, dropout, causal=True)
    return x.float().unflatten(1, (-1, encoder.config.frames_per_code // CONV_STRIDE)).mean(2)


def layer_forward(
    layer: WhisperLayer, x: Tensor, dropout: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """One layer with dropout on what it adds."""
    mixed = layer.self_attn(layer.self_attn_layer_norm(x), mask, causal)
    x = x + functional.dropout(mixed, dropout, training=dropout > 0)
    inner = functional.gelu(layer.fc1(layer.final_layer_norm(x)))
    inner = functional.dropout(inner, dropout, training=dropout > 0)
    out: Tensor = x + functional.dropout(layer.fc2(inner), dropout, training=dropout > 0)
    return out
