"""Small checkpoints of every kind that can be quantised, in their published layouts."""

from pathlib import Path

import torch

from tests.models.tiny_nano import CONFIG as NANO
from vivavoce import hub
from vivavoce.models.checkpoint import published_tensors, save_weights
from vivavoce.models.cosyvoice.lm import CosyVoiceLM, CosyVoiceLMConfig
from vivavoce.models.moss_tts_nano.model import MossTTSNano
from vivavoce.models.whisper.config import WhisperConfig
from vivavoce.models.whisper.model import Whisper

WHISPER = WhisperConfig(
    d_model=64,
    encoder_layers=2,
    encoder_attention_heads=2,
    encoder_ffn_dim=128,
    decoder_layers=2,
    decoder_attention_heads=2,
    decoder_ffn_dim=128,
    num_mel_bins=16,
    max_source_positions=20,
    max_target_positions=32,
    vocab_size=200,
)
COSYVOICE = CosyVoiceLMConfig(
    version=3,
    speech_rows=264,
    speech_codes=64,
    vocab_size=300,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    end_of_prompt=299,
)
KINDS = ("moss_speech", "moss_tts_nano", "whisper", "cosyvoice")


def write(kind: str, folder: Path) -> Path:
    """A tiny checkpoint of this kind; for MOSS-Speech, which needs a codec and a voice, the bundled miniature."""
    if kind == "moss_speech":
        return hub.resolve("mini-speech")
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "moss_tts_nano":
        model = MossTTSNano.random(NANO, seed=1, deviation=0.3)
        save_weights(model, folder)
        NANO.write(folder)
    elif kind == "whisper":
        Whisper.random(WHISPER, seed=1).save(folder, decoder_start_token_id=3)
    else:
        lm = CosyVoiceLM.random(COSYVOICE, seed=1)
        tensors = {name: tensor.detach().clone() for name, tensor in published_tensors(lm).items()}
        tensors["llm.model.lm_head.weight"] = tensors["llm.model.model.embed_tokens.weight"]
        torch.save(tensors, folder / "llm.pt")
        torch.save({"conv_post.weight": torch.randn(4, 4, 3)}, folder / "hift.pt")
        (folder / "cosyvoice3.yaml").write_text("llm: tiny\n", encoding="utf8")
    return folder
