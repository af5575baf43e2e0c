"""The turn-end model: the probability that a turn is over, from the last seconds before a pause.

Whisper's encoder over the log-mel of these seconds, attention pooling, and two linear layers. It runs at pauses only
and has no state: the answer is a function of the sound.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.audio.mel import WhisperMel
from vivavoce.audio.vad import RATE, Array, last_samples
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.checkpoint import Checkpoint, load_weights, save_weights
from vivavoce.models.whisper.config import CONV_STRIDE, MEL_FRAMES_PER_SECOND, WhisperConfig
from vivavoce.models.whisper.model import WhisperEncoder

MELS = 80
CONFIG = "turn_end.json"
BUNDLED = Path(__file__).parent.parent / "minis" / "mini-turn"


@dataclass(frozen=True)
class TurnEndConfig:
    """Sizes; the defaults are the encoder of Whisper tiny."""

    d_model: int = 384
    layers: int = 4
    heads: int = 6
    ffn: int = 1536
    seconds: int = 4
    """Of sound before the pause."""
    shift: float = 0.0
    """Log-odds that are subtracted: a turn taken too early costs more than a late answer."""

    @property
    def samples(self) -> int:
        return self.seconds * RATE

    def encoder(self) -> WhisperConfig:
        """The sizes of the encoder."""
        return WhisperConfig(
            d_model=self.d_model,
            encoder_layers=self.layers,
            encoder_attention_heads=self.heads,
            encoder_ffn_dim=self.ffn,
            decoder_attention_heads=self.heads,
            num_mel_bins=MELS,
            max_source_positions=self.seconds * MEL_FRAMES_PER_SECOND // CONV_STRIDE,
        )


class TurnEndNetwork(nn.Module):
    """Log-odds that the turn is over, from log-mels."""

    def __init__(self, config: TurnEndConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = WhisperEncoder(config.encoder())
        self.relevance = nn.Sequential(nn.Linear(config.d_model, 128), nn.Tanh(), nn.Linear(128, 1))
        self.hidden = nn.Linear(2 * config.d_model, 256)
        self.out = nn.Linear(256, 1)

    def forward(self, mel: Tensor) -> Tensor:
        """# [batch, mel, frame] → [batch]"""
        return self.decided(self.encoder(mel))

    def decided(self, states: Tensor) -> Tensor:
        """From the states of the encoder.  # [batch, time, d_model] → [batch]"""
        pooled = (self.relevance(states).softmax(dim=1) * states).sum(dim=1)
        hidden = functional.gelu(self.hidden(torch.cat([pooled, states[:, -1]], dim=1)))
        odds: Tensor = self.out(hidden)[:, 0]
        return odds


class TurnEndModel:
    """The probability that a turn is over, of its samples at 16 kHz. Threads may share it."""

    def __init__(self, network: TurnEndNetwork) -> None:
        self.network = network.eval().requires_grad_(False)
        self.mel = WhisperMel(MELS)

    @classmethod
    def load(cls, folder: str | Path) -> "TurnEndModel":
        """A folder of `viva train turn-end`, packed or not."""
        return cls(load_network(Path(folder)))

    @torch.inference_mode()
    def __call__(self, samples: Array) -> float:
        """The probability that the turn is over.  # [time] at 16 kHz"""
        if np.ndim(samples) != 1 or not len(samples):
            raise InputError(f"a turn has samples [time], not {list(np.shape(samples))}")
        window = last_samples(np.asarray(samples, np.float32), self.network.config.samples)
        odds = self.network(self.mel(torch.from_numpy(window)[None])) - self.network.config.shift
        return float(odds.sigmoid())


def save_network(network: TurnEndNetwork, folder: Path) -> None:
    """Write weights and sizes."""
    save_weights(network, folder)
    (folder / CONFIG).write_text(json.dumps(asdict(network.config), indent=1) + "\n", encoding="utf8")


def load_network(folder: Path) -> TurnEndNetwork:
    """The network of a folder."""
    try:
        config = TurnEndConfig(**json.loads((folder / CONFIG).read_text(encoding="utf8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder} is not a turn-end model ({error}); `viva train turn-end` makes one") from error
    network = TurnEndNetwork(config)
    with Checkpoint(folder) as weights:
        load_weights(network, weights)
    return network
