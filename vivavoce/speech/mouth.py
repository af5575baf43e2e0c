"""Who makes the frames of a text: the engine, for many at once on any device, or a CPU for one at a time.

Either way a voice's part of the prompt is computed once and kept.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from typing import Generic, Protocol, TypeVar

from vivavoce.device import Device
from vivavoce.engine.engine import Emission, Engine, EngineLimits
from vivavoce.engine.sampling import Generation
from vivavoce.engine.sequence import Sequence
from vivavoce.models.interface import Row
from vivavoce.models.moss_tts_nano import MossTTSNano
from vivavoce.models.moss_tts_nano_prompt import MossTTSNanoPrompt
from vivavoce.speech.cpu_decoder import CpuDecoder, NanoPast

Codes = tuple[tuple[int, ...], ...]  # [frame, codebook]; none stand for the model's own voice
Frames = Generator[tuple[int, ...], None, None]
Kept = TypeVar("Kept")
VOICES_KEPT_READY = 8
CACHE_ROWS = 6144


class Mouth(Protocol):
    """Makes frames; may be asked from several threads."""

    def frames(self, reference: Codes, text: str, generation: Generation) -> Frames:
        """The frames of a text in a voice, as they are made. Closing it stops them."""
        ...


class CpuMouth:
    """One text at a time, each in the thread that asks for it."""

    def __init__(self, model: MossTTSNano, prompt: MossTTSNanoPrompt) -> None:
        self.prompt = prompt
        self.decoder = CpuDecoder(model)
        self._voices: _Recent[NanoPast] = _Recent()
        self._lock = threading.Lock()

    def frames(self, reference: Codes, text: str, generation: Generation) -> Frames:
        """The frames of a text in a voice."""
        rows = self.prompt.speech(text)
        with self._lock:
            past = self._voices.get(reference, lambda: self.decoder.read(before_text(self.prompt, reference)))
        yield from self.decoder.speak(past, rows, generation)


class EngineMouth:
    """All texts that are asked for at a time, together."""

    def __init__(self, model: MossTTSNano, prompt: MossTTSNanoPrompt, device: Device) -> None:
        self.model, self.prompt = model, prompt
        dtype = model.transformer.wte.weight.dtype
        self.engine = Engine(model, device, dtype, EngineLimits(cache_rows=CACHE_ROWS))
        self._voices: _Recent[Sequence] = _Recent(self.engine.close)
        self._made: dict[int, deque[Emission]] = {}
        self._lock = threading.Lock()

    def frames(self, reference: Codes, text: str, generation: Generation) -> Frames:
        """The frames of a text in a voice."""
        rows = self.prompt.speech(text)
        with self._lock:
            sequence = self.engine.fork(self._voices.get(reference, lambda: self._read(reference)))
            emissions = self._made[sequence.id] = deque()
        try:
            with self._lock:
                self.engine.append(sequence, rows)
                self.engine.generate(sequence, generation)
            is_over = False
            while not is_over:
                emission = self._next(emissions)
                is_over = emission.finish is not None
                yield from self.model.spoken_frames([emission.row])
        finally:
            with self._lock:
                del self._made[sequence.id]
                self.engine.close(sequence)

    def _next(self, emissions: deque[Emission]) -> Emission:
        """The next of a text; whoever finds none takes a step for all."""
        while True:
            with self._lock:
                if emissions:
                    return emissions.popleft()
                self._step()

    def _read(self, reference: Codes) -> Sequence:
        sequence = self.engine.open(before_text(self.prompt, reference))
        while sequence.pending:
            self._step()
        return sequence

    def _step(self) -> None:
        for emission in self.engine.step():
            self._made[emission.sequence.id].append(emission)


class _Recent(Generic[Kept]):
    """What was made of the voices used last."""

    def __init__(self, drop: Callable[[Kept], None] | None = None) -> None:
        self._kept: OrderedDict[Codes, Kept] = OrderedDict()
        self._drop = drop

    def get(self, reference: Codes, make: Callable[[], Kept]) -> Kept:
        if reference not in self._kept:
            self._kept[reference] = make()
        self._kept.move_to_end(reference)
        while len(self._kept) > VOICES_KEPT_READY:
            _, oldest = self._kept.popitem(last=False)
            if self._drop is not None:
                self._drop(oldest)
        return self._kept[reference]


def before_text(prompt: MossTTSNanoPrompt, reference: Codes) -> list[Row]:
    """What stands before every text in a voice."""
    if reference:
        return prompt.voice(reference)
    rows = prompt.continuation("a")
    return rows[: len(rows) - len(prompt.speech("a"))]
