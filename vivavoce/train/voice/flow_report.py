"""How near a flow decoder comes to speech it did not learn from, offline and as a stream."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from vivavoce.models.flow import FlowDecoder
from vivavoce.models.flow_state import VoicePrompt
from vivavoce.train.voice.flow_lessons import CodedSpeech

LEFT_CHUNKS = 4
GUIDANCES = (0.0, 0.3, 0.7)


@torch.no_grad()
def measure(flow: FlowDecoder, speech: CodedSpeech, prompt: VoicePrompt) -> dict[str, float]:
    """Distances of mels to the recorded ones, and how lively they are beside them, by way of decoding."""
    voice = flow.voice(prompt)

    def streamed(codes: Tensor) -> Tensor:
        state, pieces = flow.start(voice, LEFT_CHUNKS), []
        hops = codes.split(flow.config.chunk)
        for number, hop in enumerate(hops, start=1):
            mel, state = flow.step(state, hop, final=number == len(hops))
            pieces.append(mel)
        return torch.cat(pieces, dim=1)

    figures: dict[str, float] = {}
    for guidance in GUIDANCES:
        with _guided(flow, guidance):
            figures |= _compared(speech, streamed, f"stream_guidance_{guidance}")
    figures |= _compared(speech, lambda codes: flow(codes, prompt), "offline")
    figures |= _compared(speech, lambda codes: flow(codes, prompt, streaming=True), "masked")
    return figures


def _compared(speech: CodedSpeech, decode: Callable[[Tensor], Tensor], name: str) -> dict[str, float]:
    distances, liveliness = [], []
    for index in range(len(speech)):
        codes, given = speech.utterance(index)
        made = decode(codes).T  # [frame, band]
        distances.append(float((made - given).abs().mean()))
        liveliness.append(float(made.diff(dim=0).abs().mean() / given.diff(dim=0).abs().mean()))
    return {f"{name}_l1": round(float(np.mean(distances)), 4), f"{name}_lively": round(float(np.mean(liveliness)), 4)}


@contextmanager
def _guided(flow: FlowDecoder, guidance: float) -> Iterator[None]:
    usual, flow.decoder.guidance = flow.decoder.guidance, guidance
    yield
    flow.decoder.guidance = usual
