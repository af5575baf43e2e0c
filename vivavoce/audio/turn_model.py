"""A turn-end model of our own: the probability that a turn is over, from the last three seconds before a pause.

A log-mel, two convolutions that reduce its rate to an eighth, and a recurrent layer whose last state decides: causal,
so that the end of the sound counts most. It runs at pauses only and has no state of its own: the answer is a function
of the sound.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.audio.mel import WhisperMel
from vivavoce.errors import CheckpointError, InputError

Array = NDArray[np.float32]

RATE = 16_000
SECONDS = 3
MELS = 80
SCALE = ".scale"
SUFFIX = ".safetensors"


class TurnEndNetwork(nn.Module):
    """Log-odds that the turn is over, from normalised log-mels."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Conv1d(MELS, width, kernel_size=7, stride=4)
        self.second = nn.Conv1d(width, width, kernel_size=5, stride=2)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, mel: Tensor) -> Tensor:
        """# [batch, mel, frame] → [batch]"""
        for layer in (self.first, self.second):
            mel = functional.gelu(layer(functional.pad(mel, (layer.kernel_size[0] - layer.stride[0], 0))))
        states, _ = self.recurrent(mel.transpose(1, 2))
        return self.out(functional.gelu(self.hidden(states[:, -1])))[:, 0]


class TurnFeatures(nn.Module):
    """Whisper's log-mel of the last seconds of a sound, independent of its level."""

    def __init__(self) -> None:
        super().__init__()
        self.mel = WhisperMel(MELS)

    def forward(self, samples: Tensor) -> Tensor:
        """# [batch, SECONDS · RATE] → [batch, mel, frame]"""
        log_mel = self.mel.log_mel_power(samples)
        maximum = log_mel.amax(dim=(-2, -1), keepdim=True)
        return (torch.maximum(log_mel, maximum - 6.0) - maximum) / 2.0 + 1.5


class TurnEndModel:
    """The probability that a turn is over, of its samples at 16 kHz. Threads may share it."""

    def __init__(self, weights: str | Path) -> None:
        self.features, self.network = TurnFeatures(), read_network(Path(weights))

    @torch.inference_mode()
    def __call__(self, samples: Array) -> float:
        """The probability that the turn is over.  # [time] at 16 kHz"""
        if np.ndim(samples) != 1 or not len(samples):
            raise InputError(f"a turn has samples [time], not {list(np.shape(samples))}")
        window = torch.from_numpy(last_seconds(np.asarray(samples, np.float32)))[None]
        return float(self.network(self.features(window)).sigmoid())


def last_seconds(samples: Array) -> Array:
    """The last seconds of a sound, with silence before a shorter one.  # [SECONDS · RATE]"""
    window = np.zeros(SECONDS * RATE, np.float32)
    taken = samples[-len(window) :]
    window[len(window) - len(taken) :] = taken
    return window


def write_network(network: TurnEndNetwork, path: Path) -> None:
    """Write the weights: matrices in 8 bits with a scale for each row, vectors in 16."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        if tensor.ndim == 1:
            tensors[name] = tensor.half()
            continue
        scale = tensor.flatten(1).abs().amax(1).clamp_min(1e-8).float() / 127
        rounded = (tensor / scale.view(-1, *[1] * (tensor.ndim - 1))).round()
        tensors |= {name: rounded.to(torch.int8).contiguous(), f"{name}{SCALE}": scale}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)


def read_network(path: Path) -> TurnEndNetwork:
    """The network of a file of weights."""
    from safetensors.torch import load_file

    try:
        stored = load_file(path)
        weights = {
            name: tensor * stored[f"{name}{SCALE}"].view(-1, *[1] * (tensor.ndim - 1))
            if tensor.ndim > 1
            else tensor.float()
            for name, tensor in stored.items()
            if not name.endswith(SCALE)
        }
        network = TurnEndNetwork(weights["out.weight"].shape[1])
        network.load_state_dict(weights)
    except Exception as error:  # safetensors and torch have exceptions of their own for a damaged or a wrong file
        raise CheckpointError(f"{path} is not a turn-end model ({error}); `viva train turn-end` makes one") from error
    return network.eval()
