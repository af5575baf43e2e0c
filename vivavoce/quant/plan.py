"""Memory plan of MOSS-Speech by method, computed from shapes; and random quantised models of any shape."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from vivavoce.errors import InputError
from vivavoce.models.checkpoint import published_tensors
from vivavoce.models.flow.model import FlowConfig, FlowDecoder
from vivavoce.models.hift.model import HiFT, HiFTConfig
from vivavoce.models.moss_speech.model import MossSpeech, MossSpeechConfig
from vivavoce.models.quantised import ReadQuantised, install
from vivavoce.models.speech_encoder.model import SpeechEncoder, SpeechEncoderConfig
from vivavoce.nn.linear import postponed
from vivavoce.nn.modules import allocating
from vivavoce.nn.quantised_weight import CASTS, GROUP, QuantisedWeight, Scheme, group_of
from vivavoce.quant.policy import METHODS, MOSS_SPEECH

ROWS_A_MINUTE = 12.5 * 60  # of speech, of either side
DRIVER = 600_000_000  # the CUDA context and its libraries
GRAPHS = 500_000_000  # captured graphs of all batch sizes, and their activations
PREFILL_ROWS = 512
SCALE_BYTES = 4
# Prefill workspace in multiples of the largest matrix in 16 bits; int4 is dequantised via float32 and unpacked codes.
WIDENED: dict[Scheme | None, int] = {"int8": 3, "float8": 3, "int4": 5}
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "": 1}


@dataclass(frozen=True)
class Fit:
    """Bytes by purpose for one method, and the minutes of conversation that fit in the rest."""

    method: str
    weights: int
    codec: int
    workspace: int
    kv_a_minute: int
    minutes: float

    @property
    def is_possible(self) -> bool:
        """Whether at least a minute fits."""
        return self.minutes >= 1


def plan(memory: int, config: MossSpeechConfig | None = None, dtype: torch.dtype = torch.bfloat16) -> list[Fit]:
    """Every method on a card with this memory, the float model first."""
    with torch.device("meta"):
        model = MossSpeech(config or MossSpeechConfig())
    codec = codec_bytes()
    kv = round(model.kv_shape.bytes_per_row(dtype) * ROWS_A_MINUTE)
    fits = []
    for name, scheme in {"bf16 (as published)": None, **{m.name: m.scheme for m in METHODS.values()}}.items():
        weights, workspace = weight_bytes(model, scheme, dtype), _workspace(model, scheme, dtype)
        left = memory - weights - codec - workspace
        fits.append(Fit(name, weights, codec, workspace, kv, max(0.0, left / kv)))
    return fits


def weight_bytes(model: MossSpeech, scheme: Scheme | None, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of the language model with the policy's matrices in `scheme`, the rest in `dtype`."""
    part, total = MOSS_SPEECH.parts[0], 0
    for name, tensor in published_tensors(model).items():
        kept = None if scheme is None else part.scheme_of(name, tensor.shape, scheme)
        total += tensor.numel() * dtype.itemsize if kept is None else _matrix_bytes(tensor.shape, kept)
    return total


def _matrix_bytes(shape: torch.Size, scheme: Scheme) -> int:
    outputs, inputs = shape
    if scheme == "int4":
        return outputs * inputs // 2 + 2 * 2 * outputs * (inputs // group_of(inputs))
    return outputs * inputs + SCALE_BYTES * outputs if scheme in ("int8", "float8") else 2 * outputs * inputs


def codec_parts(device: torch.device | str) -> list[nn.Module]:
    """Speech encoder, flow decoder and vocoder of the published sizes."""
    with torch.device(device):
        return [SpeechEncoder(SpeechEncoderConfig()), FlowDecoder(FlowConfig.moss_speech()), HiFT(HiFTConfig())]


def codec_bytes() -> int:
    """Bytes of the codec in float32."""
    return sum(4 * tensor.numel() for part in codec_parts("meta") for tensor in published_tensors(part).values())


def _workspace(model: MossSpeech, scheme: Scheme | None, dtype: torch.dtype) -> int:
    """Bytes of CUDA context, graphs, prefill activations and logits, and one dequantised matrix."""
    config = model.config
    rows = PREFILL_ROWS * (6 * config.hidden_size + 4 * config.intermediate_size) * dtype.itemsize
    logits = 8 * 4 * (config.vocab_size + config.audio_vocab_size) * 4
    widest = 2 * config.intermediate_size * config.hidden_size * dtype.itemsize
    return DRIVER + GRAPHS + rows + logits + WIDENED.get(scheme, 0) * widest


def byte_count(text: str) -> int:
    """`9GB` as bytes."""
    digits = text.strip().rstrip("BbIiKkMmGg")
    unit = text.strip()[len(digits) :].upper()
    try:
        return round(float(digits) * UNITS[unit])
    except (ValueError, KeyError) as error:
        raise InputError(f"{text!r} is not a size; give one such as 9GB or 500MB") from error


DEVIATION = 0.02


def random_weight(outputs: int, inputs: int, scheme: Scheme, device: torch.device | str) -> QuantisedWeight:
    """A quantised matrix with approximately normal values."""
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
    """A random model with the policy's matrices in this scheme; None: all in `dtype`."""
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
