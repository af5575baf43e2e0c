"""Creating modules: allocation on a device in a dtype, random weights, and TorchScript."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from vivavoce.errors import CapacityError
from vivavoce.nn.process_settings import default_dtype


class _Undrawn(TorchFunctionMode):
    """Skips weight initialisation, which for meta tensors would import torch's compiler, in seconds."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return named["tensor"] if "tensor" in named else args[0]
        return func(*args, **named)


@contextmanager
def allocating(device: torch.device | str, dtype: torch.dtype, drawn: bool = True) -> Iterator[None]:
    """Parameters created in the block have this device and dtype; without `drawn` they are uninitialised."""
    undrawn = nullcontext() if drawn and torch.device(device).type != "meta" else _Undrawn()
    try:
        with default_dtype.held(dtype), torch.device(device), undrawn:
            yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; the CPU allocator's error has no class
        if "memory" not in str(error):
            raise
        raise CapacityError(
            f"the model does not fit into the memory of {device} as {str(dtype).removeprefix('torch.')}; "
            "free some, or take a smaller dtype or model"
        ) from error


@torch.no_grad()
def fill_randomly(module: nn.Module, seed: int = 0, deviation: float | None = None) -> None:
    """Random weights for benchmarks and tests: norms and gains are 1, biases 0.

    Matrices are normal with this deviation, or with one that preserves the variance of their input.
    """
    device = next(module.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, deviation or parameter[0].numel() ** -0.5, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


_compiling = threading.Lock()  # two threads that compile one class would both define its methods


def scripted(module: nn.Module) -> Any:
    """The module compiled by TorchScript."""
    with _compiling, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its replacement needs a C++ compiler
        return torch.jit.script(module)
