"""Weight norm in both spellings, held against torch's own."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrizations

from vivavoce.errors import CheckpointError
from vivavoce.models.checkpoint import Checkpoint, fold_weight_norm, load_weights

MAKERS = {
    "conv": lambda: nn.Conv1d(4, 6, 3),
    "one channel": lambda: nn.Conv1d(4, 1, 3),
    "transposed": lambda: nn.ConvTranspose1d(4, 6, 5),
    "linear": lambda: nn.Linear(4, 6),
}


def normed(layer):
    """The layer under torch's weight norm, with a magnitude that is not the direction's."""
    layer = parametrizations.weight_norm(layer)
    with torch.no_grad():
        layer.parametrizations.weight.original0.mul_(torch.rand(layer.parametrizations.weight.original0.shape) + 0.5)
    return layer


def saved(tensors, folder):
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("prefix", ["parametrizations.weight.original", "weight_"])
def test_folded_weights_are_the_ones_torch_multiplies_by(maker, prefix, tmp_path):
    torch.manual_seed(0)
    layer = normed(maker())
    pair = layer.parametrizations.weight
    endings = ("0", "1") if prefix.endswith("original") else ("g", "v")
    tensors = {f"up.{prefix}{endings[0]}": pair.original0, f"up.{prefix}{endings[1]}": pair.original1}
    plain = nn.ModuleDict({"up": maker()})
    with fold_weight_norm(Checkpoint(saved({**tensors, "up.bias": layer.bias}, tmp_path))) as folded:
        assert set(folded.names()) == {"up.weight", "up.bias"}
        load_weights(plain, folded)
    torch.testing.assert_close(plain["up"].weight, layer.weight, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(plain["up"].bias, layer.bias, rtol=0, atol=0)


def test_plain_weights_pass_through(tmp_path):
    weight = torch.randn(3, 4)
    with fold_weight_norm(Checkpoint(saved({"a.weight": weight}, tmp_path))) as folded:
        assert torch.equal(folded.tensor("a.weight"), weight)
        assert folded.shapes == {"a.weight": (3, 4)}


@pytest.mark.parametrize("lonely", ["a.weight_g", "a.weight_v", "a.parametrizations.weight.original1"])
def test_half_a_pair_is_named(lonely, tmp_path):
    with pytest.raises(CheckpointError, match="its other half") as raised:
        fold_weight_norm(Checkpoint(saved({lonely: torch.ones(2, 2)}, tmp_path)))
    assert lonely in str(raised.value)


def test_nothing_is_read_before_it_is_asked_for(tmp_path):
    read = []

    class Recorded(Checkpoint):
        def tensor(self, name):
            read.append(name)
            return super().tensor(name)

    tensors = {f"{layer}.weight_{half}": torch.rand(2, 2) for layer in "ab" for half in "gv"}
    folded = fold_weight_norm(Recorded(saved(tensors, tmp_path)))
    assert read == []
    folded.tensor("b.weight")
    assert read == ["b.weight_g", "b.weight_v"]


def test_closing_the_folded_checkpoint_closes_the_file(tmp_path):
    inner = Checkpoint(saved({"a.weight": torch.ones(1)}, tmp_path))
    fold_weight_norm(inner).close()
    assert inner.names() == []
