"""Kokoro's published weights: the ONNX file in float32 and the torch file, under one set of names; and packed ones.

In the ONNX file most matrices have lost their names: weight norm is folded, linear layers are transposed, and LSTMs
have ONNX's layout. The nodes of the graph still say which module a matrix belongs to.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vivavoce.errors import CheckpointError, MissingDependencyError
from vivavoce.models.checkpoint import SINGLE_NAME, Checkpoint, first_line, fold_weight_norm, read_torch_file

ONNX_FILE, INT8_FILE = "model.onnx", "model_quantized.onnx"
TORCH_FILES = ("kokoro-v1_0.pth", "kokoro-v1_1-zh.pth")
PARTS = ("bert", "bert_encoder", "predictor", "text_encoder", "decoder")
LSTM_GATES = (0, 2, 3, 1)  # torch has input, forget, cell, output; ONNX input, output, forget, cell


def weight_file(folder: Path) -> Path:
    """The file with the weights of a published folder."""
    for name in (*TORCH_FILES, ONNX_FILE, f"onnx/{ONNX_FILE}", SINGLE_NAME):
        if (folder / name).is_file():
            return folder / name
    if (folder / INT8_FILE).is_file():
        raise CheckpointError(f"{folder / INT8_FILE} is for ONNX Runtime; fetch kokoro-82m, whose weights are float32")
    raise CheckpointError(f"{folder} has no Kokoro weights: neither {ONNX_FILE} nor {TORCH_FILES[0]}; fetch the model")


def open_weights(file: Path) -> Checkpoint:
    """The tensors of a published file, or of one with the model's own names, under the model's parameter names."""
    if file.suffix == ".safetensors":
        return Checkpoint(file)
    if file.suffix == ".onnx":
        return NamedTensors(file, onnx_tensors(file))
    return fold_weight_norm(NamedTensors(file, torch_tensors(file)))


class NamedTensors(Checkpoint):
    """A checkpoint of tensors that are read already."""

    def __init__(self, source: Path, tensors: Mapping[str, Tensor]) -> None:
        self.source = source
        self._stack = ExitStack()
        self._tensors: dict[str, Callable[[], Tensor]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, tensor in tensors.items():
            self._add(name, tuple(tensor.shape), partial(_identity, tensor), source)


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def torch_tensors(file: Path) -> dict[str, Tensor]:
    """The published torch file: one dictionary for each part, names with or without `module.`."""
    content = read_torch_file(file)
    if not isinstance(content, dict) or not all(isinstance(content.get(part), dict) for part in PARTS):
        raise CheckpointError(f"{file} is not a Kokoro file: it lacks one of {', '.join(PARTS)}")
    return {
        f"{part}.{name.removeprefix('module.')}": tensor
        for part in PARTS
        for name, tensor in content[part].items()
        if isinstance(tensor, Tensor)
    }


def onnx_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of the published ONNX file."""
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError as error:
        raise MissingDependencyError("Kokoro's ONNX file needs onnx: pip install 'vivavoce[kokoro]'") from error
    try:
        graph = onnx.load(str(file)).graph
    except Exception as error:  # protobuf's DecodeError among others
        raise CheckpointError(f"{file} cannot be read as ONNX ({first_line(error)}); fetch it again") from error
    stored = {tensor.name: tensor for tensor in graph.initializer}

    def read(name: str) -> Tensor:
        return torch.from_numpy(np.array(numpy_helper.to_array(stored[name])))

    found = {published_name(name): read(name) for name in stored if name.startswith(("encoder.", "decoder."))}
    for node in graph.node:
        inputs = [name for name in node.input if name in stored]
        for name, tensor in _layer_tensors(node.op_type, node.name, inputs, read):
            found.setdefault(name, tensor)
    if not found:
        raise CheckpointError(f"{file} is not Kokoro's published ONNX file: it has none of its tensors")
    return found


def published_name(name: str) -> str:
    """The torch name of a tensor of the graph, whose two halves are wrapped in `encoder` and `decoder`."""
    return name.removeprefix("encoder." if name.startswith("encoder.") else "decoder.")


def _layer_tensors(
    kind: str, node: str, inputs: list[str], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The parameters of the module that a node computes."""
    if kind not in ("Conv", "ConvTranspose", "MatMul", "LSTM") or not inputs:
        return
    module = _module_of(node, inputs)
    if kind in ("Conv", "ConvTranspose"):
        yield f"{module}.weight", read(inputs[0])
    elif kind == "MatMul":
        yield f"{module}.weight", read(inputs[0]).T
    elif kind == "LSTM":
        yield from lstm_tensors(module, *(read(name) for name in inputs[:3]))


def _module_of(node: str, inputs: list[str]) -> str:
    """The torch name of a node's module: that of its bias where it has one, else by its path in the graph."""
    for name in inputs:
        if name.endswith(".bias"):
            return published_name(name).removesuffix(".bias")
    path = node.strip("/").split("/")[:-1]
    module = published_name(".".join(path))
    if module.split(".")[0] in ("F0", "N", "shared", "F0_proj", "N_proj", "lstm", "duration_proj"):
        module = f"predictor.{module}"
    return module


def lstm_tensors(module: str, weight: Tensor, recurrent: Tensor, bias: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a bidirectional LSTM in torch's layout.

    # [direction, 4 · hidden, input], [direction, 4 · hidden, hidden], [direction, 8 · hidden]
    """
    for direction, suffix in enumerate(("_l0", "_l0_reverse")):
        input_bias, hidden_bias = bias[direction].chunk(2)
        parts = {
            "weight_ih": weight[direction],
            "weight_hh": recurrent[direction],
            "bias_ih": input_bias,
            "bias_hh": hidden_bias,
        }
        for name, part in parts.items():
            gates = part.chunk(4)
            yield f"{module}.{name}{suffix}", torch.cat([gates[gate] for gate in LSTM_GATES])
