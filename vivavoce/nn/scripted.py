"""Modules without Python between their calls: other threads need not wait for it, nor it for them."""

import warnings
from typing import Any

import torch
from torch import nn


def scripted(module: nn.Module) -> Any:
    """A module that TorchScript runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what is to replace it needs a C++ compiler
        return torch.jit.script(module)
