"""Who is speaking, as a vector: CAM++ through onnxruntime, from the `campplus.onnx` that codecs publish."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vivavoce.audio.mel import KaldiFbank
from vivavoce.errors import CheckpointError, InputError, MissingDependencyError

RATE = KaldiFbank.RATE


class SpeakerEmbedder:
    """Sound at 16 kHz → x-vector. It runs on the CPU: once a voice, never in a conversation."""

    def __init__(self, file: str | Path) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise MissingDependencyError(
                "a voice's speaker vector needs onnxruntime: pip install 'vivavoce[onnx]'"
            ) from error
        if not Path(file).is_file():
            raise CheckpointError(f"{file} does not exist; the codec's folder must hold it")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            self._session: Any = onnxruntime.InferenceSession(str(file), options, ["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's own exceptions share no base class
            reason = str(error).strip().split("\n", maxsplit=1)[0][:200]
            raise CheckpointError(f"{file} cannot be read as ONNX ({reason}); fetch it again") from error
        self._input = self._session.get_inputs()[0].name
        self.fbank = KaldiFbank(subtract_mean=True)

    def embed(self, samples: Tensor) -> Tensor:
        """The speaker's vector.  # [time] → [dim]"""
        if samples.ndim != 1 or not torch.isfinite(samples).all():
            raise InputError(f"a speaker vector needs finite samples [time], not {list(samples.shape)}")
        features = self.fbank(samples.cpu().float()[None])  # [1, frame, 80]
        (vector,) = self._session.run(None, {self._input: features.numpy()})
        return torch.from_numpy(np.asarray(vector, dtype=np.float32)).flatten()
