"""Int8 products are float32's, but for rounding."""

import pytest
import torch
from torch import nn

from vivavoce.cpu_speed import is_int8_fast
from vivavoce.nn.linear import Linear, PackedLinear
from vivavoce.nn.quantised import Int8Linear, to_int8

pytestmark = pytest.mark.skipif(not is_int8_fast(), reason="this processor has no int8 products")


def linear(inputs: int, outputs: int, bias: bool) -> Linear:
    made = Linear(inputs, outputs, bias)
    generator = torch.Generator().manual_seed(inputs)
    for parameter in made.parameters():
        parameter.normal_(generator=generator)
    return made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_a_product_is_off_by_a_hundredth(bias, rows):
    plain = linear(256, 96, bias)
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(1))
    expected, found = plain(x), Int8Linear.of(plain)(x)
    assert found.dtype == torch.float32
    assert (found - expected).norm() / expected.norm() < 0.02


def test_rows_of_very_different_size_keep_their_own_scale():
    plain = linear(64, 3, False)
    plain.weight.mul_(torch.tensor([[1.0], [1e-3], [1e3]]))
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(2))
    relative = (Int8Linear.of(plain)(x) - plain(x)).abs() / plain.weight.norm(dim=1) / x.norm()
    assert relative.max() < 0.005


def test_a_row_of_zeros_stays_zero():
    plain = linear(16, 4, False)
    plain.weight[2] = 0
    assert Int8Linear.of(plain)(torch.ones(1, 16))[0, 2] == 0


def test_every_plain_linear_below_is_rounded_and_nothing_else():
    tree = nn.ModuleDict({"a": linear(8, 8, True), "b": nn.ModuleList([linear(8, 4, False), nn.LayerNorm(8)])})
    tree["c"] = PackedLinear(8, {"q": 4, "k": 4})
    to_int8(tree)
    assert isinstance(tree["a"], Int8Linear) and isinstance(tree["b"][0], Int8Linear)
    assert isinstance(tree["b"][1], nn.LayerNorm) and isinstance(tree["c"], PackedLinear)
