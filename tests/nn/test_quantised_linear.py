"""Which layer a quantised matrix becomes on a processor."""

import torch

from vivavoce.cpu_speed import has_products_in
from vivavoce.nn.quantised import CastLinear, quantised_linear
from vivavoce.nn.quantised_weight import quantise


def test_float16_is_multiplied_only_where_the_cpu_has_products_in_it():
    weight = quantise(torch.randn(8, 32, generator=torch.Generator().manual_seed(0)), "float16")
    layer = quantised_linear(weight, None, torch.float32)
    assert isinstance(layer, CastLinear) if has_products_in(torch.float16) else layer is None


def test_a_product_in_16_bits_is_the_wide_one_but_for_rounding():
    generator = torch.Generator().manual_seed(0)
    matrix, rows = torch.randn(8, 32, generator=generator), torch.randn(3, 32, generator=generator)
    for scheme, error in (("float16", 1e-3), ("bfloat16", 8e-3)):
        made = CastLinear(quantise(matrix, scheme), torch.ones(8), torch.float32)(rows)
        exact = rows @ matrix.T + 1
        assert made.dtype == torch.float32 and (made - exact).norm() < error * exact.norm()
