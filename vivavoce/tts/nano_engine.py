"""Who makes the frames of a text: the engine, for many at once on any device, or a CPU for one at a time.

Either way a voice's part of the prompt is computed once and kept.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce.device import Device
from vivavoce.engine.cuda_graphs import BUCKETS
from vivavoce.engine.engine import Emission, Engine, EngineLimits, StepResult
from vivavoce.engine.sampling import Generation
from vivavoce.engine.sequence import Sequence
from vivavoce.models.interface import Row
from vivavoce.models.moss_audio_tokenizer.cuda import SlotDecoder, SlotState
from vivavoce.models.moss_audio_tokenizer.model import CodecState, MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano.model import MossTTSNano
from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoPrompt
from vivavoce.runtime.device_loop import DeviceLoop
from vivavoce.tts.frame_model import Codes, Frame, Frames, Samples
from vivavoce.tts.nano_cpu import CpuDecoder, NanoPast

Kept = TypeVar("Kept")
VOICES_KEPT_READY = 8
ROWS_A_TEXT = 640  # a voice of eight seconds, a text of 75 tokens, and half a minute of speech
CONTEXT_ROWS = 4096
MOST_TEXTS = 128
CPU_TEXTS = 10
MOST_AT_ONCE = 8  # parts of one text: more would be made long before they are heard


class FrameGenerator(Protocol):
    """Makes frames; may be asked from several threads."""

    at_once: int
    """Parts of one text that are worth making side by side."""

    def frames(self, reference: Codes, text: str, generation: Generation, said: Codes = ()) -> Frames:
        """The frames of a text in a voice, as they are made, begun now. Closing them stops it.

        `said` are frames of the text's beginning that are there already.
        """
        ...

    def warm_up(self) -> None:
        """Do ahead what would make the first text slow."""
        ...


class CpuFrameGenerator:
    """One text at a time, each in the thread that asks for it."""

    at_once = 1

    def __init__(self, model: MossTTSNano, prompt: MossTTSNanoPrompt) -> None:
        self.prompt = prompt
        self.decoder = CpuDecoder(model)
        self._voices: _Recent[NanoPast] = _Recent()
        self._lock = threading.Lock()

    def frames(self, reference: Codes, text: str, generation: Generation, said: Codes = ()) -> Frames:
        """The frames of a text in a voice."""
        rows = self.prompt.speech(text) + self.prompt.said(said)
        with self._lock:
            past = self._voices.get(reference, lambda: self.decoder.read(before_text(self.prompt, reference)))
        return self.decoder.speak(past, rows, generation)

    def warm_up(self) -> None:
        """Take Python out of the steps."""
        self.decoder.compile()


class EngineFrameGenerator:
    """All texts that are asked for at a time, together. `rounds` is where its device gets its work."""

    def __init__(
        self, model: MossTTSNano, prompt: MossTTSNanoPrompt, device: Device, rounds: DeviceLoop | None = None
    ) -> None:
        self.model, self.prompt = model, prompt
        dtype = model.transformer.wte.weight.dtype
        text_bytes = ROWS_A_TEXT * model.kv_shape.bytes_per_row(dtype)
        fits = device.samples_that_fit(text_bytes, MOST_TEXTS) if device.kind != "cpu" else CPU_TEXTS
        self.at_once = 1 if device.kind == "cpu" else min(fits, MOST_AT_ONCE)
        limits = EngineLimits(
            cache_rows=fits * ROWS_A_TEXT,
            context=CONTEXT_ROWS,
            rows_per_step=BUCKETS[-1],
            sequences_per_step=MOST_TEXTS,
        )
        self.engine = Engine(model, device, dtype, limits)
        self._voices: _Recent[Sequence] = _Recent(self.engine.close)
        self._made: dict[int, SimpleQueue[Emission | Exception]] = {}
        self.rounds = rounds or DeviceLoop()
        self.rounds.parts.append(self._step)

    def frames(self, reference: Codes, text: str, generation: Generation, said: Codes = ()) -> Frames:
        """The frames of a text in a voice."""
        rows = self.prompt.speech(text) + self.prompt.said(said)
        return self.rounds.ask(lambda: self._begun(reference, rows, generation))

    def warm_up(self) -> None:
        """Capture all steps now: later, somebody would wait for it."""
        self.rounds.ask(self.engine.runner.warm_up)

    def close(self, sequence: Sequence) -> None:
        """Stop a text. Closing twice does nothing."""
        if self.rounds.is_own_thread:  # the garbage collector may close a text amid a step
            self.rounds.post(lambda: self._close(sequence))
        elif sequence.is_open:
            self.rounds.ask(lambda: self._close(sequence))

    def _begun(self, reference: Codes, rows: list[Row], generation: Generation) -> Frames:
        sequence = self.engine.fork(self._voices.get(reference, lambda: self._read(reference)))
        try:
            self.engine.append(sequence, rows)
            self.engine.generate(sequence, generation)
        except Exception:
            self.engine.close(sequence)
            raise
        made: SimpleQueue[Emission | Exception] = SimpleQueue()
        self._made[sequence.id] = made
        return EngineFrames(self, sequence, made)

    def _close(self, sequence: Sequence) -> None:
        self._made.pop(sequence.id, None)
        self.engine.close(sequence)

    def _read(self, reference: Codes) -> Sequence:
        """Compute what stands before every text in a voice, texts under way going on beside it."""
        sequence = self.engine.open(before_text(self.prompt, reference))
        while sequence.pending:
            result = self.engine.advance()
            self._hand_out(result)
            for failure in result.failures:
                if failure.sequence is sequence:
                    self.engine.close(sequence)
                    raise failure.error
        return sequence

    def _step(self) -> bool:
        """A row more for every text; one that cannot go on ends with its error."""
        if not self.engine.has_work:
            return False
        self._hand_out(self.engine.advance())
        return True

    def _hand_out(self, result: StepResult) -> None:
        for emission in result.emissions:
            self._made[emission.sequence.id].put(emission)
        for failure in result.failures:
            made = self._made.pop(failure.sequence.id, None)
            if made is not None:  # else it is a voice, which `_read` sees to
                made.put(failure.error)
                self.engine.close(failure.sequence)


class EngineFrames:
    """The frames of one text as the engine makes them."""

    def __init__(
        self, mouth: EngineFrameGenerator, sequence: Sequence, made: SimpleQueue[Emission | Exception]
    ) -> None:
        self._mouth, self._sequence, self._made, self._is_over = mouth, sequence, made, False

    def __iter__(self) -> "EngineFrames":
        return self

    def __next__(self) -> Frame:
        while not self._is_over:
            emission = self._made.get()
            if isinstance(emission, Exception):
                self._is_over = True
                raise emission
            self._is_over = emission.finish is not None
            for frame in self._mouth.model.spoken_frames([emission.row]):
                return frame
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Stop it."""
        self._is_over = True
        self._mouth.close(self._sequence)


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
    return prompt.before_text(reference)


State = CodecState | SlotState
MOST_STREAMS = 128


class SingleDecoder:
    """Each chunk by itself."""

    def __init__(self, codec: MossAudioTokenizerNano) -> None:
        self.codec = codec

    def start(self) -> CodecState:
        """A stretch of speech before its first frame."""
        return self.codec.decoder_state()

    def __call__(self, state: State, codes: list[Frame]) -> tuple[Samples, State]:
        """# [channel, time]"""
        assert isinstance(state, CodecState)
        sound, after = self.codec.decode_step(state, torch.tensor(codes).T)
        return sound.float().cpu().numpy(), after

    def warm_up(self, codebooks: int) -> None:
        """Nothing is worth doing ahead."""


@dataclass
class _Order:
    state: State
    codes: NDArray[np.int64]  # [codebook, frame]
    made: Future[tuple[Samples, State]]


class BatchedDecoder:
    """What several texts wait for at a time, in one pass of each round; as graphs where the device has them."""

    def __init__(self, codec: MossAudioTokenizerNano, rounds: DeviceLoop, device: Device) -> None:
        self.codec, self.rounds = codec, rounds
        fits = device.samples_that_fit(SlotDecoder.slot_bytes(codec), MOST_STREAMS) if device.graphs else 0
        self.slots = SlotDecoder(codec, fits) if fits else None
        self._waiting: deque[_Order] = deque()
        rounds.parts.append(self._work)

    def start(self) -> State:
        """A stretch of speech before its first frame; where no slot is free, in memory of its own."""
        state = self.slots.start() if self.slots else None
        return self.codec.decoder_state() if state is None else state

    def __call__(self, state: State, codes: list[Frame]) -> tuple[Samples, State]:
        """# [channel, time]"""
        order = _Order(state, np.array(codes, dtype=np.int64).T, Future())
        self._waiting.append(order)
        self.rounds.wake()
        return order.made.result()

    def warm_up(self, codebooks: int) -> None:
        """Capture all steps now: later, somebody would wait for it."""
        if self.slots is not None:
            slots = self.slots
            self.rounds.ask(lambda: slots.warm_up(codebooks))

    def _work(self) -> bool:
        orders = [self._waiting.popleft() for _ in range(len(self._waiting))]
        for kind, decode in ((SlotState, self._in_slots), (CodecState, self._stacked)):
            some = [order for order in orders if isinstance(order.state, kind)]
            try:
                for order, made in zip(some, decode(some) if some else (), strict=True):
                    order.made.set_result(made)
            except Exception as error:
                for order in some:
                    order.made.set_exception(error)
        return bool(orders)

    def _in_slots(self, orders: list[_Order]) -> list[tuple[Samples, State]]:
        assert self.slots is not None
        states = [order.state for order in orders if isinstance(order.state, SlotState)]
        sounds, after = self.slots.step_batch(states, [order.codes for order in orders])
        return list(zip(sounds, after, strict=True))

    def _stacked(self, orders: list[_Order]) -> list[tuple[Samples, State]]:
        states = [order.state for order in orders if isinstance(order.state, CodecState)]
        codes = [torch.from_numpy(order.codes) for order in orders]
        sounds, after = self.codec.decode_step_batch(states, codes)
        return [(sound.float().cpu().numpy(), state) for sound, state in zip(sounds, after, strict=True)]
