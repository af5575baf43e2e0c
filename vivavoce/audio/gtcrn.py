"""GTCRN, a network of 24,000 weights that masks noise in short-time spectra of speech (Rong and others, 2024).

`vivavoce.kernels.cpu` computes a frame of a stream in one call. Where there is no C compiler numpy does, at many times
the cost. States are flat arrays of the same layout for both.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.gtcrn_weights import (
    BUNDLED,
    CHANNELS,
    DILATIONS,
    LOW,
    NEAR,
    PATHS,
    TAPS,
    WIDTH,
    Array,
    read_weights,
)
from vivavoce.kernels import cpu

Indices = NDArray[np.intp]

LAYER_NORM_EPS = 1e-8
HALF = CHANNELS // 2
HISTORY = [2 * each for each in (*DILATIONS, *reversed(DILATIONS))]  # frames before, of each block
STATE_PARTS = [*(frames * WIDTH * CHANNELS for frames in HISTORY), len(HISTORY) * CHANNELS, PATHS * WIDTH * CHANNELS]
STATE = sum(STATE_PARTS)


class Gtcrn:
    """The network of a weights file. It has no state of streams."""

    def __init__(self, weights: Path = BUNDLED) -> None:
        self._weights = read_weights(weights)
        self._flat = np.concatenate([each.reshape(-1) for each in self._weights.values()])
        self._library = cpu.gtcrn_library()
        if self._library is not None:
            assert (self._library.gtcrn_weights(), self._library.gtcrn_state()) == (self._flat.size, STATE)

    def mask(self, states: Array, rows: Indices, spectra: Array) -> Array:
        """The masked spectra; the states, with which rows begin, are updated in place.

        # [row, STATE or more], [stream], [stream, frame, 257, 2] → [stream, frame, 257, 2]
        """
        if self._library is None:
            spectra, states[rows, :STATE] = self.mask_with_numpy(states[rows, :STATE], spectra)
            return spectra
        assert states.flags.c_contiguous
        spectra, rows = np.array(spectra, np.float32, order="C"), np.ascontiguousarray(rows, np.int64)
        addresses = self._flat.ctypes.data, states.ctypes.data, states.shape[1], rows.ctypes.data
        self._library.gtcrn_frames(*addresses, *spectra.shape[:2], spectra.ctypes.data)
        return spectra

    def mask_with_numpy(self, state: Array, spectra: Array) -> tuple[Array, Array]:
        """The masked spectra, and the states after them.  # [stream, STATE], [stream, frame, 257, 2]"""
        streams, weights = len(spectra), self._weights
        *parts, gate_part, recurrent_part = np.split(state, np.cumsum(STATE_PARTS)[:-1], 1)
        histories = [part.reshape(streams, -1, WIDTH, CHANNELS) for part in parts]
        gates = list(gate_part.reshape(streams, -1, CHANNELS).swapaxes(0, 1))
        recurrent = list(recurrent_part.reshape(streams, PATHS, WIDTH, CHANNELS).swapaxes(0, 1))
        halved = self._activated("first", _halved(self._features(spectra), weights["first"]))
        x = self._activated("second", _halved(halved, weights["second"]))
        skipped = [x]
        for number in range(len(DILATIONS)):
            x, histories[number], gates[number] = self._block(number, x, histories[number], gates[number])
            skipped.append(x)
        for path in range(PATHS):
            x, recurrent[path] = self._recurrent(f"paths.{path}.", x, recurrent[path])
        for number in range(len(DILATIONS), len(HISTORY)):
            x = x + skipped.pop()
            x, histories[number], gates[number] = self._block(number, x, histories[number], gates[number])
        x = self._activated("second_last", _spread(x + skipped.pop(), weights["second_last"]))
        bands = np.tanh(_spread(x + halved, weights["last"]) + weights["last_bias"])[..., :2]
        mask = np.ascontiguousarray(_split(bands, weights["split"])).view(np.complex64)
        masked = (np.ascontiguousarray(spectra).view(np.complex64) * mask).view(np.float32)
        after = [*histories, np.stack(gates, 1), np.stack(recurrent, 1)]
        return masked, np.concatenate([part.reshape(streams, -1) for part in after], 1)

    def _features(self, spectra: Array) -> Array:
        """Magnitude, real and imaginary part of each band, each with its neighbours'.  # [stream, frame, 129, 9]"""
        magnitudes = np.sqrt(np.square(spectra).sum(3, keepdims=True) + np.float32(1e-12))
        return _with_neighbours(_split(np.concatenate([magnitudes, spectra], 3), self._weights["merge"]))

    def _activated(self, name: str, x: Array) -> Array:
        x = x + self._weights[f"{name}_bias"]
        return np.where(x >= 0, x, x * self._weights[f"{name}_slope"])

    def _block(self, number: int, x: Array, history: Array, gate: Array) -> tuple[Array, Array, Array]:
        """Half of the channels through convolutions over bands and frames, weighted; then both halves in turn."""
        weights, name, frames = self._weights, f"blocks.{number}.", x.shape[1]
        narrow = self._activated(f"{name}narrow", _with_neighbours(x[..., :HALF]) @ weights[f"{name}narrow"])
        seen = np.concatenate([history, narrow], 1)
        padded, dilation = _padded(seen, 1), history.shape[1] // 2
        depth = np.zeros_like(narrow)
        for past in range(NEAR):
            for near in range(NEAR):
                begin = past * dilation
                depth += padded[:, begin : begin + frames, near : near + WIDTH] * weights[f"{name}depth"][past, near]
        wide = self._activated(f"{name}depth", depth) @ weights[f"{name}wide"] + weights[f"{name}wide_bias"]
        power = np.square(wide[..., :HALF]).mean(2)
        inputs = power @ weights[f"{name}gate_input"].reshape(HALF, -1)
        out = np.empty_like(x)
        for frame in range(frames):
            gate = self._cell(f"{name}gate", inputs[:, frame], gate)
            attention = _sigmoid(gate @ weights[f"{name}attention"] + weights[f"{name}attention_bias"])
            out[:, frame, :, ::2] = wide[:, frame, :, :HALF] * attention[:, None, :HALF]
        out[..., 1::2] = x[..., HALF:]
        return out, seen[:, frames:], gate

    def _recurrent(self, name: str, x: Array, state: Array) -> tuple[Array, Array]:
        """A GRU along the bands in both directions, and one along the frames for each band."""
        weights = self._weights
        both = np.concatenate([x, x[:, :, ::-1]], 3) @ weights[f"{name}bands_input"].reshape(2 * CHANNELS, -1)
        hidden, along = np.zeros((*x.shape[:2], CHANNELS), np.float32), np.empty_like(x)
        for band in range(WIDTH):
            along[:, :, band] = hidden = self._cell(f"{name}bands", both[:, :, band], hidden)
        first_up, second_up, first_down, second_down = np.split(along, 4, 3)
        groups = [first_up, first_down[:, :, ::-1], second_up, second_down[:, :, ::-1]]
        x = x + self._mixed(f"{name}bands_mix", np.concatenate(groups, 3))
        inputs, states = x @ weights[f"{name}frames_input"].reshape(CHANNELS, -1), np.empty_like(x)
        for frame in range(x.shape[1]):
            states[:, frame] = state = self._cell(f"{name}frames", inputs[:, frame], state)
        return x + self._mixed(f"{name}frames_mix", states), state

    def _mixed(self, name: str, x: Array) -> Array:
        weights = self._weights
        mixed = x @ weights[f"{name}_weight"] + weights[f"{name}_bias"]
        mixed -= mixed.mean((2, 3), keepdims=True)
        mixed /= np.sqrt(np.square(mixed).mean((2, 3), keepdims=True) + np.float32(LAYER_NORM_EPS))
        return mixed * weights[f"{name}_scale"] + weights[f"{name}_shift"]

    def _cell(self, name: str, from_input: Array, hidden: Array) -> Array:
        """The state of a GRU after an input that its matrix was applied to."""
        bias, matrix = self._weights[f"{name}_bias"], self._weights[f"{name}_hidden"]
        from_state = hidden @ matrix.reshape(CHANNELS, -1)
        gates = _sigmoid(from_input[..., : 2 * CHANNELS] + from_state[..., : 2 * CHANNELS] + bias[:2].reshape(-1))
        back = gates[..., :CHANNELS] * (from_state[..., 2 * CHANNELS :] + bias[3])
        fresh = np.tanh(from_input[..., 2 * CHANNELS :] + bias[2] + back)
        return fresh + gates[..., CHANNELS:] * (hidden - fresh)


@lru_cache(maxsize=4)
def gtcrn(weights: Path = BUNDLED) -> Gtcrn:
    """The network of this file, loaded once."""
    return Gtcrn(weights)


def _split(x: Array, matrix: Array) -> Array:
    """The low bands, and a matrix applied to the others.  # [stream, frame, band, part]"""
    return np.concatenate([x[:, :, :LOW], matrix.T @ x[:, :, LOW:]], 2)


def _padded(x: Array, count: int) -> Array:
    """With zeros below the first band and above the last."""
    wide = np.zeros((*x.shape[:2], x.shape[2] + 2 * count, x.shape[3]), np.float32)
    wide[:, :, count:-count] = x
    return wide


def _with_neighbours(x: Array) -> Array:
    """Each band's channels, between those of the bands below and above.  # [stream, frame, band, 3 · channel]"""
    padded = _padded(x, 1)
    return np.concatenate([padded[:, :, :-2], x, padded[:, :, 2:]], 3)


def _halved(x: Array, weight: Array) -> Array:
    """A convolution over five bands with a stride of two."""
    padded, bands = _padded(x, TAPS // 2), x.shape[2]
    out = padded[:, :, :bands:2] @ weight[0]
    for tap in range(1, TAPS):
        out += padded[:, :, tap : tap + bands : 2] @ weight[tap]
    return out


def _spread(x: Array, weight: Array) -> Array:
    """The transposed convolution: bands become twice as many less one."""
    bands = 2 * x.shape[2] - 1
    out = np.zeros((*x.shape[:2], bands + TAPS - 1, CHANNELS), np.float32)
    for tap in range(TAPS):
        out[:, :, tap : tap + bands : 2] += x @ weight[tap]
    return out[:, :, TAPS // 2 : -(TAPS // 2)]


def _sigmoid(x: Array) -> Array:
    return 0.5 * np.tanh(0.5 * x) + 0.5  # exp would overflow
