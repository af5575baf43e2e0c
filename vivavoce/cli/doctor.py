"""What this machine has, and what to do about what is missing."""

import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from vivavoce import __version__, hub
from vivavoce.device import Device, available, dtype_name, is_multiplied_here, npu_advice
from vivavoce.export.trtllm.runner import usable_here

EXTRAS = {
    "media": "m4a, webm, mp4 and whatever else FFmpeg reads",
    "onnx": "ONNX speech without torch, speaker embeddings, voice activity",
    "export": "writing models as ONNX graphs",
    "plot": "pictures beside the JSON of `viva bench`",
    "peer": "the baseline that `viva bench lm` compares with",
    "modelscope": "models from ModelScope",
    "server": "serving over WebSocket, WebRTC and HTTP",
    "asr": "faster-whisper, to compare recognition with",
    "microphone": "asking the demo by voice",
    "judge": "opinion scores of replies in `viva bench answer`",
    "quality": "how quantised speech sounds, in `viva quantize --report`",
    "train": "training and distillation",
    "ray": "many replicas with Ray Serve",
    "test": "the test suite",
}
REQUIREMENT = re.compile(r"^(?P<package>[\w.-]+).*;.*extra == ['\"](?P<extra>\w+)['\"]")


@dataclass(frozen=True)
class DeviceReport:
    """One device in words and bytes."""

    device: str
    name: str
    dtype: str
    dtypes: tuple[str, ...]
    attention: str
    graphs: bool
    triton: bool
    memory_free: int
    memory_total: int


@dataclass(frozen=True)
class ExtraReport:
    """One optional part: what it is for, the packages it lacks, and how to get them."""

    extra: str
    what: str
    missing: tuple[str, ...]
    install: str


@dataclass(frozen=True)
class ModelReport:
    """One model: where it is (None: not here), and what to run for it."""

    name: str
    what: str
    bytes: int
    path: str | None
    missing: tuple[str, ...]
    fetch: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything `viva doctor` says; `devices` stand best first, and `advice` is what to do, one line each."""

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
        """The same as plain dicts and lists, for JSON."""
        return asdict(self)


def examine() -> Diagnosis:
    """Look at this machine: devices, packages, models, disk."""
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
        advice=(*_device_advice(devices[0]), *_model_advice(devices[0], models, disk_free), *usable_here()),
    )


def _device(device: Device) -> DeviceReport:
    return DeviceReport(
        device=str(device),
        name=device.name,
        dtype=dtype_name(device.dtype),
        dtypes=tuple(dtype_name(dtype) for dtype in device.dtypes),
        attention=device.attention,
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
        yield "only a CPU was found: right for miniatures and tests; the 9 B model wants a CUDA or Ascend device"
        if not is_multiplied_here(torch.float16):
            yield f"{device.name} multiplies in float32: folders in fewer bits are smaller on disk here, but no faster"
        if shutil.which("nvidia-smi"):
            yield "there is an NVIDIA driver but this torch cannot use it: install a CUDA build of torch"
    if kind == "npu":
        yield from npu_advice()
    if kind == "cuda" and not device.triton:
        yield "Triton is not installed, so the plain PyTorch kernels are used: pip install triton"
    if kind == "cuda" and device.attention != "flash" and "bfloat16" in device.dtypes:
        yield "FlashAttention is not installed, PyTorch's own attention is used (optional): pip install flash-attn"


def _model_advice(device: DeviceReport, models: tuple[ModelReport, ...], disk_free: int) -> Iterator[str]:
    for model in models:
        if model.path is not None and model.missing:
            yield f"{model.name} is not whole, it lacks {', '.join(model.missing)}: run `{model.fetch}` again"
        if model.path is None and model.bytes > disk_free:
            yield (
                f"{model.name} ({model.bytes / 1e9:.1f} GB) does not fit the disk of the cache: "
                "set HF_HUB_CACHE to a folder on a larger one"
            )
        elif model.path is None:
            yield f"{model.name} is not here ({model.bytes / 1e9:.1f} GB): `{model.fetch}`"
        if model.bytes > device.memory_total:
            yield f"{model.name} ({model.bytes / 1e9:.1f} GB) is larger than the memory of {device.device}"
