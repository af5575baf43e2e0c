import pytest
import torch

from vivavoce.kernels import cpu
from vivavoce.nn.lstm import BidirectionalLSTM


@pytest.fixture
def lstm() -> BidirectionalLSTM:
    torch.manual_seed(0)
    made = BidirectionalLSTM(48, 256).requires_grad_(False)
    for weight in made.parameters():
        weight.normal_(0, 0.3)  # so that gates are also far from the middle
    return made


@torch.inference_mode()
@pytest.mark.parametrize("time", [1, 2, 150])
def test_one_row_equals_that_of_pytorch(lstm, time):
    x = 3 * torch.randn(1, time, 48)
    torch.testing.assert_close(lstm.run(x, None), lstm(x)[0], atol=2e-5, rtol=0)


@torch.inference_mode()
def test_rows_of_a_batch_equal_single_ones(lstm):
    x, lengths = torch.randn(3, 20, 48), torch.tensor([20, 7, 13])
    together = lstm.run(x, lengths)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(
            together[row, :length], lstm.run(x[row : row + 1, :length], None)[0], atol=2e-5, rtol=0
        )
        assert not together[row, length:].any()


def test_it_can_be_trained(lstm):
    lstm.requires_grad_(True)
    lstm.run(torch.randn(1, 4, 48), None).sum().backward()
    assert lstm.weight_hh_l0.grad is not None and lstm.weight_hh_l0.grad.abs().sum() > 0


@pytest.mark.skipif(cpu.synthesis_library() is None, reason="no C compiler")
@torch.inference_mode()
def test_it_follows_weights_that_are_loaded_later(lstm):
    x = torch.randn(1, 5, 48)
    before = lstm.run(x, None)
    lstm.load_state_dict({name: 0.5 * weight for name, weight in lstm.state_dict().items()})
    after = lstm.run(x, None)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, lstm(x)[0], atol=2e-5, rtol=0)
