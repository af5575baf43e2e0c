"""Modules are made where they are asked for, and one that cannot fit says so."""

import subprocess
import sys

import pytest
import torch

from vivavoce.errors import CapacityError
from vivavoce.nn.linear import Linear
from vivavoce.nn.modules import allocating, fill_randomly


def test_parameters_stand_where_and_as_asked():
    with allocating("meta", torch.bfloat16):
        layer = Linear(3, 4)
    assert layer.weight.is_meta
    assert layer.weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


def test_what_has_no_memory_does_not_load_a_compiler():
    script = """
import sys, torch
from vivavoce.nn.modules import allocating
with allocating("meta", torch.float32):
    table, layer = torch.nn.Embedding(2, 3), torch.nn.Linear(3, 4)
print(table.weight.is_meta, layer.weight.is_meta, "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "False"]


def test_what_does_not_fit_is_one_line():
    with (
        pytest.raises(CapacityError, match="does not fit into the memory of cpu as float32") as caught,
        allocating("cpu", torch.float32),
    ):
        Linear(2**24, 2**24)  # a petabyte
    assert "\n" not in str(caught.value)
    assert torch.get_default_dtype() == torch.float32


def test_other_errors_pass_through():
    with pytest.raises(ZeroDivisionError), allocating("cpu", torch.float64):
        _ = 1 / 0


def test_random_weights_are_the_same_for_a_seed():
    layers = [Linear(8, 8, bias=True) for _ in range(3)]
    for layer, seed in zip(layers, (1, 1, 2), strict=True):
        fill_randomly(layer, seed)
    assert torch.equal(layers[0].weight, layers[1].weight)
    assert not torch.equal(layers[0].weight, layers[2].weight)
    assert (layers[0].bias == 0).all()
