"""Modules without Python between their calls: other threads need not wait for it, nor it for them."""

import threading
import warnings
from typing import Any

import torch
from torch import nn

_compiling = threading.Lock()  # two threads that compile one class at once would both define its methods


def scripted(module: nn.Module) -> Any:
    """A module that TorchScript runs."""
    with _compiling, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what is to replace it needs a C++ compiler
        return torch.jit.script(module)
