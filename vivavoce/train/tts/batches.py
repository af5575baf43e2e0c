"""Batches for mini-tts: audio crops for the codec, coded sentences as prompts for the LM, and its tokenizer."""

import struct
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vivavoce.errors import InputError
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano.prompt import (
    ASSISTANT_ROLE,
    NO_REFERENCE,
    OTHER_FIELDS,
    REFERENCE_FIELD,
    USER_END,
    USER_ROLE,
    MossTTSNanoConfig,
    MossTTSNanoPrompt,
    NanoTokenizerProtocol,
)
from vivavoce.models.tokenizers import BPE, SPACE, SentencePieceTokenizer
from vivavoce.train.corpus import Corpus, sentence_bounds
from vivavoce.train.tts import codes_of

IGNORED = -100
CLONED, CONTINUED = 0.4, 0.1  # shares of examples: with a reference sentence; two sentences in a row; else neither
SHORT_SHARE = 0.4  # share of a voice's shortest sentences, used two in a row
REFERENCE_FRAMES = (12, 44)
ENCODED_SECONDS = 160.0  # of audio encoded per batch
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class CodedSentences:
    """Sentences as text ids and code frames, with voices."""

    texts: list[Ids]
    frames: list[Ids]  # each [frame, codebook]
    voices: list[str]

    @classmethod
    def of(
        cls,
        corpus: Corpus,
        indices: Sequence[int],
        codec: MossAudioTokenizerNano,
        tokenizer: NanoTokenizerProtocol,
    ) -> "CodedSentences":
        """Encode sentences of a corpus, each padded with silence to whole frames."""
        if len(indices) == 0:
            raise InputError("the corpus has no sentence of the trained voices; use a larger one")
        frame = codec.config.frame_samples
        counts = {index: -(-int(corpus.starts[index + 1] - corpus.starts[index]) // frame) for index in indices}
        codes: dict[int, Ids] = {}
        for batch in _batches(sorted(indices, key=counts.__getitem__), counts, ENCODED_SECONDS / 0.08):
            sounds = torch.zeros(len(batch), max(counts[index] for index in batch) * frame)
            for row, index in enumerate(batch):
                recorded = corpus.samples[corpus.starts[index] : corpus.starts[index + 1]]
                sounds[row, : len(recorded)] = torch.from_numpy(recorded.astype(np.float32) / 32768)
            recorded_sounds = sounds.to(codec.device)[:, None].expand(-1, codec.config.channels, -1)
            encoded = codes_of(codec, recorded_sounds).transpose(1, 2).cpu().numpy()
            codes |= {index: encoded[row, : counts[index]] for row, index in enumerate(batch)}
        return cls(
            [np.array(tokenizer.encode(corpus.texts[index], symbols=False)) for index in indices],
            [codes[index] for index in indices],
            [corpus.voices[index] for index in indices],
        )

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class BatchShape:
    """Fixed size of a batch: sequences, rows and target frames of each."""

    sequences: int
    rows: int
    frames: int


class NanoBatches:
    """Random batches of a few fixed shapes, bucketed by sentence length."""

    def __init__(
        self,
        spoken: CodedSentences,
        config: MossTTSNanoConfig,
        tokenizer: NanoTokenizerProtocol,
        own_voice: str,
        rows_a_batch: int,
        classes: int = 3,
    ) -> None:
        self.spoken, self.config = spoken, config
        self.layout = PromptLayout(config, tokenizer)
        self.own_voice = own_voice
        lengths = np.array([len(frames) + len(text) for frames, text in zip(spoken.frames, spoken.texts, strict=True)])
        by_length = np.argsort(lengths, kind="stable")
        voices = np.array(spoken.voices)[by_length]
        self.of_voice = {voice: by_length[voices == voice] for voice in set(spoken.voices)}
        self.members = [part for part in np.array_split(by_length, classes) if len(part)]
        self.shapes = [self._shape(part, rows_a_batch) for part in self.members]
        batches = np.array([len(part) / shape.sequences for part, shape in zip(self.members, self.shapes, strict=True)])
        self.shape_probabilities = batches / batches.sum()

    def batch(self, random: np.random.Generator, device: torch.device | str) -> dict[str, Tensor]:
        """Rows, positions that predict frames, target codes, and stop flags."""
        kind = int(random.choice(len(self.shapes), p=self.shape_probabilities))
        members, shape = self.members[kind], self.shapes[kind]
        return self.lay_out(random.choice(members, shape.sequences), shape, random, device)

    def lay_out(
        self, chosen: Sequence[int] | Ids, shape: BatchShape, random: np.random.Generator, device: torch.device | str
    ) -> dict[str, Tensor]:
        """A batch of these sentences."""
        config = self.config
        rows = np.full((shape.sequences, shape.rows, 1 + config.n_vq), config.audio_pad_token_id, dtype=np.int64)
        rows[:, :, 0] = config.pad_token_id
        heads = np.zeros((shape.sequences, shape.frames + 1), dtype=np.int64)
        codes = np.full((shape.sequences, shape.frames + 1, config.n_vq), IGNORED, dtype=np.int64)
        stops = np.full((shape.sequences, shape.frames + 1), IGNORED, dtype=np.int64)
        for row, index in enumerate(chosen):
            prompt, frames = self._example(int(index), shape, random)
            length, count = len(prompt), len(frames)
            rows[row, :length] = prompt
            rows[row, length : length + count] = self.layout.frames(config.audio_assistant_slot_token_id, frames)
            heads[row, : count + 1] = np.arange(length - 1, length + count)
            codes[row, :count] = frames
            stops[row, : count + 1] = np.arange(count + 1) == count
        named = {"rows": rows, "heads": heads, "codes": codes, "stops": stops}
        return {name: _to_device(torch.from_numpy(each), torch.device(device)) for name, each in named.items()}

    def _example(self, index: int, shape: BatchShape, random: np.random.Generator) -> tuple[Ids, Ids]:
        """Prompt rows and target frames."""
        spoken, layout = self.spoken, self.layout
        text, frames, voice = spoken.texts[index], spoken.frames[index], spoken.voices[index]
        drawn = random.random()
        if drawn < CONTINUED:
            first, second = (self._random_sentence(voice, random, SHORT_SHARE) for _ in range(2))
            both = np.concatenate([spoken.frames[first], spoken.frames[second]])
            prompt = layout.continuation(np.concatenate([spoken.texts[first], spoken.texts[second]]))
            if len(both) <= shape.frames and len(prompt) + len(both) <= shape.rows:
                return prompt, both
        if drawn > CLONED + CONTINUED and voice == self.own_voice:
            return layout.continuation(text), frames
        reference = spoken.frames[self._random_sentence(voice, random)]
        count = min(len(reference), int(random.integers(REFERENCE_FRAMES[0], REFERENCE_FRAMES[1] + 1)))
        begin = int(random.integers(0, len(reference) - count + 1))
        return layout.clone(text, reference[begin : begin + count]), frames

    def _random_sentence(self, voice: str, random: np.random.Generator, share: float = 1.0) -> int:
        """A random sentence of a voice, or of its shortest share."""
        indices = self.of_voice[voice]
        return int(indices[random.integers(max(1, int(share * len(indices))))])

    def _shape(self, members: Ids, rows_a_batch: int) -> BatchShape:
        """The shape for the longest of these sentences with the longest reference."""
        frames = max(len(self.spoken.frames[index]) for index in members)
        both = max(len(self.spoken.frames[index]) + len(self.spoken.texts[index]) for index in members)
        prompt_rows = len(self.layout.clone(np.zeros(0, np.int64), self.spoken.frames[int(members[0])][:1])) - 1
        rows = -(-(prompt_rows + REFERENCE_FRAMES[1] + both) // 8) * 8
        return BatchShape(max(2, rows_a_batch // rows), rows, frames)


class PromptLayout:
    """The rows of `MossTTSNanoPrompt`, built from parts tokenised once."""

    def __init__(self, config: MossTTSNanoConfig, tokenizer: NanoTokenizerProtocol) -> None:
        self.config = config
        mark = tokenizer.encode("x", symbols=False)
        prompt = MossTTSNanoPrompt(config, tokenizer)
        speech = [row[0] for row in prompt.speech("x")]
        if speech[: len(mark)] != mark:
            raise InputError("the tokenizer merges the end of a text with the rest of the prompt")
        self.tail = self._text_rows(speech[len(mark) :])
        whole = [row[0] for row in prompt.continuation("x")]
        self.unvoiced = self._text_rows(whole[: len(whole) - len(speech)])
        voiced = [row[0] for row in prompt.voice([[0] * config.n_vq])]
        slot = voiced.index(config.audio_user_slot_token_id)
        self.prefix, self.suffix = self._text_rows(voiced[:slot]), self._text_rows(voiced[slot + 1 :])

    def clone(self, text: Ids, reference: Ids) -> Ids:
        """The prompt for a text in the voice of a reference.  # [row, channel]"""
        voice = self.frames(self.config.audio_user_slot_token_id, reference)
        return np.concatenate([self.prefix, voice, self.suffix, self._text_rows(text), self.tail])

    def continuation(self, text: Ids) -> Ids:
        """The prompt for a text without a reference.  # [row, channel]"""
        return np.concatenate([self.unvoiced, self._text_rows(text), self.tail])

    def frames(self, slot: int, frames: Ids) -> Ids:
        """Rows of speech.  # [frame, codebook] → [row, channel]"""
        return np.concatenate([np.full((len(frames), 1), slot), frames], axis=1)

    def _text_rows(self, ids: Sequence[int] | Ids) -> Ids:
        rows = np.full((len(ids), 1 + self.config.n_vq), self.config.audio_pad_token_id, dtype=np.int64)
        rows[:, 0] = ids
        return rows


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to a device without synchronisation."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _batches(indices: Sequence[int], counts: dict[int, int], max_total: float) -> list[list[int]]:
    """Split indices sorted by length into batches whose padded size is at most `max_total`."""
    batches: list[list[int]] = [[]]
    for index in indices:
        if batches[-1] and (len(batches[-1]) + 1) * counts[index] > max_total:
            batches.append([])
        batches[-1].append(index)
    return batches


LEAD_IN = 0.25  # share of a crop that may lie outside the sentence


class Crops:
    """Batches of crops of one length; `shares` of voices by name, "" for the sum of all others."""

    def __init__(
        self,
        corpus: Corpus,
        indices: np.ndarray,
        length: int,
        shares: Mapping[str, float],
        device: torch.device | str,
    ) -> None:
        if len(indices) == 0:
            raise InputError("the corpus has no sentence to cut crops from; use a larger one")
        self.length = length
        self.samples = torch.from_numpy(np.ascontiguousarray(corpus.samples)).to(device)
        starts, ends = sentence_bounds(corpus)
        self.starts, self.ends = (torch.from_numpy(each[indices]).to(device) for each in (starts, ends))
        self.weights = torch.from_numpy(_weights(corpus, indices, ends - starts, shares)).to(device)

    def batch(self, size: int, generator: torch.Generator) -> Tensor:
        """Crops with random levels, weighted by sentence length.  # [sound, 1, sample] in ±1"""
        device = self.samples.device
        chosen = torch.multinomial(self.weights, size, replacement=True, generator=generator)
        starts, ends = self.starts[chosen], self.ends[chosen]
        slack = int(LEAD_IN * self.length)
        shape = (ends - starts - self.length).clamp(min=0) + 2 * slack
        offset = (torch.rand(size, generator=generator, device=device) * shape).long() - slack
        indices = (starts + offset)[:, None] + torch.arange(self.length, device=device)
        inside = (indices >= starts[:, None]) & (indices < ends[:, None])
        samples = self.samples[indices.clamp(0, len(self.samples) - 1)].float() / 32768
        level = 10 ** (torch.rand(size, 1, generator=generator, device=device) * 0.8 - 0.6)
        return (samples * inside * level).clamp(-1, 1)[:, None]


def _weights(corpus: Corpus, indices: np.ndarray, lengths: np.ndarray, shares: Mapping[str, float]) -> np.ndarray:
    """Sampling weights: by length within a group of voices, groups by their shares."""
    groups = np.array([corpus.voices[index] if corpus.voices[index] in shares else "" for index in indices])
    weights = lengths[indices].astype(np.float32)
    for group in set(groups.tolist()):
        members = groups == group
        weights[members] *= shares.get(group, 0.0) / weights[members].sum()
    return weights if weights.sum() > 0 else np.ones_like(weights)


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
CONTROL_TOKENS = (
    "<s>",
    "</s>",
    "<pad>",
    "<turn>",
    "</turn>",
    "<sound>",
    "</sound>",
    "<voice>",
    "<speech>",
)  # ids 1 to 9
LETTERS = f"{SPACE}abcdefghijklmnopqrstuvwxyz0123456789.,?!'-:;"
FOLDED = (range(0x21, 0x250), range(0x1E00, 0x1F00), range(0x2000, 0x2070), range(0xFF01, 0xFF5F))
SPACES = ("\n", "\t", "\r", "\u00a0", "\u3000", "\u2028", "\u2009")
REPLACED = {"‘": "'", "’": "'", "“": "", "”": "", '"': "", "–": "-", "—": ", ", "…": ".", "\u200b": "", "\u00ad": ""}


def write_tokenizer(folder: str | Path, entries: int) -> SentencePieceTokenizer:
    """Write `tokenizer.model` for a vocabulary of at most `entries`, and read it back."""
    pieces = tokenizer_pieces()
    if len(pieces) > entries:
        raise InputError(f"the tokenizer has {len(pieces)} pieces, more than the {entries} the model has room for")
    file = Path(folder) / "tokenizer.model"
    written = b"".join(_field(1, _piece(*piece)) for piece in pieces)
    trainer = _field(3, BPE) + _field(35, 1)  # model type, and byte fallback
    normaliser = _field(1, b"mini") + _field(2, _character_map(folded_characters()))
    file.write_bytes(written + _field(2, trainer) + _field(3, normaliser))
    return SentencePieceTokenizer.load(file)


def tokenizer_pieces() -> list[tuple[str, float, int]]:
    """Text, score and type of every piece, in the order of their ids."""
    template = " ".join([USER_ROLE, REFERENCE_FIELD, NO_REFERENCE, OTHER_FIELDS, USER_END, ASSISTANT_ROLE])
    words = dict.fromkeys(word for word in template.split() if word not in LETTERS)
    return [
        ("<unk>", 0.0, UNKNOWN),
        *((sign, 0.0, CONTROL) for sign in CONTROL_TOKENS),
        *((word, 0.0, USER_DEFINED) for word in words),
        *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
        *((letter, -float(rank), NORMAL) for rank, letter in enumerate(LETTERS)),
    ]


def folded_characters() -> dict[str, str]:
    """Normalisation map of characters."""
    folded = dict.fromkeys(SPACES, " ") | REPLACED
    for code in (code for block in FOLDED for code in block):
        character = chr(code)
        plain = unicodedata.normalize("NFKD", character.casefold())
        plain = "".join(REPLACED.get(each, each) for each in plain if not unicodedata.combining(each))
        if character not in folded and plain != character and plain.isascii() and plain.isprintable():
            folded[character] = plain
    return folded


def _piece(text: str, score: float, kind: int) -> bytes:
    return _field(1, text.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", score) + _field(3, kind)


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    low = b""
    while value >= 0x80:
        low += bytes([value & 0x7F | 0x80])
        value >>= 7
    return low + bytes([value])


def _character_map(folded: Mapping[str, str]) -> bytes:
    """A double-array trie from UTF-8 sequences to offsets in a string of replacements."""
    strings, offsets = b"", {}
    for character, plain in folded.items():
        offsets[character.encode()] = len(strings)
        strings += plain.encode() + b"\0"
    trie = _double_array(offsets)
    units = struct.pack(f"<{len(trie)}I", *trie)
    return struct.pack("<I", len(units)) + units + strings


def _double_array(values: Mapping[bytes, int]) -> list[int]:
    """Units of the trie: a child is at its parent's base XOR its byte; values are at byte 0."""
    units: dict[int, int] = {0: 0}
    bases: set[int] = set()
    pending: list[tuple[int, Mapping[bytes, int]]] = [(0, values)]
    while pending:
        node, suffixes = pending.pop()
        heads = {key[0] if key else 0 for key in suffixes}
        base = _free_base(heads, units, bases)
        bases.add(base)
        units[node] |= (node ^ base) << 10
        for head in heads:
            if head == 0:
                units[node] |= 1 << 8
                units[base] = suffixes[b""] | 1 << 31
                continue
            units[base ^ head] = head
            pending.append(
                (base ^ head, {key[1:]: value for key, value in suffixes.items() if key[:1] == bytes([head])})
            )
    size = (max(units) // 256 + 1) * 256  # readers look up any byte at a base
    return [units.get(index, 0) for index in range(size)]


def _free_base(heads: Iterable[int], units: Mapping[int, int], bases: set[int]) -> int:
    heads = list(heads)
    base = 1
    while base in bases or any(base ^ head in units for head in heads):
        base += 1
    return base
