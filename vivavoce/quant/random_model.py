"""A MOSS-Speech of any size with random quantised matrices, made where it will stand, to measure speed and memory."""

from functools import partial

import torch
from torch import Tensor

from vivavoce.models.checkpoint import published_tensors
from vivavoce.models.moss_speech import MossSpeech, MossSpeechConfig
from vivavoce.models.quantised import ReadQuantised, install
from vivavoce.nn.allocation import allocating
from vivavoce.nn.linear import postponed
from vivavoce.nn.quantised_weight import CASTS, GROUP, QuantisedWeight, Scheme, group_of
from vivavoce.quant.policy import MOSS_SPEECH

DEVIATION = 0.02


def random_weight(outputs: int, inputs: int, scheme: Scheme, device: torch.device | str) -> QuantisedWeight:
    """A matrix whose widened numbers are about normal."""
    if scheme in CASTS:
        return QuantisedWeight(scheme, torch.randn(outputs, inputs, device=device).mul_(DEVIATION).to(CASTS[scheme]))
    if scheme == "int4":
        groups = inputs // group_of(inputs, GROUP)
        data = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device=device)
        scale = torch.full((outputs, groups), DEVIATION / 4.6, dtype=torch.float16, device=device)
        return QuantisedWeight(scheme, data, scale, scale * -7.5)
    scale = torch.full((outputs,), DEVIATION / 73, device=device)
    data = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, device=device)
    if scheme == "float8":
        return QuantisedWeight(scheme, data.to(torch.float16).to(torch.float8_e4m3fn), scale)
    return QuantisedWeight(scheme, data, scale)


@torch.no_grad()
def random_moss_speech(
    config: MossSpeechConfig, scheme: Scheme | None, device: torch.device | str, dtype: torch.dtype
) -> MossSpeech:
    """The model with its policy's matrices in this scheme; None: all in `dtype`."""
    if scheme is None:
        return MossSpeech.random(config, device, dtype)
    part = MOSS_SPEECH.parts[0]
    with postponed(), allocating(device, dtype):
        model = MossSpeech(config)
    quantised: dict[str, ReadQuantised] = {}
    for name, tensor in published_tensors(model).items():
        chosen = part.scheme_of(name, tensor.shape, scheme)
        if chosen is not None:
            outputs, inputs = tensor.shape
            quantised[name] = partial(random_weight, outputs, inputs, chosen, device)

    def absent(name: str) -> Tensor:
        raise AssertionError(f"MOSS-Speech's linear layers have no bias, so {name} is not read")

    install(model, quantised, absent)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, DEVIATION)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model.eval()
