"""Whisper's encoder as the engine runs it: on CUDA, full windows a few at a time replay a captured graph.

A window alone is bound by launches; from a handful on, by arithmetic, and there is nothing to gain.
"""

from collections.abc import Sequence

from torch import Tensor

from vivavoce.models.whisper import WhisperEncoder
from vivavoce.nn.graphed import Graphed

MOST_GRAPHED = 2


class WindowEncoder:
    """States of windows.  # [window, mel, frame] → [window, frame / 2, d_model]"""

    def __init__(self, encoder: WhisperEncoder) -> None:
        self.encoder = encoder
        self._graphed = Graphed[int](self._encode)

    def __call__(self, mel: Tensor) -> Tensor:
        """The encoder's states."""
        mel = mel.to(self.encoder.conv1.weight.dtype)
        if mel.is_cuda and mel.shape[0] <= MOST_GRAPHED and mel.shape[2] == self.encoder.config.window_frames:
            return self._graphed(mel.shape[0], [mel])[0]
        states: Tensor = self.encoder(mel)
        return states

    def _encode(self, windows: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (self.encoder(tensors[0]),)
