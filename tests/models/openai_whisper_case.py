"""A tiny Whisper in OpenAI's file format and sounds for it, the same on every machine: numpy's generator makes both."""

import json
from pathlib import Path

import numpy as np
import torch

from tests.models.published_tokenizer import published_tokenizer

RATE = 16_000
WIDTH, TEXT_CONTEXT, VOCABULARY = 32, 64, 51865
ENDOFTEXT, NOTIMESTAMPS = 50257, 50363
DIMS = {
    "n_mels": 80,
    "n_audio_ctx": 1500,
    "n_audio_state": WIDTH,
    "n_audio_head": 2,
    "n_audio_layer": 1,
    "n_vocab": VOCABULARY,
    "n_text_ctx": TEXT_CONTEXT,
    "n_text_state": WIDTH,
    "n_text_head": 2,
    "n_text_layer": 2,
}
SOUNDS = {"short": 3.7, "half": 17.3, "two windows": 33.1}  # seconds
GOLDEN = Path(__file__).parents[1] / "golden" / "openai_whisper.json"


def state_dict() -> dict[str, torch.Tensor]:
    """Weights under OpenAI's names; `<|endoftext|>` and timestamps are likely enough for texts to end early."""
    chance = np.random.default_rng(0)

    def normal(*shape: int, scale: float | None = None) -> torch.Tensor:
        made = chance.standard_normal(shape) * (shape[-1] ** -0.5 if scale is None else scale)
        return torch.from_numpy(made.astype(np.float32))

    made = {
        "encoder.conv1.weight": normal(WIDTH, 80, 3, scale=0.08),
        "encoder.conv1.bias": normal(WIDTH),
        "encoder.conv2.weight": normal(WIDTH, WIDTH, 3, scale=0.1),
        "encoder.conv2.bias": normal(WIDTH),
        "encoder.positional_embedding": normal(1500, WIDTH, scale=0.3),
        "decoder.token_embedding.weight": normal(VOCABULARY, WIDTH, scale=1.0),
        "decoder.positional_embedding": normal(TEXT_CONTEXT, WIDTH, scale=1.0),
    }
    for side, layers in (("encoder", 1), ("decoder", 2)):
        for layer in range(layers):
            made |= _block(f"{side}.blocks.{layer}", has_cross=side == "decoder", normal=normal)
    for norm in ("encoder.ln_post", "decoder.ln"):
        made |= {f"{norm}.weight": torch.ones(WIDTH), f"{norm}.bias": torch.zeros(WIDTH)}
    likely = normal(WIDTH)
    likely /= likely.norm()
    made["decoder.ln.bias"] = likely
    embedding = made["decoder.token_embedding.weight"]
    embedding[ENDOFTEXT] += 8.5 * likely
    return made


def _block(name: str, has_cross: bool, normal) -> dict[str, torch.Tensor]:
    made = {}
    for attention in ("attn", "cross_attn") if has_cross else ("attn",):
        for part in ("query", "key", "value", "out"):
            made[f"{name}.{attention}.{part}.weight"] = 2.0 * normal(WIDTH, WIDTH)
            if part != "key":
                made[f"{name}.{attention}.{part}.bias"] = normal(WIDTH)
        made |= {f"{name}.{attention}_ln.weight": torch.ones(WIDTH), f"{name}.{attention}_ln.bias": normal(WIDTH)}
    made |= {f"{name}.mlp_ln.weight": torch.ones(WIDTH), f"{name}.mlp_ln.bias": torch.zeros(WIDTH)}
    made |= {f"{name}.mlp.0.weight": normal(4 * WIDTH, WIDTH), f"{name}.mlp.0.bias": normal(4 * WIDTH)}
    return made | {f"{name}.mlp.2.weight": normal(WIDTH, 4 * WIDTH), f"{name}.mlp.2.bias": normal(WIDTH)}


def write_model(folder: Path) -> Path:
    """OpenAI's file beside a tokenizer; with thresholds off, so the first text of a window is taken."""
    torch.save({"dims": DIMS, "model_state_dict": state_dict()}, folder / "tiny.pt")
    (folder / "tokenizer.json").write_text(json.dumps(published_tokenizer()), encoding="utf8")
    off = dict.fromkeys(("logprob_threshold", "compression_ratio_threshold", "no_speech_threshold"))
    (folder / "generation_config.json").write_text(json.dumps(off), encoding="utf8")
    return folder / "tiny.pt"


def sound(seconds: float, seed: int) -> np.ndarray:
    """Noise whose level goes up and down, so that windows differ."""
    chance = np.random.default_rng(seed)
    samples = chance.standard_normal(int(seconds * RATE))
    level = 0.1 * (1.1 + np.sin(np.arange(len(samples)) * (2 * np.pi * (0.3 + 0.1 * seed) / RATE)))
    return (samples * level).astype(np.float32)
