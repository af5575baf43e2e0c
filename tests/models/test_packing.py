"""Packed files are small, and read as the weights they were made of, within half a step of int8."""

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vivavoce.models.checkpoint import Checkpoint
from vivavoce.models.quantised import pack_file


def test_a_packed_file_reads_as_the_weights_it_was_made_of(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "matrix": torch.randn(96, 128) * torch.logspace(-3, 2, 96)[:, None],
        "kernel": torch.randn(64, 32, 5),
        "head.weight": torch.randn(100, 64),
        "bias": torch.randn(128),
        "huge": torch.tensor([1e6, -3.0]),
        "steps": torch.arange(7),
    }
    save_file(tensors, tmp_path / "whole.safetensors")
    pack_file(tmp_path / "whole.safetensors", tmp_path / "packed.safetensors", keep=["^head"])
    assert (tmp_path / "packed.safetensors").stat().st_size < 0.4 * (tmp_path / "whole.safetensors").stat().st_size
    with Checkpoint(tmp_path / "packed.safetensors") as packed:
        assert sorted(packed.names()) == sorted(tensors)
        for name in ("matrix", "kernel"):
            wide, exact = packed.tensor(name), tensors[name]
            half_step = exact.flatten(1).abs().amax(1) / 127 / 2
            assert ((wide - exact).flatten(1).abs().amax(1) <= half_step * 1.001).all()
            assert packed.shapes[name] == tuple(exact.shape)
        for name in ("head.weight", "bias"):
            torch.testing.assert_close(packed.tensor(name), tensors[name], rtol=1e-3, atol=1e-4)
        assert torch.equal(packed.tensor("huge"), tensors["huge"])
        assert torch.equal(packed.tensor("steps"), tensors["steps"])


def test_fewer_bits_are_read_within_half_a_step_of_theirs(tmp_path):
    torch.manual_seed(0)
    tensors = {"table": torch.randn(3, 20, 96), "kernel": torch.randn(48, 32, 5), "other": torch.randn(80, 70)}
    save_file(tensors, tmp_path / "whole.safetensors")
    pack_file(tmp_path / "whole.safetensors", tmp_path / "packed.safetensors", low_bits={"table": 5, "kernel": 6})
    with Checkpoint(tmp_path / "packed.safetensors") as packed:
        for name, largest in (("table", 15), ("kernel", 31), ("other", 127)):
            wide, exact = packed.tensor(name), tensors[name]
            rows = exact.reshape(-1, 96) if name == "table" else exact.flatten(1)
            half_step = rows.abs().amax(1, keepdim=True) / largest / 2
            assert ((wide.reshape(rows.shape) - rows).abs() <= half_step * 1.05).all()
            assert packed.shapes[name] == tuple(exact.shape) == tuple(wide.shape)
    with safe_open(tmp_path / "packed.safetensors", "pt") as file:
        assert file.get_tensor("table").numel() == 3 * 20 * 96 * 5 // 8
