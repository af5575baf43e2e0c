"""The kernels of CosyVoice 3's transformer against their plain twins in float64.

Without a GPU they run in Triton's interpreter, where that is installed and asked for by TRITON_INTERPRET=1.
"""

import os

import pytest
import torch

from vivavoce import kernels
from vivavoce.models.cosyvoice.dit import NORM_EPS, rotary_angles
from vivavoce.nn.attention import rotate_pairs
from vivavoce.nn.linear import modulated_norm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and kernels.AVAILABLE
DEVICE = torch.device("cpu" if INTERPRETED and not torch.cuda.is_available() else "cuda")
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def random(*shape, dtype):
    return torch.randn(shape, device=DEVICE).to(dtype)


def assert_near(ours, exact):
    error = (ours.double().cpu() - exact).norm() / exact.norm()
    assert error < TOLERANCE[ours.dtype], f"relative error {error:.2e}"


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "time", "dim"), [(2, 50, 1024), (3, 7, 24), (32, 2, 64)])
@pytest.mark.parametrize("is_gated", [True, False])
def test_the_norm_behind_a_gated_addition(dtype, rows, time, dim, is_gated):
    x, added = 3 + random(rows, time, dim, dtype=dtype), random(rows, time, dim, dtype=dtype)
    gate, scale, shift = (random(dim, dtype=dtype) for _ in range(3))
    total, normed = kernels.modulated_norm(x, (gate, added) if is_gated else None, scale, shift, NORM_EPS)
    doubles = [tensor.double().cpu() for tensor in (x, gate, added, scale, shift)]
    gated = (doubles[1], doubles[2]) if is_gated else None
    exact_total, exact_normed = modulated_norm(doubles[0], gated, *doubles[3:], NORM_EPS)
    assert_near(total, exact_total)
    assert_near(normed, exact_normed)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "time", "heads", "dim"), [(4, 50, 16, 64), (1, 3, 2, 6)])
def test_the_first_head_alone_is_turned(dtype, rows, time, heads, dim):
    packed = random(rows, time, 3, heads, dim, dtype=dtype)
    before = packed.double().cpu()
    positions = torch.arange(time, device=DEVICE) + 100 * torch.arange(rows, device=DEVICE)[:, None]
    cos, sin = rotary_angles(positions, dim)
    query, keys, _ = packed.permute(2, 0, 3, 1, 4)
    kernels.rotate_first_head(query, keys, cos, sin)
    exact = before.clone()
    for part in range(2):
        turned = rotate_pairs(before[:, :, part, :1], cos.double().cpu(), sin.double().cpu())
        exact[:, :, part, :1] = turned
        assert_near(packed[:, :, part, :1], turned)
    assert torch.equal(packed[:, :, :, 1:].double().cpu(), exact[:, :, :, 1:])
    assert torch.equal(packed[:, :, 2].double().cpu(), exact[:, :, 2])
