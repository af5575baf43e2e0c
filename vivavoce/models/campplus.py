"""CAM++ speaker embeddings (Wang et al., 2023), in the layout of 3D-Speaker's published weights.

A small 2-D convolutional network reduces 80 filterbank bands to 320 channels; three dense blocks of time-delay layers
follow, each layer masked by the mean of the whole sound and of its second; the mean and deviation over time make the
embedding. The cosine of two embeddings says whether two sounds are of one voice.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.audio.mel import KaldiFbank
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.checkpoint import Checkpoint, load_weights, weight_files
from vivavoce.nn.modules import allocating

RATE = KaldiFbank.RATE
BANDS = 80
EMBEDDING = 192
HEAD_WIDTH = 32
HEAD_STRIDE = 8  # of the bands: three halvings
INITIAL_WIDTH = 128
GROWTH, BOTTLENECK = 32, 128
BLOCKS = ((12, 1), (24, 2), (16, 2))  # layers and dilation
CONTEXT_FRAMES = 100  # of a local mean: two seconds behind the first stride
MIN_SECONDS = 0.1
MAX_SECONDS = 30.0
TELEPHONE = Path(__file__).with_name("campplus_telephone.npy")  # by `vivavoce.bench.telephone_direction`

Array = NDArray[np.float32]


class _ResidualBlock(nn.Module):
    """Two 3 × 3 convolutions; the first one, and the shortcut, reduce the bands by `stride`."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        width = HEAD_WIDTH
        self.conv1 = nn.Conv2d(width, width, 3, stride=(stride, 1), padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut.extend([nn.Conv2d(width, width, 1, stride=(stride, 1), bias=False), nn.BatchNorm2d(width)])

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class _Head(nn.Module):
    """# [batch, band, frame] → [batch, 320, frame]"""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, HEAD_WIDTH, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(HEAD_WIDTH)
        self.layer1 = nn.Sequential(_ResidualBlock(2), _ResidualBlock(1))
        self.layer2 = nn.Sequential(_ResidualBlock(2), _ResidualBlock(1))
        self.conv2 = nn.Conv2d(HEAD_WIDTH, HEAD_WIDTH, 3, stride=(2, 1), padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(HEAD_WIDTH)

    def forward(self, bands: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(bands[:, None])))
        x = self.layer2(self.layer1(x))
        return functional.relu(self.bn2(self.conv2(x))).flatten(1, 2)


class _Norm(nn.Module):
    """A batch norm under its published name, followed by a ReLU unless it is `plain`, without scale and shift."""

    def __init__(self, channels: int, plain: bool = False) -> None:
        super().__init__()
        self.batchnorm = nn.BatchNorm1d(channels, affine=not plain)
        self.plain = plain

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.batchnorm(x)
        return normed if self.plain else functional.relu(normed)


class _TimeDelay(nn.Module):
    """The first layer behind the head, which halves the frame rate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Conv1d(HEAD_WIDTH * BANDS // HEAD_STRIDE, INITIAL_WIDTH, 5, stride=2, padding=2, bias=False)
        self.nonlinear = _Norm(INITIAL_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.nonlinear(self.linear(x))
        return y


class _ContextMask(nn.Module):
    """A dilated convolution, times a mask that depends on the mean of the sound and of the surrounding segment."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.linear_local = nn.Conv1d(BOTTLENECK, GROWTH, 3, padding=dilation, dilation=dilation, bias=False)
        self.linear1 = nn.Conv1d(BOTTLENECK, BOTTLENECK // 2, 1)
        self.linear2 = nn.Conv1d(BOTTLENECK // 2, GROWTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        frames = x.shape[-1]
        local = functional.avg_pool1d(x, CONTEXT_FRAMES, CONTEXT_FRAMES, ceil_mode=True)
        mask = self.linear2(functional.relu(self.linear1(x.mean(-1, keepdim=True) + local))).sigmoid()
        y: Tensor = self.linear_local(x) * mask.repeat_interleave(CONTEXT_FRAMES, -1)[..., :frames]
        return y


class _DenseLayer(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.nonlinear1 = _Norm(channels)
        self.linear1 = nn.Conv1d(channels, BOTTLENECK, 1, bias=False)
        self.nonlinear2 = _Norm(BOTTLENECK)
        self.cam_layer = _ContextMask(dilation)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cam_layer(self.nonlinear2(self.linear1(self.nonlinear1(x))))
        return y


class _DenseBlock(nn.Module):
    """Layers that each see the outputs of all before them."""

    def __init__(self, channels: int, layers: int, dilation: int) -> None:
        super().__init__()
        for number in range(layers):
            self.add_module(f"tdnnd{number + 1}", _DenseLayer(channels + number * GROWTH, dilation))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.cat([x, layer(x)], 1)
        return x


class _Transit(nn.Module):
    """Halves the channels between two blocks."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.nonlinear = _Norm(channels)
        self.linear = nn.Conv1d(channels, channels // 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.nonlinear(x))
        return y


class _Dense(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Conv1d(channels, EMBEDDING, 1, bias=False)
        self.nonlinear = _Norm(EMBEDDING, plain=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.nonlinear(self.linear(x[..., None]))
        return y[..., 0]


class _XVector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tdnn = _TimeDelay()
        channels = INITIAL_WIDTH
        for number, (layers, dilation) in enumerate(BLOCKS, 1):
            self.add_module(f"block{number}", _DenseBlock(channels, layers, dilation))
            channels += layers * GROWTH
            self.add_module(f"transit{number}", _Transit(channels))
            channels //= 2
        self.out_nonlinear = _Norm(channels)
        self.dense = _Dense(2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tdnn(x)
        for number in range(1, len(BLOCKS) + 1):
            x = self.get_submodule(f"transit{number}")(self.get_submodule(f"block{number}")(x))
        x = self.out_nonlinear(x)
        y: Tensor = self.dense(torch.cat([x.mean(-1), x.std(-1)], 1))
        return y


class CamPlusPlus(nn.Module):
    """Filterbank features, less their mean over time, to speaker embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.head = _Head()
        self.xvector = _XVector()

    def forward(self, features: Tensor) -> Tensor:
        """# [batch, frame, 80] → [batch, 192]"""
        y: Tensor = self.xvector(self.head(features.transpose(1, 2)))
        return y


class SpeakerEncoder:
    """Sounds at 16 kHz to unit vectors, whose products say how alike two voices are. Threads may share it.

    With `removes_telephone` vectors have no component in the direction that all narrow-band speech shares: two voices
    on the telephone would otherwise be as alike as one voice is to itself.
    """

    def __init__(self, network: CamPlusPlus, removes_telephone: bool = True) -> None:
        self.network = network.eval()
        self._fbank = KaldiFbank(BANDS, subtract_mean=True)
        self._removed = torch.from_numpy(np.load(TELEPHONE)) if removes_telephone else torch.zeros(EMBEDDING)

    @classmethod
    def load(cls, folder: Path, removes_telephone: bool = True) -> Self:
        """The encoder in a folder with the published weights."""
        with allocating("cpu", torch.float32, drawn=False):
            network = CamPlusPlus()
        with Checkpoint(_weights(folder)) as checkpoint:
            load_weights(network, checkpoint)
        return cls(network, removes_telephone)

    @torch.inference_mode()
    def embed(self, samples: Array) -> Array:
        """The unit vector of a sound; of a longer one than 30 s, that of its first 30.  # [time] → [192]"""
        if np.ndim(samples) != 1 or not np.isfinite(samples).all():
            raise InputError(f"a speaker embedding needs finite samples [time], not {list(np.shape(samples))}")
        if len(samples) < MIN_SECONDS * RATE:
            raise InputError(f"a speaker embedding needs {MIN_SECONDS} s of sound, not {len(samples) / RATE:.3f}")
        sound = torch.from_numpy(np.asarray(samples[: round(MAX_SECONDS * RATE)], np.float32))
        vector = functional.normalize(self.network(self._fbank(sound[None])), dim=1)[0]
        kept: Array = functional.normalize(vector - (vector @ self._removed) * self._removed, dim=0).numpy()
        return kept


def _weights(folder: Path) -> Path:
    files = weight_files(folder) if folder.is_file() else sorted(folder.glob("campplus*.*"))
    if len(files) != 1 or files[0].suffix == ".onnx":
        raise CheckpointError(f"{folder} holds no CAM++ weights; `viva models fetch campplus` gets them")
    return files[0]


def mean_voice(vectors: Sequence[Array]) -> Array:
    """The unit vector in the middle of some of one voice."""
    total = np.sum(vectors, axis=0)
    mean: Array = total / max(float(np.linalg.norm(total)), 1e-12)
    return mean
