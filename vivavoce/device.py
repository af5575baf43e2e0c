"""Devices (cpu, cuda, npu, mps) as values: dtypes, memory and features, detected by `pick`."""

import os
import platform
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from vivavoce.cpu_speed import has_products_in
from vivavoce.errors import InputError

Kind = Literal["cpu", "cuda", "npu", "mps"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BATCH_MEMORY_SHARE = 0.6  # of the free memory; the rest is for activations, graphs and other processes
AMPERE = (8, 0)  # the first CUDA capability with bfloat16
OLDEST_CANN = (8, 0)
NPU_ENVIRONMENT = {  # recommended for Ascend's PyTorch, and why
    "PYTORCH_NPU_ALLOC_CONF": ("expandable_segments:True", "memory in one piece, so that long texts fit"),
    "TASK_QUEUE_ENABLE": ("1", "operators queued ahead, so that the NPU does not wait for Python"),
}
ARM_PARTS = {  # Linux reports part numbers of Arm cores, not names
    "0xd08": "Cortex-A72",
    "0xd0b": "Cortex-A76",
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
}
HOW_TO_GET: dict[Kind, str] = {
    "cpu": "",
    "cuda": "install an NVIDIA driver and a CUDA build of torch (`pip install torch`), or use --device cpu",
    "npu": "install the Ascend CANN toolkit (8.0 or newer) and the torch-npu that fits this torch "
    "(`pip install torch-npu`), or use --device cpu",
    "mps": "it needs a Mac with Apple silicon and macOS 14 or newer; use --device cpu",
}


@dataclass(frozen=True)
class Device:
    """One device and its features. `dtype` is the preferred one of the supported `dtypes`."""

    kind: Kind
    index: int
    torch_device: torch.device
    name: str
    dtype: torch.dtype
    dtypes: tuple[torch.dtype, ...]
    graphs: bool = False
    """Whether it replays CUDA graphs."""
    triton: bool = False
    """Whether Triton kernels run on it."""

    def __str__(self) -> str:
        return str(self.torch_device)

    def free_memory(self) -> int:
        """Free bytes as reported by the driver or the system, so memory of other processes is not free."""
        if self.kind == "mps":
            return int(torch.mps.recommended_max_memory()) - int(torch.mps.driver_allocated_memory())
        if self.kind == "cpu":
            return _host_memory()[0]
        return int(_backend(self.kind).mem_get_info(self.index)[0])

    def samples_that_fit(self, bytes_per_sample: int, max_samples: int) -> int:
        """How many samples of this size fit into a share of the free memory, from one to `max_samples`."""
        if bytes_per_sample <= 0 or max_samples < 1:
            raise InputError(
                f"samples of {bytes_per_sample} bytes and at most {max_samples} of them: both must be above 0"
            )
        return max(1, min(max_samples, int(self.free_memory() * BATCH_MEMORY_SHARE) // bytes_per_sample))

    def total_memory(self) -> int:
        """Total bytes of memory."""
        if self.kind == "mps":
            return int(torch.mps.recommended_max_memory())
        if self.kind == "cpu":
            return _host_memory()[1]
        return int(_backend(self.kind).mem_get_info(self.index)[1])


def pick(spec: str = "auto") -> Device:
    """The device for `auto` (the first of npu, cuda, mps and cpu that exists) or for a name such as `cuda:1`."""
    if spec == "auto":
        order: tuple[Kind, ...] = ("npu", "cuda", "mps")
        return next((_describe(kind, 0) for kind in order if _count(kind)), _describe("cpu", 0))
    kind, index = _parse(spec)
    count = _count(kind)
    if count == 0:
        raise InputError(f"device {spec!r} is not on this machine: {HOW_TO_GET[kind]}")
    if index >= count:
        raise InputError(
            f"device {spec!r} is not on this machine: it has {count} {kind} device(s), the last is {kind}:{count - 1}"
        )
    return _describe(kind, index)


def available() -> list[Device]:
    """All devices of this machine, best first."""
    kinds: tuple[Kind, ...] = ("npu", "cuda", "mps", "cpu")
    return [_describe(kind, index) for kind in kinds for index in range(_count(kind))]


def resolve_dtype(spec: str, device: Device) -> torch.dtype:
    """The dtype for `auto`, `float32`, `bfloat16` or `float16` on this device."""
    if spec == "auto":
        return device.dtype
    if spec not in DTYPES:
        raise InputError(f"dtype {spec!r} is not known; use one of auto, {', '.join(DTYPES)}")
    if DTYPES[spec] not in device.dtypes:
        able = ", ".join(dtype_name(dtype) for dtype in device.dtypes)
        raise InputError(f"{device} ({device.name}) does not run {spec}; use one of auto, {able}")
    if device.kind == "cpu" and spec != "float32" and not has_products_in(DTYPES[spec]):
        slow = f"{device.name} has no {spec} instructions: it takes up to a hundred times as long as float32; use auto"
        warnings.warn(slow, stacklevel=2)
    return DTYPES[spec]


def dtype_name(dtype: torch.dtype) -> str:
    """`float16` rather than `torch.float16`."""
    return str(dtype).removeprefix("torch.")


def _parse(spec: str) -> tuple[Kind, int]:
    name, colon, index = spec.partition(":")
    for kind in get_args(Kind):
        if name == kind and (not colon or index.isdecimal()):
            return kind, int(index or 0)
    raise InputError(f"device {spec!r} is not known; use auto, cpu, cuda, cuda:1, npu, npu:0 or mps")


def _count(kind: Kind) -> int:
    if kind == "cpu":
        return 1
    if kind == "cuda":
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    if not _imports("torch_npu"):
        return 0
    npu = _backend("npu")
    return int(npu.device_count()) if npu.is_available() else 0


def _describe(kind: Kind, index: int) -> Device:
    return {"cpu": _cpu, "cuda": _cuda, "npu": _npu, "mps": _mps}[kind](index)


def _cpu(index: int) -> Device:
    dtypes = (torch.float32, torch.bfloat16)
    return Device("cpu", index, torch.device("cpu"), _cpu_name(), dtypes[0], dtypes)


def _cuda(index: int) -> Device:
    capability = torch.cuda.get_device_capability(index)
    bfloat16 = (torch.bfloat16,) if capability >= AMPERE else ()
    dtypes = (*bfloat16, torch.float16, torch.float32)
    return Device(
        kind="cuda",
        index=index,
        torch_device=torch.device("cuda", index),
        name=torch.cuda.get_device_name(index),
        dtype=dtypes[0],
        dtypes=dtypes,
        graphs=True,
        triton=_imports("triton"),
    )


def npu_advice(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Recommendations for an Ascend machine, one line each."""
    advice = [
        f"set {name}={value} before starting: {why}"
        for name, (value, why) in NPU_ENVIRONMENT.items()
        if environment.get(name) != value
    ]
    cann = str(getattr(torch.version, "cann", None) or "")
    numbers = tuple(int(part) for part in cann.split(".")[:2] if part.isdecimal())
    if numbers and numbers < OLDEST_CANN:
        advice.append(f"CANN {cann} is older than {'.'.join(map(str, OLDEST_CANN))}: upgrade the Ascend toolkit")
    return advice


def _npu(index: int) -> Device:
    # Our Triton kernels are for CUDA: plain SDPA, float16 preferred.
    dtypes = (torch.float16, torch.float32, torch.bfloat16)
    name = str(_backend("npu").get_device_name(index))
    return Device("npu", index, torch.device("npu", index), name, dtypes[0], dtypes)


def _mps(index: int) -> Device:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    name = f"Apple {platform.machine()}"
    return Device("mps", index, torch.device("mps"), name, dtypes[0], dtypes)


def _backend(kind: Kind) -> Any:
    return getattr(torch, kind)


def _imports(module: str) -> bool:
    """Whether a package is installed and can be imported: a build for another torch or driver fails on import."""
    if find_spec(module) is None:
        return False
    try:
        import_module(module)
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def _cpu_name(proc: Path = Path("/proc")) -> str:
    with suppress(OSError):
        for line in (proc / "cpuinfo").read_text(encoding="utf8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
            if line.startswith("CPU part") and (part := line.partition(":")[2].strip()) in ARM_PARTS:
                return ARM_PARTS[part]
    return platform.processor() or platform.machine()


def _host_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Free and total bytes of RAM, or of the container's memory limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    with suppress(OSError, KeyError):
        kilobytes = _fields(proc / "meminfo")
        total, free = kilobytes["MemTotal:"] * 1024, kilobytes["MemAvailable:"] * 1024
    with suppress(OSError, ValueError, KeyError):
        limit = int((cgroup / "memory.max").read_text())  # the word "max" where there is no limit
        used = int((cgroup / "memory.current").read_text())
        page_cache = _fields(cgroup / "memory.stat")
        used -= page_cache["inactive_file"] + page_cache["active_file"]
        total, free = min(total, limit), min(free, limit - used)
    return free, total


def _fields(file: Path) -> dict[str, int]:
    return {words[0]: int(words[1]) for line in file.read_text().splitlines() if len(words := line.split()) > 1}
