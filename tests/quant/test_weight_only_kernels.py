"""The kernels on float and small weights against their plain twins in float64, on fresh random inputs.

Without a GPU they run in Triton's interpreter, where that is installed and asked for by TRITON_INTERPRET=1.
"""

import os

import pytest
import torch
from torch.nn import functional

from vivavoce import kernels
from vivavoce.nn.quantised import CudaLinear
from vivavoce.nn.quantised_weight import quantise

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and kernels.AVAILABLE
DEVICE = torch.device("cpu" if INTERPRETED and not torch.cuda.is_available() else "cuda")
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16  # the interpreter has no dot of bfloat16
SCHEMES = ["bfloat16", "int8", "int4", *([] if INTERPRETED else ["float8"])]


def matrix(outputs: int, inputs: int, scheme: str, dtype: torch.dtype):
    """What the kernel reads, and the numbers it stands for."""
    weight = torch.randn(outputs, inputs) * 0.05
    if scheme == "bfloat16":
        weight = weight.to(dtype).to(DEVICE)
        return weight, weight.double()
    quantised = CudaLinear(quantise(weight, scheme).to(DEVICE), None, dtype).quantised
    return quantised, quantised.dequantised(torch.float64)


def assert_near(ours: torch.Tensor, exact: torch.Tensor) -> None:
    error = (ours.double() - exact).norm() / exact.norm()
    assert error < TOLERANCE[ours.dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 1024, 48), (5, 896, 97), (33, 512, 64)])
def test_a_product_is_that_of_the_widened_matrix(scheme, rows, inputs, outputs):
    torch.manual_seed(rows)
    weight, wide = matrix(outputs, inputs, scheme, DTYPE)
    x = torch.randn(rows, inputs).to(DTYPE).to(DEVICE)
    bias = torch.randn(outputs).to(DTYPE).to(DEVICE)
    exact = x.double() @ wide.T + bias.double()
    torch.full((rows, outputs), float("nan"), dtype=DTYPE, device=DEVICE)
    for parts, early in ((1, False), (4, True)):
        tile = kernels.Tile(16, 128, 3, parts, parts, early)
        assert_near(kernels.small_batch_linear(x, weight, bias, tile), exact)
    if rows == 1 and scheme != "int4":
        assert_near(kernels.small_batch_linear(x, weight, bias, kernels.Tile(2, 512, 0, 4)), exact)


@pytest.mark.parametrize("scheme", SCHEMES[1:])
@pytest.mark.parametrize(("rows", "outputs", "split"), [(9, 97, 1), (33, 64, 2), (130, 66, 4)])
@pytest.mark.parametrize("gated", [False, True])
def test_a_batch_is_multiplied_by_the_widened_matrix(scheme, rows, outputs, split, gated):
    torch.manual_seed(rows)
    weight, wide = matrix(outputs * (2 if gated else 1), 512, scheme, DTYPE)
    x = torch.randn(rows, 512).to(DTYPE).to(DEVICE)
    bias = torch.randn(weight.outputs).to(DTYPE).to(DEVICE)
    exact = x.double() @ wide.T + bias.double()
    if gated:
        gate, up = exact.chunk(2, dim=-1)
        exact = functional.silu(gate) * up
    torch.full((8, rows, outputs), float("nan"), device=DEVICE)
    assert_near(kernels.small_batch_linear(x, weight, bias, kernels.Tile(32, 64, 3, 4, split=split), gated), exact)


@pytest.mark.parametrize("scheme", SCHEMES[1:])
@pytest.mark.parametrize(("outputs", "inputs"), [(97, 512), (64, 1216)])
def test_many_rows_are_multiplied_by_the_dequantised_matrix(scheme, outputs, inputs):
    torch.manual_seed(outputs)
    weight, wide = matrix(outputs, inputs, scheme, DTYPE)
    x = torch.randn(3, 7, inputs).to(DTYPE).to(DEVICE)
    bias = torch.randn(outputs).to(DTYPE).to(DEVICE)
    assert_near(kernels.dequantised_linear(x, weight, bias), x.double() @ wide.T + bias.double())


@pytest.mark.parametrize(
    ("scheme", "rows", "stages"),
    [
        (scheme, rows, stages)
        for scheme in SCHEMES
        for rows, stages in ((1, 0), (1, 3), (12, 3))
        if stages or scheme != "int4"  # groups always go through the tensor cores
    ],
)
def test_a_gate_stands_behind_the_product(scheme, rows, stages):
    torch.manual_seed(rows)
    weight, wide = matrix(96, 512, scheme, DTYPE)
    x = torch.randn(rows, 512).to(DTYPE).to(DEVICE)
    found = kernels.small_batch_linear(x, weight, None, kernels.Tile(32, 128, stages, 4, parts=2), gated=True)
    gate, up = (x.double() @ wide.T).chunk(2, dim=-1)
    assert_near(found, functional.silu(gate) * up)


@pytest.mark.parametrize("scheme", ["int8", "float8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs", "tile"), [(1024, 48, (2, 512, 0, 4)), (912, 98, (4, 512, 0, 2))])
@pytest.mark.parametrize("gated", [False, True])
def test_one_row_of_any_range_meets_weights_of_a_byte(scheme, dtype, inputs, outputs, tile, gated):
    """Numbers of a row may differ by many powers of two; each keeps the digits that count in its sum."""
    torch.manual_seed(inputs)
    weight, wide = matrix(outputs, inputs, scheme, dtype)
    x = (torch.randn(1, inputs) * 2.0 ** torch.randint(-20, 8, (1, inputs))).to(dtype).to(DEVICE)
    bias = torch.randn(outputs).to(dtype).to(DEVICE)
    torch.full((1, outputs), float("nan"), dtype=dtype, device=DEVICE)
    found = kernels.small_batch_linear(x, weight, bias, kernels.Tile(*tile), gated)
    exact = x.double() @ wide.T + bias.double()
    if gated:
        gate, up = exact.chunk(2, dim=-1)
        exact = functional.silu(gate) * up
    assert_near(found, exact)


@pytest.mark.parametrize("scheme", ["int8", "float8"])
def test_one_row_with_a_number_that_is_none_makes_none(scheme):
    weight, _ = matrix(32, 256, scheme, torch.bfloat16)
    for broken in (float("nan"), float("inf")):
        x = torch.ones(1, 256, dtype=torch.bfloat16, device=DEVICE)
        x[0, 77] = broken
        assert not kernels.small_batch_linear(x, weight, None, kernels.Tile(2, 256, 0, 2)).isfinite().any()


@pytest.mark.parametrize("scheme", SCHEMES[1:])
@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.float32, torch.float16])
def test_a_layer_takes_any_leading_shape_and_any_number_of_rows(scheme, dtype):
    torch.manual_seed(1)
    weight = quantise(torch.randn(64, 256), scheme).to(DEVICE)
    layer = CudaLinear(weight, torch.ones(64, device=DEVICE), dtype)
    for shape in [(1, 1, 256), (2, 3, 256), (100, 256)]:
        x = torch.randn(shape).to(dtype).to(DEVICE)
        expected = x.double() @ weight.dequantised(torch.float64).T + 1
        found = layer(x)
        assert found.shape == expected.shape
        assert_near(found, expected)


@pytest.mark.gpu
def test_integer_products_of_many_rows_round_each_row_by_itself():
    weight = quantise(torch.randn(64, 256), "int8", activations="dynamic").to("cuda")
    x = torch.randn(100, 256, device="cuda")
    x[0] *= 1000
    found = CudaLinear(weight, None, torch.float32)(x)
    expected = x.double() @ weight.dequantised(torch.float64).T
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 0.03
