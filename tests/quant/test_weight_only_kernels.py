"""The kernels on small weights against their plain twin in float64, on fresh random inputs.

Without a GPU they run in Triton's interpreter, where that is installed and asked for by TRITON_INTERPRET=1.
"""

import os

import pytest
import torch

from vivavoce.nn import kernels
from vivavoce.nn.quantised_linear import CudaLinear
from vivavoce.nn.quantised_weight import quantise

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and kernels.AVAILABLE
DEVICE = torch.device("cpu" if INTERPRETED and not torch.cuda.is_available() else "cuda")
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = [(320, 48), (896, 1153), (4096, 64), (100, 33)]  # inputs, outputs


def schemes() -> list[str]:
    if DEVICE.type == "cpu":
        return ["int8", "int4"]
    return ["int8", "int4", *(["float8"] if torch.cuda.get_device_capability() >= (8, 9) else [])]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [1, 3, 8, 33])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_that_of_the_widened_matrix(dtype, rows, bias):
    if DEVICE.type == "cpu" and dtype == torch.bfloat16 and rows > 1:
        pytest.skip("Triton's interpreter has no dot of bfloat16")
    generator = torch.Generator().manual_seed(rows)
    for scheme in schemes():
        for inputs, outputs in SHAPES if DEVICE.type == "cuda" else SHAPES[:1]:
            weight = quantise(torch.randn(outputs, inputs, generator=generator) * 0.05, scheme).to(DEVICE)
            if not kernels.takes(weight):
                continue
            x = torch.randn(rows, inputs, generator=generator).to(dtype).to(DEVICE)
            added = torch.randn(outputs, generator=generator).to(dtype).to(DEVICE) if bias else None
            torch.full((rows, outputs), float("nan"), dtype=dtype, device=DEVICE)
            found = kernels.weight_only_linear(x, weight, added)
            exact = x.double() @ weight.dequantised(torch.float64).T + (0 if added is None else added.double())
            error = (found.double() - exact).norm() / exact.norm()
            assert found.dtype == dtype and error < TOLERANCE[dtype], (scheme, inputs, outputs, float(error))


@pytest.mark.parametrize("shape", [(1, 1, 256), (2, 3, 256), (100, 256)])
def test_a_layer_takes_any_leading_shape_and_any_number_of_rows(shape):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).to(DEVICE)
    for scheme in schemes():
        weight = quantise(torch.randn(64, 256, generator=generator), scheme, activations="float").to(DEVICE)
        layer = CudaLinear(weight, torch.ones(64, device=DEVICE), torch.float32)
        expected = x.double() @ weight.dequantised(torch.float64).T + 1
        assert (layer(x) - expected).norm() / expected.norm() < 1e-4


@pytest.mark.gpu
def test_integer_products_of_many_rows_round_each_row_by_itself():
    weight = quantise(torch.randn(64, 256), "int8", activations="dynamic").to("cuda")
    x = torch.randn(100, 256, device="cuda")
    x[0] *= 1000
    found = CudaLinear(weight, None, torch.float32)(x)
    expected = x.double() @ weight.dequantised(torch.float64).T
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 0.03
