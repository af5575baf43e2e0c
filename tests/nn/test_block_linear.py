"""Block formats: equal to the `gguf` package's reference, and packed products close to those of floats."""

import ctypes
import platform
import threading

import gguf
import numpy as np
import pytest
import torch

from vivavoce.kernels import cpu
from vivavoce.nn import block_linear
from vivavoce.nn.block_formats import FORMATS, q5_0_as_q8_0
from vivavoce.nn.block_linear import BlockEmbedding, BlockLinear, BlockMatrix

HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}  # offsets of numbers in half precision
TWO_HALVES = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
needs_kernels = pytest.mark.skipif(not cpu.is_available(), reason="needs a C compiler")
every_format = pytest.mark.parametrize("kind", FORMATS.values(), ids=lambda kind: kind.name)


def random_blocks(kind, count, seed=0):
    """Blocks of every bit pattern, with scales of a usual size."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (count, kind.bytes), dtype=np.uint8)
    for start in HALVES.get(kind.name, (0, 2) if kind.name in TWO_HALVES else (0,)):
        scales = generator.normal(scale=0.02, size=(count, 1)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8)
    return blocks


def random_matrix(kind, outputs, inputs, seed=0):
    blocks = random_blocks(kind, outputs * inputs // kind.weights, seed)
    return BlockMatrix(torch.from_numpy(blocks).view(outputs, -1), kind)


@every_format
def test_blocks_are_dequantised_as_the_reference_does(kind):
    blocks = random_blocks(kind, 64)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind.number))
    np.testing.assert_array_equal(kind.dequantised(torch.from_numpy(blocks)).numpy(), expected.reshape(64, -1))


@needs_kernels
@every_format
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_packed_products_are_those_of_the_dequantised_weights(kind, rows):
    """Inputs that int8 holds exactly leave only the error of float32 sums."""
    inputs = 768 if kind.weights == 256 else 672  # the last tile is not full
    matrix = random_matrix(kind, 45, inputs)
    x = torch.randint(-127, 128, (rows, inputs)).float()
    x[:, ::32] = 127.0  # of each group, so that its scale is 1
    bias = torch.randn(45)
    expected = x.double() @ matrix.dequantised().double().T + bias
    out = BlockLinear([matrix], bias)(x)
    assert (out - expected).abs().max() <= 2e-5 * expected.abs().max()


@needs_kernels
@pytest.mark.full
@pytest.mark.skipif(platform.machine() != "x86_64", reason="options of x86")
@pytest.mark.parametrize("target", ["-march=skylake-avx512", "-mavx2 -mfma -mf16c", "-march=x86-64"])
def test_products_for_cpus_without_vnni_are_the_same(monkeypatch, tmp_path, target):
    if "avx512" in target and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this CPU has no AVX-512")
    layers = [BlockLinear([random_matrix(kind, 45, 768)]) for kind in FORMATS.values()]
    x = torch.randn(3, 768)
    expected = [layer(x) for layer in layers]
    monkeypatch.setenv(cpu.TARGET, target)
    monkeypatch.setenv("VIVA_CACHE", str(tmp_path))
    older = cpu.library.__wrapped__()
    assert older is not None
    monkeypatch.setattr(cpu, "library", lambda: older)
    for layer, wanted in zip(layers, expected, strict=True):
        for out in (layer(x), torch.cat([layer(row[None]) for row in x])):
            assert (out - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def test_five_bits_are_the_same_numbers_as_bytes():
    matrix = random_matrix(FORMATS[6], 40, 320)
    widened = BlockMatrix(q5_0_as_q8_0(matrix.data), FORMATS[8])
    assert torch.equal(widened.dequantised(), matrix.dequantised())


@needs_kernels
@pytest.mark.parametrize("speedup", [1.0, 2.0])
def test_five_bits_become_bytes_where_those_are_faster(monkeypatch, speedup):
    monkeypatch.setattr(block_linear, "q8_0_speedup", lambda: speedup)
    for number in FORMATS:
        matrix = random_matrix(FORMATS[number], 8, 512)
        kept = block_linear.fastest_on_cpu(matrix)
        assert kept.format.name == ("Q8_0" if number == 6 and speedup > 1.5 else FORMATS[number].name)
        assert torch.equal(kept.dequantised(), matrix.dequantised())


@needs_kernels
def test_kernels_run_on_the_threads_of_pytorch():
    kernels, threads = cpu.library(), set()
    task = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: threads.add(threading.get_native_id()))
    kernels.run_on_threads(task, None, ctypes.c_int64(3))
    assert len(threads) == 3 and threading.get_native_id() in threads


@needs_kernels
def test_matrices_of_several_formats_are_one_layer_whose_rows_do_not_depend_on_each_other():
    kinds = [kind for kind in FORMATS.values() if kind.weights == 32]
    parts = [random_matrix(kind, 33, 256, seed) for seed, kind in enumerate(kinds)]
    layer, x = BlockLinear(parts), torch.randn(5, 256)
    together = layer(x)
    assert torch.equal(together, torch.cat([layer(row[None]) for row in x]))
    exact = x @ layer.weight.T
    assert (together - exact).norm() <= 0.01 * exact.norm(), "inputs are rounded to int8"
    assert torch.equal(layer(torch.zeros(1, 256)), torch.zeros(1, layer.outputs))


def test_without_a_compiler_weights_are_dequantised(monkeypatch):
    matrix, x = random_matrix(FORMATS[12], 20, 512), torch.randn(2, 512)
    monkeypatch.setattr(cpu, "is_available", lambda: False)
    torch.testing.assert_close(BlockLinear([matrix])(x), x @ matrix.dequantised().T)


def test_a_compiler_that_fails_is_reported_and_not_fatal(monkeypatch, tmp_path, caplog):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho no such target >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("VIVA_CACHE", str(tmp_path / "cache"))
    assert cpu.library.__wrapped__() is None
    assert "no such target" in caplog.text
    monkeypatch.setenv(cpu.SWITCH, "0")
    assert cpu.library.__wrapped__() is None


def test_rows_of_a_packed_table_are_looked_up():
    matrix = random_matrix(FORMATS[14], 12, 256)
    ids = torch.tensor([3, 11, 3])
    assert torch.equal(BlockEmbedding(matrix, torch.float32)(ids), matrix.dequantised()[ids])
