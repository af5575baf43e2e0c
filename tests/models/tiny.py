"""A MOSS-Speech small enough to run in milliseconds, with the published structure and its own ids."""

import torch

from vivavoce.models.moss_speech.model import MossSpeech, MossSpeechConfig

CONFIG = MossSpeechConfig(
    vocab_size=320,
    audio_vocab_size=72,
    hidden_size=32,
    intermediate_size=48,
    num_shared_layers=2,
    num_modality_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    rope_theta=10000.0,
    modality_pad_token_id=305,
    sosp_token_id=303,
    eosp_token_id=64,
    audio_pad_token_id=5,
    eos_token_id=302,
    pad_token_id=300,
)


class ByteTokenizer:
    """Bytes as ids, with the chat's special tokens above them."""

    special = {"<|endoftext|>": 300, "<|im_start|>": 301, "<|im_end|>": 302, "<|object_ref_start|>": 303}  # noqa: RUF012

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            token = next((token for token in self.special if text.startswith(token)), None)
            if token is not None:
                ids.append(self.special[token])
                text = text[len(token) :]
            else:
                ids += text[0].encode()
                text = text[1:]
        return ids


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> MossSpeech:
    """Random weights, large enough that the logits of a row differ clearly."""
    return MossSpeech.random(CONFIG, dtype=dtype, seed=seed, deviation=0.3)
