"""A random MOSS-Speech codec of a given shape, whose sound is audible, with a voice prompt."""

import torch
from torch import Tensor

from vivavoce.device import Device
from vivavoce.models.flow.estimator import FlowEstimatorConfig
from vivavoce.models.flow.model import FlowConfig, FlowDecoder, FlowEncoderConfig
from vivavoce.models.flow.state import VoicePrompt
from vivavoce.models.hift.model import HiFT, HiFTConfig
from vivavoce.models.moss_speech.codec import MossSpeechCodec
from vivavoce.models.speech_encoder.model import SpeechEncoder, SpeechEncoderConfig
from vivavoce.nn.modules import allocating, fill_randomly

SMALL_FLOW = FlowConfig(
    vocabulary=512,
    chunk=5,
    encoder=FlowEncoderConfig(ratio=4, dim=32, heads=2, feed_forward=64, code_layers=1, frame_layers=1),
    estimator=FlowEstimatorConfig(channels=32, middle_blocks=1, transformers=1, heads=2, head_dim=16),
    euler_steps=2,
)
SMALL_ENCODER = SpeechEncoderConfig(
    d_model=64, encoder_attention_heads=4, encoder_ffn_dim=128, quantize_position=2, quantize_vocab_size=512
)
SHAPES = {
    "true": (FlowConfig.moss_speech(5), SpeechEncoderConfig(), HiFTConfig()),
    "small": (SMALL_FLOW, SMALL_ENCODER, HiFTConfig(channels=16, f0_channels=8)),
}
PROMPT_CODES = 125  # a ten-second voice prompt


@torch.no_grad()
def random_codec(shape: str, device: Device, dtype: torch.dtype) -> tuple[MossSpeechCodec, VoicePrompt]:
    """A random codec with audible output, and a voice prompt."""
    flow_config, encoder_config, vocoder_config = SHAPES[shape]
    with allocating(device.torch_device, dtype):
        flow = FlowDecoder(flow_config).requires_grad_(False).eval()
    with allocating(device.torch_device, torch.float32):
        encoder = SpeechEncoder(encoder_config).requires_grad_(False).eval()
        vocoder = HiFT(vocoder_config).requires_grad_(False).eval()
    for module in (flow, encoder, vocoder):
        fill_randomly(module)
    vocoder.conv_post.weight.mul_(0.1)
    vocoder.f0_predictor.classifier.bias.fill_(150.0)
    prompt = VoicePrompt(
        random_codes(flow_config, PROMPT_CODES),
        torch.randn(PROMPT_CODES * flow_config.ratio, flow_config.mel_bands),
        torch.randn(flow_config.speaker_dim),
    )
    return MossSpeechCodec(encoder, flow, vocoder), prompt


def random_codes(config: FlowConfig, count: int, seed: int = 0) -> Tensor:
    """# [time]"""
    return torch.randint(min(config.vocabulary, 16384), (count,), generator=torch.Generator().manual_seed(seed))
