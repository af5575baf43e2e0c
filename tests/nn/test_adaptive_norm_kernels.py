"""The kernels of Kokoro's generator against their plain twins.

Without a GPU they run in Triton's interpreter, where that is installed and asked for by TRITON_INTERPRET=1.
"""

import os

import pytest
import torch

from vivavoce import kernels
from vivavoce.models.kokoro.cuda import NormSpan, PassState, Positions, add_moments, scaled_snake
from vivavoce.models.kokoro.layers import NormStatistics

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and kernels.AVAILABLE
DEVICE = torch.device("cpu" if INTERPRETED and not torch.cuda.is_available() else "cuda")
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
CHANNELS = 32
ROWS = [40, 1, 23]


def kernel_and_plain(monkeypatch, action):
    """The results of an action by kernels and without."""
    monkeypatch.setattr(kernels, "usable", lambda x: True)
    fast = action()
    monkeypatch.setattr(kernels, "usable", lambda x: False)
    return fast, action()


def random(*shape):
    return torch.randn(shape, device=DEVICE)


@pytest.mark.parametrize(("rate", "extra"), [(10, 0), (6, 1)])
@pytest.mark.parametrize("has_sum", [True, False])
def test_norm_and_snake(monkeypatch, rate, extra, has_sum):
    torch.manual_seed(0)
    lengths = torch.tensor(ROWS, device=DEVICE)
    positions = Positions(lengths, rate, extra)
    time = max(ROWS) * rate + extra
    x, added, bias = 20 + random(3, time, CHANNELS), random(3, time, CHANNELS), random(CHANNELS)
    earlier = NormStatistics(
        random(3, 2 * CHANNELS), random(3, 2 * CHANNELS).abs(), 7.0 * torch.arange(3, device=DEVICE)
    )
    gains, alpha = random(3, 4 * CHANNELS), 0.5 + random(CHANNELS).abs()
    span = NormSpan(CHANNELS, CHANNELS)

    def norm():
        state = PassState(gains, earlier)
        state.statistics.zero_()
        total, moments = add_moments(x, (added, bias) if has_sum else None, positions)
        affine = state.affine(moments, positions, span)
        return total, affine, state.statistics, scaled_snake(total, affine, alpha, positions)

    fast, plain = kernel_and_plain(monkeypatch, norm)
    for ours, exact in zip(fast, plain, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-4, rtol=1e-4)
    assert not fast[3][1, rate + extra :].any()
