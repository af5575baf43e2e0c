"""MOSS-TTS-Nano's configuration, sampling defaults, prompt rows, and the split of long texts into chunks.

A prompt is a template with the reference voice and the text to say; every piece is tokenised separately, as published.
The rows before the text depend only on the voice, so their cache can be forked for every text. Long texts are cut at
punctuation, except between two letters or digits (3.14, 12:30). This module loads without torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vivavoce.errors import CheckpointError, InputError
from vivavoce.models import read_config

if TYPE_CHECKING:
    from vivavoce.models.interface import Row


MODEL_TYPE = "moss_tts_nano"
TRUNK_KEYS = {  # field → GPT-2's key, nested under `gpt2_config`
    "vocab_size": "vocab_size",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "max_positions": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rope_base",
}
OWN_KEYS = (
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
SUPPORTED_TRUNK = {
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
    def read(cls, folder: str | Path) -> MossTTSNanoConfig:
        """The configuration of a checkpoint folder."""
        file = Path(folder) / "config.json"
        values = read_config(file, "MOSS-TTS-Nano")
        kind = values.get("model_type")
        if kind != MODEL_TYPE:
            raise CheckpointError(f"{file} describes a {kind!r} model, not {MODEL_TYPE!r}")
        trunk = values.get("gpt2_config") or {}
        fields: dict[str, Any] = {name: trunk.get(theirs) for name, theirs in TRUNK_KEYS.items()}
        fields |= {name: values.get(name) for name in OWN_KEYS}
        absent = sorted(name for name, value in fields.items() if value is None)
        if absent:
            raise CheckpointError(f"{file} lacks {', '.join(absent)}")
        config = cls(**fields)
        config.check(values, trunk, file)
        return config

    def check(self, values: dict[str, Any], trunk: dict[str, Any], file: Path) -> None:
        """Raise `CheckpointError` for variants that this implementation does not support."""
        for name, supported in SUPPORTED_TRUNK.items():
            if trunk.get(name, supported) != supported:
                raise CheckpointError(f"{file} has {name} {trunk[name]!r}; only {supported!r} is supported")
        architecture = values.get("model_architecture", "global_local_transformer")
        if architecture != "global_local_transformer":
            raise CheckpointError(f"{file} has the architecture {architecture!r}, which is not supported")
        sizes = values.get("audio_codebook_sizes", [self.audio_vocab_size] * self.n_vq)
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
        content |= {name: values[name] for name in OWN_KEYS}
        content["gpt2_config"] = {theirs: values[name] for name, theirs in TRUNK_KEYS.items()} | SUPPORTED_TRUNK
        (Path(folder) / "config.json").write_text(json.dumps(content, indent=2), encoding="utf8")


@dataclass(frozen=True)
class NanoSampling:
    """Sampling parameters of the published command line; the defaults in the model's code differ."""

    text_temperature: float = 1.0
    text_top_p: float = 1.0
    text_top_k: int = 50
    audio_temperature: float = 0.8
    audio_top_p: float = 0.95
    audio_top_k: int = 25
    audio_repetition_penalty: float = 1.2
    """Counts the codes of the reply in the same codebook, not those of the reference voice."""
    max_new_frames: int = 375

    def per_channel(self, codebooks: int) -> tuple[tuple[float, int, float, float], ...]:
        """(temperature, top_k, top_p, repetition penalty) of the text channel and of each codebook's."""
        text = (self.text_temperature, self.text_top_k, self.text_top_p, 1.0)
        audio = (self.audio_temperature, self.audio_top_k, self.audio_top_p, self.audio_repetition_penalty)
        return (text, *[audio] * codebooks)


USER_ROLE = "user\n"
REFERENCE_FIELD = "<user_inst>\n- Reference(s):\n"
NO_REFERENCE = "None"
OTHER_FIELDS = (
    "\n- Instruction:\nNone\n- Tokens:\nNone\n- Quality:\nNone\n- Sound Event:\nNone\n"
    "- Ambient Sound:\nNone\n- Language:\nNone\n- Text:\n"
)
USER_END = "\n</user_inst>"
BETWEEN_TURNS = "\n"
ASSISTANT_ROLE = "assistant\n"
Frames = Sequence[Sequence[int]]  # [frame, codebook]


class NanoTokenizerProtocol(Protocol):
    """Text to ids; `symbols`: whether the model's special symbols are recognised in the text."""

    def encode(self, text: str, symbols: bool = True) -> list[int]:
        """The ids of a text."""
        ...


class MossTTSNanoPrompt:
    """Builds rows: `voice` then `speech` for a cloned voice, `continuation` for the default voice or a prompt's."""

    def __init__(self, config: MossTTSNanoConfig, tokenizer: NanoTokenizerProtocol) -> None:
        self.config = config
        self.tokenizer = tokenizer

    def count_tokens(self, text: str) -> int:
        """Rows of a text."""
        return len(self.tokenizer.encode(text, symbols=False))

    def voice(self, reference: Frames) -> list[Row]:
        """The rows before the text for a reference voice, independent of the text."""
        config = self.config
        if len(reference) == 0:
            raise InputError("the reference voice has no frames; give at least a second of speech")
        return [
            *self._head(),
            self._text_row(config.audio_start_token_id),
            *self._frames(config.audio_user_slot_token_id, reference),
            self._text_row(config.audio_end_token_id),
            *self._template(OTHER_FIELDS),
        ]

    def before_text(self, reference: Frames) -> list[Row]:
        """The rows before any text in a voice; without a reference, in the model's default voice."""
        if len(reference):
            return self.voice(reference)
        rows = self.continuation("a")
        return rows[: len(rows) - len(self.speech("a"))]

    def speech(self, text: str) -> list[Row]:
        """The text and the head of the reply, after which the codes follow."""
        config = self.config
        ids = self.tokenizer.encode(text, symbols=False)  # with symbols, a text could end the turn
        if not ids:
            raise InputError("there is no text to say; give at least one letter")
        return [
            *(self._text_row(token) for token in ids),
            *self._template(USER_END),
            self._text_row(config.im_end_token_id),
            *self._template(BETWEEN_TURNS),
            self._text_row(config.im_start_token_id),
            *self._template(ASSISTANT_ROLE),
            self._text_row(config.audio_start_token_id),
        ]

    def clone(self, text: str, reference: Frames) -> list[Row]:
        """The whole prompt to say a text in the voice of a reference."""
        return self.voice(reference) + self.speech(text)

    def continuation(self, text: str, prompt_text: str = "", prompt: Frames = ()) -> list[Row]:
        """The whole prompt to say a text without a reference, or to continue speech whose text is known."""
        if bool(prompt_text.strip()) != (len(prompt) > 0):
            raise InputError("a prompt to continue needs both its text and its codes, or neither")
        if not text.strip():
            raise InputError("there is no text to say; give at least one letter")
        head = [*self._head(), *self._template(NO_REFERENCE), *self._template(OTHER_FIELDS)]
        return head + self.speech(prompt_text + text) + self.spoken(prompt)

    def spoken(self, frames: Frames) -> list[Row]:
        """Frames that start the reply; the model continues them."""
        return self._frames(self.config.audio_assistant_slot_token_id, frames)

    def _head(self) -> list[Row]:
        return [
            self._text_row(self.config.im_start_token_id),
            *self._template(USER_ROLE),
            *self._template(REFERENCE_FIELD),
        ]

    def _template(self, text: str) -> list[Row]:
        return [self._text_row(token) for token in self.tokenizer.encode(text)]

    def _text_row(self, token: int) -> Row:
        """A row without codes."""
        return (token, *[self.config.audio_pad_token_id] * self.config.n_vq)

    def _frames(self, slot: int, frames: Frames) -> list[Row]:
        """Rows of speech; missing codebooks are padded."""
        codebooks, entries = self.config.n_vq, self.config.audio_vocab_size
        rows: list[Row] = []
        for frame in frames:
            codes = [int(code) for code in frame]
            if not 1 <= len(codes) <= codebooks:
                raise InputError(f"a frame has 1 to {codebooks} codes, not {len(codes)}")
            invalid = next((code for code in codes if not 0 <= code < entries), None)
            if invalid is not None:
                raise InputError(f"speech code {invalid} is not in 0…{entries - 1}")
            rows.append((slot, *codes, *[self.config.audio_pad_token_id] * (codebooks - len(codes))))
        return rows


SENTENCE_ENDS = frozenset(".!?。！？；;")
CLAUSE_ENDS = frozenset(",，、；;：:")
CLOSERS = frozenset("\"'”’)]}）】》」』")
LOOK_BACK = 25  # characters before a forced cut in which a boundary is searched
MAX_CHUNK_TOKENS = 75
MAX_TEXT_CHARACTERS = 100_000  # characters; hours of speech


@dataclass(frozen=True)
class Chunk:
    """A part of a text that is synthesised in one piece, and the pause after it in seconds."""

    text: str
    pause: float


def chunks(text: str, count_tokens: Callable[[str], int], max_tokens: int = MAX_CHUNK_TOKENS) -> list[Chunk]:
    """A text in parts of at most `max_tokens` tokens, cut at sentences, else at clauses, else anywhere.

    `max_tokens` ≤ 0 leaves the text whole.
    """
    text = text.strip()
    if not text:
        raise InputError("there is no text to say; give at least one letter")
    if len(text) > MAX_TEXT_CHARACTERS:
        raise InputError(f"the text has {len(text)} characters; give at most {MAX_TEXT_CHARACTERS} at a time")
    parts = (
        list(_joined(_fitting_parts(_prepared(text), count_tokens, max_tokens), count_tokens, max_tokens))
        if max_tokens > 0
        else []
    )
    if len(parts) <= 1:
        return [Chunk(text, 0.0)]
    return [Chunk(part, _pause(part)) for part in parts[:-1]] + [Chunk(parts[-1], 0.0)]


def _pause(text: str) -> float:
    """The official pause after a chunk: longer after a short one."""
    return 0.40 if len(text.split()) <= 4 else 0.24


def _prepared(text: str) -> str:
    """The text on one line, with an initial capital and a final full stop, as it is cut."""
    text = " ".join(text.split())
    if has_cjk(text):
        return text if text[-1] in SENTENCE_ENDS else text + "。"
    text = text[0].upper() + text[1:]
    return text + "." if text[-1].isalnum() else text


def _fitting_parts(text: str, count_tokens: Callable[[str], int], max_tokens: int) -> Iterator[str]:
    """Sentences, clauses or pieces within the budget."""
    for sentence in _cut_after(text, SENTENCE_ENDS):
        if count_tokens(sentence) <= max_tokens:
            yield sentence
            continue
        for clause in _cut_after(sentence, CLAUSE_ENDS):
            yield from _pieces(clause, count_tokens, max_tokens)


def _cut_after(text: str, marks: frozenset[str]) -> Iterator[str]:
    """The text cut after marks, quotes that close there included."""
    start = index = 0
    while index < len(text):
        index += 1
        if text[index - 1] not in marks or _is_inside_word(text, index - 1):
            continue
        while index < len(text) and text[index] in CLOSERS:
            index += 1
        if part := text[start:index].strip():
            yield part
        start = index
    if part := text[start:].strip():
        yield part


def _is_inside_word(text: str, index: int) -> bool:
    """Whether an ASCII mark is between letters or digits of a script with spaces."""
    around = text[index - 1 : index] + text[index + 1 : index + 2]
    return text[index].isascii() and len(around) == 2 and around.isalnum() and not has_cjk(around)


def _pieces(text: str, count_tokens: Callable[[str], int], max_tokens: int) -> Iterator[str]:
    """A text cut to the budget, at punctuation or a space within the last `LOOK_BACK` characters if there is one."""
    while text:
        end = _max_prefix_within(text, count_tokens, max_tokens)
        if end < len(text):
            back = next((at for at in range(end, max(0, end - LOOK_BACK), -1) if _is_boundary(text[at - 1])), None)
            end = back or end
        if piece := text[:end].strip():
            yield piece
        text = text[end:].strip()


def _max_prefix_within(text: str, count_tokens: Callable[[str], int], max_tokens: int) -> int:
    """The length of the longest prefix within the budget, at least one character."""
    fits, too_long = 1, max(2, max_tokens)
    while too_long <= len(text) and count_tokens(text[:too_long]) <= max_tokens:
        fits, too_long = too_long, 2 * too_long
    if too_long > len(text):
        if count_tokens(text) <= max_tokens:
            return len(text)
        too_long = len(text)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if count_tokens(text[:middle]) <= max_tokens:
            fits = middle
        else:
            too_long = middle
    return fits


def _is_boundary(character: str) -> bool:
    return character == " " or character in SENTENCE_ENDS or character in CLAUSE_ENDS


def _joined(parts: Iterator[str], count_tokens: Callable[[str], int], max_tokens: int) -> Iterator[str]:
    """Neighbours joined while they stay within the budget."""
    current, current_tokens = "", 0
    for part in parts:
        tokens = count_tokens(part)
        joined = current + part if has_cjk(current + part) or not current else f"{current} {part}"
        if current and (current_tokens + tokens > max_tokens or count_tokens(joined) > max_tokens):
            yield current
            current, current_tokens = part, tokens
        else:
            current, current_tokens = joined, count_tokens(joined)
    if current:
        yield current


def has_cjk(text: str) -> bool:
    """Whether there are Han characters, kana or hangul in a text."""
    return any(
        "\u4e00" <= each <= "\u9fff"
        or "\u3400" <= each <= "\u4dbf"
        or "\u3040" <= each <= "\u30ff"
        or "\uac00" <= each <= "\ud7af"
        for each in text
    )
