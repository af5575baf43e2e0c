"""Codecs of MOSS-Speech with random weights, of the published shape and of a small one."""

import torch
from torch import Tensor

from vivavoce.device import Device
from vivavoce.models.flow import FlowConfig, FlowDecoder
from vivavoce.models.flow_encoder import FlowEncoderConfig
from vivavoce.models.flow_estimator import FlowEstimatorConfig
from vivavoce.models.flow_state import VoicePrompt
from vivavoce.models.hift import HiFT
from vivavoce.models.hift_geometry import HiFTConfig
from vivavoce.models.moss_speech_codec import MossSpeechCodec
from vivavoce.models.speech_encoder import SpeechEncoder, SpeechEncoderConfig
from vivavoce.nn.allocation import allocating, fill_randomly

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
