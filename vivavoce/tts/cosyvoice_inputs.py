"""What CosyVoice makes of the voices on the shelf: once on disk, and ready for speech in memory."""

import glob
import hashlib
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vivavoce.audio.io import Sound
from vivavoce.errors import CheckpointError, InputError, NothingToSayError
from vivavoce.models.cosyvoice.folder import ADDED, EVENTS, CosyVoiceSpeechTokenizer
from vivavoce.models.flow.state import FlowCache, FlowVoice, VoicePrompt
from vivavoce.models.flow.stream import StreamingFlow
from vivavoce.models.moss_tts_nano.prompt import CLAUSE_ENDS, SENTENCE_ENDS, Chunk, chunks, has_cjk
from vivavoce.tts.interface import VoiceStore
from vivavoce.tts.text import cleaned, numbers_as_words

MAX_TOKENS = 80  # said in one breath; of Chinese, characters
MARKED = ("<|", "|>")  # who writes the model's own marks wants them read as they are
INLINE = re.compile(r"\[([^\[\]\s()|]{1,20})\](?!\()|</?(?:strong|laughter)>")
NAMED_EVENT = re.compile(r"\[[a-z][a-z_-]{2,}\]")
STAND_IN = re.compile(r"zqx([a-j]+)qz")  # a word that no rule for texts changes
DIGITS = "abcdefghij"
SUPERSCRIPTS = str.maketrans({"²": "平方", "³": "立方", "（": None, "）": None, "【": None, "】": None, "`": None})
POINT = re.compile(r"(?<!\d)\.|\.(?!\d)")
SPACE_IN_CHINESE = re.compile(r"(?<![\x21-\x7e]) +| +(?![\x21-\x7e])")
MAX_WAIT = 48  # characters that a growing text may have without a place to cut


def prepared(text: str, version: int, clean: bool = True) -> str:
    """The text as the model gets it; an event or phoneme that this version does not have is refused by name.

    Not cleaned, it is left as it is, and so is a text with the model's own marks.
    """
    if all(mark in text for mark in MARKED):
        return text
    return _around_tokens(text, version, (lambda words: _spelled(cleaned(words))) if clean else str)


def prepared_piece(piece: str, version: int) -> str:
    """A piece of a growing text as the model gets it; the space before it stays."""
    bare = piece.strip()
    if not bare:
        return piece
    return piece[: len(piece) - len(piece.lstrip())] + _around_tokens(bare, version, _spelled)


def _around_tokens(text: str, version: int, change: Callable[[str], str]) -> str:
    """A change of the text that leaves its inline tokens alone."""
    tokens: list[str] = []

    def kept(found: re.Match[str]) -> str:
        if not _is_known(found[0], version):
            return found[0]
        tokens.append(found[0])
        number = "".join(DIGITS[int(digit)] for digit in str(len(tokens) - 1))
        return f"zqx{number}qz"

    changed = change(INLINE.sub(kept, text))
    return STAND_IN.sub(lambda found: tokens[int("".join(str(DIGITS.index(each)) for each in found[1]))], changed)


def _spelled(text: str) -> str:
    return _chinese(text) if has_cjk(text) else numbers_as_words(text)


def _is_known(token: str, version: int) -> bool:
    """Whether a bracketed word is a token; what looks like one but is none of this version is refused."""
    if token in ADDED[version]:
        return True
    if token in ADDED[3]:
        raise InputError(f"CosyVoice {version} has no phonemes, so {token} cannot be said; leave it out")
    if NAMED_EVENT.fullmatch(token):
        events = " ".join(event for event in EVENTS if event.startswith("["))
        raise InputError(f"CosyVoice {version} cannot make {token}; it knows {events}")
    return False


def _chinese(text: str) -> str:
    """Chinese as the published front end leaves it, but for its grammar of numbers."""
    text = text.replace("\n", "").replace(" - ", "，").replace("——", " ").translate(SUPERSCRIPTS)
    text = POINT.sub("。", SPACE_IN_CHINESE.sub("", text))
    return re.sub(r"[，,、]+$", "。", text)


def breaths(text: str, count_tokens: Callable[[str], int]) -> list[Chunk]:
    """A text in parts that are said one after another; Chinese is counted in characters."""
    parts = chunks(text, len if has_cjk(text) else count_tokens, MAX_TOKENS)
    sayable = [part for part in parts if any(character.isalnum() for character in part.text)]
    if not sayable:
        raise NothingToSayError(f"there is nothing to say in {text[:30]!r}; give at least one letter or digit")
    return sayable


def tidied_transcript(text: str) -> str:
    """A reference's words as the model likes them: in sentence case and with an end, or it speaks nonsense."""
    text = " ".join(text.split())
    if text.isupper() and text.isascii():
        text = text.capitalize()
    if text and text[-1] not in SENTENCE_ENDS | CLAUSE_ENDS:
        text += "。" if has_cjk(text[-1]) else "."
    return text


def words_of(pieces: Iterable[str]) -> Iterator[str]:
    """A growing text cut before spaces and after marks, so that tokens are those of the whole text."""
    held = ""
    for piece in pieces:
        held += piece
        cut = max((place for place in range(1, len(held)) if _is_cut(held, place)), default=0)
        if not cut and len(held) > MAX_WAIT:
            cut = len(held)
        if cut:
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def _is_cut(text: str, place: int) -> bool:
    before, after = text[place - 1], text[place]
    return (after == " " and before != " ") or before in "。！？，、；："


Stamp = tuple[tuple[str, int, int], ...]  # of files: path, time of change, size
DERIVED, READY = ".safetensors", ".ready.safetensors"
PROMPT = {"codes", "mel", "speaker"}
LOOKED_AT = 16  # of each tensor, to tell models apart
MAX_REFERENCES = 8  # recordings that are not kept, remembered
MIN_PROMPT = 25  # codes: one chunk
MIN_SHARE_CACHED = 0.75  # of a reference, where it is cut for a short first hop
MAX_READY_BYTES = {"cpu": 2 * 2**30}  # keys and values of voices in memory, by kind of device
MAX_READY_BYTES_OFF_CUDA = 16 * 2**30


@dataclass(frozen=True)
class VoiceReference:
    """A voice as CosyVoice knows it."""

    prompt: VoicePrompt
    transcript: str
    mark: str
    """The same for the same sound."""
    file: Path | None = None
    """Where what is derived of it is kept, if it is."""


class References:
    """Voices by name or recording. What is derived from a kept one stands in a file beside it."""

    def __init__(self, voices: VoiceStore, load_tokenizer: Callable[[], CosyVoiceSpeechTokenizer], kind: str) -> None:
        """`ear` is asked for when a recording must be heard; `kind` says whose derived values they are."""
        self.voices, self._load_tokenizer, self._kind = voices, load_tokenizer, kind
        self._named: dict[str, tuple[Stamp, VoiceReference]] = {}
        self._heard: OrderedDict[str, VoicePrompt] = OrderedDict()

    def named(self, name: str) -> VoiceReference:
        """A voice of the shelf; read again when a file of it has changed."""
        stamp, reference = self._named.get(name, ((), None))
        if reference is None or stamp != self._stamp(name):
            reference = self._read(name)
            self._named[name] = self._stamp(name), reference
        return reference

    def heard(self, recording: Sound, transcript: str = "") -> VoiceReference:
        """A recording that is not kept; the last few are not heard again."""
        mark = mark_of(recording)
        if mark not in self._heard:
            self._heard[mark] = self._load_tokenizer().reference(recording)
        self._heard.move_to_end(mark)
        if len(self._heard) > MAX_REFERENCES:
            self._heard.popitem(last=False)
        return VoiceReference(self._heard[mark], tidied_transcript(transcript), mark)

    def _stamp(self, name: str) -> Stamp:
        files = sorted(each for each in self.voices.folder.glob(f"{glob.escape(name)}.*") if READY not in each.name)
        return tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files)

    def _read(self, name: str) -> VoiceReference:
        kept = self.voices.get(name)
        recording = self.voices.recording(name)
        if recording is None:
            raise InputError(f"the voice {name!r} was made for another model and has no recording; add it anew")
        mark, file = mark_of(recording), self.voices.folder / f"{name}.{self._kind}{DERIVED}"
        tensors = _read(file, mark)
        if tensors is None or set(tensors) != PROMPT:
            prompt = self._load_tokenizer().reference(recording)
            tensors = {"codes": prompt.codes, "mel": prompt.mel, "speaker": prompt.speaker}
            _write(file, tensors, mark)
        prompt = VoicePrompt(tensors["codes"], tensors["mel"], tensors["speaker"])
        return VoiceReference(prompt, tidied_transcript(kept.text), mark, file)


def mark_of(sound: Sound) -> str:
    """A name that the same sound always has."""
    samples = np.ascontiguousarray(sound.samples)
    return hashlib.sha256(str((sound.rate, samples.shape)).encode() + samples.tobytes()).hexdigest()


def _read(file: Path, mark: str) -> dict[str, Tensor] | None:
    """What was derived and bears this mark, if there is such."""
    try:
        tensors = load_file(file)
        return tensors if bytes(tensors.pop("mark").tolist()).decode() == mark else None
    except (OSError, SafetensorError, KeyError, ValueError):
        return None  # absent, damaged or of another time: it is made anew


def _write(file: Path, tensors: dict[str, Tensor], mark: str) -> None:
    partial = file.with_suffix(".partial")
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole | {"mark": torch.tensor(list(mark.encode()), dtype=torch.uint8)}, partial)
        os.replace(partial, file)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"cannot keep what was derived of a voice in {file} ({error})") from error


class PreparedVoices:
    """The flow's share of the voices used last, computed once and shared by all who speak with them.

    Where computing takes far longer than reading, on CPUs, that of a kept voice stands in a second file beside it.
    """

    def __init__(
        self,
        flow: StreamingFlow,
        first_hop: int,
        prompt_codes: int,
        max_bytes: int | None = None,
        keeps: bool | None = None,
    ) -> None:
        self._flow, self._first_hop, self._prompt_codes = flow, first_hop, prompt_codes
        self._keeps = flow.device.type == "cpu" if keeps is None else keeps
        usual = MAX_READY_BYTES.get(flow.device.type, MAX_READY_BYTES_OFF_CUDA)
        self._max_bytes = usual if max_bytes is None else max_bytes
        self._ready: OrderedDict[str, FlowVoice] = OrderedDict()

    def of(self, reference: VoiceReference) -> FlowVoice:
        """The voice, its prompt cut to end where the first hop is short."""
        if reference.mark not in self._ready:
            self._ready[reference.mark] = self._voice(reference)
        self._ready.move_to_end(reference.mark)
        while len(self._ready) > 1 and sum(voice.cache.nbytes for voice in self._ready.values()) > self._max_bytes:
            self._ready.popitem(last=False)
        return self._ready[reference.mark]

    def placeholder(self) -> FlowVoice:
        """A voice as long as any, of silence: hops in it take as long as in others."""
        config, codes = self._flow.config, self._prompt_codes
        mel, speaker = torch.zeros(codes * config.ratio, config.mel_bands), torch.ones(config.speaker_dim)
        return self._flow.voice(self.shortened(VoicePrompt(torch.zeros(codes, dtype=torch.long), mel, speaker)))

    def _voice(self, reference: VoiceReference) -> FlowVoice:
        prompt = self.shortened(reference.prompt)
        if reference.file is None or not self._keeps:
            return self._flow.voice(prompt)
        file, mark = reference.file.with_suffix(READY), f"{reference.mark} {len(prompt.codes)} {self._weights}"
        tensors = _read(file, mark)
        if tensors is not None and set(tensors) == set(FlowCache.WINDOW_AXES | FlowCache.CONTEXT_AXES):
            return self._flow.voice(prompt, FlowCache(self._flow.config.ratio, **tensors))
        voice = self._flow.voice(prompt)
        with suppress(CheckpointError):  # a full disk costs time at the next start, not the speech now
            _write(file, voice.cache.tensors, mark)
        return voice

    @cached_property
    def _weights(self) -> str:
        """A name that the same weights in the same precision always have, of a few values of each."""
        flow, kinds = self._flow, "".join(type(layer).__name__ for layer in self._flow.modules())  # quantised or not
        tensors = [*flow.parameters(), *flow.buffers()]
        some = torch.cat([each.detach().flatten()[:LOOKED_AT].cpu().float() for each in tensors])
        digest = hashlib.sha256(some.numpy().tobytes() + kinds.encode()).hexdigest()
        return f"{flow.spk_embed_affine_layer.weight.dtype} {digest}"

    def shortened(self, prompt: VoicePrompt) -> VoicePrompt:
        """The end of a prompt, as long as it may be and so that the first hop has the wanted codes."""
        config = self._flow.config
        if len(prompt.codes) < min(config.chunk, MIN_PROMPT):
            raise InputError(f"the reference has {len(prompt.codes)} codes; give at least a second of speech")
        cut = max(0, len(prompt.codes) - self._prompt_codes)
        recent = VoicePrompt(prompt.codes[cut:], prompt.mel[cut * config.ratio :], prompt.speaker)
        aligned = self._flow.aligned(recent, self._first_hop)
        # Of a short reference every bit counts more than when the first sound comes.
        return aligned if len(aligned.codes) >= MIN_SHARE_CACHED * len(recent.codes) else recent
