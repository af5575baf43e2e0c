"""The published sizes and ids of MOSS-TTS-Nano, and its `config.json`."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vivavoce.errors import CheckpointError
from vivavoce.models.config_file import read_config

MODEL_TYPE = "moss_tts_nano"
TRUNK_NAMES = {  # ours → GPT-2's, which the file nests under `gpt2_config`
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "max_positions": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rope_base",
}
OWN_NAMES = (
    "n_vq",
    "audio_vocab_size",
    "audio_pad_token_id",
    "local_transformer_layers",
    "pad_token_id",
    "im_start_token_id",
    "im_end_token_id",
    "audio_start_token_id",
    "audio_end_token_id",
    "audio_user_slot_token_id",
    "audio_assistant_slot_token_id",
)
UNSUPPORTED_OTHERWISE = {
    "activation_function": "gelu_new",
    "position_embedding_type": "rope",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}


@dataclass(frozen=True)
class MossTTSNanoConfig:
    """The published sizes and ids; `config.json` of a checkpoint overrides them."""

    vocab_size: int = 16384
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_layers: int = 12
    num_heads: int = 12
    max_positions: int = 32768
    layer_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    n_vq: int = 16
    audio_vocab_size: int = 1024
    audio_pad_token_id: int = 1024
    local_transformer_layers: int = 1
    pad_token_id: int = 3
    im_start_token_id: int = 4
    im_end_token_id: int = 5
    audio_start_token_id: int = 6
    audio_end_token_id: int = 7
    audio_user_slot_token_id: int = 8
    audio_assistant_slot_token_id: int = 9

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_heads

    @classmethod
    def read(cls, folder: str | Path) -> "MossTTSNanoConfig":
        """The configuration of a checkpoint folder."""
        file = Path(folder) / "config.json"
        given = read_config(file, "MOSS-TTS-Nano")
        kind = given.get("model_type")
        if kind != MODEL_TYPE:
            raise CheckpointError(f"{file} describes a {kind!r} model, not {MODEL_TYPE!r}")
        trunk = given.get("gpt2_config") or {}
        found: dict[str, Any] = {name: trunk.get(theirs) for name, theirs in TRUNK_NAMES.items()}
        found |= {name: given.get(name) for name in OWN_NAMES}
        absent = sorted(name for name, value in found.items() if value is None)
        if absent:
            raise CheckpointError(f"{file} lacks {', '.join(absent)}")
        config = cls(**found)
        config.check(given, trunk, file)
        return config

    def check(self, given: dict[str, Any], trunk: dict[str, Any], file: Path) -> None:
        """Refuse what this implementation would compute wrongly."""
        for name, supported in UNSUPPORTED_OTHERWISE.items():
            if trunk.get(name, supported) != supported:
                raise CheckpointError(f"{file} asks for {name} {trunk[name]!r}; only {supported!r} is supported")
        architecture = given.get("model_architecture", "global_local_transformer")
        if architecture != "global_local_transformer":
            raise CheckpointError(f"{file} asks for the architecture {architecture!r}, which is not supported")
        sizes = given.get("audio_codebook_sizes", [self.audio_vocab_size] * self.n_vq)
        if sizes != [self.audio_vocab_size] * self.n_vq or self.audio_pad_token_id < self.audio_vocab_size:
            raise CheckpointError(
                f"{file}: {self.n_vq} codebooks of {self.audio_vocab_size} codes, and a pad id beyond them, "
                f"are expected, not {sizes} and {self.audio_pad_token_id}"
            )
        if self.hidden_size % self.num_heads or self.head_dim % 2:
            raise CheckpointError(f"{file}: {self.hidden_size} is not {self.num_heads} heads of an even size")

    def write(self, folder: str | Path) -> None:
        """Write `config.json` as the published checkpoint has it."""
        values = dataclasses.asdict(self)
        content: dict[str, Any] = {"model_type": MODEL_TYPE, "model_architecture": "global_local_transformer"}
        content |= {name: values[name] for name in OWN_NAMES}
        content["gpt2_config"] = {theirs: values[name] for name, theirs in TRUNK_NAMES.items()} | UNSUPPORTED_OTHERWISE
        (Path(folder) / "config.json").write_text(json.dumps(content, indent=2), encoding="utf8")


@dataclass(frozen=True)
class NanoSampling:
    """How speech is drawn, as the published command line does it; the model's own defaults are greedy and wilder."""

    text_temperature: float = 1.0
    text_top_p: float = 1.0
    text_top_k: int = 50
    audio_temperature: float = 0.8
    audio_top_p: float = 0.95
    audio_top_k: int = 25
    audio_repetition_penalty: float = 1.2
    """Over the codes the reply itself has in a codebook: those of the reference voice do not count."""
    max_new_frames: int = 375

    def per_channel(self, codebooks: int) -> tuple[tuple[float, int, float, float], ...]:
        """(temperature, top_k, top_p, repetition penalty) of the text channel and of each codebook's."""
        text = (self.text_temperature, self.text_top_k, self.text_top_p, 1.0)
        audio = (self.audio_temperature, self.audio_top_k, self.audio_top_p, self.audio_repetition_penalty)
        return (text, *[audio] * codebooks)
