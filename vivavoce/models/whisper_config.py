"""Sizes of a Whisper, from Hugging Face's `config.json` or from the `dims` of OpenAI's files."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from vivavoce.errors import CheckpointError
from vivavoce.models.config_file import read_config

CONV_STRIDE = 2  # mel frames that make one encoder position
MEL_FRAMES_PER_SECOND = 100
REQUIRED = {"activation_function": "gelu", "scale_embedding": False, "tie_word_embeddings": True}
OF_DIMS = {
    "n_mels": "num_mel_bins",
    "n_audio_ctx": "max_source_positions",
    "n_audio_state": "d_model",
    "n_audio_head": "encoder_attention_heads",
    "n_audio_layer": "encoder_layers",
    "n_vocab": "vocab_size",
    "n_text_ctx": "max_target_positions",
    "n_text_head": "decoder_attention_heads",
    "n_text_layer": "decoder_layers",
}


@dataclass(frozen=True)
class WhisperConfig:
    """Sizes as `config.json` names them; the defaults are large-v2's, which is also Breeze-ASR-25."""

    d_model: int = 1280
    encoder_layers: int = 32
    encoder_attention_heads: int = 20
    encoder_ffn_dim: int = 5120
    decoder_layers: int = 32
    decoder_attention_heads: int = 20
    decoder_ffn_dim: int = 5120
    num_mel_bins: int = 80
    max_source_positions: int = 1500
    max_target_positions: int = 448
    vocab_size: int = 51865

    def __post_init__(self) -> None:
        for side, heads in (("encoder", self.encoder_attention_heads), ("decoder", self.decoder_attention_heads)):
            if self.d_model % heads:
                raise CheckpointError(f"a Whisper of d_model {self.d_model} cannot have {heads} {side} heads")

    @property
    def window_frames(self) -> int:
        """Mel frames the encoder sees at once: 3000 (30 s) in every published size."""
        return CONV_STRIDE * self.max_source_positions

    @property
    def window_seconds(self) -> float:
        """The length of sound the encoder sees at once."""
        return self.window_frames / MEL_FRAMES_PER_SECOND

    @classmethod
    def read(cls, folder: str | Path) -> "WhisperConfig":
        """The `config.json` of a folder; an architecture that only looks like Whisper is refused."""
        file = Path(folder) / "config.json"
        values = read_config(file, "Whisper")
        if values.get("model_type", "whisper") != "whisper":
            raise CheckpointError(f"{file} is of a {values['model_type']!r} model, not of a Whisper")
        for name, wanted in REQUIRED.items():
            if values.get(name, wanted) != wanted:
                raise CheckpointError(f"{file} has {name} = {values[name]!r}; only {wanted!r} is supported")
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})

    @classmethod
    def from_dims(cls, dims: Mapping[str, int]) -> "WhisperConfig":
        """The sizes that an OpenAI file carries beside its weights."""
        try:
            named = {ours: int(dims[theirs]) for theirs, ours in OF_DIMS.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the file's dims are not those of a Whisper ({error!r})") from error
        return cls(**named, encoder_ffn_dim=4 * named["d_model"], decoder_ffn_dim=4 * named["d_model"])

    def write(self, folder: str | Path, **ids: int) -> None:
        """Write `config.json` as transformers reads it; `ids` are its special token ids."""
        fixed = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "dropout": 0.0}
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(fixed | REQUIRED | asdict(self) | ids, indent=2)
        (folder / "config.json").write_text(text + "\n", encoding="utf8")


def _size(d_model: int, layers: int, heads: int, **more: int) -> WhisperConfig:
    ffn = 4 * d_model
    sizes = {"encoder_layers": layers, "decoder_layers": layers}
    return WhisperConfig(d_model, **sizes | more, encoder_attention_heads=heads, decoder_attention_heads=heads,
                         encoder_ffn_dim=ffn, decoder_ffn_dim=ffn)  # fmt: skip


SIZES = {
    "tiny": _size(384, 4, 6),
    "base": _size(512, 6, 8),
    "small": _size(768, 12, 12),
    "medium": _size(1024, 24, 16),
    "large-v2": WhisperConfig(),
    "large-v3": WhisperConfig(num_mel_bins=128, vocab_size=51866),
    "large-v3-turbo": WhisperConfig(num_mel_bins=128, vocab_size=51866, decoder_layers=4),
}
