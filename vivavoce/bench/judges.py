"""Judges we did not train: an ASR that says what it heard, and a model of listeners that says how it sounds.

Both are ONNX files of other projects' packages, found on this machine, never fetched: Moonshine base (MIT) from the npm
package `@usefulsensors/moonshine-js@0.1.16`, its tokenizer from the PyPI package `useful-moonshine-onnx`, and DNSMOS
P.835 (MIT) from the PyPI package `speechmos`.
"""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.sound import Sound
from vivavoce.errors import InputError, MissingDependencyError

RATE = 16_000
DNSMOS_SAMPLES = int(9.01 * RATE)
OVERALL = np.poly1d([-0.06766283, 1.11546468, 0.04602535])  # from the network's scale to the listeners', as published
ENCODER, DECODER = "encoder_model.onnx", "decoder_model_merged.onnx"
MOONSHINE_FOLDERS = ("", "dist/model/base/quantized", "package/dist/model/base/quantized")
START, END = 1, 2
TOKENS_PER_SECOND = 6.5  # of English; more is a loop


class Moonshine:
    """Speech to text by Moonshine base; `folder` is the unpacked npm package."""

    def __init__(self, folder: str | Path, threads: int = 2) -> None:
        places = [Path(folder) / inner for inner in MOONSHINE_FOLDERS]
        found = next((place for place in places if (place / ENCODER).is_file()), None)
        if found is None:
            raise InputError(f"{folder} holds no {ENCODER}; unpack `npm pack @usefulsensors/moonshine-js@0.1.16` there")
        self._encoder = _session(found / ENCODER, threads)
        self._decoder = _session(found / DECODER, threads)
        self._pasts = [given for given in self._decoder.get_inputs() if given.name.startswith("past")]
        self._presents = [given.name for given in self._decoder.get_outputs()][1:]
        self._tokenizer = _tokenizer()

    def transcribe(self, sound: Sound) -> str:
        """What it heard."""
        samples = sound.mono().resampled(RATE).samples
        hidden = self._encoder.run(None, {"input_values": samples})[0]
        past = {given.name: np.zeros((1, given.shape[1], 0, given.shape[3]), np.float32) for given in self._pasts}
        tokens = [START]
        for step in range(max(8, int(samples.shape[1] / RATE * TOKENS_PER_SECOND))):
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
                # Keys and values of the sound are written at the first step only.
                if step == 0 or ".decoder." in name:
                    past[name.replace("present", "past_key_values")] = value
        text: str = self._tokenizer.decode(tokens)
        return text


class Listeners:
    """DNSMOS P.835: the mean opinion of overall quality, 1 to 5, that listeners would give."""

    def __init__(self, threads: int = 2) -> None:
        spec = importlib.util.find_spec("speechmos")
        if spec is None or spec.origin is None:
            raise MissingDependencyError("opinion scores need DNSMOS: pip install 'vivavoce[judge]'")
        self._session = _session(Path(spec.origin).parent / "dnsmos_models" / "sig_bak_ovr.onnx", threads)

    def overall(self, sound: Sound) -> float:
        """The score; sound shorter than nine seconds is repeated, as the model's authors do."""
        samples = sound.mono().resampled(RATE).samples[0]
        if not len(samples):
            raise InputError("there is no sound to judge")
        samples = np.tile(samples, -(-DNSMOS_SAMPLES // len(samples))) if len(samples) < DNSMOS_SAMPLES else samples
        starts = range(0, len(samples) - DNSMOS_SAMPLES + 1, RATE)
        return float(np.mean([OVERALL(self._raw(samples[start : start + DNSMOS_SAMPLES])) for start in starts]))

    def _raw(self, samples: NDArray[np.float32]) -> float:
        _signal, _background, overall = self._session.run(None, {"input_1": samples[None].astype(np.float32)})[0][0]
        return float(overall)


def word_errors(reference: str, heard: str) -> int:
    """Words to insert, delete or replace to get from one to the other."""
    said, other = reference.split(), heard.split()
    row = list(range(len(other) + 1))
    for i, word in enumerate(said, start=1):
        diagonal, row[0] = row[0], i
        for j, candidate in enumerate(other, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != candidate))
    return row[-1]


def _session(file: Path, threads: int) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError("judging needs onnxruntime: pip install 'vivavoce[judge]'") from error
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
