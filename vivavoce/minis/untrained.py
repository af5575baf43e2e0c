"""An untrained miniature: MOSS-Speech's published layout with random weights, small enough to make in a moment.

It answers nonsense, but through every real part: config, sharded safetensors, tokenizer, prompt, engine.
"""

from pathlib import Path
from typing import Any

from vivavoce.models.checkpoint import save_weights
from vivavoce.models.moss_speech import MossSpeech, MossSpeechConfig

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|modality_pad|>")
BYTES = 256
CONFIG = MossSpeechConfig(
    vocab_size=BYTES + 8,
    audio_vocab_size=1024 + 8,
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
    eosp_token_id=1024,
    audio_pad_token_id=512,
)


def write_untrained(folder: Path, seed: int = 0) -> None:
    """Write the checkpoint into a folder: `config.json`, `tokenizer.json` and weights in shards."""
    model = MossSpeech.random(CONFIG, seed=seed, deviation=0.15)
    save_weights(model, folder, shard_bytes=2_000_000)
    CONFIG.write(folder)
    _byte_tokenizer().save(str(folder / "tokenizer.json"))


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer
