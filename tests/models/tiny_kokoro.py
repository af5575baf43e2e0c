"""A tiny Kokoro with random weights, and its folder in the published torch layout."""

import json
from pathlib import Path

import numpy as np
import torch

from vivavoce.models.kokoro.config import AlbertConfig, GeneratorConfig, KokoroConfig
from vivavoce.models.kokoro.model import Kokoro, PhonemeText
from vivavoce.nn.modules import fill_randomly

PHONEMES = '$;:,.!?—…"()“” abcdefhijklmnopqrstuvwxyzæðŋɑɔəɛɜɡɪɹʃʊʌʒʤʧˈˌːθᵊAIOQSWY'
CONFIG = KokoroConfig(
    symbols=len(PHONEMES),
    hidden=32,
    style=8,
    layers=2,
    max_duration=4,
    decoder_channels=48,
    bert=AlbertConfig(hidden=32, embedding=128, heads=4, feed_forward=48, layers=2, positions=128),
    generator=GeneratorConfig(channels=32),
)


def tiny_kokoro(seed: int = 0) -> Kokoro:
    """The model; gains of its norms are those of a trained one in size."""
    model = Kokoro(CONFIG).eval().requires_grad_(False)
    fill_randomly(model, seed)
    with torch.no_grad():
        model.decoder.generator.conv_post.weight *= 0.02
        model.predictor.F0_proj.bias += 150.0
    return model


def text(length: int, seed: int = 0, noise: int | None = 0) -> PhonemeText:
    """Random phonemes in a random voice."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, CONFIG.symbols, (length,), generator=generator).tolist()
    return PhonemeText(ids, torch.randn(2 * CONFIG.style, generator=generator), 1.0, noise)


def write_folder(model: Kokoro, folder: Path) -> Path:
    """The published torch file, with weight norm as it stores it, the config and two voices."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    convolutions = {
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Conv1d | torch.nn.ConvTranspose1d)
    }
    for name, tensor in model.state_dict().items():
        part, _, rest = name.partition(".")
        stored = parts.setdefault(part, {})
        plain = any(word in name for word in ("noise_convs", "_proj"))
        if rest.endswith(".weight") and name.removesuffix(".weight") in convolutions and not plain:
            module = f"module.{rest.removesuffix('.weight')}"
            stored[f"{module}.weight_g"] = torch.linalg.vector_norm(tensor, dim=(1, 2), keepdim=True)
            stored[f"{module}.weight_v"] = 3 * tensor
        else:
            stored[f"module.{rest}"] = tensor
    (folder / "voices").mkdir(parents=True)
    torch.save(parts, folder / "kokoro-v1_0.pth")
    sound, bert = CONFIG.generator, CONFIG.bert
    content = {
        "n_token": CONFIG.symbols, "hidden_dim": CONFIG.hidden, "style_dim": CONFIG.style, "n_layer": CONFIG.layers,
        "text_encoder_kernel_size": CONFIG.text_kernel, "max_dur": CONFIG.max_duration,
        "decoder_channels": CONFIG.decoder_channels,
        "vocab": {phoneme: number for number, phoneme in enumerate(PHONEMES)},
        "plbert": {
            "hidden_size": bert.hidden, "num_attention_heads": bert.heads, "intermediate_size": bert.feed_forward,
            "num_hidden_layers": bert.layers, "max_position_embeddings": bert.positions,
        },
        "istftnet": {
            "upsample_initial_channel": sound.channels, "upsample_rates": sound.upsample_rates,
            "upsample_kernel_sizes": sound.upsample_kernels, "resblock_kernel_sizes": sound.resblock_kernels,
            "resblock_dilation_sizes": [sound.dilations] * 3, "gen_istft_n_fft": sound.n_fft,
            "gen_istft_hop_size": sound.fft_hop,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content), encoding="utf8")
    generator = np.random.default_rng(0)
    for name in ("af_heart", "af_bella", "ef_dora"):
        generator.standard_normal((40, 2 * CONFIG.style)).astype("<f4").tofile(folder / "voices" / f"{name}.bin")
    return folder
