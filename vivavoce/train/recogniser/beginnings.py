"""What a recogniser begins as: fresh, as the lower layers of an ear, or as an earlier recogniser."""

import re
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
    """Begin as an earlier recogniser of the same width; the share of weights that are its own, in per cent.

    A deeper decoder has its layers at even distances, the last one last, and a wider one its hidden units first; what
    is new adds nothing yet, so all of it writes what the earlier one wrote. What has no place is taken where shapes
    are the same.
    """
    mine, known = model.state_dict(), earlier.state_dict()
    layers, theirs = len(model.decoder.stack), len(earlier.decoder.stack)
    if layers >= theirs:
        _add_nothing(model)
        places = spread_layers(theirs, layers)
        known = {_moved(name, places): tensor for name, tensor in known.items()}
    taken = 0
    for name, tensor in mine.items():
        if name in known and _has_room(name, tensor, known[name]):
            tensor[tuple(slice(size) for size in known[name].shape)] = known[name]
            taken += known[name].numel()
    return round(100 * taken / sum(tensor.numel() for tensor in mine.values()))


def _has_room(name: str, mine: Tensor, theirs: Tensor) -> bool:
    """Whether a weight can be taken: its shape is the same, or there are more hidden units of the decoder."""
    if mine.shape == theirs.shape:
        return True
    grows = re.search(r"^decoder.*\.fc[12]\.", name) is not None
    return grows and all(size >= least for size, least in zip(mine.shape, theirs.shape, strict=True))


def spread_layers(few: int, many: int) -> list[int]:
    """Where each of few layers stands among many: at even distances, the last one last."""
    return [many - 1 - (few - 1 - index) * many // few for index in range(few)]


def _add_nothing(model: Whisper) -> None:
    """Let no decoder layer change what passes through it."""
    for layer in model.decoder.stack:
        for added in (layer.self_attn.out_proj, layer.encoder_attn.out_proj, layer.fc2):
            for parameter in added.parameters():
                parameter.zero_()


def _moved(name: str, places: list[int]) -> str:
    return re.sub(r"^(decoder\.layers\.)(\d+)", lambda found: f"{found[1]}{places[int(found[2])]}", name)


def known_pieces(folder: Path, fresh: nn.Linear) -> dict[str, Tensor]:
    """The CTC head beside an earlier recogniser, or a fresh one where there is none."""
    file = folder / "pieces" / "model.safetensors"
    if not file.is_file():
        return fresh.state_dict()
    return {name.removeprefix("pieces."): tensor.float() for name, tensor in load_file(file).items()}
