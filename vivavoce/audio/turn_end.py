"""Is the turn finished, or only a pause? Smart Turn v3 listens to how it was said, where its ONNX file is at hand."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce.audio.mel import WhisperMel
from vivavoce.errors import CheckpointError, InputError, MissingDependencyError

RATE = 16_000
SECONDS = 8
MODEL_VARIABLE = "VIVA_SMART_TURN"


def smart_turn_file() -> Path | None:
    """Where the model is: named by the environment, or inside an installed pipecat-ai; None: nowhere."""
    named = os.environ.get(MODEL_VARIABLE)
    if named:
        return Path(named)
    pipecat = find_spec("pipecat")
    for root in (pipecat.submodule_search_locations or []) if pipecat is not None else []:
        models = sorted((Path(root) / "audio/turn/smart_turn/data").glob("smart-turn-v3*.onnx"))
        if models:
            return models[-1]
    return None


class SmartTurn:
    """How surely a turn is finished, from its last eight seconds. Loads its file when it is first asked."""

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
        """The chance that the turn is finished.  # [time] at 16 kHz"""
        if np.ndim(samples) != 1 or not len(samples):
            raise InputError(f"a turn has samples [time], not {list(np.shape(samples))}")
        (answer,) = self._loaded().run(None, {"input_features": self.features(samples)})
        return float(np.clip(answer.ravel()[0], 0.0, 1.0))

    def features(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """The normalised log-mel of the last eight seconds, silence before what is shorter.  # [1, 80, 800]"""
        sound = np.zeros(SECONDS * RATE, np.float32)
        last = np.asarray(samples, np.float32)[-len(sound) :]
        sound[len(sound) - len(last) :] = last
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
            except Exception as error:  # the library's own kinds
                raise CheckpointError(f"{self.path} is not a turn model ({error})") from error
        return self._session
