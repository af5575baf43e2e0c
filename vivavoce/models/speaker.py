"""Who is speaking, as a vector: CAM++ through onnxruntime, from the `campplus.onnx` that codecs publish."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vivavoce.audio.mel import KaldiFbank
from vivavoce.errors import InputError
from vivavoce.models.onnx_file import OnnxFile

RATE = KaldiFbank.RATE


class SpeakerEmbedder:
    """Sound at 16 kHz → x-vector."""

    def __init__(self, file: str | Path) -> None:
        self._network = OnnxFile(file, "a voice's speaker vector")
        self.fbank = KaldiFbank(subtract_mean=True)

    def embed(self, samples: Tensor) -> Tensor:
        """The speaker's vector.  # [time] → [dim]"""
        if samples.ndim != 1 or not torch.isfinite(samples).all():
            raise InputError(f"a speaker vector needs finite samples [time], not {list(samples.shape)}")
        features = self.fbank(samples.cpu().float()[None])  # [1, frame, 80]
        return torch.from_numpy(self._network.run(features.numpy()).astype(np.float32)).flatten()
