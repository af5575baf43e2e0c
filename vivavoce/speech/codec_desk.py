"""Who decodes the chunks of MOSS-TTS-Nano: each by itself, or those of several texts together."""

import threading
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from vivavoce.models.moss_audio_tokenizer_nano import CodecState, MossAudioTokenizerNano
from vivavoce.speech.sounding import Frame, Samples


class Alone:
    """Each chunk by itself."""

    def __init__(self, codec: MossAudioTokenizerNano) -> None:
        self.codec = codec

    def __call__(self, state: CodecState, codes: list[Frame]) -> tuple[Samples, CodecState]:
        """# [channel, time]"""
        sound, after = self.codec.decode_step(state, torch.tensor(codes).T)
        return sound.float().cpu().numpy(), after


@dataclass
class _Order:
    state: CodecState
    codes: Tensor  # [codebook, frame]
    made: tuple[Samples, CodecState] | None = None
    error: Exception | None = None


class Together:
    """What several threads wait for at a time, in one pass: whoever gets the lock works for all.

    `lock` is of the device: while one thread captures a graph there, no other may give it work.
    """

    def __init__(self, codec: MossAudioTokenizerNano, lock: "threading.Lock | None" = None) -> None:
        self.codec = codec
        self._waiting: deque[_Order] = deque()
        self._lock = lock or threading.Lock()

    def __call__(self, state: CodecState, codes: list[Frame]) -> tuple[Samples, CodecState]:
        """# [channel, time]"""
        order = _Order(state, torch.tensor(codes).T)
        self._waiting.append(order)
        with self._lock:
            if order.made is None and order.error is None:
                self._work()
        if order.error is not None:
            raise order.error
        assert order.made is not None
        return order.made

    def _work(self) -> None:
        orders = [self._waiting.popleft() for _ in range(len(self._waiting))]
        try:
            sounds, states = self.codec.decode_step_batch(
                [order.state for order in orders], [order.codes for order in orders]
            )
            for order, sound, state in zip(orders, sounds, states, strict=True):
                order.made = sound.float().cpu().numpy(), state
        except Exception as error:
            for order in orders:
                order.error = error
