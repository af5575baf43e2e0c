"""The pool of cache pages: who holds how many, counted, so that forks share and nothing leaks."""

import torch

from vivavoce.device import Device
from vivavoce.errors import CapacityError, InputError
from vivavoce.models.interface import GenerativeModel
from vivavoce.nn.paged_kv import FP8, SCRATCH_PAGE, PagedCache


class PagePool:
    """Free pages and reference counts. Pure bookkeeping: the tensors are in `vivavoce.nn.paged_kv`."""

    def __init__(self, pages: int) -> None:
        if pages < 2:
            raise CapacityError(f"a cache of {pages} pages holds nothing; give at least 2 (one is scratch)")
        self.holders = [0] * pages
        # The page given back last is taken first: it is still in the processor's caches, and others stay untouched.
        self._free = [page for page in reversed(range(pages)) if page != SCRATCH_PAGE]

    @property
    def size(self) -> int:
        """Pages that sequences can hold."""
        return len(self.holders) - 1

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A free page, now held once."""
        page = self._free.pop()
        self.holders[page] = 1
        return page

    def share(self, page: int) -> None:
        """One more holder of a page that is held already."""
        if self.holders[page] == 0:
            raise AssertionError(f"page {page} is free and cannot be shared")
        self.holders[page] += 1

    def release(self, page: int) -> None:
        """One holder less; the last one frees the page."""
        if self.holders[page] == 0:
            raise AssertionError(f"page {page} was freed twice")
        self.holders[page] -= 1
        if self.holders[page] == 0:
            self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether writing into this page would be seen by another sequence."""
        return self.holders[page] > 1


CPU_CACHE_ROWS = 16384
FREE_MEMORY_SHARE = 0.85  # of what the weights leave; the rest is for activations and graphs


def cache_dtype(model: GenerativeModel, device: Device, dtype: torch.dtype, kv: str) -> torch.dtype:
    """The type in which keys and values are kept, refused where something would have to compute with it that cannot."""
    if kv == "float":
        return dtype
    if kv != "fp8":
        raise InputError(f"kv must be 'float' or 'fp8', not {kv!r}")
    if not getattr(model, "takes_fp8_cache", False):
        raise InputError(f"{type(model).__name__} keeps keys and values as floats only; leave kv at 'float'")
    if device.kind == "mps" or (device.kind == "cuda" and torch.cuda.get_device_capability(device.index) < (8, 9)):
        raise InputError(f"{device.name} does not compute with float8; leave kv at 'float'")
    return FP8


def rows_that_fit(model: GenerativeModel, device: Device, dtype: torch.dtype) -> int:
    if device.kind == "cpu":
        return CPU_CACHE_ROWS
    row = model.kv_shape.bytes_per_row(dtype)
    free = int(device.free_memory() * FREE_MEMORY_SHARE)
    if free < row * 64:
        raise CapacityError(
            f"{device.name} has {free / 2**20:.0f} MiB left for the cache; free memory or take a smaller model"
        )
    return free // row


def allocate_cache(
    model: GenerativeModel, pages: int, page_size: int, dtype: torch.dtype, device: Device
) -> PagedCache:
    try:
        return PagedCache.allocate(model.kv_shape, pages, page_size, dtype, device.torch_device)
    except RuntimeError as error:  # torch's out-of-memory errors on every device
        size = model.kv_shape.bytes_per_row(dtype) * pages * page_size
        raise CapacityError(
            f"a cache of {size / 2**30:.1f} GiB does not fit on {device.name}; lower cache_rows"
        ) from error
