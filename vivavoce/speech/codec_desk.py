"""Who decodes the chunks of MOSS-TTS-Nano: each by itself, or those of several texts together."""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce.device import Device
from vivavoce.models.moss_audio_tokenizer_nano import CodecState, MossAudioTokenizerNano
from vivavoce.models.moss_audio_tokenizer_slots import SlotDecoder, SlotState
from vivavoce.speech.rounds import DeviceLoop
from vivavoce.speech.sounding import Frame, Samples

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
