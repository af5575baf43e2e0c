"""Codes → sound: a flow and its vocoder as one stream, batched over replies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from vivavoce.models.flow_state import FlowState, FlowVoice
from vivavoce.models.flow_stream import StreamingFlow

Held = TypeVar("Held")


class StreamingVocoder(Protocol[Held]):
    """Mel → sound in any pieces."""

    @property
    def delay_frames(self) -> int:
        """Mel frames that are held back."""
        ...

    def initial_state(self, seed: int | None = 0, batch: int = 1) -> Held:
        """The state before the first frame; `seed` draws the excitation's noise, None leaves it out."""
        ...

    def step_batch(
        self, states: Sequence[Held], mels: Sequence[Tensor], final: Sequence[bool]
    ) -> tuple[list[Tensor], list[Held]]:
        """The next hop of several streams.  # mels [1, mel, frame] → [1, sample]"""
        ...


@dataclass
class SpokenState:
    """A reply between two hops. A step of it alone uses it up: keep a `copy()` to come back to it."""

    flow: FlowState
    vocoder: Any  # whatever its vocoder keeps

    def copy(self) -> "SpokenState":
        """The same state in its own memory; the voice is shared."""
        return SpokenState(self.flow.copy(), self.vocoder)

    @property
    def nbytes(self) -> int:
        """Memory of what is the reply's own, the few frames the vocoder keeps not counted."""
        return 0 if self.flow.cache is None else self.flow.cache.nbytes


class FlowSpeech:
    """A flow and a vocoder, and the way between them."""

    def __init__(self, flow: StreamingFlow, vocoder: StreamingVocoder[Any]) -> None:
        self.flow, self.vocoder = flow, vocoder

    def start(self, voice: FlowVoice, left_chunks: int | None = None, seed: int = 0) -> SpokenState:
        """A reply about to begin. `left_chunks` bounds how far the flow looks back, so what it keeps."""
        return SpokenState(self.flow.start(voice, left_chunks), self.vocoder.initial_state(seed))

    def step(self, state: SpokenState, codes: Tensor, final: bool = False) -> tuple[Tensor, SpokenState]:
        """Sound that these codes complete.  # [code] → [sample]"""
        (sound,), (after,) = self.step_batch([state], [codes], [final])
        return sound, after

    @torch.no_grad()
    def step_batch(
        self, states: Sequence[SpokenState], codes: Sequence[Tensor], final: Sequence[bool]
    ) -> tuple[list[Tensor], list[SpokenState]]:
        """The next hop of several replies; those of equal size run together. Several states stay as they were."""
        mels, flows = self.flow.step_batch([state.flow for state in states], codes, final)
        sounds = [mel.new_zeros(0) for mel in mels]
        vocoders = [state.vocoder for state in states]
        # A stream to which no frame came has nothing to say yet, unless it ends.
        heard = [index for index, mel in enumerate(mels) if mel.shape[1] or final[index]]
        if heard:
            made, after = self.vocoder.step_batch(
                [vocoders[index] for index in heard],
                [mels[index][None] for index in heard],
                [final[index] for index in heard],
            )
            for index, sound, vocoder in zip(heard, made, after, strict=True):
                sounds[index], vocoders[index] = sound[0], vocoder
        return sounds, [SpokenState(flow, vocoder) for flow, vocoder in zip(flows, vocoders, strict=True)]
