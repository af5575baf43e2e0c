"""Mels of a trained flow decoder: for a vocoder to learn from, and to measure the flow on held-out sentences."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.models.flow.model import FlowDecoder
from vivavoce.models.flow.state import FlowPass, Pasts, VoicePrompt
from vivavoce.nn.attention import KeySpan
from vivavoce.nn.streaming import Silence
from vivavoce.train.flow_vocoder import TeacherSpeech
from vivavoce.train.flow_vocoder.flow_batches import CodedSpeech

LEFT_CHUNKS = 4


@torch.no_grad()
def flow_mels(flow: FlowDecoder, speech: CodedSpeech, prompt: VoicePrompt, codes: int = 125, rows: int = 32) -> Tensor:
    """Flow mels of all codes, in passages of this many codes after the prompt.  # [code · ratio, band]"""
    device, config = speech.codes.device, flow.config
    begins = torch.arange(0, len(speech.codes), codes, device=device)
    indices = begins[:, None] + torch.arange(codes + config.lookahead, device=device)
    passages = speech.codes[indices.clamp(max=len(speech.codes) - 1)]
    mels = [_passage_mels(flow, chunk, prompt) for chunk in passages.split(rows)]
    return torch.cat(mels).flatten(0, 1)[: len(speech.codes) * config.ratio]


def _passage_mels(flow: FlowDecoder, passages: Tensor, prompt: VoicePrompt) -> Tensor:
    rows, device, config = len(passages), passages.device, flow.config
    length = len(prompt.codes)
    codes = torch.cat([prompt.codes.to(device).expand(rows, -1), passages], dim=1)
    time = codes.shape[1] - config.lookahead
    zeros = torch.zeros(rows, dtype=torch.int64, device=device)
    sink = max(0, (length - config.lookahead) // config.chunk * config.chunk)
    span = KeySpan(zeros, time, zeros + sink)
    prompt_mel = torch.zeros(rows, time * config.ratio, config.mel_bands, device=device)
    prompt_mel[:, : length * config.ratio] = prompt.mel.to(device)
    speaker = flow.spk_embed_affine_layer(functional.normalize(prompt.speaker.to(device), dim=0)).expand(rows, -1)
    pasts = Pasts(Silence(), Silence(), lambda step: Silence())
    mel = flow.decode(FlowPass(codes, speaker, prompt_mel, span, pasts, config.chunk, LEFT_CHUNKS))
    return mel[:, length * config.ratio :]


def with_flow_mels(speech: TeacherSpeech, utterances: Tensor, coded: CodedSpeech, mels: Tensor) -> Tensor:
    """The mels of speech with those of the coded utterances replaced.  # [frame, band]"""
    replaced = speech.mel.clone()
    begins, ends = coded.starts[:-1].tolist(), coded.starts[1:].tolist()
    for utterance, begin, end in zip(utterances.tolist(), begins, ends, strict=True):
        first, count = int(speech.starts[utterance]), (end - begin) * coded.ratio
        replaced[first : first + count] = mels[begin * coded.ratio : end * coded.ratio]
    return replaced


GUIDANCES = (0.0, 0.3, 0.7)


@torch.no_grad()
def measure(
    flow: FlowDecoder, speech: CodedSpeech, prompt: VoicePrompt, moved: CodedSpeech | None = None
) -> dict[str, float]:
    """L1 distance to recorded mels, and relative temporal variation, for each way of decoding.

    `moved`: the same sentences at another offset to the codes, streamed as by default.
    """
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
        with _with_guidance(flow, guidance):
            figures |= _distances(speech, streamed, f"stream_guidance_{guidance}")
    if moved is not None:
        figures |= _distances(moved, streamed, "stream_moved")
    figures |= _distances(speech, lambda codes: flow(codes, prompt), "offline")
    figures |= _distances(speech, lambda codes: flow(codes, prompt, streaming=True), "masked")
    return figures


def _distances(speech: CodedSpeech, decode: Callable[[Tensor], Tensor], name: str) -> dict[str, float]:
    distances, liveliness = [], []
    for index in range(len(speech)):
        codes, recorded = speech.utterance(index)
        generated = decode(codes).T  # [frame, band]
        distances.append(float((generated - recorded).abs().mean()))
        liveliness.append(float(generated.diff(dim=0).abs().mean() / recorded.diff(dim=0).abs().mean()))
    return {f"{name}_l1": round(float(np.mean(distances)), 4), f"{name}_lively": round(float(np.mean(liveliness)), 4)}


@contextmanager
def _with_guidance(flow: FlowDecoder, guidance: float) -> Iterator[None]:
    usual, flow.decoder.guidance = flow.decoder.guidance, guidance
    try:
        yield
    finally:
        flow.decoder.guidance = usual
