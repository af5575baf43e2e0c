"""MOSS-Speech: one language model over both text and speech codes (arXiv 2510.00499).

A row has two channels, a text id and an audio code, of which one is used: where the text id is `modality_pad`, the row
is speech. 32 shared layers feed two tails of 4 layers, one with a text head and one with an audio head. Both tails run
on every row, because each has its own keys and values.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vivavoce.errors import CheckpointError
from vivavoce.models import read_config
from vivavoce.models.checkpoint import Checkpoint, load_weights
from vivavoce.models.interface import Draw, Row
from vivavoce.nn.attention import PagedAttention, RotaryTable
from vivavoce.nn.decoder import DecoderLayer
from vivavoce.nn.linear import Embedding, Linear, RMSNorm
from vivavoce.nn.modules import allocating, fill_randomly
from vivavoce.nn.paged_kv import KVShape, RowBatch
from vivavoce.nn.quantised import project

TEXT, AUDIO = 0, 1  # channels of a row, and the modes a reply can be in


@dataclass(frozen=True)
class MossSpeechConfig:
    """The published sizes and ids; `config.json` of a checkpoint overrides them."""

    vocab_size: int = 151680
    audio_vocab_size: int = 16512
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_shared_layers: int = 32
    num_modality_layers: int = 4
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 40960
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    modality_pad_token_id: int = 151667
    sosp_token_id: int = 151646
    eosp_token_id: int = 16384
    audio_pad_token_id: int = 512
    eos_token_id: int = 151645
    pad_token_id: int = 151643

    @classmethod
    def read(cls, folder: str | Path) -> "MossSpeechConfig":
        """The configuration of a checkpoint folder."""
        file = Path(folder) / "config.json"
        values = read_config(file, "MOSS-Speech")
        if values.get("model_type") != "moss_speech":
            raise CheckpointError(f"{file} describes a {values.get('model_type')!r} model, not 'moss_speech'")
        # The class default of rope_theta upstream is 10000, so a checkpoint that leaves it out would be misread.
        values.setdefault("rope_theta", (values.get("rope_parameters") or {}).get("rope_theta"))
        fields = {field.name for field in dataclasses.fields(cls)}
        absent = sorted(name for name in fields if values.get(name) is None)
        if absent:
            raise CheckpointError(f"{file} lacks {', '.join(absent)}")
        config = cls(**{name: values[name] for name in fields})
        config.check(values, file)
        return config

    def check(self, values: dict[str, Any], file: Path) -> None:
        """Raise `CheckpointError` for variants that this implementation does not support."""
        depth = values.get("num_hidden_layers", self.num_shared_layers + self.num_modality_layers)
        if depth != self.num_shared_layers + self.num_modality_layers:
            raise CheckpointError(f"{file}: num_hidden_layers {depth} is not shared + modality layers")
        unsupported = [name for name in ("rope_scaling", "attention_bias", "use_sliding_window") if values.get(name)]
        if values.get("tie_word_embeddings") or unsupported:
            raise CheckpointError(f"{file} has {', '.join(unsupported) or 'tied embeddings'}, which is not supported")

    def write(self, folder: str | Path) -> None:
        """Write `config.json` as the published checkpoints have it."""
        content = {"model_type": "moss_speech", "num_hidden_layers": self.num_shared_layers + self.num_modality_layers}
        content |= dataclasses.asdict(self) | {"tie_word_embeddings": False, "channels": 2}
        (Path(folder) / "config.json").write_text(json.dumps(content, indent=2), encoding="utf8")


class LayerGroup(nn.Module):
    """Consecutive decoder layers; `first` is the KV-cache index of the first one."""

    def __init__(self, config: MossSpeechConfig, layers: int, first: int) -> None:
        super().__init__()
        self.first = first
        self.layers = nn.ModuleList(_layer(config) for _ in range(layers))

    def forward(
        self, x: Tensor, residual: Tensor | None, rotary: RotaryTable, batch: RowBatch
    ) -> tuple[Tensor, Tensor | None]:
        """The last layer's output before its residual add, and the residual stream."""
        for index, layer in enumerate(self.layers, start=self.first):
            x, residual = layer(x, residual, rotary, index, batch)
        return x, residual

    def store_kv(self, x: Tensor, residual: Tensor | None, rotary: RotaryTable, batch: RowBatch) -> None:
        """Write the rows' keys and values of all layers, without computing the last layer's output."""
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers[:last], start=self.first):
            x, residual = layer(x, residual, rotary, index, batch)
        final: DecoderLayer = self.layers[last]  # type: ignore[assignment]
        final.store_kv(x, residual, rotary, self.first + last, batch)


def _layer(config: MossSpeechConfig) -> DecoderLayer:
    attention = PagedAttention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rms_norm_eps,
    )
    return DecoderLayer(attention, config.hidden_size, config.intermediate_size, config.rms_norm_eps)


class Trunk(nn.Module):
    """Embeddings, shared layers and both modality tails, without the heads."""

    def __init__(self, config: MossSpeechConfig) -> None:
        super().__init__()
        shared, tail = config.num_shared_layers, config.num_modality_layers
        self.modality_pad = config.modality_pad_token_id
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.audio_embed = Embedding(config.audio_vocab_size, config.hidden_size)
        self.shared_block = LayerGroup(config, shared, first=0)
        self.text_block = LayerGroup(config, tail, first=shared)
        self.audio_block = LayerGroup(config, tail, first=shared + tail)
        self.text_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.audio_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryTable(config.head_dim, config.max_position_embeddings, config.rope_theta)

    def embed(self, rows: Tensor) -> Tensor:
        """One embedding a row, chosen by its text id: a select, not a sum.  # [row, 2] → [row, hidden]"""
        text, audio = rows[:, TEXT], rows[:, AUDIO]
        is_audio = (text == self.modality_pad)[:, None]
        return torch.where(is_audio, self.audio_embed(audio), self.embed_tokens(text))

    def forward(self, rows: Tensor, batch: RowBatch) -> Tensor:
        """Both tails' normed states of every row.  # [row, 2] → [row, 2, hidden]"""
        x, residual = self.shared_block(self.embed(rows), None, self.rotary, batch)
        audio, audio_residual = self.audio_block(x, residual, self.rotary, batch)
        audio, _ = self.audio_norm.add(audio, audio_residual)
        if batch.shared_mode == AUDIO:
            self.text_block.store_kv(x, residual, self.rotary, batch)
            return audio[:, None].expand(-1, 2, -1)  # the text states are not read
        text, text_residual = self.text_block(x, residual, self.rotary, batch)
        text, _ = self.text_norm.add(text, text_residual)
        return torch.stack([text, audio], dim=1)


class MossSpeech(nn.Module):
    """The language model with its generation rules; the engine runs it through `vivavoce.models.interface`."""

    channels = 2
    lone_modes = (AUDIO,)  # a batch that is all audio skips the text head and the last text layer
    takes_fp8_cache = True
    captures_prefill = True

    def __init__(self, config: MossSpeechConfig) -> None:
        super().__init__()
        self.config = config
        self.vocabularies: tuple[int, ...] = (config.vocab_size, config.audio_vocab_size)
        self.context_limit = config.max_position_embeddings
        layers = config.num_shared_layers + 2 * config.num_modality_layers
        self.kv_shape = KVShape(layers, config.num_key_value_heads, config.head_dim)
        self.model = Trunk(config)
        self.text_lm_head = Linear(config.hidden_size, config.vocab_size)
        self.audio_lm_head = Linear(config.hidden_size, config.audio_vocab_size)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        progress: Callable[[int, int], None] | None = None,
    ) -> "MossSpeech":
        """A published checkpoint, memory-mapped and copied tensor by tensor onto the device."""
        config = MossSpeechConfig.read(folder)
        with Checkpoint(folder) as checkpoint:
            with allocating(device, dtype):
                model = cls(config)
            load_weights(model, checkpoint, progress=progress)
        return model.eval()

    @classmethod
    def random(
        cls,
        config: MossSpeechConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        deviation: float = 0.02,
    ) -> "MossSpeech":
        """Random weights drawn on the device, for benchmarks and tests."""
        with allocating(device, dtype):
            model = cls(config)
        fill_randomly(model, seed, deviation)
        return model.eval()

    def forward(self, rows: Tensor, batch: RowBatch) -> Tensor:
        """Both tails' states of every row.  # [row, 2] → [row, 2, hidden]"""
        hidden: Tensor = self.model(rows, batch)
        return hidden

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of both heads.  # [sequence, 2, hidden] → [sequence, vocabulary] twice, float32"""
        return self._head_logits(hidden, TEXT), self._head_logits(hidden, AUDIO)

    def _head_logits(self, hidden: Tensor, channel: int) -> Tensor:
        head = self.text_lm_head if channel == TEXT else self.audio_lm_head
        logits = project(head, hidden[:, channel])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def next_rows(self, hidden: Tensor, draw: Draw) -> Tensor:
        """Sample both channels; in audio mode the text id is `modality_pad`.  # [sequence, 2]"""
        pad = self.config.modality_pad_token_id
        audio = self._audio(hidden, draw)
        if draw.shared_mode == AUDIO:
            return torch.stack([torch.full_like(audio, pad), audio], dim=1)
        text = draw.sample(TEXT, self._head_logits(hidden, TEXT))
        # In text mode the audio sample is not embedded, but it stays in the row: the repetition penalty counts it.
        return torch.stack([torch.where(draw.modes == AUDIO, pad, text), audio], dim=1)

    def _audio(self, hidden: Tensor, draw: Draw) -> Tensor:
        end = self.config.eosp_token_id
        logits = self._head_logits(hidden, AUDIO)[:, : end + 1]
        logits[:, end].masked_fill_(draw.generated < draw.min_rows, float("-inf"))
        return draw.sample(AUDIO, logits)

    def start_mode(self, last: Row) -> int:
        """Audio if the prompt ends inside speech or with start-of-speech, else text."""
        in_speech = last[TEXT] == self.config.modality_pad_token_id and last[AUDIO] != self.config.audio_pad_token_id
        return self.next_mode(AUDIO if in_speech else TEXT, last)

    def next_mode(self, mode: int, row: Row) -> int:
        """Start-of-speech switches to audio, end-of-speech back to text; tested in this order, as published."""
        if mode == TEXT and row[TEXT] == self.config.sosp_token_id:
            mode = AUDIO
        if mode == AUDIO and row[AUDIO] == self.config.eosp_token_id:
            mode = TEXT
        return mode

    def next_modes(self, modes: Tensor, rows: Tensor) -> Tensor:
        """`next_mode` of a batch on the device.  # [sequence], [sequence, 2] → [sequence]"""
        starts = rows[:, TEXT] == self.config.sosp_token_id
        ends = rows[:, AUDIO] == self.config.eosp_token_id
        is_speech = (modes == AUDIO) | ((modes == TEXT) & starts)
        return torch.where(is_speech & ~ends, AUDIO, torch.where(is_speech, TEXT, modes))

    def ends(self, row: Row) -> bool:
        """Whether the text channel has `<|im_end|>` or `<|endoftext|>`."""
        return row[TEXT] in (self.config.eos_token_id, self.config.pad_token_id)

    def spoken_codes(self, rows: Iterable[Row]) -> list[int]:
        """The codes of the first speech segment of a reply, without end-of-speech."""
        codes: list[int] = []
        for row in rows:
            if row[TEXT] == self.config.modality_pad_token_id:
                if row[AUDIO] == self.config.eosp_token_id:
                    break
                codes.append(row[AUDIO])
        return codes

    def written_ids(self, rows: Iterable[Row]) -> list[int]:
        """The text ids of a reply."""
        return [row[TEXT] for row in rows if row[TEXT] != self.config.modality_pad_token_id]
