"""Kokoro's generator on CUDA: texts share a pass, captured once for each number of rows and length."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.models.kokoro.decoder import Generator
from vivavoce.models.kokoro.model import PreparedSpeech
from vivavoce.nn.cuda_graphs import Graphed, bucket_for

LENGTHS = (64, 96, 128, 160, 192, 256, 320, 400, 512, 640, 800, 1024)  # features; longer ones are not captured
ROWS = (1, 2, 4, 8, 16, 32, 64)


class GraphedGenerator:
    """Sound of a batch; rows and lengths are padded to those of a captured graph. Thread-safe."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.graphs: Graphed[tuple[int, int]] = Graphed(self._function)
        self._lock = threading.Lock()

    @torch.inference_mode()
    def __call__(self, prepared: PreparedSpeech) -> Tensor:
        """# [batch, time · 300]; behind the end of a row there is silence or noise"""
        rows, _, length = prepared.features.shape
        lengths = prepared.lengths
        if lengths is None:
            lengths = torch.full((rows,), length, device=prepared.features.device)
        if length > LENGTHS[-1] or rows > ROWS[-1]:
            sound: Tensor = self.generator(prepared.features, prepared.style, prepared.spectrum, lengths)
            return sound
        height, time = bucket_for(ROWS, rows), bucket_for(LENGTHS, length)
        rate = self.generator.config.hop // self.generator.config.fft_hop
        tensors = [
            functional.pad(prepared.features, (0, time - length, 0, 0, 0, height - rows)),
            functional.pad(prepared.style, (0, 0, 0, height - rows)),
            functional.pad(prepared.spectrum, (0, (time - length) * rate, 0, 0, 0, height - rows)),
            functional.pad(lengths, (0, height - rows), value=1),
        ]
        with self._lock:
            return self.graphs((height, time), tensors)[0][:rows, : length * self.generator.config.hop]

    def _function(self, key: tuple[int, int], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        features, style, spectrum, lengths = tensors
        return (self.generator(features, style, spectrum, lengths),)
