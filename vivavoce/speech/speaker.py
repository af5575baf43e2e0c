"""A loaded text-to-speech model: text in, sound out from the first frame on.

A voice's part of the prompt is computed once and forked for every text. Frames become sound in chunks that grow with
the lead over an imagined player, so the first sound comes at once and later ones cost little.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce import hub
from vivavoce.audio.sound import Sound
from vivavoce.audio.time_stretch import TimeStretch
from vivavoce.device import Device, pick, resolve_dtype
from vivavoce.dialogue.chunking import Grain, LeadPolicy, next_chunk
from vivavoce.dialogue.player import SimulatedPlayer
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.moss_audio_tokenizer_nano import MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano import MossTTSNano
from vivavoce.models.moss_tts_nano_prompt import MossTTSNanoPrompt, Tokenizer
from vivavoce.models.moss_tts_nano_text import Chunk, chunks
from vivavoce.models.sentencepiece_tokenizer import SentencePieceTokenizer
from vivavoce.nn.int8_linear import int8_is_fast_here, to_int8
from vivavoce.speech.cleaning import cleaned
from vivavoce.speech.mouth import Codes, CpuMouth, EngineMouth, Mouth
from vivavoce.speech.numbers import numbers_as_words
from vivavoce.speech.settings import SpeechSettings
from vivavoce.speech.voices import KeptVoice, VoiceShelf

Samples = NDArray[np.float32]
OFFICIAL_CODEC = "OpenMOSS-Team/MOSS-Audio-Tokenizer-Nano"
CODEC_FOLDER = "codec"
SMALLEST_ROUNDED = 512  # hidden size
LONGEST_PAUSE = 10.0


@dataclass(frozen=True)
class Manner:
    """How a text is said."""

    speed: float = 1.0
    """0.5 to 2, at the voice's own pitch."""
    pause: float = 1.0
    """Times the usual silence between sentences that are said apart."""
    seed: int = 0
    greedy: bool = False
    """Always the likeliest code: the same whatever the seed, and duller."""
    clean: bool = True
    """Whether markup and the like are taken out of the text first."""

    def __post_init__(self) -> None:
        if not 0 <= self.pause <= LONGEST_PAUSE:
            raise InputError(f"pause must be 0 to {LONGEST_PAUSE:.0f} times the usual, not {self.pause}")


class Speaker:
    """Says texts, several at a time if asked from several threads."""

    def __init__(
        self,
        model: MossTTSNano,
        codec: MossAudioTokenizerNano,
        tokenizer: Tokenizer,
        device: Device,
        settings: SpeechSettings | None = None,
        voices: str | Path | None = None,
    ) -> None:
        if codec.config.quantizer.num_quantizers < model.codebooks:
            raise CheckpointError(
                f"the model writes {model.codebooks} codebooks, the codec has "
                f"{codec.config.quantizer.num_quantizers}; give the codec that belongs to the model"
            )
        self.model, self.codec = model, codec
        self.prompt = MossTTSNanoPrompt(model.config, tokenizer)
        self.settings = settings or SpeechSettings()
        self.shelf = VoiceShelf(self.settings.voices, voices)
        alone = device.kind == "cpu" and model.transformer.wte.weight.dtype == torch.float32
        self.mouth: Mouth = CpuMouth(model, self.prompt) if alone else EngineMouth(model, self.prompt, device)

    @classmethod
    def load(
        cls,
        name: str = "mini-tts",
        device: str = "auto",
        dtype: str = "auto",
        codec: str | None = None,
        codebooks: int | None = None,
        voices: str | Path | None = None,
    ) -> "Speaker":
        """A model by its bundled name, folder or hub id; its codec stands in its `codec` folder or is fetched too.

        `dtype` is `auto`, `float32`, `bfloat16`, `float16`, or `int8` on CPUs; `auto` takes int8 where it is faster.
        """
        folder, on = hub.resolve(name), pick(device)
        beside = folder / CODEC_FOLDER
        codec_folder = hub.resolve(codec or (str(beside) if beside.is_dir() else OFFICIAL_CODEC))
        model = MossTTSNano.load(folder, on.torch_device, _dtype_of(dtype, on), codebooks)
        if dtype == "int8" or (dtype == "auto" and _is_better_rounded(model, on)):
            to_int8(model.transformer)
            to_int8(model.local_transformer)
        return cls(
            model,
            MossAudioTokenizerNano.load(codec_folder, on.torch_device),
            SentencePieceTokenizer.load(folder),
            on,
            SpeechSettings.read(folder),
            voices,
        )

    @property
    def rate(self) -> int:
        """Samples a second of what comes out."""
        return self.codec.config.sample_rate

    def add_voice(self, name: str, sound: Sound, consent: str = "") -> KeptVoice:
        """Keep a voice on this machine under a name, from a recording of three to eight seconds."""
        codes = self.codec.reference(sound)[: self.model.codebooks].T.tolist()
        return self.shelf.add(KeptVoice(name, codes, f"{self.rate} Hz", consent))

    def stream(
        self,
        text: str,
        voice: str | Sound | None = None,
        manner: Manner | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Iterator[Samples]:
        """The sound of a text, as it is made.  # pieces [channel, time]

        `voice` is a name, or a recording to sound like; none is the model's own. Leaving off half-way costs nothing.
        """
        manner = manner or Manner()
        stretch = TimeStretch(self.rate, manner.speed)
        parts = chunks(self.prepared(text, manner.clean), self.prompt.count_tokens, self.settings.chunk_tokens)
        return self._stream(parts, self._reference(voice), manner, stretch, clock)

    def say(self, text: str, voice: str | Sound | None = None, manner: Manner | None = None) -> Sound:
        """The whole sound of a text."""
        pieces = list(self.stream(text, voice, manner))
        return Sound(np.concatenate(pieces, axis=1), self.rate)

    def prepared(self, text: str, clean: bool = True) -> str:
        """The text as the model gets it."""
        text = cleaned(text) if clean else text
        return numbers_as_words(text) if self.settings.spells_numbers else text

    def _stream(
        self,
        parts: list[Chunk],
        reference: Codes,
        manner: Manner,
        stretch: TimeStretch,
        clock: Callable[[], float],
    ) -> Iterator[Samples]:
        player, channels = SimulatedPlayer(), self.codec.config.channels
        for number, part in enumerate(parts):
            state = stretch.initial_state(channels)
            tokens, seed = self.prompt.count_tokens(part.text), manner.seed + number
            generation = self.settings.generation(self.model.config.n_vq, tokens, seed, manner.greedy)
            with closing(self.mouth.frames(reference, part.text, generation)) as frames:
                for sound in self._sounds(frames, player, clock):
                    stretched, state = stretch.step(state, sound)
                    yield from self._heard(stretched, player, clock)
            silence = np.zeros((channels, round(part.pause * manner.pause * self.rate)), np.float32)
            yield from self._heard(np.concatenate([stretch.flush(state), silence], axis=1), player, clock)

    def _heard(self, sound: Samples, player: SimulatedPlayer, clock: Callable[[], float]) -> Iterator[Samples]:
        """Hand a piece on, and let the imagined player have it."""
        if sound.shape[1]:
            player.feed(clock(), sound.shape[1] / self.rate)
            yield sound

    def _sounds(
        self, frames: Iterator[tuple[int, ...]], player: SimulatedPlayer, clock: Callable[[], float]
    ) -> Iterator[Samples]:
        """Frames decoded in chunks, by the lead over the player."""
        policy = LeadPolicy(Grain(frame_seconds=1 / self.codec.config.frame_rate))
        state, waiting, decoded, is_last = self.codec.decoder_state(), list[tuple[int, ...]](), 0, False
        while not is_last:
            frame = next(frames, None)
            is_last = frame is None
            if frame is not None:
                waiting.append(frame)
            while waiting and (count := next_chunk(policy, len(waiting), is_last, decoded, player.lead(clock()))):
                codes, waiting = waiting[:count], waiting[count:]
                sound, state = self.codec.decode_step(state, torch.tensor(codes).T)
                decoded += 1
                yield sound.float().cpu().numpy()

    def _reference(self, voice: str | Sound | None) -> Codes:
        """The codes of a voice; none for the model's own."""
        if isinstance(voice, Sound):
            codes = self.codec.reference(voice)[: self.model.codebooks].T.tolist()
        else:
            codes = [] if voice is None or voice == self.settings.own_voice else self.shelf.get(voice).codes
        return tuple(tuple(frame) for frame in codes)


def _dtype_of(name: str, device: Device) -> torch.dtype:
    if name == "int8":
        if device.kind != "cpu" or not int8_is_fast_here():
            raise InputError(f"int8 speech needs an x86 CPU with VNNI, and this is {device.name}; use auto or float32")
        return torch.float32
    return resolve_dtype("float32" if device.kind == "cpu" and name == "auto" else name, device)


def _is_better_rounded(model: MossTTSNano, device: Device) -> bool:
    """Whether a row waits for memory: large layers on a CPU that multiplies int8."""
    return device.kind == "cpu" and model.config.hidden_size >= SMALLEST_ROUNDED and int8_is_fast_here()
