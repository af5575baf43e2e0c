"""A published ONNX file, run on the CPU: for networks that are used once a voice and never in a conversation."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vivavoce.errors import CheckpointError, MissingDependencyError


class OnnxFile:
    """Arrays in, the first output out."""

    def __init__(self, file: str | Path, what: str) -> None:
        """`what` it is needed for, as an error should say."""
        try:
            import onnxruntime
        except ImportError as error:
            raise MissingDependencyError(f"{what} needs onnxruntime: pip install 'vivavoce[onnx]'") from error
        if not Path(file).is_file():
            raise CheckpointError(f"{file} does not exist; the codec's folder must hold it")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            self._session: Any = onnxruntime.InferenceSession(str(file), options, ["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's own exceptions share no base class
            reason = str(error).strip().split("\n", maxsplit=1)[0][:200]
            raise CheckpointError(f"{file} cannot be read as ONNX ({reason}); fetch it again") from error
        self._inputs = [each.name for each in self._session.get_inputs()]

    def run(self, *arrays: NDArray[Any]) -> NDArray[Any]:
        """The first output for inputs in the file's order."""
        made = self._session.run(None, dict(zip(self._inputs, arrays, strict=True)))
        return np.asarray(made[0])
