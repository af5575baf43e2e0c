"""`viva doctor`: devices, packages and models of this machine with advice, and the classes that run a model."""

import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from vivavoce import __version__, hub
from vivavoce.asr.backends import backend_choice
from vivavoce.cascade.local_chat import BUNDLED as BUNDLED_CHAT
from vivavoce.cpu_speed import has_products_in
from vivavoce.device import Device, available, dtype_name, npu_advice, pick, resolve_dtype
from vivavoce.errors import CheckpointError
from vivavoce.export.trtllm.runner import usable_exports
from vivavoce.implementations import (
    Choice,
    choose_chat_model,
    choose_cosyvoice_flow,
    choose_cosyvoice_lm,
    choose_cosyvoice_vocoder,
    choose_decode_steps,
    choose_flow,
    choose_moss_speech_lm,
    choose_moss_speech_text_prompts,
    choose_nano_codec,
    choose_nano_lm,
    choose_prefill_attention,
    choose_speech_encoder,
    choose_vocoder,
    choose_whisper_decoder,
    choose_whisper_encoder,
)
from vivavoce.models.checkpoint import Checkpoint
from vivavoce.models.cosyvoice.folder import version_of
from vivavoce.models.gguf import GGUF
from vivavoce.models.hift.cpu import MIN_ALPHA
from vivavoce.models.llama import bundled_smollm2, chat_file
from vivavoce.models.moss_speech.codec import VOCODER
from vivavoce.models.moss_speech.cpu import CpuMossSpeech
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoConfig
from vivavoce.models.quantised import QUANTISED
from vivavoce.models.registry import family_of, model_type, read_model_config
from vivavoce.models.whisper.cpu import has_plain_products
from vivavoce.models.whisper.model import Whisper

EXTRAS = {
    "media": "m4a, webm, mp4 and all other formats of FFmpeg",
    "onnx": "ONNX Runtime: TTS without torch, speaker embeddings, voice activity",
    "export": "exporting models as ONNX graphs",
    "tools": "tool calls and JSON that are always valid",
    "mcp": "tools of MCP servers",
    "plot": "plots of `viva bench`",
    "peer": "the baseline of `viva bench lm`",
    "modelscope": "models from ModelScope",
    "server": "serving over WebSocket, WebRTC and HTTP",
    "asr": "faster-whisper, as a backend of recognition",
    "hibari": "a light English voice, the default of `viva say`",
    "kokoro": "weights and phonemes of Kokoro-82M",
    "microphone": "the microphone in `viva demo`",
    "talk": "`viva talk`, with every stack that runs on a CPU",
    "judge": "opinion scores of replies in `viva bench answer`",
    "quality": "speech quality in `viva quantize --report`",
    "train": "training and distillation",
    "fleet": "replicas on several devices, and remote codecs",
    "ray": "replicas with Ray Serve",
    "test": "the test suite",
}
REQUIREMENT = re.compile(r"^(?P<package>[\w.-]+).*;.*extra == ['\"](?P<extra>\w+)['\"]")


@dataclass(frozen=True)
class DeviceReport:
    device: str
    name: str
    dtype: str
    dtypes: tuple[str, ...]
    graphs: bool
    triton: bool
    memory_free: int
    memory_total: int


@dataclass(frozen=True)
class ExtraReport:
    """One extra: its purpose, missing packages, and the command that installs them."""

    extra: str
    what: str
    missing: tuple[str, ...]
    install: str


@dataclass(frozen=True)
class ModelReport:
    """One model: its folder (None: not on this machine), missing files, and the command that fetches it."""

    name: str
    what: str
    bytes: int
    path: str | None
    missing: tuple[str, ...]
    fetch: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything `viva doctor` prints: devices, the best first, extras, models, and advice, one line each."""

    version: str
    python: str
    torch: str
    system: str
    devices: tuple[DeviceReport, ...]
    extras: tuple[ExtraReport, ...]
    models: tuple[ModelReport, ...]
    cache: str
    disk_free: int
    offline: bool
    advice: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """As plain dicts and lists, for JSON."""
        return asdict(self)


def examine() -> Diagnosis:
    """Devices, packages, models and disk of this machine."""
    devices = tuple(_device(device) for device in available())
    extras, models = tuple(_extras()), tuple(_models())
    cache = hub.cache_folder()
    disk_free = hub.free_disk(cache)
    return Diagnosis(
        version=__version__,
        python=sys.version.split()[0],
        torch=str(torch.__version__),
        system=platform.platform(),
        devices=devices,
        extras=extras,
        models=models,
        cache=str(cache),
        disk_free=disk_free,
        offline=hub.is_offline(),
        advice=(*_device_advice(devices[0]), *_model_advice(devices[0], models, disk_free), *usable_exports()),
    )


def _device(device: Device) -> DeviceReport:
    return DeviceReport(
        device=str(device),
        name=device.name,
        dtype=dtype_name(device.dtype),
        dtypes=tuple(dtype_name(dtype) for dtype in device.dtypes),
        graphs=device.graphs,
        triton=device.triton,
        memory_free=device.free_memory(),
        memory_total=device.total_memory(),
    )


def _extras() -> Iterator[ExtraReport]:
    packages: dict[str, list[str]] = {extra: [] for extra in EXTRAS}
    try:
        requirements = metadata.requires("vivavoce") or []
    except metadata.PackageNotFoundError:  # run from a source tree on a bare GPU box
        requirements = []
    for requirement in requirements:
        if (match := REQUIREMENT.match(requirement)) and match["extra"] in packages:
            packages[match["extra"]].append(match["package"])
    for extra, what in EXTRAS.items():
        missing = tuple(package for package in packages[extra] if not _installed(package))
        yield ExtraReport(extra, what, missing, f"pip install 'vivavoce[{extra}]'")


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _models() -> Iterator[ModelReport]:
    local = hub.local_models()
    for found in local:
        if found.source == "bundled":
            yield ModelReport(found.name, "bundled", _folder_size(found.path), str(found.path), (), "")
    for model in hub.KNOWN:
        copies = [found for found in local if found.name in (model.name, *model.mirrors)]
        best = min(copies, key=lambda found: len(found.missing), default=None)
        path, missing = (str(best.path), best.missing) if best else (None, ())
        yield ModelReport(model.name, model.what, model.bytes, path, missing, f"viva models fetch {model.name}")


def _folder_size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _device_advice(device: DeviceReport) -> Iterator[str]:
    kind = device.device.partition(":")[0]
    if kind == "cpu":
        yield "only a CPU was found: enough for the miniature models; the 9 B model needs a CUDA or Ascend device"
        if not has_products_in(torch.float16):
            yield f"{device.name} multiplies in float32: quantised models are smaller on disk, but not faster"
        if shutil.which("nvidia-smi"):
            yield "an NVIDIA driver was found, but this torch cannot use it: install a CUDA build of torch"
    if kind == "npu":
        yield from npu_advice()
    if kind == "cuda" and not device.triton:
        yield "Triton is not installed, so the plain PyTorch kernels are used: pip install triton"


def _model_advice(device: DeviceReport, models: tuple[ModelReport, ...], disk_free: int) -> Iterator[str]:
    for model in models:
        if model.path is not None and model.missing:
            yield f"{model.name} is incomplete, it lacks {', '.join(model.missing)}: run `{model.fetch}` again"
        if model.path is None and model.bytes > disk_free:
            yield (
                f"{model.name} ({model.bytes / 1e9:.1f} GB) does not fit on the disk of the cache: "
                "set HF_HUB_CACHE to a folder on a larger one"
            )
        elif model.path is None:
            yield f"{model.name} is not downloaded ({model.bytes / 1e9:.1f} GB): `{model.fetch}`"
        if model.bytes > device.memory_total:
            yield f"{model.name} ({model.bytes / 1e9:.1f} GB) is larger than the memory of {device.device}"


@dataclass(frozen=True)
class StageReport:
    """One stage of a model: the class that runs it, its dtype, and the reason."""

    stage: str
    implementation: str
    module: str
    dtype: str
    why: str


@dataclass(frozen=True)
class ModelStages:
    """The stages of a model on a device."""

    model: str
    family: str
    device: str
    stages: tuple[StageReport, ...]

    def as_dict(self) -> dict[str, Any]:
        """As plain dicts and lists, for JSON."""
        return asdict(self)


def examine_model(name: str, device: str = "auto", dtype: str = "auto") -> ModelStages:
    """Every stage of a model as its loader would choose it; weights are read only if the choice depends on them."""
    path = Path(name).expanduser()
    source = bundled_smollm2() if name == BUNDLED_CHAT else path if path.is_file() else hub.resolve(name)
    family, picked = family_of(source), pick(device)
    if family is None:
        raise CheckpointError(f"{source} holds no known model (its type is {model_type(source) or 'not given'})")
    choices = STAGES.get(family.name, _reference)(source, picked, dtype)
    stages = tuple(
        StageReport(choice.stage, choice.name, choice.implementation.partition(":")[0], choice.dtype_name, choice.why)
        for choice in choices
    )
    return ModelStages(name, family.name, str(picked), stages)


def _moss_speech(folder: Path, device: Device, dtype: str) -> Iterator[Choice]:
    is_plain = not _is_quantised(folder) or CpuMossSpeech.suits(MossSpeech.load(folder))
    lm = choose_moss_speech_lm(device, dtype, is_plain)
    yield lm
    if lm.cls is CpuMossSpeech:
        yield choose_moss_speech_text_prompts(device, dtype)
    yield from _engine(device, lm.dtype)
    yield from _moss_speech_codec(folder / hub.CODEC_FOLDER, device)


def _moss_speech_codec(folder: Path, device: Device) -> Iterator[Choice]:
    """A missing folder counts as the published codec."""
    yield choose_speech_encoder(device)
    is_plain, is_steep = True, True
    if folder.is_dir() and device.kind == "cpu":
        is_plain, is_steep = not _is_quantised(folder / "flow"), _has_steep_snakes(folder / "flow")
    yield choose_flow(device, is_plain)
    yield choose_vocoder(device, is_steep)


def _has_steep_snakes(flow: Path) -> bool:
    file = next((file for file in sorted(flow.glob(f"{VOCODER}.*")) if file.suffix in (".safetensors", ".pt")), None)
    if file is None:
        raise CheckpointError(f"{flow} lacks {VOCODER}; fetch the model again")
    with Checkpoint(file) as weights:
        alphas = [weights.tensor(name) for name in weights.names() if name.endswith(".alpha")]
    return all(float(alpha.abs().min()) >= MIN_ALPHA for alpha in alphas)


def _moss_tts_nano(folder: Path, device: Device, dtype: str) -> Iterator[Choice]:
    lm = choose_nano_lm(device, dtype, MossTTSNanoConfig.read(folder).hidden_size)
    yield lm
    if lm.name == "EngineFrameGenerator":
        yield from _engine(device, lm.dtype)
    yield choose_nano_codec(device, lm)


def _cosyvoice(folder: Path, device: Device, dtype: str) -> Iterator[Choice]:
    version, lm = version_of(folder) or 2, choose_cosyvoice_lm(device, dtype)
    yield lm
    yield from _engine(device, lm.dtype)
    yield choose_cosyvoice_flow(device, dtype, version)
    yield choose_cosyvoice_vocoder(device, version)


def _whisper(source: Path, device: Device, dtype: str) -> Iterator[Choice]:
    backend = backend_choice(source, device)
    yield backend
    if backend.name != "OwnBackend":
        return
    is_plain = not _is_quantised(source) or has_plain_products(Whisper.load(source).encoder)
    encoder = choose_whisper_encoder(device, dtype, is_plain)
    yield encoder
    decoder = choose_whisper_decoder(device, dtype, is_plain)
    yield decoder
    yield from _engine(device, decoder.dtype)


def _llama(source: Path, device: Device, dtype: str) -> Iterator[Choice]:
    source = chat_file(source)
    stored = GGUF(source) if source.is_file() else None
    size = stored.setting("embedding_length") if stored else read_model_config(source).get("hidden_size", 0)
    lm = choose_chat_model(device, stored is not None, int(size))
    yield lm
    yield from _engine(device, lm.dtype)


def _engine(device: Device, dtype: torch.dtype) -> Iterator[Choice]:
    yield choose_decode_steps(device, dtype)
    if device.kind != "cpu":  # on CPUs, attention is part of each implementation
        yield choose_prefill_attention(device, dtype)


def _reference(source: Path, device: Device, dtype: str) -> Iterator[Choice]:
    family = family_of(source)
    assert family is not None
    yield Choice(family.task, family.loader, resolve_dtype(dtype, device), "one implementation runs on every device")


def _is_quantised(folder: Path) -> bool:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            if QUANTISED in (tensors.metadata() or {}):
                return True
    return False


STAGES: dict[str, Callable[[Path, Device, str], Iterator[Choice]]] = {
    "moss-speech": _moss_speech,
    "moss-speech-codec": lambda folder, device, _: _moss_speech_codec(folder, device),
    "moss-tts-nano": _moss_tts_nano,
    "cosyvoice": _cosyvoice,
    "whisper": _whisper,
    "llama": _llama,
}
