"""MOSS-TTS-Nano: text and a reference voice to sixteen codes of 48 kHz speech every 80 ms.

A row is a text id and sixteen codes. A global transformer of twelve layers reads rows; for every frame a local
transformer of one layer first predicts whether the speech continues, then generates the codes of the frame one after
another. The local transformer has an empty cache at each frame, so the state of a sequence is the keys and values of
the global one.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.checkpoint import Checkpoint, load_weights
from vivavoce.models.interface import Draw, Row
from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoConfig
from vivavoce.nn.attention import RotaryTable, attend, pair_rotation
from vivavoce.nn.linear import Embedding, Linear
from vivavoce.nn.modules import allocating
from vivavoce.nn.paged_kv import KVShape, RowBatch

TEXT = 0  # the channel of text ids; code i is in channel i + 1
Attend = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # queries, keys, values of new rows [.., head, dim] → [.., head, dim]


class NanoAttention(nn.Module):
    """QKV and output projections; `attend` is the attention over the past."""

    def __init__(self, config: MossTTSNanoConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.c_attn = Linear(config.hidden_size, 3 * config.hidden_size, bias=True)
        self.c_proj = Linear(config.hidden_size, config.hidden_size, bias=True)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """Attend each row to its past and itself.  # [.., hidden] → [.., hidden]"""
        queries, keys, values = self.c_attn(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return self.c_proj(attend(queries, keys, values).flatten(-2))


class NanoFeedForward(nn.Module):
    """`fc_out(gelu_new(fc_in(x)))`."""

    def __init__(self, config: MossTTSNanoConfig) -> None:
        super().__init__()
        self.fc_in = Linear(config.hidden_size, config.intermediate_size, bias=True)
        self.fc_out = Linear(config.intermediate_size, config.hidden_size, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """# [.., hidden] → [.., hidden]"""
        return self.fc_out(functional.gelu(self.fc_in(x), approximate="tanh"))


class NanoLayer(nn.Module):
    """A pre-norm GPT-2 layer."""

    def __init__(self, config: MossTTSNanoConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.attn = NanoAttention(config)
        self.ln_2 = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = NanoFeedForward(config)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """# [.., hidden] → [.., hidden]"""
        x = x + self.attn(self.ln_1(x), attend)
        return x + self.mlp(self.ln_2(x))


class NanoTransformer(nn.Module):
    """Layers and a final norm; the global transformer also holds the text embedding."""

    def __init__(self, config: MossTTSNanoConfig, layers: int, has_text: bool = False) -> None:
        super().__init__()
        if has_text:
            self.wte = Embedding(config.vocab_size, config.hidden_size)
        self.h = nn.ModuleList(NanoLayer(config) for _ in range(layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Tensor, attend_in_layer: Callable[[int, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Normed states; each layer attends by its index."""
        for index, layer in enumerate(self.h):
            x = layer(x, partial(attend_in_layer, index))
        return self.ln_f(x)


class CodeTables(nn.Module):
    """Embeddings of all codebooks in one tensor, tied to the output heads."""

    def __init__(self, config: MossTTSNanoConfig) -> None:
        super().__init__()
        size = (config.n_vq, config.audio_vocab_size, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def published_tensors(self) -> dict[str, Tensor]:
        """`audio_embeddings.0.weight` and so on; the tied heads are published as well, but not stored here."""
        return {f"audio_embeddings.{index}.weight": table for index, table in enumerate(self.weight)}

    def summed(self, codes: Tensor) -> Tensor:
        """The sum of a frame's embeddings; ids beyond the codebook add nothing.  # [row, codebook] → [row, hidden]"""
        codebooks, entries, _ = self.weight.shape
        is_code = codes < entries
        first = torch.arange(0, codebooks * entries, entries, device=codes.device)
        vectors = functional.embedding(torch.where(is_code, codes + first, 0), self.weight.flatten(0, 1))
        return (vectors * is_code[..., None]).sum(dim=1)

    def embed(self, codebook: int, codes: Tensor) -> Tensor:
        """Embeddings of one codebook's codes."""
        return functional.embedding(codes, self.weight[codebook])

    def logits(self, codebook: int, hidden: Tensor) -> Tensor:
        """Logits of one codebook.  # [.., hidden] → [.., code]"""
        return functional.linear(hidden, self.weight[codebook])


class LocalFrame:
    """The local transformer's keys and values within one frame."""

    def __init__(self, rotary: RotaryTable, config: MossTTSNanoConfig, sequences: int, like: Tensor) -> None:
        size = (config.local_transformer_layers, 2, sequences, config.num_heads, config.n_vq + 1, config.head_dim)
        self.keys_values = like.new_empty(size)
        self.cos, self.sin = rotary.cos[: config.n_vq + 1], rotary.sin[: config.n_vq + 1]
        self.start = self.end = 0

    def grow(self, positions: int) -> None:
        """Advance by the next positions."""
        self.start, self.end = self.end, self.end + positions

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of the new positions.  # [sequence, new, head, dim]"""
        rotate = pair_rotation(self.cos[self.start : self.end], self.sin[self.start : self.end])
        cached_keys, cached_values = self.keys_values[layer, :, :, :, : self.end]
        cached_keys[:, :, self.start :] = rotate(keys).transpose(1, 2)
        cached_values[:, :, self.start :] = values.transpose(1, 2)
        rotated = rotate(queries).transpose(1, 2)
        causal = self.start == 0  # later positions are single and attend to all
        mixed = functional.scaled_dot_product_attention(rotated, cached_keys, cached_values, is_causal=causal)
        return mixed.transpose(1, 2)


class MossTTSNano(nn.Module):
    """The language model with its generation rules; the engine runs it through `vivavoce.models.interface`."""

    def __init__(self, config: MossTTSNanoConfig, codebooks: int | None = None) -> None:
        super().__init__()
        codebooks = config.n_vq if codebooks is None else codebooks
        if not 1 <= codebooks <= config.n_vq:
            raise InputError(f"this model generates 1 to {config.n_vq} codebooks, not {codebooks}")
        self.config = config
        self.codebooks = codebooks
        self.channels = 1 + config.n_vq
        self.vocabularies: tuple[int, ...] = (config.vocab_size, *[config.audio_pad_token_id + 1] * config.n_vq)
        self.context_limit = config.max_positions
        self.kv_shape = KVShape(config.num_layers, config.num_heads, config.head_dim)
        self.transformer = NanoTransformer(config, config.num_layers, has_text=True)
        self.local_transformer = NanoTransformer(config, config.local_transformer_layers)
        self.audio_embeddings = CodeTables(config)
        self.rotary = RotaryTable(config.head_dim, config.max_positions, config.rope_theta)
        self.requires_grad_(False)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        codebooks: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> "MossTTSNano":
        """A published checkpoint. With fewer `codebooks` than it has, generation is faster and quality lower."""
        config = MossTTSNanoConfig.read(folder)
        with Checkpoint(folder) as checkpoint:
            with allocating(device, dtype):
                model = cls(config, codebooks)
            load_weights(model, without_tied_heads(checkpoint), progress=progress)
        return model.eval()

    @classmethod
    @torch.no_grad()
    def random(
        cls,
        config: MossTTSNanoConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        deviation: float = 0.02,
        codebooks: int | None = None,
    ) -> "MossTTSNano":
        """Random weights drawn on the device, for benchmarks and tests."""
        with allocating(device, dtype):
            model = cls(config, codebooks)
        generator = torch.Generator(device).manual_seed(seed)
        for name, parameter in model.named_parameters():
            is_gain = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(1.0 if is_gain else 0.0, deviation, generator=generator)
        return model.eval()

    def embed(self, rows: Tensor) -> Tensor:
        """The sum of a row's text and code embeddings.  # [row, channel] → [row, hidden]"""
        return self.transformer.wte(rows[:, TEXT]) + self.audio_embeddings.summed(rows[:, TEXT + 1 :])

    def forward(self, rows: Tensor, batch: RowBatch) -> Tensor:
        """Global states of every row.  # [row, channel] → [row, hidden]"""
        positions = batch.positions.long()
        rotate = pair_rotation(self.rotary.cos[positions], self.rotary.sin[positions])

        def attend_in_layer(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            batch.write(layer, rotate(keys), values)
            return attend(rotate(queries), layer, batch)

        hidden: Tensor = self.transformer(self.embed(rows), attend_in_layer)
        return hidden

    def next_rows(self, hidden: Tensor, draw: Draw) -> Tensor:
        """Continue or stop, then the frame's codes one after another.  # [sequence, hidden] → [sequence, channel]"""
        config = self.config
        frame = LocalFrame(self.rotary, config, hidden.shape[0], hidden)
        slot = self.transformer.wte.weight[config.audio_assistant_slot_token_id]
        # The first code's state does not depend on the stop decision, so both positions are computed in one call.
        stop_state, state = self._local(frame, torch.stack([hidden, slot.expand_as(hidden)], dim=1)).unbind(1)
        stops = draw.choose(TEXT, self._stop_logits(stop_state, draw)) == 1
        codes = [draw.sample(TEXT + 1, self.code_logits(0, state))]
        for codebook in range(1, self.codebooks):
            vector = self.audio_embeddings.embed(codebook - 1, codes[-1])
            state = self._local(frame, vector[:, None])[:, 0]
            codes.append(draw.sample(TEXT + 1 + codebook, self.code_logits(codebook, state)))
        rows = torch.full((len(hidden), self.channels), config.audio_pad_token_id, device=hidden.device)
        rows[:, TEXT + 1 : TEXT + 1 + self.codebooks] = torch.stack(codes, dim=1)
        rows = rows.masked_fill(stops[:, None], config.audio_pad_token_id)
        rows[:, TEXT] = config.audio_assistant_slot_token_id
        rows[:, TEXT].masked_fill_(stops, config.audio_end_token_id)
        return rows

    def code_logits(self, codebook: int, state: Tensor) -> Tensor:
        """Logits of one codebook.  # [sequence, hidden] → [sequence, code], float32"""
        return _float32(self.audio_embeddings.logits(codebook, state))

    def stop_logits(self, stop_state: Tensor) -> Tensor:
        """Logits of continuing (0) and stopping (1), the only two text ids allowed.  # [sequence, 2]"""
        vectors = self.transformer.wte.weight
        vectors_of_choices = [
            vectors[self.config.audio_assistant_slot_token_id],
            vectors[self.config.audio_end_token_id],
        ]
        return _float32(functional.linear(stop_state, torch.stack(vectors_of_choices)))

    def start_mode(self, last: Row) -> int:
        return 0

    def next_mode(self, mode: int, row: Row) -> int:
        return mode

    def ends(self, row: Row) -> bool:
        """Whether this is the end row, which holds no codes."""
        return row[TEXT] == self.config.audio_end_token_id

    def spoken_frames(self, rows: Iterable[Row]) -> list[tuple[int, ...]]:
        """The frames of a reply, `codebooks` codes each."""
        slot = self.config.audio_assistant_slot_token_id
        return [row[TEXT + 1 : TEXT + 1 + self.codebooks] for row in rows if row[TEXT] == slot]

    def _local(self, frame: LocalFrame, x: Tensor) -> Tensor:
        frame.grow(x.shape[1])
        states: Tensor = self.local_transformer(x, frame.attend)
        return states

    def _stop_logits(self, stop_state: Tensor, draw: Draw) -> Tensor:
        logits = self.stop_logits(stop_state)
        logits[:, 1] = logits[:, 1].masked_fill(draw.generated < draw.min_rows, float("-inf"))
        return logits


def without_tied_heads(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint without its heads, which must equal the embeddings."""
    for name in checkpoint.names():
        source = _tied_to(name)
        if source is None:
            continue
        if source not in checkpoint or not torch.equal(checkpoint.tensor(name), checkpoint.tensor(source)):
            raise CheckpointError(f"{checkpoint.source}: {name} is not {source}; only tied heads are supported")
    return checkpoint.renamed(lambda name: name if _tied_to(name) is None else None)


def _tied_to(name: str) -> str | None:
    if name == "text_lm_head.weight":
        return "transformer.wte.weight"
    return name.replace("audio_lm_heads", "audio_embeddings") if name.startswith("audio_lm_heads.") else None


def _float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
