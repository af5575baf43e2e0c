"""Snake in one launch against its plain twin in float64."""

import pytest
import torch

from vivavoce import kernels
from vivavoce.nn.vocoder import NEVER_ZERO, Snake

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(1, 3, 1), (2, 64, 1025), (32, 256, 440)])
def test_snake(dtype, shape):
    snake = Snake(shape[1]).requires_grad_(False)
    snake.alpha.uniform_(0.05, 4.0)
    x = 3 * torch.randn(shape, dtype=dtype, device=CUDA)
    ours = kernels.snake(x, snake.alpha.to(CUDA, dtype), NEVER_ZERO)
    exact_alpha = Snake(shape[1]).requires_grad_(False).double()
    exact_alpha.alpha.copy_(snake.alpha.to(dtype).double())
    exact = exact_alpha(x.double().cpu())
    assert (ours.double().cpu() - exact).norm() / exact.norm() < TOLERANCE[dtype]


def test_a_module_takes_the_kernel_where_samples_lie_side_by_side():
    snake = Snake(5).requires_grad_(False).to(CUDA)
    x = torch.randn(2, 5, 40, device=CUDA)
    plain = snake.cpu()(x.cpu())
    snake.to(CUDA)
    assert torch.allclose(snake(x).cpu(), plain, atol=1e-6)
    assert torch.allclose(snake(x[..., 3:30]).cpu(), plain[..., 3:30], atol=1e-6)
    apart = x.mT.contiguous().mT
    assert apart.stride(-1) != 1
    assert torch.allclose(snake(apart).cpu(), plain, atol=1e-6)
