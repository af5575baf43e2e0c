"""MOSS-TTS-Nano's prompt as rows: a template, the reference voice inside it, and the text to say.

Every piece of the template is tokenised by itself, as published. What stands before the text depends on the voice
alone, so its rows can be computed once and forked for every text.
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
    def read(cls, folder: str | Path) -> MossTTSNanoConfig:
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
    """Text to ids; `symbols` says whether what reads like a symbol of the model's own is one."""

    def encode(self, text: str, symbols: bool = True) -> list[int]:
        """The ids of a text."""
        ...


class MossTTSNanoPrompt:
    """Builds rows: `voice` then `speech` for a cloned voice, `continuation` for the model's own or a prompt's."""

    def __init__(self, config: MossTTSNanoConfig, tokenizer: NanoTokenizerProtocol) -> None:
        self.config = config
        self.tokenizer = tokenizer

    def count_tokens(self, text: str) -> int:
        """How many rows a text to say takes."""
        return len(self.tokenizer.encode(text, symbols=False))

    def voice(self, reference: Frames) -> list[Row]:
        """What stands before the text for a reference voice: the same rows for every text."""
        config = self.config
        if len(reference) == 0:
            raise InputError("the reference voice has no frames; give at least a second of speech")
        return [
            *self._head(),
            self._sign(config.audio_start_token_id),
            *self._frames(config.audio_user_slot_token_id, reference),
            self._sign(config.audio_end_token_id),
            *self._template(OTHER_FIELDS),
        ]

    def before_text(self, reference: Frames) -> list[Row]:
        """What stands before every text in a voice; without a reference, in the model's own."""
        if len(reference):
            return self.voice(reference)
        rows = self.continuation("a")
        return rows[: len(rows) - len(self.speech("a"))]

    def speech(self, text: str) -> list[Row]:
        """The text to say and the head of the reply, after which speech begins."""
        config = self.config
        ids = self.tokenizer.encode(text, symbols=False)  # or a text could end its own turn
        if not ids:
            raise InputError("there is no text to say; give at least one letter")
        return [
            *(self._sign(token) for token in ids),
            *self._template(USER_END),
            self._sign(config.im_end_token_id),
            *self._template(BETWEEN_TURNS),
            self._sign(config.im_start_token_id),
            *self._template(ASSISTANT_ROLE),
            self._sign(config.audio_start_token_id),
        ]

    def clone(self, text: str, reference: Frames) -> list[Row]:
        """The whole prompt to say a text in the voice of a reference."""
        return self.voice(reference) + self.speech(text)

    def continuation(self, text: str, prompt_text: str = "", prompt: Frames = ()) -> list[Row]:
        """The whole prompt to say a text without a reference, or to go on from speech whose text is known."""
        if bool(prompt_text.strip()) != (len(prompt) > 0):
            raise InputError("a prompt to continue needs both its text and its codes, or neither")
        if not text.strip():
            raise InputError("there is no text to say; give at least one letter")
        head = [*self._head(), *self._template(NO_REFERENCE), *self._template(OTHER_FIELDS)]
        return head + self.speech(prompt_text + text) + self.said(prompt)

    def said(self, frames: Frames) -> list[Row]:
        """Frames as if the model had just said them: they stand behind the text, and speech goes on from them."""
        return self._frames(self.config.audio_assistant_slot_token_id, frames)

    def _head(self) -> list[Row]:
        return [
            self._sign(self.config.im_start_token_id),
            *self._template(USER_ROLE),
            *self._template(REFERENCE_FIELD),
        ]

    def _template(self, text: str) -> list[Row]:
        return [self._sign(token) for token in self.tokenizer.encode(text)]

    def _sign(self, token: int) -> Row:
        """A row without sound."""
        return (token, *[self.config.audio_pad_token_id] * self.config.n_vq)

    def _frames(self, slot: int, frames: Frames) -> list[Row]:
        """Rows of speech; codebooks that were left out stay empty."""
        most, entries = self.config.n_vq, self.config.audio_vocab_size
        rows: list[Row] = []
        for frame in frames:
            codes = [int(code) for code in frame]
            if not 1 <= len(codes) <= most:
                raise InputError(f"a frame has 1 to {most} codes, not {len(codes)}")
            wrong = next((code for code in codes if not 0 <= code < entries), None)
            if wrong is not None:
                raise InputError(f"speech code {wrong} is not in 0…{entries - 1}")
            rows.append((slot, *codes, *[self.config.audio_pad_token_id] * (most - len(codes))))
        return rows


SENTENCE_ENDS = frozenset(".!?。！？；;")
CLAUSE_ENDS = frozenset(",，、；;：:")
CLOSERS = frozenset("\"'”’)]}）】》」』")
LOOK_BACK = 25  # characters in which a forced cut looks for a better place
MAX_CHUNK_TOKENS = 75
LONGEST_TEXT = 100_000  # characters; hours of speech


@dataclass(frozen=True)
class Chunk:
    """A part of a text that is said at once, and the silence after it in seconds."""

    text: str
    pause: float


def chunks(text: str, count_tokens: Callable[[str], int], most: int = MAX_CHUNK_TOKENS) -> list[Chunk]:
    """A text in parts of at most `most` tokens, cut at sentences, else at clauses, else where it must be.

    `most` 0 or less leaves the text whole.
    """
    text = text.strip()
    if not text:
        raise InputError("there is no text to say; give at least one letter")
    if len(text) > LONGEST_TEXT:
        raise InputError(f"the text has {len(text)} characters; give at most {LONGEST_TEXT} at a time")
    parts = list(_packed(_sayable(_prepared(text), count_tokens, most), count_tokens, most)) if most > 0 else []
    if len(parts) <= 1:
        return [Chunk(text, 0.0)]
    return [Chunk(part, _pause(part)) for part in parts[:-1]] + [Chunk(parts[-1], 0.0)]


def _pause(text: str) -> float:
    """Upstream's pause after a chunk: longer after a short one."""
    return 0.40 if len(text.split()) <= 4 else 0.24


def _prepared(text: str) -> str:
    """A text that will be cut: on one line, with a capital and a full stop."""
    text = " ".join(text.split())
    if has_cjk(text):
        return text if text[-1] in SENTENCE_ENDS else text + "。"
    text = text[0].upper() + text[1:]
    return text + "." if text[-1].isalnum() else text


def _sayable(text: str, count_tokens: Callable[[str], int], most: int) -> Iterator[str]:
    """Sentences, clauses or pieces within the budget."""
    for sentence in _cut_after(text, SENTENCE_ENDS):
        if count_tokens(sentence) <= most:
            yield sentence
            continue
        for clause in _cut_after(sentence, CLAUSE_ENDS):
            yield from _pieces(clause, count_tokens, most)


def _cut_after(text: str, marks: frozenset[str]) -> Iterator[str]:
    """The text cut after marks, quotes that close there included."""
    start = place = 0
    while place < len(text):
        place += 1
        if text[place - 1] not in marks or _is_inside_word(text, place - 1):
            continue
        while place < len(text) and text[place] in CLOSERS:
            place += 1
        if part := text[start:place].strip():
            yield part
        start = place
    if part := text[start:].strip():
        yield part


def _is_inside_word(text: str, place: int) -> bool:
    """Whether an ASCII mark has letters or digits of a spaced script at both sides."""
    around = text[place - 1 : place] + text[place + 1 : place + 2]
    return text[place].isascii() and len(around) == 2 and around.isalnum() and not has_cjk(around)


def _pieces(text: str, count_tokens: Callable[[str], int], most: int) -> Iterator[str]:
    """A text cut by force, at a mark or a space where one is near."""
    while text:
        end = _longest_within(text, count_tokens, most)
        if end < len(text):
            back = next((at for at in range(end, max(0, end - LOOK_BACK), -1) if _is_boundary(text[at - 1])), None)
            end = back or end
        if piece := text[:end].strip():
            yield piece
        text = text[end:].strip()


def _longest_within(text: str, count_tokens: Callable[[str], int], most: int) -> int:
    """The most characters from the start that stay within the budget, at least one."""
    fits, too_long = 1, max(2, most)
    while too_long <= len(text) and count_tokens(text[:too_long]) <= most:
        fits, too_long = too_long, 2 * too_long
    if too_long > len(text):
        if count_tokens(text) <= most:
            return len(text)
        too_long = len(text)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if count_tokens(text[:middle]) <= most:
            fits = middle
        else:
            too_long = middle
    return fits


def _is_boundary(character: str) -> bool:
    return character == " " or character in SENTENCE_ENDS or character in CLAUSE_ENDS


def _packed(parts: Iterator[str], count_tokens: Callable[[str], int], most: int) -> Iterator[str]:
    """Neighbours joined while they stay within the budget."""
    current, held = "", 0
    for part in parts:
        tokens = count_tokens(part)
        joined = current + part if has_cjk(current + part) or not current else f"{current} {part}"
        if current and (held + tokens > most or count_tokens(joined) > most):
            yield current
            current, held = part, tokens
        else:
            current, held = joined, count_tokens(joined)
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
