"""Kokoro's published ONNX files by ONNX Runtime, as peers of our implementation in `viva bench tts`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce import hub
from vivavoce.bench.tts_contenders import TEXT, TTSBenchSetup
from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.models.kokoro.config import BOUNDARY, RATE, KokoroConfig, read_vocabulary
from vivavoce.models.kokoro.voices import VoiceTables
from vivavoce.models.kokoro.weights import INT8_FILE, ONNX_FILE
from vivavoce.tts.kokoro import DEFAULT_VOICES
from vivavoce.tts.phonemes import phonemes, sentences

INT8_MODEL = "kokoro-82m-int8"


class OnnxKokoro:
    """One of the published graphs; `name` says which. A sentence is a piece, as the graph makes it."""

    rate = RATE

    def __init__(self, model: str, name: str, setup: TTSBenchSetup) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            raise MissingDependencyError("the peer needs onnxruntime: pip install 'vivavoce[onnx]'") from error
        self.name = name
        folder = Path(hub.resolve(model))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self._session: Any = onnxruntime.InferenceSession(
            str(graph_file(folder, name)), options, providers=["CPUExecutionProvider"]
        )
        self._vocabulary = read_vocabulary(folder)
        self._voices = VoiceTables(folder, 2 * KokoroConfig().style)

    def stream(self, seed: int) -> Iterator[NDArray[np.float32]]:
        """The sentences of the text; the graphs have no noise, so the seed changes nothing."""
        for sentence in sentences(TEXT):
            spoken = phonemes(sentence, "a", self._vocabulary.__contains__).text
            ids = [BOUNDARY, *(self._vocabulary[phoneme] for phoneme in spoken), BOUNDARY]
            inputs = {
                "input_ids": np.array([ids]),
                "style": self._voices.style(DEFAULT_VOICES[0], len(spoken))[None].numpy(),
                "speed": np.ones(1, np.float32),
            }
            yield self._session.run(None, inputs)[0].reshape(1, -1)

    def stages(self) -> dict[str, Callable[[], object]]:
        """No per-stage timing."""
        return {}


def graph_file(folder: Path, name: str) -> Path:
    """The float32 graph of a folder, or the int8 one there or of its own model."""
    file = folder / (INT8_FILE if name.endswith("int8") else ONNX_FILE)
    if not file.is_file() and name.endswith("int8"):
        file = Path(hub.resolve(INT8_MODEL)) / INT8_FILE
    if not file.is_file():
        raise InputError(f"{folder} has no {file.name}; {name} needs Kokoro's published ONNX file")
    return file


PEERS = ("onnxruntime", "onnxruntime-int8")
