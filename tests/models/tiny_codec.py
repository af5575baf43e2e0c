"""A MOSS-Speech codec with the published rates and structure, and few channels."""

import torch

from vivavoce.models.flow.estimator import FlowEstimatorConfig
from vivavoce.models.flow.model import FlowConfig, FlowDecoder, FlowEncoderConfig
from vivavoce.models.hift.model import HiFT, HiFTConfig
from vivavoce.models.moss_speech.codec import MossSpeechCodec
from vivavoce.models.speech_encoder.model import SpeechEncoder, SpeechEncoderConfig
from vivavoce.nn.modules import fill_randomly

SPEECH_ENCODER = SpeechEncoderConfig(
    d_model=16,
    encoder_attention_heads=2,
    encoder_ffn_dim=32,
    num_mel_bins=32,
    quantize_position=2,
    quantize_vocab_size=64,
)
FLOW = FlowConfig(
    vocabulary=80,
    chunk=5,
    encoder=FlowEncoderConfig(ratio=4, dim=16, heads=2, feed_forward=24, code_layers=1, frame_layers=1),
    estimator=FlowEstimatorConfig(channels=16, middle_blocks=1, transformers=1, heads=2, head_dim=8),
    euler_steps=3,
)
VOCODER = HiFTConfig(channels=32, f0_channels=8)


@torch.no_grad()
def tiny_codec(seed: int = 0) -> MossSpeechCodec:
    """Random weights, scaled so that every part changes its input and none drowns it."""
    encoder, flow, vocoder = SpeechEncoder(SPEECH_ENCODER), FlowDecoder(FLOW), HiFT(VOCODER)
    for module in (encoder, flow, vocoder):
        fill_randomly(module.requires_grad_(False).eval(), seed)
    vocoder.f0_predictor.classifier.bias.fill_(150)
    vocoder.conv_post.weight.mul_(0.2)
    vocoder.conv_post.bias.sub_(3)
    return MossSpeechCodec(encoder, flow, vocoder)
