"""A MOSS-TTS-Nano and its codec with the published structure, a few channels, and windows of a few frames."""

import torch

from vivavoce.models.moss_audio_tokenizer.config import MossAudioTokenizerConfig, QuantizerConfig, StageConfig
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano.model import MossTTSNano
from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoConfig
from vivavoce.nn.modules import fill_randomly

CONFIG = MossTTSNanoConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    max_positions=512,
    n_vq=5,
    audio_vocab_size=24,
    audio_pad_token_id=24,
)


def _stage(inputs: int, outputs: int, layers: int, seconds: float) -> StageConfig:
    return StageConfig(inputs, outputs, layers, seconds, d_model=16, num_heads=2, dim_feedforward=24)


# 1000 Hz stereo in frames of 80 samples: stages at 200, 100 and 25 positions a second, windows of 3, 4 and 5 frames.
CODEC_CONFIG = MossAudioTokenizerConfig(
    sample_rate=1000,
    channels=2,
    encoder=(10, _stage(10, 12, 2, 0.24), 2, _stage(24, 12, 1, 0.32), 4, _stage(48, 10, 1, 0.4), 2),
    decoder=(2, _stage(10, 48, 1, 0.4), 4, _stage(12, 24, 1, 0.32), 2, _stage(12, 10, 2, 0.24), 10),
    quantizer=QuantizerConfig(20, 12, 20, num_quantizers=6, codebook_size=32, codebook_dim=4),
)


class LetterTokenizer:
    """A letter is an id of its own above the model's signs; white space is none, as in the published tokenizer."""

    def encode(self, text: str, symbols: bool = True) -> list[int]:
        return [16 + byte for byte in "".join(text.split()).encode()]


def tiny_nano(seed: int = 0, dtype: torch.dtype = torch.float64, codebooks: int | None = None) -> MossTTSNano:
    """Random weights, large enough that the logits of a row differ clearly."""
    return MossTTSNano.random(CONFIG, dtype=dtype, seed=seed, deviation=0.3, codebooks=codebooks)


@torch.no_grad()
def tiny_nano_codec(seed: int = 0) -> MossAudioTokenizerNano:
    """Random weights; every part changes its input and none drowns it."""
    codec = MossAudioTokenizerNano(CODEC_CONFIG).eval()
    fill_randomly(codec, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in codec.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        if "codebook" in name:
            parameter.normal_(generator=generator)
    return codec
