"""Who computes Kokoro's texts: one after another on a CPU, and those of all callers in shared passes on a GPU."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch.nn import functional

from vivavoce.device import Device
from vivavoce.models.kokoro.cuda import COMMON_LENGTHS, LENGTHS, ROWS, GraphedGenerator
from vivavoce.models.kokoro.layers import NormStatistics
from vivavoce.models.kokoro.model import GeneratedSound, Kokoro, PhonemeText, PreparedSpeech
from vivavoce.nn.cuda_graphs import CudaStream, compiling_ahead
from vivavoce.runtime.batcher import DynamicBatcher
from vivavoce.runtime.executor import executor_for

Generate = Callable[[PreparedSpeech], GeneratedSound]
MAX_TEXTS = ROWS[-1]


class KokoroWorker(Protocol):
    """Computes texts and windows of concurrent callers."""

    def prepare(self, text: PhonemeText) -> PreparedSpeech:
        """What the generator reads for a text."""
        ...

    def generate(self, prepared: PreparedSpeech, lead: float = 0.0) -> GeneratedSound:
        """The sound of one row, needed within `lead` seconds."""
        ...

    def whole(self, texts: Sequence[PhonemeText]) -> list[GeneratedSound]:
        """The sound of each text as a whole."""
        ...

    def close(self) -> None:
        """Take no more work."""
        ...


class SingleWorker:
    """One text at a time, on the caller's thread."""

    def __init__(self, model: Kokoro, generate: Generate) -> None:
        self._model, self._generate = model, generate
        self._one_at_a_time = threading.Lock()

    def prepare(self, text: PhonemeText) -> PreparedSpeech:
        """What the generator reads for a text."""
        with self._one_at_a_time:
            return self._model.prepare([text])

    def generate(self, prepared: PreparedSpeech, lead: float = 0.0) -> GeneratedSound:
        """The sound of one row."""
        with self._one_at_a_time, torch.inference_mode():
            return self._generate(prepared)

    def whole(self, texts: Sequence[PhonemeText]) -> list[GeneratedSound]:
        """The sound of each text as a whole."""
        return [self.generate(self.prepare(text)) for text in texts]

    def close(self) -> None:
        """Nothing to stop."""


class BatchedWorker:
    """The texts of all callers in shared passes, and their windows likewise, each with a thread and a CUDA stream."""

    def __init__(self, model: Kokoro, generate: Generate, device: Device) -> None:
        self._model, self._generate = model, generate
        executor = executor_for(device.torch_device)
        self._text_stream, self._sound_stream = CudaStream(device.torch_device), CudaStream(device.torch_device, True)
        self.texts: DynamicBatcher[PhonemeText, PreparedSpeech] = DynamicBatcher(
            "viva-kokoro-text",
            self._prepare,
            executor,
            MAX_TEXTS,
            kind=lambda text: text.seed is None,
            leaves_jobs=True,
        )
        self.sounds: DynamicBatcher[PreparedSpeech, GeneratedSound] = DynamicBatcher(
            "viva-kokoro-sound", self._sound, executor, MAX_TEXTS, kind=_length_kind, leaves_jobs=True
        )
        self.texts.start()
        self.sounds.start()

    def prepare(self, text: PhonemeText) -> PreparedSpeech:
        """What the generator reads for a text."""
        return self.texts.submit(text).result()

    def generate(self, prepared: PreparedSpeech, lead: float = 0.0) -> GeneratedSound:
        """The sound of one row, needed within `lead` seconds; the samples are on the CPU."""
        return self.sounds.submit(prepared, max(0.0, lead)).result()

    def whole(self, texts: Sequence[PhonemeText]) -> list[GeneratedSound]:
        """The sound of each text as a whole."""
        prepared = [self.texts.submit(text) for text in texts]
        return [made.result() for made in [self.sounds.submit(each.result()) for each in prepared]]

    def warm_up(self, prepared: PreparedSpeech) -> None:
        """Capture the passes of common numbers of rows and lengths, from one row of any length."""
        if not isinstance(self._generate, GraphedGenerator):
            return
        wanted = [(rows, length) for length in COMMON_LENGTHS for rows in ROWS]

        def capture() -> None:
            with self._sound_stream():
                for rows, length in wanted:
                    self._generate(stacked([_resized(prepared, length)] * rows))

        with compiling_ahead() as has_kernels:
            if has_kernels:
                self._generate(stacked([_resized(prepared, COMMON_LENGTHS[0])]))
        self.sounds.call(capture)

    def close(self) -> None:
        """Take no more work."""
        self.texts.shutdown()
        self.sounds.shutdown()

    def _prepare(self, texts: Sequence[PhonemeText]) -> list[PreparedSpeech]:
        with self._text_stream():
            prepared = self._model.prepare(texts)
            return [prepared.row(index) for index in range(len(texts))]

    def _sound(self, rows: Sequence[PreparedSpeech]) -> list[GeneratedSound]:
        with self._sound_stream(), torch.inference_mode():
            generated = self._generate(stacked(rows))
            self._sound_stream.wait()
            samples, statistics = generated.samples.float().cpu(), generated.statistics
            return [
                GeneratedSound(
                    samples[index : index + 1, : row.features.shape[-1] * (samples.shape[1] // _max_length(rows))],
                    NormStatistics(*(each[index : index + 1] for each in vars(statistics).values())),
                )
                for index, row in enumerate(rows)
            ]


def _max_length(rows: Sequence[PreparedSpeech]) -> int:
    return max(row.features.shape[-1] for row in rows)


def _length_kind(row: PreparedSpeech) -> int:
    """Rows of about the same length share a pass."""
    length = row.features.shape[-1]
    return next((index for index, size in enumerate(LENGTHS[2::2]) if length <= size), len(LENGTHS))


def stacked(rows: Sequence[PreparedSpeech]) -> PreparedSpeech:
    """Rows of different lengths as one batch."""
    lengths = [row.features.shape[-1] for row in rows]
    max_length, device = max(lengths), rows[0].features.device
    rate = (rows[0].spectrum.shape[-1] - 1) // lengths[0]
    missing = [max_length - length for length in lengths]
    features = torch.cat([functional.pad(row.features, (0, gap)) for row, gap in zip(rows, missing, strict=True)])
    padding = [gap * rate for gap in missing]
    spectrum = torch.cat([functional.pad(row.spectrum, (0, gap)) for row, gap in zip(rows, padding, strict=True)])
    known = [row.earlier for row in rows]
    sizes = {each.means.shape[1] for each in known if each is not None}
    earlier = None
    if sizes:
        none = features.new_zeros(1, sizes.pop())
        filled = [NormStatistics(none, none, none[:, 0]) if each is None else each for each in known]
        parts = zip(*((each.means, each.variances, each.features) for each in filled), strict=True)
        earlier = NormStatistics(*(torch.cat(part) for part in parts))
    return PreparedSpeech(
        features,
        spectrum,
        torch.cat([row.style for row in rows]),
        torch.tensor(lengths, device=device) if len(set(lengths)) > 1 else None,
        [row.durations[0] for row in rows],
        earlier,
    )


def _resized(prepared: PreparedSpeech, length: int) -> PreparedSpeech:
    """Some row of a given length."""
    rate = (prepared.spectrum.shape[-1] - 1) // prepared.features.shape[-1]
    return replace(
        prepared,
        features=prepared.features.new_zeros(1, prepared.features.shape[1], length),
        spectrum=prepared.spectrum.new_zeros(1, prepared.spectrum.shape[1], length * rate + 1),
    )
