"""Modules are made where they are asked for, and one that cannot fit says so."""

import pytest
import torch

from vivavoce.errors import CapacityError
from vivavoce.nn.allocation import allocating, fill_randomly
from vivavoce.nn.linear import Linear


def test_parameters_stand_where_and_as_asked():
    with allocating("meta", torch.bfloat16):
        layer = Linear(3, 4)
    assert layer.weight.is_meta
    assert layer.weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


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
