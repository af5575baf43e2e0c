"""The inputs of CosyVoice: texts in the form it was trained on, and voices prepared from their recordings.

`References` derives prompts from recordings and stores them beside the voices' files; `PreparedVoices` caches the
flow's state after a prompt, in memory and, on CPUs, on disk.
"""

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

MAX_TOKENS = 80  # of a text chunk; characters for Chinese
MARKED = ("<|", "|>")  # a text with the model's control tokens is not changed
INLINE = re.compile(r"\[([^\[\]\s()|]{1,20})\](?!\()|</?(?:strong|laughter)>")
NAMED_EVENT = re.compile(r"\[[a-z][a-z_-]{2,}\]")
STAND_IN = re.compile(r"zqx([a-j]+)qz")  # a placeholder word that normalisation leaves unchanged
DIGITS = "abcdefghij"
SUPERSCRIPTS = str.maketrans({"²": "平方", "³": "立方", "（": None, "）": None, "【": None, "】": None, "`": None})
POINT = re.compile(r"(?<!\d)\.|\.(?!\d)")
SPACE_IN_CHINESE = re.compile(r"(?<![\x21-\x7e]) +| +(?![\x21-\x7e])")
MAX_WAIT = 48  # characters of streaming text that are held back while no word ends


def prepare_text(text: str, version: int, clean: bool = True) -> str:
    """The text as it is given to the model; an event or phoneme that this version does not have is refused.

    With `clean` false, and for a text with control tokens, the text is not changed.
    """
    if all(digest in text for digest in MARKED):
        return text
    return _around_tokens(text, version, (lambda words: _spelled(cleaned(words))) if clean else str)


def prepare_piece(piece: str, version: int) -> str:
    """A piece of streaming text as it is given to the model; its leading space is preserved."""
    bare = piece.strip()
    if not bare:
        return piece
    return piece[: len(piece) - len(piece.lstrip())] + _around_tokens(bare, version, _spelled)


def _around_tokens(text: str, version: int, change: Callable[[str], str]) -> str:
    """Change a text except for its inline tokens."""
    tokens: list[str] = []

    def stored(found: re.Match[str]) -> str:
        if not _is_known(found[0], version):
            return found[0]
        tokens.append(found[0])
        number = "".join(DIGITS[int(digit)] for digit in str(len(tokens) - 1))
        return f"zqx{number}qz"

    changed = change(INLINE.sub(stored, text))
    return STAND_IN.sub(lambda found: tokens[int("".join(str(DIGITS.index(each)) for each in found[1]))], changed)


def _spelled(text: str) -> str:
    return _chinese(text) if has_cjk(text) else numbers_as_words(text)


def _is_known(token: str, version: int) -> bool:
    """Whether a bracketed word is a token; a token that this version does not have is refused."""
    if token in ADDED[version]:
        return True
    if token in ADDED[3]:
        raise InputError(f"CosyVoice {version} has no phonemes, so {token} cannot be spoken; leave it out")
    if NAMED_EVENT.fullmatch(token):
        events = " ".join(event for event in EVENTS if event.startswith("["))
        raise InputError(f"CosyVoice {version} has no event {token}; it has {events}")
    return False


def _chinese(text: str) -> str:
    """Normalise Chinese as the published front end does, except for numbers."""
    text = text.replace("\n", "").replace(" - ", "，").replace("——", " ").translate(SUPERSCRIPTS)
    text = POINT.sub("。", SPACE_IN_CHINESE.sub("", text))
    return re.sub(r"[，,、]+$", "。", text)


def text_chunks(text: str, count_tokens: Callable[[str], int]) -> list[Chunk]:
    """Split a text into chunks that are spoken one after another; the length of Chinese is in characters."""
    parts = chunks(text, len if has_cjk(text) else count_tokens, MAX_TOKENS)
    sayable = [part for part in parts if any(character.isalnum() for character in part.text)]
    if not sayable:
        raise NothingToSayError(f"there is nothing to say in {text[:30]!r}; give at least one letter or digit")
    return sayable


def normalise_transcript(text: str) -> str:
    """A transcript in sentence case with final punctuation; the model speaks nonsense after other transcripts."""
    text = " ".join(text.split())
    if text.isupper() and text.isascii():
        text = text.capitalize()
    if text and text[-1] not in SENTENCE_ENDS | CLAUSE_ENDS:
        text += "。" if has_cjk(text[-1]) else "."
    return text


def cut_at_words(pieces: Iterable[str]) -> Iterator[str]:
    """Cut streaming text before spaces and after punctuation, so that its tokens equal those of the whole text."""
    buffered = ""
    for piece in pieces:
        buffered += piece
        cut = max((position for position in range(1, len(buffered)) if _is_cut(buffered, position)), default=0)
        if not cut and len(buffered) > MAX_WAIT:
            cut = len(buffered)
        if cut:
            yield buffered[:cut]
            buffered = buffered[cut:]
    if buffered:
        yield buffered


def _is_cut(text: str, position: int) -> bool:
    before, after = text[position - 1], text[position]
    return (after == " " and before != " ") or before in "。！？，、；："


Stamp = tuple[tuple[str, int, int], ...]  # of files: path, time of change, size
DERIVED, READY = ".safetensors", ".ready.safetensors"
PROMPT = {"codes", "mel", "speaker"}
VALUES_PER_TENSOR = 16  # that the digest of a model's weights covers
MAX_REFERENCES = 8  # cached prompts of recordings that are not stored voices
MIN_PROMPT = 25  # codes: one chunk
MIN_ALIGNED_SHARE = 0.75  # of a reference, to be cut for a short first hop
MAX_CPU_BYTES, MAX_GPU_BYTES = 2 * 2**30, 16 * 2**30  # keys and values of prepared voices in memory


@dataclass(frozen=True)
class VoiceReference:
    """A voice's prompt, transcript and digest."""

    prompt: VoicePrompt
    transcript: str
    digest: str
    """Of the recording."""
    file: Path | None = None
    """The file of the derived prompt, for stored voices."""


class References:
    """Prompts of voices, by name or recording. Those of stored voices are saved in a file beside the voice."""

    def __init__(self, voices: VoiceStore, load_tokenizer: Callable[[], CosyVoiceSpeechTokenizer], kind: str) -> None:
        """`load_tokenizer` is called when a recording must be encoded; `kind` is part of the names of the files."""
        self.voices, self._load_tokenizer, self._kind = voices, load_tokenizer, kind
        self._named: dict[str, tuple[Stamp, VoiceReference]] = {}
        self._recordings: OrderedDict[str, VoicePrompt] = OrderedDict()

    def by_name(self, name: str) -> VoiceReference:
        """A stored voice; it is read again when one of its files has changed."""
        stamp, reference = self._named.get(name, ((), None))
        if reference is None or stamp != self._stamp(name):
            reference = self._read_stored(name)
            self._named[name] = self._stamp(name), reference
        return reference

    def from_recording(self, recording: Sound, transcript: str = "") -> VoiceReference:
        """A recording that is not a stored voice; the most recent ones are cached."""
        digest = sound_digest(recording)
        if digest not in self._recordings:
            self._recordings[digest] = self._load_tokenizer().reference(recording)
        self._recordings.move_to_end(digest)
        if len(self._recordings) > MAX_REFERENCES:
            self._recordings.popitem(last=False)
        return VoiceReference(self._recordings[digest], normalise_transcript(transcript), digest)

    def _stamp(self, name: str) -> Stamp:
        files = sorted(each for each in self.voices.folder.glob(f"{glob.escape(name)}.*") if READY not in each.name)
        return tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files)

    def _read_stored(self, name: str) -> VoiceReference:
        stored = self.voices.get(name)
        recording = self.voices.recording(name)
        if recording is None:
            raise InputError(f"the voice {name!r} was made for another model and has no recording; add it again")
        digest, file = sound_digest(recording), self.voices.folder / f"{name}.{self._kind}{DERIVED}"
        tensors = _load_derived(file, digest)
        if tensors is None or set(tensors) != PROMPT:
            prompt = self._load_tokenizer().reference(recording)
            tensors = {"codes": prompt.codes, "mel": prompt.mel, "speaker": prompt.speaker}
            _save_derived(file, tensors, digest)
        prompt = VoicePrompt(tensors["codes"], tensors["mel"], tensors["speaker"])
        return VoiceReference(prompt, normalise_transcript(stored.text), digest, file)


def sound_digest(sound: Sound) -> str:
    """A hash of a recording."""
    samples = np.ascontiguousarray(sound.samples)
    return hashlib.sha256(str((sound.rate, samples.shape)).encode() + samples.tobytes()).hexdigest()


def _load_derived(file: Path, digest: str) -> dict[str, Tensor] | None:
    """The tensors of a file with this digest, or None."""
    try:
        tensors = load_file(file)
        return tensors if bytes(tensors.pop("mark").tolist()).decode() == digest else None
    except (OSError, SafetensorError, KeyError, ValueError):
        return None  # absent, damaged or of an older format: it is derived again


def _save_derived(file: Path, tensors: dict[str, Tensor], digest: str) -> None:
    partial = file.with_suffix(".partial")
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole | {"mark": torch.tensor(list(digest.encode()), dtype=torch.uint8)}, partial)
        os.replace(partial, file)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write the prepared voice {file} ({error})") from error


class PreparedVoices:
    """LRU cache of the flow's state after a voice's prompt, shared by all texts in that voice.

    On CPUs, where computing takes far longer than reading, the state of a stored voice is also saved in a file.
    """

    def __init__(
        self,
        flow: StreamingFlow,
        first_hop: int,
        prompt_codes: int,
        max_bytes: int | None = None,
        stores_files: bool | None = None,
    ) -> None:
        self._flow, self._first_hop, self._prompt_codes = flow, first_hop, prompt_codes
        self._stores_files = flow.device.type == "cpu" if stores_files is None else stores_files
        default = MAX_CPU_BYTES if flow.device.type == "cpu" else MAX_GPU_BYTES
        self._max_bytes = default if max_bytes is None else max_bytes
        self._voices: OrderedDict[str, FlowVoice] = OrderedDict()

    def get(self, reference: VoiceReference) -> FlowVoice:
        """The prepared voice, its prompt shortened so that the first hop is short."""
        if reference.digest not in self._voices:
            self._voices[reference.digest] = self._voice(reference)
        self._voices.move_to_end(reference.digest)
        while len(self._voices) > 1 and sum(voice.cache.nbytes for voice in self._voices.values()) > self._max_bytes:
            self._voices.popitem(last=False)
        return self._voices[reference.digest]

    def placeholder(self) -> FlowVoice:
        """A silent voice of maximum length, whose hops take as long as those of any voice."""
        config, codes = self._flow.config, self._prompt_codes
        mel, speaker = torch.zeros(codes * config.ratio, config.mel_bands), torch.ones(config.speaker_dim)
        return self._flow.voice(self.shorten(VoicePrompt(torch.zeros(codes, dtype=torch.long), mel, speaker)))

    def _voice(self, reference: VoiceReference) -> FlowVoice:
        prompt = self.shorten(reference.prompt)
        if reference.file is None or not self._stores_files:
            return self._flow.voice(prompt)
        file, digest = reference.file.with_suffix(READY), f"{reference.digest} {len(prompt.codes)} {self._weights}"
        tensors = _load_derived(file, digest)
        if tensors is not None and set(tensors) == set(FlowCache.WINDOW_AXES | FlowCache.CONTEXT_AXES):
            return self._flow.voice(prompt, FlowCache(self._flow.config.ratio, **tensors))
        voice = self._flow.voice(prompt)
        with suppress(CheckpointError):  # a full disk costs time at the next start, not the speech now
            _save_derived(file, voice.cache.tensors, digest)
        return voice

    @cached_property
    def _weights(self) -> str:
        """A digest of the flow's weights and precision, from a few values of each tensor."""
        flow, kinds = self._flow, "".join(type(layer).__name__ for layer in self._flow.modules())  # quantised or not
        tensors = [*flow.parameters(), *flow.buffers()]
        some = torch.cat([each.detach().flatten()[:VALUES_PER_TENSOR].cpu().float() for each in tensors])
        digest = hashlib.sha256(some.numpy().tobytes() + kinds.encode()).hexdigest()
        return f"{flow.spk_embed_affine_layer.weight.dtype} {digest}"

    def shorten(self, prompt: VoicePrompt) -> VoicePrompt:
        """The end of a prompt, at most `prompt_codes` long and aligned for the wanted first hop."""
        config = self._flow.config
        if len(prompt.codes) < min(config.chunk, MIN_PROMPT):
            raise InputError(f"the reference has {len(prompt.codes)} codes; give at least a second of speech")
        cut = max(0, len(prompt.codes) - self._prompt_codes)
        recent = VoicePrompt(prompt.codes[cut:], prompt.mel[cut * config.ratio :], prompt.speaker)
        aligned = self._flow.aligned(recent, self._first_hop)
        # For a short reference, its full length matters more than a short first hop.
        return aligned if len(aligned.codes) >= MIN_ALIGNED_SHARE * len(recent.codes) else recent
