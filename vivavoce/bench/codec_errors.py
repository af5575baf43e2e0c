"""What streaming changes in the signal of a codec: left windows, chunk edges, look-ahead and running normalisation."""

import torch
from torch import Tensor

from vivavoce.bench.codec_shapes import random_codes
from vivavoce.models.flow.model import FlowDecoder
from vivavoce.models.flow.state import FlowVoice, VoicePrompt
from vivavoce.models.hift.stream import HiFTStream
from vivavoce.models.moss_speech.codec import DECODER_RATE, MossSpeechCodec

WINDOWS = (1, 2, 4, 8)
LOOK_RIGHT = (2, 5, 8, 12, 20)


@torch.no_grad()
def window_errors(flow: FlowDecoder, prompt: VoicePrompt) -> dict[int, float]:
    """Relative difference of the mel under a left window from the mel with full left context."""
    codes = random_codes(flow.config, 60)
    whole = flow(codes, prompt, streaming=True)
    errors = {}
    for window in WINDOWS:
        mel = flow(codes, prompt, streaming=True, left_chunks=window)
        errors[window] = float((mel - whole).norm() / whole.norm())
    return errors


def jumps_at_edges(
    codec: MossSpeechCodec, voice: FlowVoice, left_chunks: int, codes: Tensor, sizes: list[int]
) -> dict[str, float]:
    """Largest sample-to-sample jump at chunk edges, and the 99.9th percentile inside chunks."""
    state, pieces, sent = codec.start(voice, left_chunks), [], 0
    for number in range(1, len(sizes) + 1):
        until = min(len(codes), sum(sizes[:number]) + codec.flow.config.lookahead)
        is_last = number == len(sizes)
        sound, state = codec.step(state, codes[sent : len(codes) if is_last else until], final=is_last)
        pieces.append(sound.float().cpu())
        sent = until
    pieces = [piece for piece in pieces if len(piece)]
    jumps = torch.cat(pieces).diff().abs()
    edges = torch.tensor([len(piece) for piece in pieces]).cumsum(0)[:-1] - 1
    inside = jumps[torch.randperm(len(jumps), generator=torch.Generator().manual_seed(0))[:100_000]]
    largest = float(jumps[edges].max()) if len(edges) else 0.0
    return {"largest_jump_at_edges": largest, "p999_jump_inside": float(inside.quantile(0.999))}


@torch.no_grad()
def codes_that_differ(codec: MossSpeechCodec, samples: Tensor) -> dict[str, float]:
    """Share of codes that differ when the mel is normalised by the running maximum instead of the turn's."""
    first, state = codec.speech_encoder.step(codec.speech_encoder.initial_state(), samples)
    last, state = codec.speech_encoder.finish(state)
    streamed, exact = torch.cat([first, last]), codec.speech_encoder.exact_codes(state)
    return {"codes": len(exact), "codes_that_differ": float((streamed != exact).float().mean())}


@torch.no_grad()
def look_right_errors(codec: MossSpeechCodec, samples: Tensor) -> dict[int, float]:
    """Relative difference of streamed from whole vocoder output, by look-ahead in mel frames (20 ms)."""
    hift = codec.vocoder.hift
    mel = codec.mel(samples[None, : 3 * DECODER_RATE]).to(hift.conv_pre.weight)
    whole = hift(mel)
    errors = {}
    for frames in LOOK_RIGHT:
        stream = HiFTStream(hift, frames)
        state, pieces = stream.initial_state(), []
        hops = mel.split(20, dim=-1)
        for number, hop in enumerate(hops, start=1):
            piece, state = stream.step(state, hop, final=number == len(hops))
            pieces.append(piece)
        errors[frames] = float((torch.cat(pieces, dim=1) - whole).norm() / whole.norm())
    return errors
