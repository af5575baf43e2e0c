"""What streaming does to MOSS-Speech's sound: windows, chunk edges, look-ahead, the running normalisation of the ear.

On random weights these only compare settings with each other.
"""

import torch
from torch import Tensor

from vivavoce.device import Device
from vivavoce.models.flow.estimator import FlowEstimatorConfig
from vivavoce.models.flow.model import FlowConfig, FlowDecoder, FlowEncoderConfig
from vivavoce.models.flow.state import FlowVoice, VoicePrompt
from vivavoce.models.hift.model import HiFT, HiFTConfig
from vivavoce.models.hift.stream import HiFTStream
from vivavoce.models.moss_speech.codec import VOICE_RATE, MossSpeechCodec
from vivavoce.models.speech_encoder.model import SpeechEncoder, SpeechEncoderConfig
from vivavoce.nn.modules import allocating, fill_randomly

SMALL_FLOW = FlowConfig(
    vocabulary=512,
    chunk=5,
    encoder=FlowEncoderConfig(ratio=4, dim=32, heads=2, feed_forward=64, code_layers=1, frame_layers=1),
    estimator=FlowEstimatorConfig(channels=32, middle_blocks=1, transformers=1, heads=2, head_dim=16),
    euler_steps=2,
)
SMALL_EAR = SpeechEncoderConfig(
    d_model=64, encoder_attention_heads=4, encoder_ffn_dim=128, quantize_position=2, quantize_vocab_size=512
)
SHAPES = {
    "true": (FlowConfig.moss_speech(5), SpeechEncoderConfig(), HiFTConfig()),
    "small": (SMALL_FLOW, SMALL_EAR, HiFTConfig(channels=16, f0_channels=8)),
}
PROMPT_CODES = 125  # ten seconds of the voice


@torch.no_grad()
def random_codec(shape: str, device: Device, dtype: torch.dtype) -> tuple[MossSpeechCodec, VoicePrompt]:
    """A codec of a shape whose voice is loud enough to be heard, and a prompt for it."""
    flow_config, ear_config, vocoder_config = SHAPES[shape]
    with allocating(device.torch_device, dtype):
        flow = FlowDecoder(flow_config).requires_grad_(False).eval()
        ear = SpeechEncoder(ear_config).requires_grad_(False).eval()
    with allocating(device.torch_device, torch.float32):
        vocoder = HiFT(vocoder_config).requires_grad_(False).eval()
    for module in (flow, ear, vocoder):
        fill_randomly(module)
    vocoder.conv_post.weight.mul_(0.1)
    vocoder.f0_predictor.classifier.bias.fill_(150.0)
    prompt = VoicePrompt(
        random_codes(flow_config, PROMPT_CODES),
        torch.randn(PROMPT_CODES * flow_config.ratio, flow_config.mel_bands),
        torch.randn(flow_config.speaker_dim),
    )
    return MossSpeechCodec(ear, flow, vocoder), prompt


def random_codes(config: FlowConfig, count: int, seed: int = 0) -> Tensor:
    """So many codes that the flow knows.  # [time]"""
    return torch.randint(min(config.vocabulary, 16384), (count,), generator=torch.Generator().manual_seed(seed))


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
    """The largest jump between neighbouring samples where chunks of these sizes meet, and what is usual inside them."""
    state, pieces, fed = codec.start(voice, left_chunks), [], 0
    for number in range(1, len(sizes) + 1):
        until = min(len(codes), sum(sizes[:number]) + codec.flow.config.lookahead)
        is_last = number == len(sizes)
        sound, state = codec.step(state, codes[fed : len(codes) if is_last else until], final=is_last)
        pieces.append(sound.float().cpu())
        fed = until
    pieces = [piece for piece in pieces if len(piece)]
    jumps = torch.cat(pieces).diff().abs()
    edges = torch.tensor([len(piece) for piece in pieces]).cumsum(0)[:-1] - 1
    inside = jumps[torch.randperm(len(jumps), generator=torch.Generator().manual_seed(0))[:100_000]]
    largest = float(jumps[edges].max()) if len(edges) else 0.0
    return {"largest_jump_at_edges": largest, "p999_jump_inside": float(inside.quantile(0.999))}


@torch.no_grad()
def codes_that_differ(codec: MossSpeechCodec, samples: Tensor) -> dict[str, float]:
    """How many codes of a turn differ when the mel is normalised by the maximum so far instead of the turn's."""
    first, state = codec.ear.step(codec.ear.initial_state(), samples)
    last, state = codec.ear.finish(state)
    streamed, exact = torch.cat([first, last]), codec.ear.exact_codes(state)
    return {"codes": len(exact), "codes_that_differ": float((streamed != exact).float().mean())}


@torch.no_grad()
def look_right_errors(codec: MossSpeechCodec, samples: Tensor) -> dict[int, float]:
    """Relative difference of the vocoder's stream from its whole, by mel frames (20 ms) held back."""
    hift = codec.vocoder.hift
    mel = codec.mel(samples[None, : 3 * VOICE_RATE]).to(hift.conv_pre.weight)
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
