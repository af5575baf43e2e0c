"""Modules allocated where and as they will be used: no copy on the CPU first, no cast afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def allocating(device: torch.device | str, dtype: torch.dtype) -> Iterator[None]:
    """Parameters made inside stand on this device, with this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
