"""What a recogniser begins as: fresh, as the lower layers of an ear, or as an earlier recogniser."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vivavoce.errors import InputError
from vivavoce.models.speech_encoder import SpeechEncoder
from vivavoce.models.whisper import Whisper
from vivavoce.nn.sinusoids import sinusoids


@torch.no_grad()
def initialise(model: Whisper) -> None:
    """Fresh weights: small at what is added to the residual stream, fixed sinusoids at the encoder's positions."""
    config = model.config
    layers = config.encoder_layers + config.decoder_layers
    for name, parameter in model.named_parameters():
        if "layer_norm" in name:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        elif "embed" in name:
            parameter.normal_(0.0, 0.02)
        else:
            scale = (2 * layers) ** -0.5 if "out_proj" in name or "fc2" in name else 1.0
            parameter.normal_(0.0, scale * parameter[0].numel() ** -0.5)
    positions = model.encoder.embed_positions.weight
    positions.copy_(sinusoids(config.max_source_positions, config.d_model))
    positions.requires_grad_(False)


@torch.no_grad()
def begin_as_ear(model: Whisper, ear: SpeechEncoder) -> None:
    """Let the encoder begin as the lower layers of an ear, which hears the past alone; it will learn to look on."""
    mine, theirs = model.encoder, ear.config
    sizes = (mine.config.d_model, mine.config.encoder_ffn_dim, mine.config.num_mel_bins)
    if sizes != (theirs.d_model, theirs.encoder_ffn_dim, theirs.num_mel_bins) or len(mine.layers) > len(ear.layers):
        raise InputError("this ear has other sizes than the recogniser's encoder, or fewer layers; train it anew")
    for name in ("conv1", "conv2"):
        getattr(mine, name).load_state_dict(getattr(ear, name).state_dict())
    for layer, heard in zip(mine.layers, ear.layers, strict=False):
        layer.load_state_dict(heard.state_dict())
    mine.embed_positions.weight.copy_(ear.embed_positions.weight[: len(mine.embed_positions.weight)])


@torch.no_grad()
def begin_as(model: Whisper, earlier: Whisper) -> int:
    """Take every weight that an earlier recogniser has in the same place and shape; the share of weights, in per cent.

    So a deeper or narrower decoder begins with the encoder, the words and the attention that were learnt already.
    """
    known = earlier.state_dict()
    taken = total = 0
    for name, tensor in model.state_dict().items():
        total += tensor.numel()
        if name in known and known[name].shape == tensor.shape:
            tensor.copy_(known[name])
            taken += tensor.numel()
    return round(100 * taken / total)


def known_pieces(folder: Path, fresh: nn.Linear) -> dict[str, Tensor]:
    """The CTC head beside an earlier recogniser, or a fresh one where there is none."""
    file = folder / "pieces" / "model.safetensors"
    if not file.is_file():
        return fresh.state_dict()
    return {name.removeprefix("pieces."): tensor.float() for name, tensor in load_file(file).items()}
