"""A miniature MOSS-Speech and codec in the published layout with random weights.

Its replies are noise, but use every part of the real model: safetensors shards, tokenizer, speech encoder, engine, flow
decoder, vocoder.
"""

from pathlib import Path
from typing import Any

import torch

from vivavoce.models.checkpoint import save_weights
from vivavoce.models.flow.estimator import FlowEstimatorConfig
from vivavoce.models.flow.model import FlowConfig, FlowDecoder, FlowEncoderConfig
from vivavoce.models.hift.model import HiFT, HiFTConfig
from vivavoce.models.moss_speech.codec import MossSpeechCodec
from vivavoce.models.moss_speech.model import MossSpeech, MossSpeechConfig
from vivavoce.models.speech_encoder.model import SpeechEncoder, SpeechEncoderConfig
from vivavoce.nn.modules import fill_randomly

CODES = 1024
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|modality_pad|>")
BYTES = 256
CONFIG = MossSpeechConfig(
    vocab_size=BYTES + 8,
    audio_vocab_size=CODES + 8,
    hidden_size=128,
    intermediate_size=384,
    num_shared_layers=4,
    num_modality_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=4096,
    pad_token_id=BYTES,
    eos_token_id=BYTES + 2,
    sosp_token_id=BYTES + 3,
    modality_pad_token_id=BYTES + 4,
    eosp_token_id=CODES,
    audio_pad_token_id=512,
)

SPEECH_ENCODER = SpeechEncoderConfig(
    d_model=64,
    encoder_attention_heads=4,
    encoder_ffn_dim=128,
    num_mel_bins=80,
    quantize_position=2,
    quantize_vocab_size=CODES,
)
FLOW = FlowConfig(
    vocabulary=CODES,
    chunk=5,
    encoder=FlowEncoderConfig(ratio=4, dim=64, heads=4, feed_forward=128, code_layers=2, frame_layers=2),
    estimator=FlowEstimatorConfig(channels=64, middle_blocks=1, transformers=1, heads=4, head_dim=16),
    euler_steps=4,
)
VOCODER = HiFTConfig(channels=64, f0_channels=32)


def write_untrained(folder: Path, seed: int = 0) -> None:
    """Write the checkpoint into a folder: `config.json`, `tokenizer.json` and weights in shards."""
    model = MossSpeech.random(CONFIG, seed=seed, deviation=0.15)
    save_weights(model, folder, shard_bytes=2_000_000)
    CONFIG.write(folder)
    _byte_tokenizer().save(str(folder / "tokenizer.json"))


@torch.no_grad()
def untrained_codec(device: torch.device | str = "cpu", seed: int = 0) -> MossSpeechCodec:
    """The codec with random weights; its output depends on the codes and is the same on every device."""
    encoder, flow, vocoder = SpeechEncoder(SPEECH_ENCODER), FlowDecoder(FLOW), HiFT(VOCODER)
    for module in (encoder, flow, vocoder):  # on the CPU: other devices draw other numbers from the same seed
        fill_randomly(module.requires_grad_(False).eval(), seed)
    vocoder.f0_predictor.classifier.bias.fill_(140.0)
    vocoder.conv_post.weight.mul_(0.3)
    dict(vocoder.named_parameters())["conv_post.bias"].sub_(2.0)  # quiet enough to be rarely clamped
    return MossSpeechCodec(encoder.to(device), flow.to(device), vocoder.to(device))


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer
