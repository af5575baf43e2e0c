"""Codes made into sound chunk by chunk, without the silence before the first word, as fast as was asked for."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from vivavoce.audio.onset import OnsetGate
from vivavoce.audio.time_stretch import TimeStretch
from vivavoce.dialogue.chunking import next_chunk
from vivavoce.dialogue.interface import Samples
from vivavoce.models.flow_state import FlowVoice
from vivavoce.models.moss_speech_codec import VOICE_RATE, SpokenState

if TYPE_CHECKING:
    from vivavoce.pipelines.moss_speech import MossSpeechBackend


class ChunkedDecoder:
    """The sound of a growing row of codes, chunk by chunk."""

    def __init__(self, pipeline: "MossSpeechBackend", voice: str | None, speed: float) -> None:
        self._pipeline = pipeline
        self._state: SpokenState | FlowVoice = pipeline.voice_of(voice)
        self._gate = OnsetGate(VOICE_RATE)
        self._onset = self._gate.initial_state()
        self._stretch = TimeStretch(VOICE_RATE, speed)
        self._stretched = self._stretch.initial_state()
        self._spoken = self._fed = self._chunks = 0

    @property
    def left_out(self) -> float:
        """Seconds of silence before the first word."""
        return self._onset.dropped / VOICE_RATE

    def ready(self, codes: list[int], is_last: bool, lead: float) -> int:
        """How many of these codes are the next chunk, `lead` seconds before the listener needs it; 0: too few."""
        policy, waiting = self._pipeline.chunks, len(codes) - self._spoken
        if is_last and self._chunks and waiting <= policy.end * policy.wanted(self._chunks, lead):
            return waiting
        return next_chunk(policy, waiting, is_last, self._chunks, lead)

    def lacks(self, codes: list[int], lead: float) -> int:
        """How many more codes to wait for before looking again: those of the next chunk, a grain at a time at most."""
        policy = self._pipeline.chunks
        wanted = policy.wanted(self._chunks, lead) + policy.grain.lookahead
        most = policy.later * policy.grain.frames + policy.grain.lookahead
        return max(0, min(most, wanted - (len(codes) - self._spoken)))

    async def say(self, codes: list[int], size: int, is_last: bool, urgency: float) -> tuple[Samples, list[int]]:
        """The next chunk of sound, of `size` codes, and its codes; it is needed in `urgency` seconds."""
        if not codes:
            return np.zeros(0, np.float32), []
        # A chunk is fed with the codes that follow it, which the decoder keeps for the next one.
        lookahead = self._pipeline.policy.grain.lookahead
        until = len(codes) if is_last else self._spoken + size + lookahead
        given = torch.tensor(codes[self._fed : until], dtype=torch.long)
        sound, self._state = await self._pipeline.voice.do((self._state, given, is_last), urgency)
        said = codes[self._spoken : until if is_last else self._spoken + size]
        self._fed, self._spoken, self._chunks = until, self._spoken + size, self._chunks + 1
        heard, self._onset = self._gate.step(self._onset, sound.numpy(), final=is_last)
        samples, self._stretched = self._stretch.step(self._stretched, heard[None])
        rest = self._stretch.flush(self._stretched) if is_last else samples[:, :0]
        return np.concatenate([samples[0], rest[0]]), said
