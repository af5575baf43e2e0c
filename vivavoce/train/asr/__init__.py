"""Training of mini-asr: initial weights, the byte-level BPE vocabulary, and checkpoints in Hugging Face's layout."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from vivavoce.errors import InputError
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.models.whisper.config import AFTER_LANGUAGES, SECONDS_PER_TIMESTAMP, WhisperTokens
from vivavoce.models.whisper.model import Whisper
from vivavoce.nn.attention import sinusoids


@torch.no_grad()
def initialise(model: Whisper) -> None:
    """Initial weights: outputs to the residual stream scaled down, fixed sinusoids as encoder positions."""
    config = model.config
    layers = config.encoder_layers + config.decoder_layers
    for name, parameter in model.named_parameters():
        if "layer_norm" in name:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        elif "embed" in name:
            parameter.normal_(0.0, 0.02)
        else:
            scale = (2 * layers) ** -0.5 if "out_proj" in name or "fc2" in name else 1.0
            parameter.normal_(0.0, scale * parameter[0].numel() ** -0.5)
    positions = model.encoder.embed_positions.weight
    positions.copy_(sinusoids(config.max_source_positions, config.d_model))
    positions.requires_grad_(False)


@torch.no_grad()
def init_from_speech_encoder(model: Whisper, encoder: SpeechEncoder) -> None:
    """Initialise the encoder with the lower layers of a (causal) speech encoder."""
    target, config = model.encoder, encoder.config
    sizes = (target.config.d_model, target.config.encoder_ffn_dim, target.config.num_mel_bins)
    if sizes != (config.d_model, config.encoder_ffn_dim, config.num_mel_bins) or len(target.layers) > len(
        encoder.layers
    ):
        raise InputError("the speech encoder has other sizes than the ASR model's encoder, or fewer layers")
    for name in ("conv1", "conv2"):
        getattr(target, name).load_state_dict(getattr(encoder, name).state_dict())
    for layer, source_layer in zip(target.layers, encoder.layers, strict=False):
        layer.load_state_dict(source_layer.state_dict())
    target.embed_positions.weight.copy_(encoder.embed_positions.weight[: len(target.embed_positions.weight)])


@torch.no_grad()
def init_from_earlier(model: Whisper, earlier: Whisper) -> int:
    """Initialise from an earlier ASR model of the same width; returns the percentage of weights copied.

    Decoder layers are spread evenly if there are more of them now, and hidden units come first if there are more; new
    ones add nothing, so that the output stays the same. Other weights are copied where shapes match.
    """
    own, theirs = model.state_dict(), earlier.state_dict()
    layers, earlier_layers = len(model.decoder.stack), len(earlier.decoder.stack)
    if layers >= earlier_layers:
        _zero_output_projections(model)
        positions = spread_layers(earlier_layers, layers)
        theirs = {_at_layer(name, positions): tensor for name, tensor in theirs.items()}
    copied = 0
    for name, tensor in own.items():
        if name in theirs and _can_copy(name, tensor, theirs[name]):
            tensor[tuple(slice(size) for size in theirs[name].shape)] = theirs[name]
            copied += theirs[name].numel()
    return round(100 * copied / sum(tensor.numel() for tensor in own.values()))


def _can_copy(name: str, own: Tensor, theirs: Tensor) -> bool:
    """Whether a weight can be copied: same shape, or more hidden units in a decoder layer."""
    if own.shape == theirs.shape:
        return True
    grows = re.search(r"^decoder.*\.fc[12]\.", name) is not None
    return grows and all(size >= known_size for size, known_size in zip(own.shape, theirs.shape, strict=True))


def spread_layers(few: int, many: int) -> list[int]:
    """Indices of `few` layers spread evenly among `many`, ending with the last."""
    return [many - 1 - (few - 1 - index) * many // few for index in range(few)]


def _zero_output_projections(model: Whisper) -> None:
    """Zero the output projections, so that every decoder layer is the identity."""
    for layer in model.decoder.stack:
        for added in (layer.self_attn.out_proj, layer.encoder_attn.out_proj, layer.fc2):
            for parameter in added.parameters():
                parameter.zero_()


def _at_layer(name: str, positions: list[int]) -> str:
    return re.sub(r"^(decoder\.layers\.)(\d+)", lambda match: f"{match[1]}{positions[int(match[2])]}", name)


def load_ctc_head(folder: Path, fresh: nn.Linear) -> dict[str, Tensor]:
    """The CTC head stored with an earlier ASR model, else the fresh one."""
    file = folder / "pieces" / "model.safetensors"
    if not file.is_file():
        return fresh.state_dict()
    return {name.removeprefix("pieces."): tensor.float() for name, tensor in load_file(file).items()}


WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\w\s]|_)+|\s+(?!\S)|\s+")
LANGUAGE = "en"
RANDOM_ENCODINGS = 8  # random encodings of each word under merge dropout

Pair = tuple[str, str]


def byte_letters() -> dict[int, str]:
    """GPT-2's printable character for each byte: visible Latin-1 first, the rest from U+0100."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible}
    return letters | {byte: chr(256 + index) for index, byte in enumerate(hidden)}


@dataclass
class Vocabulary:
    """A byte-level BPE: merges in the order they were learned, and the seconds that timestamps cover."""

    merges: list[Pair]
    window_seconds: float
    _ranks: dict[Pair, int] = field(init=False, repr=False)
    _ids: dict[str, int] = field(init=False, repr=False)
    _letters: dict[int, str] = field(init=False, repr=False)
    _encoded: dict[str, list[int]] = field(init=False, repr=False, default_factory=dict)
    _random_encodings: dict[tuple[str, float], list[list[int]]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        self._letters = byte_letters()
        pieces = [*self._letters.values(), *("".join(pair) for pair in self.merges)]
        self._ids = {piece: id_ for id_, piece in enumerate(pieces)}

    @classmethod
    def learn(cls, texts: Iterable[str], merges: int, window_seconds: float) -> "Vocabulary":
        """Learn the most frequent merges of the texts' words."""
        letters = byte_letters()
        counts = Counter(word for text in texts for word in WORDS.findall(" " + text))
        words = [([letters[byte] for byte in word.encode()], count) for word, count in sorted(counts.items())]
        learned: list[Pair] = []
        while len(learned) < merges:
            pairs: Counter[Pair] = Counter()
            for pieces, count in words:
                for pair in pairwise(pieces):
                    pairs[pair] += count
            known = {"".join(pair) for pair in learned}
            best = max((p for p in pairs if "".join(p) not in known), key=lambda p: (pairs[p], p), default=None)
            if best is None or pairs[best] < 2:
                break
            learned.append(best)
            words = [(_merged(pieces, best), count) for pieces, count in words]
        return cls(learned, window_seconds)

    @property
    def tokens(self) -> WhisperTokens:
        """Ids of the special tokens."""
        return WhisperTokens.in_order(len(self._ids), [LANGUAGE])

    @property
    def size(self) -> int:
        """Number of ids: text, special tokens and timestamps."""
        return self.tokens.timestamps + round(self.window_seconds / SECONDS_PER_TIMESTAMP) + 1

    def encode(self, text: str, dropout: float = 0.0, source: random.Random | None = None) -> list[int]:
        """Ids of a text at the start of a segment, so with a space before it; with `dropout`, merges are skipped."""
        words = WORDS.findall(" " + text)
        if dropout and source is not None:
            return [id_ for word in words for id_ in source.choice(self._encodings_of(word, dropout, source))]
        for word in words:
            if word not in self._encoded:
                self._encoded[word] = self._encode_word(word, 0.0, random.Random(0))
        return [id_ for word in words for id_ in self._encoded[word]]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids without special tokens."""
        bytes_of = {letter: byte for byte, letter in self._letters.items()}
        pieces = list(self._ids)
        text = "".join(pieces[id_] for id_ in ids if id_ < len(pieces))
        return bytes(bytes_of[letter] for letter in text).decode(errors="replace")

    def _encodings_of(self, word: str, dropout: float, source: random.Random) -> list[list[int]]:
        """Random encodings of a word, drawn once."""
        if (word, dropout) not in self._random_encodings:
            drawn = [self._encode_word(word, dropout, source) for _ in range(RANDOM_ENCODINGS)]
            self._random_encodings[word, dropout] = drawn
        return self._random_encodings[word, dropout]

    def _encode_word(self, word: str, dropout: float, source: random.Random) -> list[int]:
        pieces = [self._letters[byte] for byte in word.encode()]
        while len(pieces) > 1:
            pairs = [p for p in pairwise(pieces) if p in self._ranks]
            if dropout:
                pairs = [p for p in pairs if source.random() >= dropout]
            if not pairs:
                break
            pieces = _merged(pieces, min(pairs, key=self._ranks.__getitem__))
        return [self._ids[piece] for piece in pieces]

    def write(self, folder: str | Path) -> None:
        """Write `tokenizer.json`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(json.dumps(self._tokenizer(), ensure_ascii=False) + "\n", "utf8")

    @classmethod
    def read(cls, folder: str | Path) -> "Vocabulary":
        """Read `tokenizer.json`."""
        tokenizer = json.loads((Path(folder) / "tokenizer.json").read_text("utf8"))
        times = [token for token in tokenizer["added_tokens"] if re.fullmatch(r"<\|\d+\.\d\d\|>", token["content"])]
        merges = [(first, second) for first, second in tokenizer["model"]["merges"]]
        return cls(merges, (len(times) - 1) * SECONDS_PER_TIMESTAMP)

    def special_names(self) -> list[str]:
        """The special tokens in the order of their ids."""
        times = range(self.size - self.tokens.timestamps)
        names = ["endoftext", "startoftranscript", LANGUAGE, *AFTER_LANGUAGES]
        return [f"<|{name}|>" for name in names] + [f"<|{time * SECONDS_PER_TIMESTAMP:.2f}|>" for time in times]

    def _tokenizer(self) -> dict[str, Any]:
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added = [
            {"id": len(self._ids) + index, "content": name, **flags, "special": not name[2].isdigit()}
            for index, name in enumerate(self.special_names())
        ]
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": self._ids,
            "merges": [list(pair) for pair in self.merges],
        }
        parts = {"truncation": None, "padding": None, "normalizer": None, "post_processor": None}
        return {
            "version": "1.0",
            **parts,
            "added_tokens": added,
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": model,
        }


def _merged(pieces: list[str], pair: Pair) -> list[str]:
    merged: list[str] = []
    for piece in pieces:
        if merged and (merged[-1], piece) == pair:
            merged[-1] += piece
        else:
            merged.append(piece)
    return merged


MIN_WINDOW_SECONDS = 1.2  # seconds of the shortest window it transcribes well


def save_whisper(
    model: Whisper, vocabulary: Vocabulary, folder: Path, heads: Sequence[tuple[int, int]] | None = None
) -> None:
    """Write a checkpoint that transformers reads too: float16 weights, config, tokenizer, generation, preprocessor.

    `heads` are the alignment heads as (layer, head); default: all of the last layer.
    """
    last = [(model.config.decoder_layers - 1, head) for head in range(model.config.decoder_attention_heads)]
    ids = vocabulary.tokens
    special = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), ids.endoftext)
    special["decoder_start_token_id"] = ids.startoftranscript
    half = Whisper(model.config).half()
    half.load_state_dict(model.state_dict())
    half.save(folder, **special)
    vocabulary.write(folder)
    begin_suppressed = [*vocabulary.encode("")[:1], ids.endoftext]
    generation: dict[str, Any] = {
        **special,
        "begin_suppress_tokens": begin_suppressed,
        "suppress_tokens": list(ids.specials),
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": id_ for code, id_ in ids.languages.items()},
        "task_to_id": {"transcribe": ids.transcribe, "translate": ids.translate},
        "no_timestamps_token_id": ids.notimestamps,
        "prev_sot_token_id": ids.startofprev,
        "max_initial_timestamp_index": 100,
        "shortest_window": MIN_WINDOW_SECONDS,
        "window_fill": "silence",  # as in training
        "untimed_up_to": model.config.window_seconds,  # text is more accurate without timestamps
        "likely_text_is_speech": False,  # trained on the no-speech token; text probability says nothing about speech
        "max_length": model.config.max_target_positions,
        "alignment_heads": [list(pair) for pair in heads or last],
    }
    seconds = model.config.window_seconds
    preprocessor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": model.config.num_mel_bins,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": int(seconds),
        "n_samples": int(seconds * 16_000),
        "nb_max_frames": model.config.window_frames,
        "padding_side": "right",
        "padding_value": 0.0,
    }
    for name, values in (("generation_config", generation), ("preprocessor_config", preprocessor)):
        write_json(folder / f"{name}.json", values)


def write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf8")
