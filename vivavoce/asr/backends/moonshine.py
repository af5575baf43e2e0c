"""Moonshine base (MIT) by ONNX Runtime: English on small machines, as accurate there as much larger models."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce.audio.io import Sound
from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.hub import resolve
from vivavoce.models.registry import MOONSHINE_DECODER, MOONSHINE_ENCODER, moonshine_folder
from vivavoce.models.whisper.steps import TranscriptionOptions, TranscriptSegment

RATE = 16_000
MAX_SECONDS = 30.0  # per piece; its authors advise against more
SEARCH_SECONDS = 8.0  # before that, in which the quietest place is sought for the cut
QUIET_WINDOW = RATE // 10
MIN_SAMPLES = RATE // 2  # shorter sounds are padded: the encoder's convolutions need some
START, END = 1, 2
TOKENS_PER_SECOND = 6.5  # of English; a longer text repeats itself


class Moonshine:
    """Speech to text by Moonshine base; `folder` has its ONNX files, as `viva models fetch moonshine-base-en` does."""

    RATE = RATE

    def __init__(self, folder: str | Path, threads: int = 1) -> None:
        found = moonshine_folder(Path(folder))
        if found is None:
            raise InputError(f"{folder} holds no {MOONSHINE_ENCODER}; `viva models fetch moonshine-base-en` gets it")
        self._encoder = onnx_session(found / MOONSHINE_ENCODER, threads)
        self._decoder = onnx_session(found / MOONSHINE_DECODER, threads)
        self._pasts = [given for given in self._decoder.get_inputs() if given.name.startswith("past")]
        self._presents = [given.name for given in self._decoder.get_outputs()][1:]
        self._tokenizer = _tokenizer(found)

    def transcribe(self, sound: Sound) -> str:
        """The text of a sound."""
        return self.write(sound.mono().resampled(self.RATE).samples[0])

    def write(self, samples: NDArray[np.float32], is_wanted: Callable[[], bool] = lambda: True) -> str:
        """The text of samples at 16 kHz, of at most 30 s; what there is of it once it is no longer wanted.  # [time]"""
        padded = np.pad(samples.astype(np.float32), (0, max(0, MIN_SAMPLES - len(samples))))
        hidden = self._encoder.run(None, {"input_values": padded[None]})[0]
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
            if tokens[-1] == END or not is_wanted():
                break
            for name, value in zip(self._presents, present, strict=True):
                # Cross-attention keys and values are returned by the first step only.
                if step == 0 or ".decoder." in name:
                    past[name.replace("present", "past_key_values")] = value
        text: str = self._tokenizer.decode(tokens)
        return text


class MoonshineBackend:
    """`Moonshine` as a `Backend`: a segment for every 30 seconds or less, without word times."""

    languages: tuple[str, ...] = ("en",)

    def __init__(self, folder: str | Path, threads: int = 1) -> None:
        self.model = Moonshine(folder, threads)

    def own_language(self, samples: torch.Tensor) -> str:
        """English."""
        return "en"

    def segments(
        self, samples: torch.Tensor, options: TranscriptionOptions | None = None
    ) -> Iterator[TranscriptSegment]:
        """A segment for every piece of up to 30 seconds; long sounds are cut where they are quiet."""
        _check(options or TranscriptionOptions())
        for first, end in pieces(samples.numpy()):
            text = self.model.write(samples[first:end].numpy()).strip()
            if text:
                yield TranscriptSegment(first / RATE, end / RATE, f" {text}", (), 0.0, 0.0, 0.0, 0.0, language="en")


def _check(options: TranscriptionOptions) -> None:
    """InputError for an option that Moonshine cannot follow."""
    languages = (options.language,) if options.language else options.languages
    if options.task != "transcribe" or (languages and "en" not in languages):
        raise InputError(f"Moonshine transcribes English only, not {', '.join(languages)}; use another backend")
    if options.prompt or options.hotwords:
        raise InputError("Moonshine takes no prompt and no keywords; use a Whisper")
    if options.logprobs:
        raise InputError("Moonshine returns no log-probabilities of tokens; use a Whisper")


def pieces(samples: NDArray[np.float32]) -> Iterator[tuple[int, int]]:
    """First and end of pieces of at most 30 s, cut at the quietest tenth of a second.  # [time] at 16 kHz"""
    first, size, search = 0, int(MAX_SECONDS * RATE), int(SEARCH_SECONDS * RATE)
    while len(samples) - first > size:
        start = first + size - search
        power = np.square(samples[start : first + size]).reshape(-1, QUIET_WINDOW).mean(1)
        end = start + int(power.argmin()) * QUIET_WINDOW + QUIET_WINDOW // 2
        yield first, end
        first = end
    yield first, len(samples)


def load_moonshine(model: str | Path, device: str = "auto") -> MoonshineBackend:
    """Load Moonshine by folder or name; it runs on the CPU, whatever the device."""
    return MoonshineBackend(resolve(str(model)))


def onnx_session(file: Path, threads: int) -> Any:
    """An ONNX Runtime session on the CPU."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError("this network needs onnxruntime: pip install 'vivavoce[onnx]'") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # other models need the cores
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _tokenizer(folder: Path) -> Any:
    """The tokenizer beside the networks, else that of the publisher's package."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if file.is_file():
        return Tokenizer.from_file(str(file))
    spec = importlib.util.find_spec("moonshine_onnx")
    if spec is None or spec.origin is None:
        raise MissingDependencyError(f"{file} is missing: `viva models fetch moonshine-base-en` has it")
    return Tokenizer.from_file(str(Path(spec.origin).parent / "assets" / "tokenizer.json"))
