"""Moonshine base (MIT) by its ONNX files: English speech to text on the smallest machines.

The files are in the npm package `@usefulsensors/moonshine-js@0.1.16`, the tokenizer in the PyPI package
`useful-moonshine-onnx`; both are found on this machine, never fetched.
"""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.io import Sound
from vivavoce.errors import InputError, MissingDependencyError

ENCODER, DECODER = "encoder_model.onnx", "decoder_model_merged.onnx"
FOLDERS = ("", "dist/model/base/quantized", "package/dist/model/base/quantized")
START, END = 1, 2
TOKENS_PER_SECOND = 6.5  # of English; more is a repetition


class Moonshine:
    """Speech to text by Moonshine base; `folder` is the unpacked npm package, or the files themselves."""

    RATE = 16_000

    def __init__(self, folder: str | Path, threads: int = 2) -> None:
        found = moonshine_folder(Path(folder))
        if found is None:
            raise InputError(f"{folder} holds no {ENCODER}; unpack `npm pack @usefulsensors/moonshine-js@0.1.16` there")
        self._encoder = onnx_session(found / ENCODER, threads)
        self._decoder = onnx_session(found / DECODER, threads)
        self._pasts = [given for given in self._decoder.get_inputs() if given.name.startswith("past")]
        self._presents = [given.name for given in self._decoder.get_outputs()][1:]
        self._tokenizer = _tokenizer()

    def transcribe(self, sound: Sound) -> str:
        """The text of a sound."""
        return self.write(sound.mono().resampled(self.RATE).samples[0])

    def write(self, samples: NDArray[np.float32]) -> str:
        """The text of samples at 16 kHz.  # [time]"""
        hidden = self._encoder.run(None, {"input_values": samples[None].astype(np.float32)})[0]
        past = {given.name: np.zeros((1, given.shape[1], 0, given.shape[3]), np.float32) for given in self._pasts}
        tokens = [START]
        for step in range(max(8, int(len(samples) / self.RATE * TOKENS_PER_SECOND))):
            logits, *present = self._decoder.run(
                None,
                {
                    "input_ids": np.array([tokens[-1:]], np.int64),
                    "encoder_hidden_states": hidden,
                    "use_cache_branch": np.array([step > 0]),
                    **past,
                },
            )
            tokens.append(int(logits[0, -1].argmax()))
            if tokens[-1] == END:
                break
            for name, value in zip(self._presents, present, strict=True):
                # Cross-attention keys and values are returned by the first step only.
                if step == 0 or ".decoder." in name:
                    past[name.replace("present", "past_key_values")] = value
        text: str = self._tokenizer.decode(tokens)
        return text


def moonshine_folder(folder: Path) -> Path | None:
    """The subfolder with Moonshine's files; None where there is none."""
    candidates = [folder / inner for inner in FOLDERS]
    return next((each for each in candidates if (each / ENCODER).is_file()), None)


def onnx_session(file: Path, threads: int) -> Any:
    """An ONNX Runtime session on the CPU."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError("this network needs onnxruntime: pip install 'vivavoce[onnx]'") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _tokenizer() -> Any:
    from tokenizers import Tokenizer

    spec = importlib.util.find_spec("moonshine_onnx")
    if spec is None or spec.origin is None:
        raise MissingDependencyError("Moonshine's tokenizer is missing: pip install --no-deps useful-moonshine-onnx")
    return Tokenizer.from_file(str(Path(spec.origin).parent / "assets" / "tokenizer.json"))
