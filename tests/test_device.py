"""What a device can do is decided once, and a device that is not there is one clear line."""

import json
import os
import platform
import subprocess
import sys
import warnings
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch

from vivavoce.cpu_speed import has_products_in
from vivavoce.device import _cpu_name, _host_memory, available, dtype_name, npu_advice, pick, resolve_dtype
from vivavoce.errors import InputError

ROOT = Path(__file__).parent.parent


def test_the_cpu_is_always_there_in_float32():
    cpu = pick("cpu")
    assert (cpu.kind, str(cpu), cpu.dtype) == ("cpu", "cpu", torch.float32)
    assert not cpu.graphs
    assert not cpu.triton
    assert available()[-1] == cpu
    assert torch.ones(2, device=cpu.torch_device).device == cpu.torch_device


def test_a_device_is_a_value():
    cpu = pick("cpu")
    with pytest.raises(FrozenInstanceError):
        cpu.kind = "cuda"
    assert hash(cpu) == hash(pick("cpu"))


def test_auto_takes_the_first_of_what_there_is():
    assert pick("auto") == pick() == available()[0]


def test_memory_is_real():
    cpu = pick("cpu")
    assert 0 < cpu.free_memory() <= cpu.total_memory()


def test_memory_of_a_container_is_its_limit_less_what_it_holds(tmp_path):
    (tmp_path / "meminfo").write_text(
        "MemTotal: 8000000 kB\nMemFree: 10 kB\nMemAvailable: 6000000 kB\nHugePages_Total: 0\n"
    )
    assert _host_memory(tmp_path, tmp_path / "none") == (6_000_000 * 1024, 8_000_000 * 1024)
    (tmp_path / "memory.current").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 1000000\ninactive_file 1500000\nactive_file 500000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert _host_memory(tmp_path, tmp_path) == (6_000_000 * 1024, 8_000_000 * 1024)
    (tmp_path / "memory.max").write_text("4000000\n")
    assert _host_memory(tmp_path, tmp_path) == (3_000_000, 4_000_000)


def test_as_many_samples_are_worked_on_as_memory_has_room_for():
    cpu = pick("cpu")
    assert cpu.samples_that_fit(1, 8) == 8
    assert cpu.samples_that_fit(2**60, 8) == 1
    fitting = cpu.samples_that_fit(cpu.total_memory() // 100, 1000)
    assert 1 <= fitting <= 100
    with pytest.raises(InputError, match="above 0"):
        cpu.samples_that_fit(0, 8)


@pytest.mark.parametrize("spec", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0:1", "", "CUDA"])
def test_an_unknown_device_says_which_there_are(spec):
    with pytest.raises(InputError, match="use auto, cpu, cuda, cuda:1, npu, npu:0 or mps"):
        pick(spec)


@pytest.mark.parametrize(
    ("kind", "to_install"), [("cuda", "NVIDIA driver"), ("npu", "torch-npu"), ("mps", "Apple silicon")]
)
def test_an_absent_device_says_what_it_needs(kind, to_install):
    if any(device.kind == kind for device in available()):
        pytest.skip(f"this machine has {kind}")
    with pytest.raises(InputError, match=to_install) as raised:
        pick(kind)
    assert "\n" not in str(raised.value)


def test_an_index_beyond_the_last_says_how_many_there_are():
    with pytest.raises(InputError, match="has 1 cpu device"):
        pick("cpu:7")


def test_dtypes():
    cpu = pick("cpu")
    assert resolve_dtype("auto", cpu) is torch.float32
    assert resolve_dtype("bfloat16", cpu) is torch.bfloat16
    with pytest.raises(InputError, match="does not run float16; use one of auto, float32, bfloat16"):
        resolve_dtype("float16", cpu)
    with pytest.raises(InputError, match="dtype 'fp8' is not known"):
        resolve_dtype("fp8", cpu)
    assert dtype_name(torch.bfloat16) == "bfloat16"


def test_a_processor_has_its_name(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Platinum 8488C\n")
    assert _cpu_name(tmp_path) == "Intel(R) Xeon(R) Platinum 8488C"
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n")
    assert _cpu_name(tmp_path) == "Neoverse-N1"
    (tmp_path / "cpuinfo").write_text("CPU part\t: 0xfff\n")
    assert _cpu_name(tmp_path) == _cpu_name(tmp_path / "none") == (platform.processor() or platform.machine())


def test_a_dtype_that_the_cpu_has_no_products_in_is_warned_of():
    cpu = pick("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert resolve_dtype("bfloat16", cpu) is torch.bfloat16
        assert resolve_dtype("float32", cpu) is torch.float32
    assert len(caught) == int(not has_products_in(torch.bfloat16))
    assert all("no bfloat16 instructions" in str(one.message) for one in caught)


@pytest.mark.gpu
def test_cuda_is_described_as_it_is():
    cuda = pick("cuda")
    assert cuda.graphs
    assert cuda.dtype in (torch.bfloat16, torch.float16)
    assert cuda.free_memory() < cuda.total_memory()
    held = torch.ones(256 << 20, dtype=torch.uint8, device=cuda.torch_device)
    assert cuda.total_memory() - cuda.free_memory() >= held.numel()
    with pytest.raises(InputError, match="the last is cuda"):
        pick(f"cuda:{torch.cuda.device_count()}")


# A package that registers itself with torch as Ascend's does: the name `npu`, and a module `torch.npu`.
STAND_IN = """
import sys, types
import torch
npu = types.ModuleType("torch.npu")
npu.is_available = lambda: True
npu.device_count = lambda: 2
npu.get_device_name = lambda index=0: f"Ascend910B{index}"
npu.mem_get_info = lambda index=0: ((30 - index) * 2**30, 32 * 2**30)
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", npu)
torch.version.cann = "7.0.RC1"
"""

ASK = """
import json
from vivavoce.device import available, npu_advice, pick, resolve_dtype
first, second = pick("auto"), pick("npu:1")
print(json.dumps({
    "auto": str(first), "second": str(second), "name": second.name, "dtype": str(first.dtype),
    "dtypes": [str(resolve_dtype(name, first)) for name in ("float16", "float32", "bfloat16")],
    "graphs": first.graphs, "triton": first.triton,
    "free": second.free_memory(), "total": second.total_memory(), "all": [str(device) for device in available()],
    "fit": [second.samples_that_fit(size, 16) for size in (2**30, 2**36)], "advice": npu_advice(),
}))
"""


def ask(package: str, folder: Path) -> dict:
    """What a fresh process says of its devices when this torch_npu is installed."""
    (folder / "torch_npu.py").write_text(package)
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_npu_comes_first_in_float16(tmp_path):
    said = ask(STAND_IN, tmp_path)
    assert said["auto"] == "npu:0"
    assert (said["second"], said["name"]) == ("npu:1", "Ascend910B1")
    assert said["dtype"] == "torch.float16"
    assert said["dtypes"] == ["torch.float16", "torch.float32", "torch.bfloat16"]
    assert (said["graphs"], said["triton"]) == (False, False)
    assert (said["free"], said["total"]) == (29 * 2**30, 32 * 2**30)
    assert said["all"][:2] == ["npu:0", "npu:1"]
    assert said["fit"] == [16, 1]
    assert [line.partition(" before")[0] for line in said["advice"][:2]] == [
        "set PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
        "set TASK_QUEUE_ENABLE=1",
    ]
    assert said["advice"][2:] == ["CANN 7.0.RC1 is older than 8.0: upgrade the Ascend toolkit"]


def test_an_npu_that_is_set_up_right_needs_no_advice(monkeypatch):
    monkeypatch.setattr(torch.version, "cann", "8.1.RC1", raising=False)
    assert npu_advice({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", "TASK_QUEUE_ENABLE": "1"}) == []
    assert len(npu_advice({})) == 2


def test_a_torch_npu_that_does_not_load_counts_as_absent(tmp_path):
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    code = "from vivavoce.device import pick; print(pick('auto').kind)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == pick("auto").kind
