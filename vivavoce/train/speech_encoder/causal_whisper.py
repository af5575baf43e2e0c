"""`viva train causal-whisper`: the encoder of a published Whisper as the beginning of a speech encoder.

A published Whisper has heard people; a speech encoder that begins with it needs less speech to hear them. Layers, mel
and convolutions are the same, so weights are copied; training has to adapt them to convolutions and attention that see
only the past. New layers at the end, which do nothing at first, learn to write the features that are quantised. Those
are the first channels of the states, so the channels are reordered: the quietest ones come first.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from vivavoce import hub
from vivavoce.audio.io import read
from vivavoce.audio.mel import WhisperMel
from vivavoce.models.speech_encoder.model import SpeechEncoder, SpeechEncoderConfig
from vivavoce.models.whisper.model import Whisper, WhisperEncoder, WhisperLayer
from vivavoce.train.speech_encoder import BatchMel, Lattice
from vivavoce.train.speech_encoder.train import EncoderPlan, save_encoder

NEW_LAYERS = 2
SPEECH = hub.BUNDLED / "questions"


@torch.no_grad()
def causal_encoder(whisper: WhisperEncoder, lattice: Lattice, new_layers: int = NEW_LAYERS) -> SpeechEncoder:
    """A speech encoder with a Whisper's weights, and new layers that change nothing."""
    config = whisper.config
    encoder = SpeechEncoder(
        SpeechEncoderConfig(
            d_model=config.d_model,
            encoder_attention_heads=config.encoder_attention_heads,
            encoder_ffn_dim=config.encoder_ffn_dim,
            num_mel_bins=config.num_mel_bins,
            max_source_positions=config.max_source_positions,
            quantize_position=config.encoder_layers + new_layers,
            quantize_vocab_size=lattice.size,
        )
    )
    own = encoder.state_dict()
    for name, tensor in whisper.state_dict().items():
        if name in own:
            own[name].copy_(tensor)
    for layer in _layers(encoder)[config.encoder_layers :]:
        for projection in (layer.self_attn.out_proj, layer.fc2):
            projection.weight.zero_()
            projection.bias.zero_()
    encoder.codebook.weight.copy_(lattice.codebook(config.d_model))
    return encoder.eval()


@torch.no_grad()
def quietest_first(encoder: SpeechEncoder, mel: Tensor) -> Tensor:
    """The channels of the states in the order of their size on some speech.  # [batch, mel, frame] → [channel]"""
    return encoder.features(mel).square().mean((0, 1)).argsort()


@torch.no_grad()
def reorder(encoder: SpeechEncoder, order: Tensor) -> None:
    """Give the channels of the states another order; the features are the same but for it."""
    rows = [encoder.conv2.weight, encoder.conv2.bias]
    columns = [encoder.embed_positions.weight]
    for layer in _layers(encoder):
        for norm in (layer.self_attn_layer_norm, layer.final_layer_norm):
            rows += [norm.weight, norm.bias]
        for projection in (layer.self_attn.out_proj, layer.fc2):
            rows += [projection.weight, projection.bias]
        columns += [projection.weight for projection in (*_inputs(layer), layer.fc1)]
    for tensor in rows:
        assert tensor is not None
        tensor.copy_(tensor[order])
    for tensor in columns:
        tensor.copy_(tensor[:, order])


def _layers(encoder: SpeechEncoder) -> Sequence[WhisperLayer]:
    return cast(Sequence[WhisperLayer], list(encoder.layers))


def _inputs(layer: WhisperLayer) -> tuple[torch.nn.Linear, ...]:
    return layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj


def bundled_speech(bins: int) -> Tensor:
    """Mels of the bundled questions.  # [question, mel, frame]"""
    sounds = [torch.from_numpy(read(file, rate=WhisperMel.RATE).samples[0]) for file in sorted(SPEECH.glob("*.opus"))]
    lengths = torch.tensor([len(sound) for sound in sounds])
    padded = torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True)
    return cast(Tensor, BatchMel(bins)(padded, lengths, running=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """`viva train causal-whisper --out DIR`: a folder for `viva train speech-encoder --begin DIR`."""
    parser = argparse.ArgumentParser(description="A published Whisper's encoder as the beginning of a speech encoder.")
    parser.add_argument("--model", default="whisper-tiny.en", help="name or folder; default: whisper-tiny.en")
    parser.add_argument("--new-layers", type=int, default=NEW_LAYERS, help="layers after its own")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    lattice = Lattice(EncoderPlan().levels)
    whisper = Whisper.load(hub.resolve(options.model)).encoder
    encoder = causal_encoder(whisper, lattice, options.new_layers)
    reorder(encoder, quietest_first(encoder, bundled_speech(encoder.config.num_mel_bins)))
    save_encoder(encoder, lattice, options.out)
    count = sum(parameter.numel() for parameter in encoder.parameters())
    print(f"{count / 1e6:.1f} M parameters, {dataclasses.asdict(encoder.config)}, in {options.out}")


if __name__ == "__main__":
    main()
