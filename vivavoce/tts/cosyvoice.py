"""CosyVoice 2 and 3 as a TTS model: voices from recordings, style instructions, streaming text and audio.

`cosyvoice_inputs` prepares texts and voices, `cosyvoice_engine` runs language model, flow and vocoder for all texts.
"""

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
from vivavoce.tts.cosyvoice_engine import CosyVoiceSynthesizer
from vivavoce.tts.cosyvoice_hops import UtteranceOptions
from vivavoce.tts.cosyvoice_inputs import (
    PreparedVoices,
    References,
    VoiceReference,
    cut_at_words,
    normalise_transcript,
    prepare_piece,
    prepare_text,
    text_chunks,
)
from vivavoce.tts.interface import Samples, SpeakingStyle, StoredVoice, VoiceStore
from vivavoce.tts.style import STYLES, DirectedStyle, apply_request

PUBLISHED = Sampling(temperature=1.0, top_k=25, top_p=0.8)
RATE = CosyVoiceSpeechTokenizer.rates.output
CODES_A_SECOND = 25
LANGUAGES = {2: ("zh", "en", "ja", "ko"), 3: ("zh", "en", "ja", "ko", "de", "es", "fr", "it", "ru")}
"""By version, as published."""
BATCH_SIZES = (1, 2, 4, 8, 16)  # numbers of texts for which hops are captured in `warm_up`


@dataclass(frozen=True)
class CosyVoiceSettings:
    """Settings that trade quality for latency and memory."""

    first_hop: int = 15
    """Codes of the first hop, from 1 to a chunk. A short one lowers the latency, and shortens the voice's prompt by
    up to a second."""
    left_chunks: int | None = 4
    """Left context of the flow in chunks, besides the voice; None: unlimited, at 90 MB for each second."""
    prompt_seconds: float = 10.0
    """The flow is conditioned on the last seconds of a reference; in 16 bits each takes 90 MB per voice."""
    sampling: Sampling = PUBLISHED


class CosyVoiceTTS:
    """A `SpeechModel`; several threads may speak concurrently."""

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
        self.prepared_voices = PreparedVoices(speech.flow, min(self.settings.first_hop, chunk), max_codes)

    @property
    def languages(self) -> Sequence[str]:
        """Codes of the languages it was published for."""
        return LANGUAGES[self.version]

    @property
    def frame_rate(self) -> float:
        """Codes a second."""
        return float(CODES_A_SECOND)

    def count_tokens(self, text: str) -> int:
        """The tokens of a text."""
        return len(self.parts.tokenizer.encode(text))

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
        """Load a published folder or hub id; `reinforced` uses the language model of version 3 tuned by RL.

        `dtype` is `auto`, `float32`, `bfloat16`, `float16`, or, on CPUs only, `int8`: the language model's layers in
        int8 and the flow in the faster of bfloat16 and float32. `auto` does the same on CPUs.
        """
        on = pick(device)
        lm_dtype, flow_dtype, is_int8 = dtypes_for(dtype, on)
        parts = load_cosyvoice(hub.resolve(name), on.torch_device, lm_dtype, flow_dtype, reinforced)
        if is_int8:
            round_layers(parts.lm)
        return cls(parts, on, settings, voices)

    @property
    def voices(self) -> VoiceStore:
        """The stored voices; may be replaced."""
        return self.references.voices

    @voices.setter
    def voices(self, voices: VoiceStore) -> None:
        self.references.voices = voices

    @property
    def rate(self) -> int:
        """Sample rate of the output in Hz."""
        return RATE

    @property
    def channels(self) -> int:
        """Channels of the output."""
        return 1

    def add_voice(self, name: str, sound: Sound, consent: str = "", text: str = "") -> StoredVoice:
        """Store a voice by name, from a recording of one to thirty seconds and, if known, its transcript."""
        transcript = normalise_transcript(text)
        reference = self.references.from_recording(sound, transcript)
        if transcript:
            self.prompt.zero_shot(transcript, reference.prompt.codes.tolist())
        stored = self.voices.add(StoredVoice(name, [], "", consent, text=transcript), sound)
        self.references.by_name(name)
        return stored

    def warm_up(self, voice: str | Sound | None = None, batches: Sequence[int] | None = None) -> None:
        """Prepare a voice and, on CUDA, capture hops for batches of these sizes; by default all that fit in memory.

        If no voice is stored, a placeholder is used.
        """
        without_voice = voice is None and not self.voices.names()
        if without_voice and not self.device.graphs:
            return
        placeholder = self.prepared_voices.placeholder() if without_voice else None
        prepared = placeholder or self._prepared_voice(self._reference(voice))
        if batches is None:
            reply = self.synthesizer.speech.start(prepared, self.settings.left_chunks).nbytes
            fit = self.device.samples_that_fit(2 * reply, BATCH_SIZES[-1])  # the states before and after a hop
            batches = [streams for streams in BATCH_SIZES if streams <= fit]
        self.synthesizer.warm_up(prepared, batches)

    def styled_by_instructions(self, instructions: str, style: SpeakingStyle) -> DirectedStyle:
        """The style for the name of a style, a request such as "more slowly, please", or free text.

        A style that this version does not have is refused.
        """
        plain, words = _as_directed(style), instructions.strip()
        name = words.lower().rstrip(".!")
        if any(name in styles for styles in STYLES.values()):
            requested = replace(plain, style=name, instruction="")
        else:
            requested = apply_request(words, plain) or replace(plain, style="", instruction=words)
        requested.instruction_for(self.version)
        return requested

    def styled_by_request(self, text: str, style: SpeakingStyle) -> DirectedStyle | None:
        """The style after a user's text, if all of it is a request that this version can follow; else None."""
        requested = apply_request(text, _as_directed(style))
        if requested is None or (requested.style and requested.style not in STYLES[self.version]):
            return None
        return requested

    @former_arguments(manner="style")
    def stream(
        self,
        text: str | Iterable[str],
        voice: str | Sound | None = None,
        style: SpeakingStyle | None = None,
        clock: Callable[[], float] | None = time.monotonic,
    ) -> Iterator[Samples]:
        """Speak a text, and yield audio while it is generated.  # pieces [1, time]

        The text may be an iterator of pieces, which are spoken while they arrive. `voice` is the name of a voice or a
        recording of one; None is the first stored voice. Without a clock there are no deadlines.
        """
        style = _as_directed(style)
        reference = self._reference(voice)
        prefix = self._prompt_prefix(reference, style)
        playback = PlaybackLead(clock)
        if isinstance(text, str):
            count = self.parts.tokenizer.encode
            parts = text_chunks(prepare_text(text, self.version, style.clean), lambda part: len(count(part)))
            sounds = self._stream_chunks(parts, prefix, reference, style, playback)
        else:
            sounds = self._stream_pieces(text, prefix, reference, style, playback)
        return self._finish(sounds, style, playback)

    @former_arguments(manner="style")
    def say(self, text: str, voice: str | Sound | None = None, style: SpeakingStyle | None = None) -> Sound:
        """Speak a text, and return all of its audio."""
        return _whole(self.stream(text, voice, style, clock=None))

    @former_arguments(manner="style")
    def convert(
        self, sound: Sound, voice: str | Sound | None = None, style: SpeakingStyle | None = None
    ) -> Iterator[Samples]:
        """Convert a recording of any length to another voice.  # pieces [1, time]"""
        style, playback = _as_directed(style), PlaybackLead(None)
        if style.instruction_for(self.version):
            raise InputError("a converted recording keeps its speaking style; only the speed can be changed")
        options = self._utterance_options(self._reference(voice), playback, style.seed)
        return self._finish(self._convert(sound, options), style, playback)

    def _convert(self, sound: Sound, options: UtteranceOptions) -> Iterator[Tensor]:
        mono = sound.mono()
        window = int(MAX_REFERENCE_SECONDS * mono.rate)
        for start in range(0, mono.samples.shape[1], window):
            part = mono.samples[:, start : start + window]
            if part.shape[1] >= mono.rate / CODES_A_SECOND:
                codes = self.parts.speech_tokenizer.codes(Sound(part, mono.rate))
                yield from self.synthesizer.speech_codes(codes.tolist(), options)

    def _stream_chunks(
        self,
        parts: list[Chunk],
        prefix: PromptPrefix,
        reference: VoiceReference,
        style: DirectedStyle,
        playback: "PlaybackLead",
    ) -> Iterator[Tensor]:
        for number, part in enumerate(parts):
            ids = self.prompt.text(part.text)
            min_rows, max_rows = self.parts.lm.length_limits(len(ids))
            generation = self._generation(style, number, min_rows, max_rows)
            options = self._utterance_options(reference, playback, style.seed + number)
            with closing(self.synthesizer.text(self.prompt.rows(prefix, ids), generation, options)) as sounds:
                yield from sounds
            yield torch.zeros(round(part.pause * style.pause * RATE))

    def _stream_pieces(
        self,
        text: Iterable[str],
        prefix: PromptPrefix,
        reference: VoiceReference,
        style: DirectedStyle,
        playback: "PlaybackLead",
    ) -> Generator[Tensor, None, None]:
        rounds = Interleave(self.parts.lm.config, prefix)
        tokens = (self.prompt.text(prepare_piece(piece, self.version)) for piece in cut_at_words(text))
        options = self._utterance_options(reference, playback, style.seed)
        generation = self._generation(style, 0, 0, 1)
        with closing(self.synthesizer.streaming_text(rounds, tokens, generation, options)) as sounds:
            yield from sounds

    def _generation(self, style: DirectedStyle, number: int, min_rows: int, max_rows: int) -> Generation:
        sampling = GREEDY if style.greedy else self.settings.sampling
        return Generation(sampling, max_new_rows=max_rows, min_new_rows=min_rows, seed=style.seed + number)

    def _utterance_options(self, reference: VoiceReference, playback: "PlaybackLead", seed: int) -> UtteranceOptions:
        return UtteranceOptions(self._prepared_voice(reference), playback.lead, seed)

    def _prepared_voice(self, reference: VoiceReference) -> FlowVoice:
        return self.synthesizer.call(lambda: self.prepared_voices.get(reference))

    def _prompt_prefix(self, reference: VoiceReference, style: DirectedStyle) -> PromptPrefix:
        """The prompt of an instruction, or of the reference's transcript, or of a voice without a transcript."""
        if instruction := style.instruction_for(self.version):
            return self.prompt.instructed(instruction)
        if reference.transcript:
            return self.prompt.zero_shot(reference.transcript, reference.prompt.codes.tolist())
        return self.prompt.cross_lingual()

    def _reference(self, voice: str | Sound | None) -> VoiceReference:
        if isinstance(voice, Sound):
            return self.references.from_recording(voice)
        if voice is not None:
            return self.references.by_name(voice)
        if not (names := self.voices.names()):
            raise InputError("CosyVoice has no built-in voice; add one: viva voices add NAME FILE --text TRANSCRIPT")
        return self.references.by_name(names[0])

    def _finish(self, sounds: Iterator[Tensor], style: DirectedStyle, playback: "PlaybackLead") -> Iterator[Samples]:
        """Apply speed and volume, and record what was yielded for playback."""
        stretch, limiter = TimeStretch(RATE, style.speed), Limiter(RATE)
        stretched, limited = stretch.initial_state(1), limiter.initial_state(1)
        for sound in sounds:
            piece, stretched = stretch.step(stretched, sound.numpy()[None])
            if style.volume != 1.0:
                piece, limited = limiter.step(limited, piece * np.float32(style.volume))
            if piece.shape[1]:
                playback.feed(piece.shape[1] / RATE)
                yield piece
        rest = stretch.flush(stretched)
        if style.volume != 1.0:
            loud, limited = limiter.step(limited, rest * np.float32(style.volume))
            rest = np.concatenate([loud, limiter.flush(limited)], axis=1)
        if rest.shape[1]:
            yield rest


class PlaybackLead:
    """How far generated audio is ahead of its playback. Thread-safe; without a clock, time stands still."""

    def __init__(self, clock: Callable[[], float] | None) -> None:
        self._clock = clock or (lambda: 0.0)
        self._player, self._lock = PlaybackClock(), threading.Lock()

    def feed(self, seconds: float) -> None:
        """Add audio of this length."""
        with self._lock:
            self._player.feed(self._clock(), seconds)

    def lead(self) -> float:
        """Seconds of audio that have not been played yet."""
        with self._lock:
            return self._player.lead(self._clock())


class Dtypes(NamedTuple):
    """The dtypes of the language model and the flow, and whether the former's layers are int8."""

    lm: torch.dtype
    flow: torch.dtype
    is_int8: bool = False


def dtypes_for(spec: str, device: Device) -> Dtypes:
    """The dtype of each part for the value of a `dtype` option."""
    lm = choose_cosyvoice_lm(device, spec)
    return Dtypes(lm.dtype, choose_cosyvoice_flow(device, spec).dtype, lm.is_int8)


def round_layers(lm: CosyVoiceLM) -> None:
    """Quantise the language model's layers to int8 in place; its head and embeddings are unchanged."""
    for parent, name, _, linear in list(linears(lm.trunk)):
        setattr(parent, name, Int8Linear.of_weight(linear.weight, linear.bias))


def _as_directed(style: SpeakingStyle | None) -> DirectedStyle:
    if isinstance(style, DirectedStyle):
        return style
    if style is None:
        return DirectedStyle()
    return DirectedStyle(style.speed, style.pause, style.seed, style.greedy, style.clean)


def _whole(pieces: Iterator[Samples]) -> Sound:
    return Sound(np.concatenate([np.zeros((1, 0), np.float32), *pieces], axis=1), RATE)
