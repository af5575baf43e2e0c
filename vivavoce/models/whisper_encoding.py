"""Whisper's encoder as the engine runs it: on CUDA, windows a few at a time replay a captured graph.

A window alone is bound by launches; from a handful on, by arithmetic, and there is nothing to gain. A trimmed window's
length is captured when it comes again: a capture takes longer than encoding it once.
"""

from collections.abc import Sequence

from torch import Tensor

from vivavoce.models.whisper import WhisperEncoder
from vivavoce.nn.graphed import Graphed

MOST_GRAPHED = 2
MOST_LENGTHS = 32  # of trimmed windows that are captured

Size = tuple[int, int]
"""Windows, and the frames of each."""


class WindowEncoder:
    """States of windows.  # [window, mel, frame] → [window, frame / 2, d_model]"""

    def __init__(self, encoder: WhisperEncoder) -> None:
        self.encoder = encoder
        self._graphed = Graphed[Size](self._encode)
        self._met: set[Size] = set()

    def __call__(self, mel: Tensor) -> Tensor:
        """The encoder's states."""
        mel = mel.to(self.encoder.conv1.weight.dtype)
        size = (mel.shape[0], mel.shape[2])
        if mel.is_cuda and mel.shape[0] <= MOST_GRAPHED and self._is_captured(size):
            return self._graphed(size, [mel])[0]
        states: Tensor = self.encoder(mel)
        return states

    def _is_captured(self, size: Size) -> bool:
        """Whether windows of a size have a graph or are to have one."""
        if size[1] == self.encoder.config.window_frames or size in self._graphed:
            return True
        comes_again = size in self._met
        self._met.add(size)
        return comes_again and self._graphed.captured < MOST_LENGTHS

    def _encode(self, size: Size, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (self.encoder(tensors[0]),)
