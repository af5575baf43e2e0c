"""CosyVoice 2 and 3 as text to speech: any voice from a recording, told how to speak, heard while it is made."""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vivavoce import hub
from vivavoce._deprecated import former_arguments
from vivavoce.audio.io import Sound
from vivavoce.audio.level import Limiter
from vivavoce.audio.player import PlaybackClock
from vivavoce.audio.stretch import TimeStretch
from vivavoce.device import Device, pick
from vivavoce.engine.sampling import GREEDY, Generation, Sampling
from vivavoce.errors import InputError
from vivavoce.implementations import choose_cosyvoice_flow, choose_cosyvoice_lm
from vivavoce.models.cosyvoice.folder import (
    MAX_REFERENCE_SECONDS,
    CosyVoiceParts,
    CosyVoiceSpeechTokenizer,
    graphed,
    load_cosyvoice,
)
from vivavoce.models.cosyvoice.lm import CosyVoiceLM, CosyVoicePrompt, Interleave, PromptPrefix
from vivavoce.models.flow.cuda import GraphedFlow
from vivavoce.models.flow.state import FlowVoice
from vivavoce.models.moss_tts_nano.prompt import Chunk
from vivavoce.models.quantised import linears
from vivavoce.nn.quantised import Int8Linear
from vivavoce.tts.cosyvoice_engine import CosyVoiceSynthesizer, UtteranceOptions
from vivavoce.tts.cosyvoice_inputs import (
    PreparedVoices,
    References,
    VoiceReference,
    breaths,
    prepared,
    prepared_piece,
    tidied_transcript,
    words_of,
)
from vivavoce.tts.interface import Samples, SpeakingStyle, StoredVoice, VoiceStore
from vivavoce.tts.style import STYLES, DirectedStyle, directed

PUBLISHED = Sampling(temperature=1.0, top_k=25, top_p=0.8)
RATE = CosyVoiceSpeechTokenizer.rates.output
CODES_A_SECOND = 25
AT_ONCE = (1, 2, 4, 8, 16)  # texts whose hops are captured before anybody speaks


@dataclass(frozen=True)
class CosyVoiceSettings:
    """What trades quality for time and memory."""

    first_hop: int = 15
    """Codes of the first hop, 1 to a chunk: it is heard so much sooner, and cuts less than a second off the voice's
    prompt."""
    left_chunks: int | None = 4
    """Chunks of a reply that the flow looks back on, besides the voice; None: all, and each second costs 90 MB."""
    prompt_seconds: float = 10.0
    """The most of a reference that the flow sees, its end; in 16 bits a second of it takes 90 MB, once a voice."""
    sampling: Sampling = PUBLISHED


class CosyVoiceTTS:
    """Says texts, several at a time if asked from several threads. It is a `SpeechModel`."""

    def __init__(
        self,
        parts: CosyVoiceParts,
        device: Device,
        settings: CosyVoiceSettings | None = None,
        voices: str | Path | None = None,
    ) -> None:
        self.parts, self.device, self.settings = parts, device, settings or CosyVoiceSettings()
        self.version = parts.version
        self.prompt = CosyVoicePrompt(parts.lm, parts.tokenizer)
        self.references = References(
            VoiceStore(None, voices), lambda: parts.speech_tokenizer, f"cosyvoice{self.version}"
        )
        speech = graphed(parts.speech) if choose_cosyvoice_flow(device).cls is GraphedFlow else parts.speech
        self.synthesizer = CosyVoiceSynthesizer(parts.lm, speech, device, self.settings.left_chunks)
        chunk = speech.flow.config.chunk
        max_codes = max(chunk, round(self.settings.prompt_seconds * CODES_A_SECOND))
        self.ready = PreparedVoices(speech.flow, min(self.settings.first_hop, chunk), max_codes)

    @classmethod
    def load(
        cls,
        name: str,
        device: str = "auto",
        dtype: str = "auto",
        voices: str | Path | None = None,
        settings: CosyVoiceSettings | None = None,
        reinforced: bool = False,
    ) -> "CosyVoiceTTS":
        """A published folder or hub id; `reinforced` takes the language model of version 3 that errs less.

        `dtype` is `auto`, `float32`, `bfloat16`, `float16`, or `int8` on CPUs: then the language model's layers are
        rounded and the flow is in the faster of bfloat16 and float32, which is also what `auto` does there.
        """
        on = pick(device)
        lm_dtype, flow_dtype, is_rounded = dtypes_for(dtype, on)
        parts = load_cosyvoice(hub.resolve(name), on.torch_device, lm_dtype, flow_dtype, reinforced)
        if is_rounded:
            round_layers(parts.lm)
        return cls(parts, on, settings, voices)

    @property
    def voices(self) -> VoiceStore:
        """The voices that can be named; another shelf may be put here."""
        return self.references.voices

    @voices.setter
    def voices(self, voices: VoiceStore) -> None:
        self.references.voices = voices

    @property
    def rate(self) -> int:
        """Samples a second of what comes out."""
        return RATE

    @property
    def channels(self) -> int:
        """Of what comes out."""
        return 1

    def add_voice(self, name: str, sound: Sound, consent: str = "", text: str = "") -> StoredVoice:
        """Keep a voice on this machine under a name, from a recording of one to thirty seconds and its words."""
        transcript = tidied_transcript(text)
        reference = self.references.heard(sound, transcript)
        if transcript:
            self.prompt.zero_shot(transcript, reference.prompt.codes.tolist())
        kept = self.voices.add(StoredVoice(name, [], "", consent, text=transcript), sound)
        self.references.named(name)
        return kept

    def warm_up(self, voice: str | Sound | None = None, batches: Sequence[int] | None = None) -> None:
        """Compute a voice and, on CUDA, capture hops of so many texts at once, before anybody waits.

        Unsaid, those are as many as there is memory for. Where no voice is kept yet, nobody's is taken.
        """
        without_voice = voice is None and not self.voices.names()
        if without_voice and not self.device.graphs:
            return
        ready = self.ready.placeholder() if without_voice else self._ready(self._reference(voice))
        if batches is None:
            reply = self.synthesizer.speech.start(ready, self.settings.left_chunks).nbytes
            fit = self.device.samples_that_fit(2 * reply, AT_ONCE[-1])  # a hop has its past and its future
            batches = [streams for streams in AT_ONCE if streams <= fit]
        self.synthesizer.warm_up(ready, batches)

    def styled_by_instructions(self, instructions: str, style: SpeakingStyle) -> DirectedStyle:
        """The manner of a style by its name, of a wish such as "more slowly, please", or of free words.

        What this version was not taught is refused by name.
        """
        plain, words = _directed(style), instructions.strip()
        name = words.lower().rstrip(".!")
        if any(name in styles for styles in STYLES.values()):
            asked = replace(plain, style=name, instruction="")
        else:
            asked = directed(words, plain) or replace(plain, style="", instruction=words)
        asked.instruction_for(self.version)
        return asked

    def styled_by_request(self, said: str, style: SpeakingStyle) -> DirectedStyle | None:
        """The manner after what a listener said, if all of it was a wish and this version was taught it."""
        asked = directed(said, _directed(style))
        return None if asked is None or (asked.style and asked.style not in STYLES[self.version]) else asked

    @former_arguments(manner="style")
    def stream(
        self,
        text: str | Iterable[str],
        voice: str | Sound | None = None,
        style: SpeakingStyle | None = None,
        clock: Callable[[], float] | None = time.monotonic,
    ) -> Iterator[Samples]:
        """The sound of a text, as it is made.  # pieces [1, time]

        The text may itself come in pieces, and is spoken while it comes. `voice` is a name, or a recording to sound
        like; none is the first voice there is. Without a clock nobody waits for the sound.
        """
        style = _directed(style)
        reference = self._reference(voice)
        before = self._before(reference, style)
        listener = PlaybackLead(clock)
        if isinstance(text, str):
            count = self.parts.tokenizer.encode
            parts = breaths(prepared(text, self.version, style.clean), lambda part: len(count(part)))
            sounds = self._parts(parts, before, reference, style, listener)
        else:
            sounds = self._growing(text, before, reference, style, listener)
        return self._finished(sounds, style, listener)

    @former_arguments(manner="style")
    def say(self, text: str, voice: str | Sound | None = None, style: SpeakingStyle | None = None) -> Sound:
        """The whole sound of a text."""
        return _whole(self.stream(text, voice, style, clock=None))

    @former_arguments(manner="style")
    def convert(
        self, sound: Sound, voice: str | Sound | None = None, style: SpeakingStyle | None = None
    ) -> Iterator[Samples]:
        """What a recording of any length says, in another voice.  # pieces [1, time]"""
        style, listener = _directed(style), PlaybackLead(None)
        if style.instruction_for(self.version):
            raise InputError("a converted recording keeps its own way of speaking; it can be told nothing but speed")
        saying = self._saying(self._reference(voice), listener, style.seed)
        return self._finished(self._converted(sound, saying), style, listener)

    def _converted(self, sound: Sound, saying: UtteranceOptions) -> Iterator[Tensor]:
        mono = sound.mono()
        window = int(MAX_REFERENCE_SECONDS * mono.rate)
        for start in range(0, mono.samples.shape[1], window):
            part = mono.samples[:, start : start + window]
            if part.shape[1] >= mono.rate / CODES_A_SECOND:
                codes = self.parts.speech_tokenizer.codes(Sound(part, mono.rate))
                yield from self.synthesizer.speech_codes(codes.tolist(), saying)

    def _parts(
        self,
        parts: list[Chunk],
        before: PromptPrefix,
        reference: VoiceReference,
        style: DirectedStyle,
        listener: "PlaybackLead",
    ) -> Iterator[Tensor]:
        for number, part in enumerate(parts):
            ids = self.prompt.text(part.text)
            min_rows, max_rows = self.parts.lm.length_limits(len(ids))
            generation = self._generation(style, number, min_rows, max_rows)
            saying = self._saying(reference, listener, style.seed + number)
            with closing(self.synthesizer.text(self.prompt.rows(before, ids), generation, saying)) as sounds:
                yield from sounds
            yield torch.zeros(round(part.pause * style.pause * RATE))

    def _growing(
        self,
        text: Iterable[str],
        before: PromptPrefix,
        reference: VoiceReference,
        style: DirectedStyle,
        listener: "PlaybackLead",
    ) -> Generator[Tensor, None, None]:
        rounds = Interleave(self.parts.lm.config, before)
        tokens = (self.prompt.text(prepared_piece(piece, self.version)) for piece in words_of(text))
        saying = self._saying(reference, listener, style.seed)
        with closing(self.synthesizer.growing_text(rounds, tokens, self._generation(style, 0, 0, 1), saying)) as sounds:
            yield from sounds

    def _generation(self, style: DirectedStyle, number: int, min_rows: int, max_rows: int) -> Generation:
        sampling = GREEDY if style.greedy else self.settings.sampling
        return Generation(sampling, max_new_rows=max_rows, min_new_rows=min_rows, seed=style.seed + number)

    def _saying(self, reference: VoiceReference, listener: "PlaybackLead", seed: int) -> UtteranceOptions:
        return UtteranceOptions(self._ready(reference), listener.lead, seed)

    def _ready(self, reference: VoiceReference) -> FlowVoice:
        return self.synthesizer.call(lambda: self.ready.of(reference))

    def _before(self, reference: VoiceReference, style: DirectedStyle) -> PromptPrefix:
        """An instruction goes without the reference's words, and a voice whose words nobody knows without them too."""
        if instruction := style.instruction_for(self.version):
            return self.prompt.instructed(instruction)
        if reference.transcript:
            return self.prompt.zero_shot(reference.transcript, reference.prompt.codes.tolist())
        return self.prompt.cross_lingual()

    def _reference(self, voice: str | Sound | None) -> VoiceReference:
        if isinstance(voice, Sound):
            return self.references.heard(voice)
        if voice is not None:
            return self.references.named(voice)
        if not (names := self.voices.names()):
            raise InputError("CosyVoice has no voice of its own; add one: viva voices add NAME FILE --text WORDS")
        return self.references.named(names[0])

    def _finished(self, sounds: Iterator[Tensor], style: DirectedStyle, listener: "PlaybackLead") -> Iterator[Samples]:
        """At the speed and loudness that are wanted, told to the listener as it is handed on."""
        stretch, limiter = TimeStretch(RATE, style.speed), Limiter(RATE)
        stretched, limited = stretch.initial_state(1), limiter.initial_state(1)
        for sound in sounds:
            piece, stretched = stretch.step(stretched, sound.numpy()[None])
            if style.volume != 1.0:
                piece, limited = limiter.step(limited, piece * np.float32(style.volume))
            if piece.shape[1]:
                listener.hear(piece.shape[1] / RATE)
                yield piece
        rest = stretch.flush(stretched)
        if style.volume != 1.0:
            loud, limited = limiter.step(limited, rest * np.float32(style.volume))
            rest = np.concatenate([loud, limiter.flush(limited)], axis=1)
        if rest.shape[1]:
            yield rest


class PlaybackLead:
    """Somebody who hears a text at its own pace; may be asked from any thread."""

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self._clock = clock or (lambda: 0.0)
        self._player, self._lock = PlaybackClock(), threading.Lock()

    def hear(self, seconds: float) -> None:
        """Sound of this length is handed to them."""
        with self._lock:
            self._player.feed(self._clock(), seconds)

    def lead(self) -> float:
        """Seconds that they have not heard yet."""
        with self._lock:
            return self._player.lead(self._clock())


class Dtypes(NamedTuple):
    """Of the language model and of the flow, and whether the first one's layers are rounded to int8."""

    lm: torch.dtype
    flow: torch.dtype
    is_rounded: bool = False


def dtypes_for(spec: str, device: Device) -> Dtypes:
    """What a dtype by name means for each part."""
    lm = choose_cosyvoice_lm(device, spec)
    return Dtypes(lm.dtype, choose_cosyvoice_flow(device, spec).dtype, lm.is_int8)


def round_layers(lm: CosyVoiceLM) -> None:
    """The language model's layers in int8, in place; its head and tables stay as they are."""
    for parent, name, _, linear in list(linears(lm.trunk)):
        setattr(parent, name, Int8Linear.of_weight(linear.weight, linear.bias))


def _directed(style: SpeakingStyle | None) -> DirectedStyle:
    if isinstance(style, DirectedStyle):
        return style
    if style is None:
        return DirectedStyle()
    return DirectedStyle(style.speed, style.pause, style.seed, style.greedy, style.clean)


def _whole(pieces: Iterator[Samples]) -> Sound:
    return Sound(np.concatenate([np.zeros((1, 0), np.float32), *pieces], axis=1), RATE)
