"""Small models with the published structure, of sizes that ranks and kernels can cut, and in 16-bit values."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.models.tiny import CONFIG
from vivavoce.export.trtllm.export import whole_batch
from vivavoce.models.checkpoint import published_tensors, save_weights
from vivavoce.models.cosyvoice.lm import CosyVoiceLM, CosyVoiceLMConfig
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.whisper.config import WhisperConfig
from vivavoce.models.whisper.model import Whisper

# Two key heads, so that four ranks must repeat them. CosyVoice's 281 ids no number of ranks divides.
MOSS = replace(CONFIG, hidden_size=256, intermediate_size=512, num_attention_heads=8, head_dim=32)
COSYVOICE = {
    "speech_codes": 81,
    "vocab_size": 200,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "end_of_prompt": 7,
}
WHISPER = WhisperConfig(
    d_model=256,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=1024,
    decoder_ffn_dim=1024,
    vocab_size=51_867,
    max_source_positions=60,
    max_target_positions=40,
    num_mel_bins=16,
)


@torch.no_grad()
def in_16_bits(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Every weight a value of this type, biases and norms too, in float32 as the model computes."""
    torch.manual_seed(3)
    for name, tensor in published_tensors(model).items():
        if tensor.ndim == 1:
            tensor.add_(torch.randn(tensor.shape) * 0.1)
        if name != "encoder.embed_positions.weight":  # Whisper's sinusoids, which the export computes itself
            tensor.copy_(tensor.to(dtype))
    return model


def moss_speech(folder: Path) -> MossSpeech:
    model = in_16_bits(MossSpeech.random(MOSS, deviation=0.06))
    save_weights(model, folder)
    MOSS.write(folder)
    return model


def cosyvoice(folder: Path, version: int) -> CosyVoiceLM:
    rows = {2: 84, 3: 281}[version]
    model = in_16_bits(CosyVoiceLM.random(CosyVoiceLMConfig(version=version, speech_rows=rows, **COSYVOICE)))
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(dict(published_tensors(model)), folder / "llm.pt")
    return model


def whisper(folder: Path) -> Whisper:
    model = in_16_bits(Whisper.random(WHISPER))
    model.save(folder)
    return model


@torch.no_grad()
def hidden_states(model: nn.Module, rows: Tensor) -> Tensor:
    """What the model gives for the rows of one sequence."""
    return model(rows, whole_batch(model, len(rows)))
