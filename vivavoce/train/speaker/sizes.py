"""The sizes of `mini-tts`: MOSS-TTS-Nano and its codec in small, and smaller still for trying out the recipe."""

from vivavoce.models.moss_audio_tokenizer_config import MossAudioTokenizerConfig, QuantizerConfig, StageConfig
from vivavoce.models.moss_tts_nano_config import MossTTSNanoConfig

RATE = 16_000  # what the voices to learn from have; a higher rate would hold nothing more


def _ears(inputs: int, layers: int, seconds: float) -> StageConfig:
    return StageConfig(inputs, 128, layers, seconds, d_model=128, num_heads=4, dim_feedforward=512)


def _mouth(inputs: int, outputs: int, layers: int, seconds: float) -> StageConfig:
    return StageConfig(inputs, outputs, layers, seconds, d_model=192, num_heads=6, dim_feedforward=768)


# Stages at 200, 100 and 50 positions a second; a frame of 80 ms is 16, 8 and 4 of them.
CODEC = MossAudioTokenizerConfig(
    sample_rate=RATE,
    channels=1,
    encoder=(80, _ears(80, 1, 0.64), 2, _ears(256, 1, 1.28), 2, _ears(256, 2, 2.56), 4),
    decoder=(4, _mouth(128, 384, 2, 2.56), 2, _mouth(192, 384, 1, 1.28), 2, _mouth(192, 80, 3, 0.64), 80),
    quantizer=QuantizerConfig(512, 64, 512, num_quantizers=8, codebook_size=512, codebook_dim=8),
)
LM = MossTTSNanoConfig(
    vocab_size=384,
    hidden_size=256,
    intermediate_size=384,
    num_layers=4,
    num_heads=4,
    max_positions=2048,
    n_vq=8,
    audio_vocab_size=512,
    audio_pad_token_id=512,
    local_transformer_layers=1,
)


def _tiny(inputs: int, outputs: int) -> StageConfig:
    return StageConfig(inputs, outputs, 1, 0.32, d_model=16, num_heads=2, dim_feedforward=32)


TINY_CODEC = MossAudioTokenizerConfig(
    sample_rate=RATE,
    channels=1,
    encoder=(80, _tiny(80, 16), 4, _tiny(64, 16), 4),
    decoder=(4, _tiny(16, 64), 4, _tiny(16, 80), 80),
    quantizer=QuantizerConfig(64, 24, 64, num_quantizers=8, codebook_size=32, codebook_dim=4),
)
TINY_LM = MossTTSNanoConfig(
    vocab_size=384,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    max_positions=2048,
    n_vq=8,
    audio_vocab_size=32,
    audio_pad_token_id=32,
)
