"""MOSS-TTS-Nano as ONNX graphs and the files beside them, with the names and shapes of the published ONNX folder.

`prefill` and `decode_step` are the global transformer; the local one has three graphs: all codes of a frame at once,
one cached step, and a whole frame with sampling inside the graph.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.export.nano_onnx_codec import CODE_TOLERANCE, attend, codec_graphs, rotated_qkv
from vivavoce.export.onnx_graph import OnnxExport, StreamCheck
from vivavoce.models.moss_audio_tokenizer.config import MossAudioTokenizerConfig
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano.model import MossTTSNano, NanoLayer, NanoTransformer
from vivavoce.models.moss_tts_nano.prompt import (
    ASSISTANT_ROLE,
    BETWEEN_TURNS,
    OTHER_FIELDS,
    REFERENCE_FIELD,
    USER_END,
    USER_ROLE,
    MossTTSNanoConfig,
    NanoSampling,
)
from vivavoce.models.tokenizers import SentencePieceTokenizer
from vivavoce.tts.interface import SETTINGS_FILE, SpeechSettings

HIDDEN, TEXT_STEP, AUDIO_STEP = 0, 1, 2  # `step_type` of the cached local step


class NanoRows(nn.Module):
    """Base of the graphs: embedding, rotary angles and one layer."""

    def __init__(self, model: MossTTSNano) -> None:
        super().__init__()
        self.model = model

    def angles_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """# [batch, row] → cos and sin [batch, row, dim / 2]"""
        return self.model.rotary.cos[positions], self.model.rotary.sin[positions]

    def embed_rows(self, rows: Tensor) -> Tensor:
        """# [batch, row, channel] → [batch, row, hidden]"""
        return self.model.embed(rows.flatten(0, 1).long()).unflatten(0, rows.shape[:2])

    def layer(
        self, layer: nn.Module, x: Tensor, angles: tuple[Tensor, Tensor], visible: Tensor, past: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output of a layer for new rows, and all keys and values.  # [batch, row, head, dim]"""
        assert isinstance(layer, NanoLayer)
        queries, keys, values = rotated_qkv(layer.attn.c_attn(layer.ln_1(x)), layer.attn.heads, angles)
        if past:
            keys, values = torch.cat([past[0], keys], dim=1), torch.cat([past[1], values], dim=1)
        x = x + layer.attn.c_proj(attend(queries, keys, values, visible))
        return x + layer.mlp(layer.ln_2(x)), keys, values


class Prefill(NanoRows):
    """Prefill of a whole prompt."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """# [batch, row, channel], [batch, row] → hidden [batch, row, hidden], then keys and values of each layer"""
        mask = attention_mask.to(torch.int64)
        angles = self.angles_at((mask.cumsum(1) - 1).clamp(min=0))
        rows = torch.arange(input_ids.shape[1], device=input_ids.device)
        visible = (rows <= rows[:, None]) & (mask[:, None] > 0)
        valid = mask[..., None].float()
        x, past = self.embed_rows(input_ids) * valid, list[Tensor]()
        for layer in self.model.transformer.h:
            x, keys, values = self.layer(layer, x, angles, visible)
            x = x * valid
            past += [keys, values]
        return self.model.transformer.ln_f(x) * valid, *past


class DecodeStep(NanoRows):
    """Rows after a KV cache whose first `past_valid_lengths` rows are valid. The published graph takes one row."""

    def forward(self, input_ids: Tensor, past_valid_lengths: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """# [batch, new, channel], [batch], keys and values of each layer [batch, row, head, dim]"""
        lengths, new = past_valid_lengths.to(torch.int64)[:, None], input_ids.shape[1]
        angles = self.angles_at(lengths + torch.arange(new, device=input_ids.device))
        visible = _causal_mask(past[0].shape[1], new, lengths[..., None])
        x, extended = self.embed_rows(input_ids), list[Tensor]()
        for index, layer in enumerate(self.model.transformer.h):
            x, keys, values = self.layer(layer, x, angles, visible, past[2 * index : 2 * index + 2])
            extended += [keys, values]
        return self.model.transformer.ln_f(x), *extended


def _causal_mask(held: int, new: int, lengths: Tensor) -> Tensor:
    """Causal mask of new rows over the valid cached rows and each other.  # bool [batch, new, held + new]"""
    rows, own = torch.arange(held + new, device=lengths.device), torch.arange(new, device=lengths.device)
    return (rows < lengths) | ((rows >= held) & (rows - held <= own[:, None]))


class LocalRows(NanoRows):
    """The local transformer over the positions of one frame."""

    def local(self, x: Tensor, past: list[tuple[Tensor, ...]], position: int | Tensor) -> Tensor:
        """States of new positions; their keys and values are appended to `past`.  # [batch, position, hidden]"""
        transformer: NanoTransformer = self.model.local_transformer
        new, held = x.shape[1], past[0][0].shape[1] if past[0] else 0
        angles = self.angles_at(position + torch.arange(new, device=x.device)[None])
        visible = _causal_mask(held, new, torch.as_tensor(position, device=x.device).reshape(1, 1, 1)).expand(
            x.shape[0], -1, -1
        )
        for index, layer in enumerate(transformer.h):
            x, keys, values = self.layer(layer, x, angles, visible, past[index])
            past[index] = (keys, values)
        states: Tensor = transformer.ln_f(x)
        return states

    def empty_cache(self) -> list[tuple[Tensor, ...]]:
        """The empty KV cache of a new frame."""
        return [() for _ in self.model.local_transformer.h]

    def text_logits(self, state: Tensor) -> Tensor:
        """# [batch, hidden] → [batch, text id]"""
        return functional.linear(state, self.model.transformer.wte.weight)


class LocalDecoder(LocalRows):
    """Teacher-forced logits of a whole frame."""

    def forward(
        self, global_hidden: Tensor, text_token_id: Tensor, audio_prefix_token_ids: Tensor
    ) -> tuple[Tensor, ...]:
        """# [batch, hidden], [batch], [batch, codebook − 1] → [batch, text id], [batch, codebook, code]"""
        tables = self.model.audio_embeddings.weight
        codes = [tables[book][audio_prefix_token_ids[:, book].long()] for book in range(self.model.config.n_vq - 1)]
        vectors = torch.stack([global_hidden, self.model.transformer.wte(text_token_id.long()), *codes], dim=1)
        states = self.local(vectors, self.empty_cache(), 0)
        return self.text_logits(states[:, 0]), torch.einsum("bkh,kch->bkc", states[:, 1:], tables)


class LocalCachedStep(LocalRows):
    """One cached step; `step_type` selects the input: global state, text id or previous code."""

    def forward(
        self,
        global_hidden: Tensor,
        text_token_id: Tensor,
        audio_token_id: Tensor,
        channel_index: Tensor,
        step_type: Tensor,
        past_valid_lengths: Tensor,
        *local_past: Tensor,
    ) -> tuple[Tensor, ...]:
        """# [batch, hidden], [batch] five times, keys and values [batch, position, head, dim] of each layer"""
        tables = self.model.audio_embeddings.weight
        kind = step_type.long()[:, None]
        code = tables.flatten(0, 1)[channel_index.long() * tables.shape[1] + audio_token_id.long()]
        text = self.model.transformer.wte(text_token_id.long())
        vector = torch.where(kind == HIDDEN, global_hidden, torch.where(kind == TEXT_STEP, text, code))
        past: list[tuple[Tensor, ...]] = [
            (local_past[2 * index], local_past[2 * index + 1]) for index in range(len(local_past) // 2)
        ]
        state = self.local(vector[:, None], past, past_valid_lengths.long()[:, None])[:, 0]
        logits = torch.einsum("bh,kch->bkc", state, tables)
        return self.text_logits(state), logits, *(tensor for layer in past for tensor in layer)


class LocalFixedSampledFrame(LocalRows):
    """A whole frame sampled in the graph from given uniform numbers, with the sampling settings built in."""

    def __init__(self, model: MossTTSNano, sampling: NanoSampling) -> None:
        super().__init__(model)
        self.sampling = sampling

    def forward(
        self, global_hidden: Tensor, repetition_seen_mask: Tensor, assistant_random_u: Tensor, audio_random_u: Tensor
    ) -> tuple[Tensor, Tensor]:
        """# [1, hidden], [1, codebook, code], [1], [1, codebook] → [1, 1], [1, codebook]"""
        config, tables, past = self.model.config, self.model.audio_embeddings.weight, self.empty_cache()
        slot = self.model.transformer.wte.weight[config.audio_assistant_slot_token_id]
        first = torch.stack([global_hidden, slot.expand_as(global_hidden)], dim=1)
        stop_state, state = self.local(first, past, 0).unbind(1)
        probabilities = (self.model.stop_logits(stop_state) / self.sampling.text_temperature).softmax(-1)
        continues = (assistant_random_u <= probabilities[:, 0]).to(torch.int32)[:, None]
        codes = list[Tensor]()
        for book in range(config.n_vq):
            if book:
                state = self.local(tables[book - 1][codes[-1]][:, None], past, book + 1)[:, 0]
            logits = functional.linear(state, tables[book])
            codes.append(self.drawn(logits, repetition_seen_mask[:, book] > 0, audio_random_u[:, book]))
        return continues, torch.stack(codes, dim=1).to(torch.int32)

    def drawn(self, logits: Tensor, repeated: Tensor, uniform: Tensor) -> Tensor:
        """# [1, code], bool [1, code], [1] → [1]"""
        penalty = self.sampling.audio_repetition_penalty
        logits = torch.where(repeated, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        top_k = min(self.sampling.audio_top_k, logits.shape[-1])
        scores, ids = (logits / self.sampling.audio_temperature).topk(top_k, dim=-1)
        probabilities = scores.softmax(-1)
        kept = probabilities * (probabilities.cumsum(-1) - probabilities < self.sampling.audio_top_p)
        reached = (kept / kept.sum(-1, keepdim=True)).cumsum(-1)
        position = (reached <= uniform[:, None]).sum(-1, keepdim=True).clamp(max=top_k - 1)
        return ids.gather(-1, position)[:, 0]


def nano_graphs(folder: Path) -> Iterator[OnnxExport]:
    """The graphs of a model folder, including its codec's if it has a `codec` folder."""
    yield from lm_graphs(MossTTSNano.load(folder), SpeechSettings.read(folder).sampling)
    if (folder / "codec").is_dir():
        yield from codec_graphs(MossAudioTokenizerNano.load(folder / "codec"))


def lm_graphs(model: MossTTSNano, sampling: NanoSampling | None = None) -> Iterator[OnnxExport]:
    """The five graphs of the language model."""
    config = model.config
    heads = (config.num_heads, config.head_dim)
    noise = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, config.hidden_size, generator=noise)
    rows = torch.full((2, 7, model.channels), config.audio_pad_token_id, dtype=torch.int32)
    rows[..., 0] = torch.randint(10, config.vocab_size, (2, 7), generator=noise)
    rows[:, 2:5, 1:] = torch.randint(config.audio_vocab_size, (2, 3, config.n_vq), generator=noise).int()
    mask = torch.ones(2, 7, dtype=torch.int32)
    padded = mask.clone()
    padded[1, :3] = 0
    row_axes = {0: "batch", 1: "row"}
    presents = [f"present_{kind}_{layer}" for layer in range(config.num_layers) for kind in ("key", "value")]
    yield OnnxExport(
        "moss_tts_prefill", Prefill(model), {"input_ids": rows, "attention_mask": mask},
        {"input_ids": row_axes, "attention_mask": row_axes}, ("global_hidden", *presents),
        ({"input_ids": rows, "attention_mask": padded}, {"input_ids": rows[:1, :4], "attention_mask": mask[:1, :4]}),
    )  # fmt: skip

    def past(batch: int, length: int) -> dict[str, Tensor]:
        names = [name.replace("present", "past") for name in presents]
        return {name: torch.randn(batch, length, *heads, generator=noise) for name in names}

    def step(batch: int, new: int, length: int, valid: list[int]) -> dict[str, Tensor]:
        lengths = torch.tensor(valid, dtype=torch.int32)
        return {"input_ids": rows[:batch, 2 : 2 + new], "past_valid_lengths": lengths, **past(batch, length)}

    example = step(2, 3, 6, [6, 4])
    axes = {"input_ids": {0: "batch", 1: "new"}, "past_valid_lengths": {0: "batch"}}
    axes |= {name: {0: "batch", 1: "past"} for name in example if name.startswith("past_key") or "value" in name}
    first_call = step(1, 1, 3, [3])
    stream = StreamCheck(
        first_call,
        tuple({"input_ids": rows[:1, row : row + 1], "past_valid_lengths": first_call["past_valid_lengths"] + row}
              for row in range(1, 5)),
        {name.replace("present", "past"): name for name in presents},
    )  # fmt: skip
    yield OnnxExport(
        "moss_tts_decode_step", DecodeStep(model), example, axes, ("global_hidden", *presents),
        (step(1, 1, 9, [9]),), stream=stream,
    )  # fmt: skip
    yield from _local_graphs(model, sampling or NanoSampling(), hidden, noise)


def _local_graphs(
    model: MossTTSNano, sampling: NanoSampling, hidden: Tensor, noise: torch.Generator
) -> Iterator[OnnxExport]:
    config = model.config
    one = torch.ones(1, dtype=torch.int32)
    prefix = torch.randint(config.audio_vocab_size, (1, config.n_vq - 1), generator=noise).int()
    yield OnnxExport(
        "moss_tts_local_decoder", LocalDecoder(model),
        {"global_hidden": hidden, "text_token_id": 9 * one, "audio_prefix_token_ids": prefix}, {},
        ("text_logits", "audio_logits"),
    )  # fmt: skip

    def step(kind: int, length: int) -> dict[str, Tensor]:
        sizes = (1, length, config.num_heads, config.head_dim)
        layers = range(config.local_transformer_layers)
        names = [f"local_past_{part}_{layer}" for layer in layers for part in ("key", "value")]
        scalars = {"text_token_id": 9, "audio_token_id": 3, "channel_index": 1, "step_type": kind}
        given = {name: value * one for name, value in scalars.items()} | {"past_valid_lengths": length * one}
        return {"global_hidden": hidden, **given, **{n: torch.randn(sizes, generator=noise) for n in names}}

    example = step(AUDIO_STEP, 4)
    pasts = {name: name.replace("past", "present") for name in example if name.startswith("local_past")}
    kinds = (TEXT_STEP, AUDIO_STEP, AUDIO_STEP, AUDIO_STEP)  # after the hidden state, as in a real frame
    following = tuple(step(kind, length) for length, kind in enumerate(kinds, start=1))
    yield OnnxExport(
        "moss_tts_local_cached_step", LocalCachedStep(model), example, {name: {1: "past"} for name in pasts},
        ("text_logits", "audio_logits", *pasts.values()),
        (step(HIDDEN, 0), step(TEXT_STEP, 1), step(AUDIO_STEP, 7)),
        stream=StreamCheck(step(HIDDEN, 0), following, pasts),
    )  # fmt: skip
    repeated = (torch.rand(1, config.n_vq, config.audio_vocab_size, generator=noise) < 0.1).int()
    uniform = torch.rand(1, 1 + config.n_vq, generator=noise)
    frame = {
        "global_hidden": hidden,
        "repetition_seen_mask": repeated,
        "assistant_random_u": uniform[:, 0],
        "audio_random_u": uniform[:, 1:],
    }
    other = frame | {"global_hidden": -hidden, "audio_random_u": 1 - uniform[:, 1:]}
    yield OnnxExport(
        "moss_tts_local_fixed_sampled_frame", LocalFixedSampledFrame(model, sampling), frame, {},
        ("should_continue", "frame_token_ids"), (other,), CODE_TOLERANCE,
    )  # fmt: skip


FORMAT_VERSION = 1
MANIFEST = "browser_poc_manifest.json"
TTS_META, CODEC_META = "tts_browser_onnx_meta.json", "codec_browser_onnx_meta.json"


def write_runtime_files(folder: Path, out: Path) -> None:
    """Write the tokenizer, the settings and the manifest, which a runtime needs besides the graphs."""
    config, settings = MossTTSNanoConfig.read(folder), SpeechSettings.read(folder)
    encode = SentencePieceTokenizer.load(folder).encode
    shutil.copy(folder / "tokenizer.model", out / "tokenizer.model")
    if (folder / SETTINGS_FILE).is_file():
        shutil.copy(folder / SETTINGS_FILE, out / SETTINGS_FILE)
    manifest = {
        "format_version": FORMAT_VERSION,
        "model_files": {"tts_meta": TTS_META, "codec_meta": CODEC_META, "tokenizer_model": "tokenizer.model"},
        "tts_config": asdict(config),
        "prompt_templates": {
            "user_prompt_prefix_token_ids": [
                config.im_start_token_id, *encode(USER_ROLE), *encode(REFERENCE_FIELD)
            ],
            "user_prompt_after_reference_token_ids": encode(OTHER_FIELDS),
            "assistant_prompt_prefix_token_ids": [
                *encode(USER_END), config.im_end_token_id, *encode(BETWEEN_TURNS), config.im_start_token_id,
                *encode(ASSISTANT_ROLE),
            ],
        },
        "generation_defaults": asdict(settings.sampling) | {"do_sample": True, "sample_mode": "fixed"},
        "builtin_voices": [
            {"voice": name, "display_name": name, "group": "", "audio_file": "", "prompt_audio_codes": voice.codes}
            for name, voice in settings.voices.items()
        ],
        "text_samples": [],
    }  # fmt: skip
    codec: dict[str, Any] = {}
    if (folder / "codec" / "config.json").is_file():
        sizes = MossAudioTokenizerConfig.read(folder / "codec")
        codec = {
            "sample_rate": sizes.sample_rate, "channels": sizes.channels, "frame_samples": sizes.frame_samples,
            "num_quantizers": sizes.quantizer.num_quantizers,
            "mark": MossAudioTokenizerNano.load(folder / "codec").mark,
        }  # fmt: skip
    for name, content in ((MANIFEST, manifest), (TTS_META, {"config": asdict(config)}), (CODEC_META, codec)):
        (out / name).write_text(json.dumps(content), encoding="utf8")
