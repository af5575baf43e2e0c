"""How fast this device reads memory: the floor under every step that must read its weights once."""

import gc
import time
from collections.abc import Callable

import torch

from vivavoce.device import Device

LARGEST_BUFFER = 2**30


def synchronize(device: Device) -> None:
    """Wait until the device has done all it was given."""
    if device.kind != "cpu":
        getattr(torch, device.kind).synchronize()


def give_back(device: Device) -> None:
    """Free what nobody holds any more, so that the next model finds room."""
    gc.collect()
    if device.kind == "cuda":
        torch.cuda.empty_cache()


def median_seconds(action: Callable[[], object], device: Device, repeats: int, warm_up: int = 3) -> float:
    """The median wall time of an action, the device idle before and after it."""
    times = []
    for number in range(warm_up + repeats):
        synchronize(device)
        start = time.perf_counter()
        action()
        synchronize(device)
        if number >= warm_up:
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def read_bandwidth(device: Device) -> float:
    """Bytes a second: the better of a copy (bytes read and written) and a sum, on buffers larger than any cache."""
    most = LARGEST_BUFFER if device.kind == "cpu" else 4 * LARGEST_BUFFER
    size = min(most, device.free_memory() // 4)
    source = torch.ones(size // 4, dtype=torch.float32, device=device.torch_device)
    target = torch.zeros_like(source)
    copied = 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device, repeats=10)
    summed = source.nbytes / median_seconds(source.sum, device, repeats=10)
    return max(copied, summed)
