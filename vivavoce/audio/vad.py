"""Voice activity detection: a probability for every 32 ms of 16 kHz audio, by Silero's network or by energy.

Both are one `VoiceActivity`: `step(state, window)`, the state a value, so that a stream can be copied or dropped.
"""

import os
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce.audio.mel import WhisperMel
from vivavoce.errors import CheckpointError, InputError, MissingDependencyError

Array = NDArray[np.float32]

RATE = 16_000
WINDOW = 512  # samples: 32 ms
WINDOW_SECONDS = WINDOW / RATE
WINDOW_MS = 32
BUNDLED = Path(__file__).parent.parent / "minis" / "silero" / "silero_vad_16k.safetensors"


class VoiceActivity(Protocol):
    """Estimates the probability of speech in a window. The state is a value."""

    def initial_state(self) -> Any:
        """The state before the first window: silence."""
        ...

    def step(self, state: Any, samples: Array) -> tuple[float, Any]:
        """The probability of speech in the next 512 samples, and the state after them."""
        ...


def voice_activity(weights: str | Path | None = None) -> VoiceActivity:
    """Silero from these weights or the bundled ones; where they are missing, the energy detector."""
    path = Path(weights) if weights is not None else BUNDLED
    return _silero(path) if weights is not None or path.is_file() else EnergyActivity()


@lru_cache(maxsize=4)
def _silero(path: Path) -> VoiceActivity:
    """The network is loaded once and shared: it has no state."""
    return SileroActivity(path)


def speech_probabilities(detector: VoiceActivity, samples: Array) -> Array:
    """The probability of speech in each whole window of a sound.  # [time] → [window]"""
    state, probabilities = detector.initial_state(), []
    for start in range(0, len(samples) - WINDOW + 1, WINDOW):
        probability, state = detector.step(state, samples[start : start + WINDOW])
        probabilities.append(probability)
    return np.array(probabilities, np.float32)


@dataclass(frozen=True)
class SileroState:
    """The end of the last window, and the state of the recurrent cell."""

    context: Array  # [64]
    hidden: Array  # [128]
    cell: Array  # [128]


class SileroActivity:
    """Silero VAD's 16 kHz network in plain numpy: a learned spectrum, four convolutions, one recurrent cell."""

    CONTEXT, N_FFT, HOP = 64, 256, 128
    STRIDES = (1, 2, 2, 1)

    def __init__(self, weights: str | Path = BUNDLED) -> None:
        tensors = _read(Path(weights))
        self.spectrum = np.ascontiguousarray(tensors["stft_conv.weight"][:, 0].T)  # [sample, 2 · 129]
        self.convolutions = [
            (_taps_first(tensors[f"conv{n}.weight"]), tensors[f"conv{n}.bias"], stride)
            for n, stride in enumerate(self.STRIDES, start=1)
        ]
        self.cell = np.concatenate([tensors["lstm_cell.weight_ih"], tensors["lstm_cell.weight_hh"]], axis=1)
        self.cell_bias = tensors["lstm_cell.bias_ih"] + tensors["lstm_cell.bias_hh"]
        self.final, self.final_bias = tensors["final_conv.weight"][0, :, 0], float(tensors["final_conv.bias"][0])

    def initial_state(self) -> SileroState:
        """The state before the first window: silence."""
        return SileroState(np.zeros(self.CONTEXT, np.float32), np.zeros(128, np.float32), np.zeros(128, np.float32))

    def step(self, state: SileroState, samples: Array) -> tuple[float, SileroState]:
        """The probability of speech in the next 512 samples, and the state after them."""
        _check(samples)
        x = self._magnitudes(np.concatenate([state.context, samples]))
        for taps, bias, stride in self.convolutions:
            x = np.maximum(_convolve(x, taps, stride) + bias, 0.0)
        hidden, cell = self._recur(x[0], state)
        probability = _sigmoid(np.maximum(hidden, 0.0) @ self.final + self.final_bias)
        return float(probability), SileroState(np.array(samples[-self.CONTEXT :], np.float32), hidden, cell)

    def _magnitudes(self, samples: Array) -> Array:
        """# [576] → [4, 129]"""
        padded = np.concatenate([samples, samples[-2 : -2 - self.HOP // 2 : -1]])
        spectrum = _windows(padded, self.N_FFT, self.HOP) @ self.spectrum
        half = spectrum.shape[1] // 2
        np.square(spectrum, out=spectrum)
        return np.sqrt(spectrum[:, :half] + spectrum[:, half:])

    def _recur(self, x: Array, state: SileroState) -> tuple[Array, Array]:
        gates = (self.cell @ np.concatenate([x, state.hidden]) + self.cell_bias).reshape(4, -1)
        input_gate, forget_gate, _, output_gate = _sigmoid(gates)
        cell = forget_gate * state.cell + input_gate * np.tanh(gates[2])
        return output_gate * np.tanh(cell), cell


@dataclass(frozen=True)
class EnergyState:
    """The noise floor and the last probability."""

    floor_db: float | None = None
    probability: float = 0.0


class EnergyActivity:
    """A detector without weights: level over an adaptive noise floor, and spectral flatness.

    Steady noise is learned as floor within a second or two; white bursts are recognised by their flat spectrum.
    """

    RISE_DB, FALL_DB = 0.12, 1.5  # per window by which the floor follows the level: slowly up, quickly down
    QUIETEST_DB = -70.0
    SURE_DB = 9.0  # over the floor, at which the probability is one half

    def __init__(self) -> None:
        self._window = np.hanning(WINDOW).astype(np.float32)
        frequencies = np.fft.rfftfreq(WINDOW, 1 / RATE)
        self._band = (frequencies >= 90) & (frequencies <= 4000)

    def initial_state(self) -> EnergyState:
        """The state before the first window."""
        return EnergyState()

    def step(self, state: EnergyState, samples: Array) -> tuple[float, EnergyState]:
        """The probability of speech in the next 512 samples, and the state after them."""
        _check(samples)
        power = np.square(np.abs(np.fft.rfft(samples * self._window))[self._band]) + 1e-12
        level = max(10.0 * float(np.log10(power.mean() / WINDOW)), self.QUIETEST_DB)
        flatness = float(np.exp(np.log(power).mean()) / power.mean())
        floor = min(level, -45.0) if state.floor_db is None else state.floor_db
        evidence = (level - floor - self.SURE_DB) / 3.0 - max(0.0, flatness - 0.25) * 12.0
        probability = 0.6 * float(_sigmoid(np.float32(evidence))) + 0.4 * state.probability
        change = np.clip(level - floor, -self.FALL_DB, self.RISE_DB if probability < 0.9 else self.RISE_DB / 8)
        return probability, EnergyState(floor + float(change), probability)


def _read(path: Path) -> dict[str, Array]:
    from safetensors.numpy import load_file

    try:
        tensors: dict[str, Array] = load_file(str(path))
        absent = {"stft_conv.weight", "lstm_cell.weight_ih", "final_conv.bias"} - tensors.keys()
    except Exception as error:  # safetensors has its own exception for a damaged file
        raise CheckpointError(f"{path} cannot be read ({error}); give silero_vad_16k.safetensors") from error
    if absent:
        raise CheckpointError(f"{path} lacks {', '.join(sorted(absent))}; give silero_vad_16k.safetensors")
    return tensors


def _check(samples: Array) -> None:
    if np.shape(samples) != (WINDOW,):
        raise InputError(f"voice activity takes windows of {WINDOW} samples, not {list(np.shape(samples))}")


def _taps_first(weight: Array) -> Array:
    """# [out, in, 3] → [3 · in, out]"""
    return np.ascontiguousarray(weight.transpose(2, 1, 0).reshape(-1, weight.shape[0]))


def _convolve(x: Array, taps: Array, stride: int) -> Array:
    """A convolution over three frames, zeros around them.  # [frame, in] → [frame / stride, out]"""
    padded = np.zeros((len(x) + 2, x.shape[1]), np.float32)
    padded[1:-1] = x
    return _windows(padded.reshape(-1), 3 * x.shape[1], stride * x.shape[1]) @ taps


def _windows(samples: Array, length: int, hop: int) -> Array:
    """All whole windows of samples, as a view; numpy's sliding_window_view takes longer than the computation."""
    samples = np.ascontiguousarray(samples, np.float32)
    count = (len(samples) - length) // hop + 1
    return np.ndarray((count, length), np.float32, samples, 0, (4 * hop, 4))


def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


SECONDS = 8
MODEL_VARIABLE = "VIVA_SMART_TURN"


def smart_turn_file() -> Path | None:
    """The path of the model: from the environment, or inside an installed pipecat-ai; None: not found."""
    named = os.environ.get(MODEL_VARIABLE)
    if named:
        return Path(named)
    pipecat = find_spec("pipecat")
    for root in (pipecat.submodule_search_locations or []) if pipecat is not None else []:
        models = sorted((Path(root) / "audio/turn/smart_turn/data").glob("smart-turn-v3*.onnx"))
        if models:
            return models[-1]
    return None


def last_samples(samples: Array, count: int) -> Array:
    """The last samples of a sound, with silence before a shorter one.  # [count]"""
    window = np.zeros(count, np.float32)
    taken = samples[-count:]
    window[count - len(taken) :] = taken
    return window


class SmartTurn:
    """Smart Turn v3: the probability that a turn is finished, from its last eight seconds. Loaded on first use."""

    def __init__(self, file: str | Path | None = None) -> None:
        path = Path(file) if file is not None else smart_turn_file()
        if path is None:
            raise MissingDependencyError(
                f"no turn model was found: pip install pipecat-ai, or name a smart-turn-v3 file in {MODEL_VARIABLE}"
            )
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist; give the path of a smart-turn-v3 ONNX file")
        self.path = path
        self._session: Any = None
        self._mel = WhisperMel(80)

    def __call__(self, samples: NDArray[np.float32]) -> float:
        """The probability that the turn is finished.  # [time] at 16 kHz"""
        if np.ndim(samples) != 1 or not len(samples):
            raise InputError(f"a turn has samples [time], not {list(np.shape(samples))}")
        (answer,) = self._loaded().run(None, {"input_features": self.features(samples)})
        return float(np.clip(answer.ravel()[0], 0.0, 1.0))

    def features(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """The normalised log-mel of the last eight seconds, padded with silence before them.  # [1, 80, 800]"""
        sound = last_samples(np.asarray(samples, np.float32), SECONDS * RATE)
        level = (sound - sound.mean()) / np.sqrt(sound.var() + 1e-7)
        features: NDArray[np.float32] = self._mel(torch.from_numpy(level.astype(np.float32))[None]).numpy()
        return features

    def _loaded(self) -> Any:
        if self._session is None:
            try:
                import onnxruntime
            except ImportError as error:
                raise MissingDependencyError("the turn model needs pip install 'vivavoce[onnx]'") from error
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = options.inter_op_num_threads = 1
            try:
                self._session = onnxruntime.InferenceSession(str(self.path), options)
            except Exception as error:  # onnxruntime has its own exceptions
                raise CheckpointError(f"{self.path} is not a turn model ({error})") from error
        return self._session
