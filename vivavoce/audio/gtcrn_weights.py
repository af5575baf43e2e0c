"""The published weights of GTCRN as the network reads them.

Batch norms are folded into their convolutions, and each group of small GRUs becomes one of 16 units with zeros between
the groups.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vivavoce.errors import CheckpointError

Array = NDArray[np.float32]

BUNDLED = Path(__file__).parent.parent / "minis" / "gtcrn" / "gtcrn_dns3.safetensors"
BINS, LOW, WIDTH = 257, 65, 33
CHANNELS, TAPS, NEAR = 16, 5, 3
DILATIONS = (1, 2, 5)
PATHS = 2
BATCH_NORM_EPS = 1e-5


def read_weights(path: Path) -> dict[str, Array]:
    """The weights of a file as `kernels/cpu/gtcrn.c` declares them, in its order."""
    from safetensors.numpy import load_file

    try:
        return rearranged(load_file(str(path)))
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}; give the weights of GTCRN as safetensors") from error
    except Exception as error:  # safetensors has its own exception for a damaged file
        raise CheckpointError(f"{path} cannot be read ({error}); give the weights of GTCRN as safetensors") from error


def rearranged(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The published tensors as `gtcrn.c` declares them, in its order."""
    source = _Published(tensors)
    weights = {
        "merge": tensors["erb.erb_fc.weight"].T,
        "split": tensors["erb.ierb_fc.weight"].T,
        **source.convolution("first", "encoder.en_convs.0.", features=3),
        **source.convolution("second", "encoder.en_convs.1."),
    }
    for number in range(len(DILATIONS)):
        weights |= source.block(f"blocks.{number}.", f"encoder.en_convs.{2 + number}.", is_transposed=False)
    for number in range(len(DILATIONS)):
        weights |= source.block(f"blocks.{len(DILATIONS) + number}.", f"decoder.de_convs.{number}.", is_transposed=True)
    for path in range(PATHS):
        weights |= source.path(f"paths.{path}.", f"dpgrnn{1 + path}.")
    weights |= source.transposed("second_last", "decoder.de_convs.3.") | source.transposed(
        "last", "decoder.de_convs.4."
    )
    return {name: np.ascontiguousarray(each, np.float32) for name, each in weights.items()}


class _Published:
    """Reads the published tensors as matrices from inputs to outputs, with 16 outputs."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self._tensors = tensors

    def convolution(self, name: str, source: str, features: int = 0) -> dict[str, Array]:
        """A convolution over bands; `features` are those that its input has of each neighbour."""
        weight, bias = self._normed(f"{source}conv", f"{source}bn", self._tensors[f"{source}conv.weight"][:, :, 0])
        weight = _ungrouped(weight).transpose(2, 1, 0)  # [tap, in, out]
        if features:  # published: the neighbours of each feature
            weight = weight.reshape(TAPS, features, NEAR, -1).swapaxes(1, 2).reshape(TAPS, NEAR * features, -1)
        return {name: weight, f"{name}_bias": bias, f"{name}_slope": self._tensors[f"{source}act.weight"]}

    def transposed(self, name: str, source: str) -> dict[str, Array]:
        """A transposed convolution over bands."""
        published = self._tensors[f"{source}conv.weight"][:, :, 0]  # [in, out of a group, tap]
        groups = CHANNELS // published.shape[1] if f"{source}act.weight" in self._tensors else 1
        outwards = np.concatenate([each.swapaxes(0, 1) for each in np.split(published, groups)])
        weight, bias = self._normed(f"{source}conv", f"{source}bn", outwards)
        parts = {name: _padded(_ungrouped(weight).transpose(2, 1, 0)), f"{name}_bias": _padded(bias)}
        slope = self._tensors.get(f"{source}act.weight")
        return parts if slope is None else parts | {f"{name}_slope": slope}

    def block(self, name: str, source: str, is_transposed: bool) -> dict[str, Array]:
        """A block of grouped convolutions over bands and frames."""
        half, tensors = CHANNELS // 2, self._tensors
        points = [tensors[f"{source}point_conv{each}.weight"][:, :, 0, 0] for each in (1, 2)]
        depth = tensors[f"{source}depth_conv.weight"][:, 0]  # [channel, frame, band]
        if is_transposed:
            points, depth = [each.T for each in points], depth[:, ::-1, ::-1]
        inner, inner_bias = self._normed(f"{source}point_conv1", f"{source}point_bn1", points[0])
        depth, depth_bias = self._normed(f"{source}depth_conv", f"{source}depth_bn", depth)
        wide, wide_bias = self._normed(f"{source}point_conv2", f"{source}point_bn2", points[1])
        gate_input, gate = self._cell(f"{name}gate", [f"{source}tra.att_gru"])
        return {
            f"{name}narrow": inner.reshape(-1, half, NEAR).transpose(2, 1, 0).reshape(NEAR * half, CHANNELS),
            f"{name}narrow_bias": inner_bias,
            f"{name}narrow_slope": tensors[f"{source}point_act.weight"],
            f"{name}depth": depth.transpose(1, 2, 0),
            f"{name}depth_bias": depth_bias,
            f"{name}depth_slope": tensors[f"{source}depth_act.weight"],
            f"{name}wide": _padded(wide.T),
            f"{name}wide_bias": _padded(wide_bias),
            f"{name}gate_input": gate_input,
            **gate,
            f"{name}attention": _padded(tensors[f"{source}tra.att_fc.weight"].T),
            f"{name}attention_bias": _padded(tensors[f"{source}tra.att_fc.bias"]),
        }

    def path(self, name: str, source: str) -> dict[str, Array]:
        """The GRUs along bands and frames."""
        groups = [f"{source}intra_rnn.rnn{each}" for each in (1, 2)]
        up, up_cell = self._cell(f"{name}bands", groups)
        down, down_cell = self._cell(f"{name}bands", groups, "_reverse")
        frames, frames_cell = self._cell(f"{name}frames", [f"{source}inter_rnn.rnn{each}" for each in (1, 2)])
        half = CHANNELS // 2
        bands_input = np.zeros((2 * CHANNELS, 3, CHANNELS), np.float32)
        bands_input[:CHANNELS, :, :half], bands_input[CHANNELS:, :, half:] = up, down
        hidden = np.zeros((CHANNELS, 3, CHANNELS), np.float32)
        hidden[:half, :, :half] = up_cell[f"{name}bands_hidden"]
        hidden[half:, :, half:] = down_cell[f"{name}bands_hidden"]
        bias = np.concatenate([up_cell[f"{name}bands_bias"], down_cell[f"{name}bands_bias"]], 1)
        return {
            f"{name}bands_input": bands_input,
            f"{name}bands_hidden": hidden,
            f"{name}bands_bias": bias,
            **self._mix(f"{name}bands_mix", f"{source}intra_"),
            f"{name}frames_input": frames,
            **frames_cell,
            **self._mix(f"{name}frames_mix", f"{source}inter_"),
        }

    def _mix(self, name: str, source: str) -> dict[str, Array]:
        return {
            f"{name}_weight": self._tensors[f"{source}fc.weight"].T,
            f"{name}_bias": self._tensors[f"{source}fc.bias"],
            f"{name}_scale": self._tensors[f"{source}ln.weight"],
            f"{name}_shift": self._tensors[f"{source}ln.bias"],
        }

    def _cell(self, name: str, sources: list[str], direction: str = "") -> tuple[Array, dict[str, Array]]:
        """GRUs side by side: their matrix of inputs, and what their states need.  # [in, gate, unit]"""

        def read(part: str) -> list[Array]:
            published = [self._tensors[f"{one}.{part}_l0{direction}"] for one in sources]
            return [np.moveaxis(each.reshape(3, -1, *each.shape[1:]), (0, 1), (-2, -1)) for each in published]

        from_input, from_state = (np.concatenate(read(part), 1) for part in ("bias_ih", "bias_hh"))
        bias = np.stack([*(from_input + from_state)[:2], from_input[2], from_state[2]])
        hidden = _side_by_side(read("weight_hh"))
        return _side_by_side(read("weight_ih")), {f"{name}_hidden": hidden, f"{name}_bias": bias}

    def _normed(self, convolution: str, norm: str, weight: Array) -> tuple[Array, Array]:
        """Weight [out, …] and bias of a convolution with its batch norm folded in."""
        tensors = self._tensors
        scale = tensors[f"{norm}.weight"] / np.sqrt(tensors[f"{norm}.running_var"] + BATCH_NORM_EPS)
        bias = (tensors[f"{convolution}.bias"] - tensors[f"{norm}.running_mean"]) * scale + tensors[f"{norm}.bias"]
        return weight * scale.reshape(-1, *[1] * (weight.ndim - 1)), bias


def _ungrouped(weight: Array) -> Array:
    """A convolution in two groups as one with zeros.  # [out, in of a group, tap] → [out, in, tap]"""
    outputs, inputs, taps = weight.shape
    if inputs != CHANNELS // 2:
        return weight
    whole = np.zeros((outputs, CHANNELS, taps), np.float32)
    whole[: outputs // 2, :inputs], whole[outputs // 2 :, inputs:] = np.split(weight, 2)
    return whole


def _side_by_side(matrices: list[Array]) -> Array:
    """Matrices [in, gate, out] as one with zeros between them."""
    inputs, outputs = sum(each.shape[0] for each in matrices), sum(each.shape[2] for each in matrices)
    whole, row, column = np.zeros((inputs, 3, outputs), np.float32), 0, 0
    for each in matrices:
        whole[row : row + each.shape[0], :, column : column + each.shape[2]] = each
        row, column = row + each.shape[0], column + each.shape[2]
    return whole


def _padded(weight: Array) -> Array:
    """With zeros up to 16 outputs."""
    return np.concatenate([weight, np.zeros((*weight.shape[:-1], CHANNELS - weight.shape[-1]), np.float32)], -1)
