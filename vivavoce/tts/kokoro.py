"""Kokoro-82M as a TTS model: sentences, and windows inside long ones, are spoken while the rest is computed."""

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vivavoce import hub
from vivavoce.audio.io import Sound
from vivavoce.audio.stretch import FASTEST, SLOWEST
from vivavoce.device import Device, pick
from vivavoce.errors import InputError, MissingDependencyError, NothingToSayError, shown
from vivavoce.implementations import Choice, choose_kokoro_generator
from vivavoce.models.kokoro.config import RATE, read_vocabulary
from vivavoce.models.kokoro.layers import NormStatistics
from vivavoce.models.kokoro.model import GeneratedSound, Kokoro, PhonemeText, PreparedSpeech
from vivavoce.models.kokoro.voices import VoiceTables
from vivavoce.models.kokoro.windows import FEATURES_A_SECOND, Break, WindowLengths, cuts, sound_in_windows
from vivavoce.models.moss_tts_nano.prompt import has_cjk
from vivavoce.tts.fixed_voices import FixedVoiceModel, FixedVoices
from vivavoce.tts.interface import Samples, SpeakingStyle, StoredVoice
from vivavoce.tts.kokoro_batch import BatchedWorker, Generate, KokoroWorker, SingleWorker
from vivavoce.tts.phonemes import Phonemes, phonemes, sentences, split_long
from vivavoce.tts.text import cleaned

logger = logging.getLogger(__name__)

DEFAULT_VOICES = ("af_heart", "zf_xiaoxiao")  # of texts without and with Chinese characters
PAUSE_MARKS = frozenset(";:,.!?—…")
CPU_WINDOWS = WindowLengths(0.45, 0.8, 4.0, 2.4)  # a GPU's first sound is early enough with longer ones
ONSET = 12  # features before the first phoneme where sound may begin; what is earlier is silent
PAUSE = 0.25  # seconds between sentences, beside the silence that the model makes itself
MAX_PHONEMES = 400  # of a part; the model was trained on shorter ones than it has positions for
VOICE_SAMPLE = "ʃˌi hæd jʊɹ dˈɑɹk sˈut ɪn ɡɹˈisi wˈɔʃ wˈɔTəɹ ˈɔl jˈɪɹ."  # what a voice's statistics are taken from
# Phonemes of a text for which they are taken: a voice has a style for each length of text.
SAMPLED_LENGTHS = (16, 64)
MAX_KNOWN_STATISTICS = 64 * len(SAMPLED_LENGTHS)
WARM_UP_TEXTS = ("Good evening, and welcome.", "晚上好，欢迎光临。")
Phonemise = Callable[[str, str, Callable[[str], bool]], Phonemes]


class WordTime(NamedTuple):
    """A written word and when it is spoken, in seconds from the start of the text."""

    word: str
    start: float
    end: float


@dataclass(frozen=True)
class SpokenPiece:
    """Some audio of a text, and the words of the sentence that begins with it."""

    samples: Samples  # [1, time]
    words: tuple[WordTime, ...] = ()


class KokoroVoices(FixedVoices):
    """The model's voices and mixtures of them."""

    refusal = "Kokoro cannot imitate a recording; mix its voices, as in af_heart:0.7+af_bella:0.3"

    def __init__(self, tables: VoiceTables) -> None:
        super().__init__({name: StoredVoice(name, []) for name in tables.names})
        self._tables = tables

    def names(self) -> list[str]:
        """The names of the model's voices, the default first."""
        known = [name for name in DEFAULT_VOICES if name in self.built_in]
        return [*known, *(name for name in self.built_in if name not in known)]

    def __contains__(self, name: str) -> bool:
        try:
            return bool(self._tables.mixture(name))
        except InputError:  # an answer, not a failure
            return False


class KokoroTTS(FixedVoiceModel):
    """A `SpeechModel`; several threads may speak concurrently."""

    def __init__(
        self,
        model: Kokoro,
        folder: Path,
        device: Device,
        dtype: str = "auto",
        windows: WindowLengths | None = None,
        phonemise: Phonemise = phonemes,
    ) -> None:
        self.model, self.device, self._phonemise = model, device, phonemise
        self.windows = windows or (CPU_WINDOWS if device.kind == "cpu" else WindowLengths())
        self.vocabulary = read_vocabulary(folder)
        self.tables = VoiceTables(folder, 2 * model.config.style)
        self.voices = KokoroVoices(self.tables)
        self.choice: Choice = choose_kokoro_generator(device, dtype)
        generate: Generate = model.generate
        if device.kind == "cpu" or device.graphs:
            generate = self.choice.cls(model.decoder.generator, self.choice.dtype)
        self.worker: KokoroWorker = (
            SingleWorker(model, generate) if device.kind == "cpu" else BatchedWorker(model, generate, device)
        )
        self._voice_statistics: OrderedDict[tuple[str, int], NormStatistics] = OrderedDict()

    @classmethod
    def load(
        cls, name: str, device: str = "auto", dtype: str = "auto", windows: WindowLengths | None = None
    ) -> "KokoroTTS":
        """A published folder, ONNX or torch, or a model's name. `dtype`: auto, float32, or on CPUs bfloat16."""
        on, folder = pick(device), hub.resolve(name)
        choose_kokoro_generator(on, dtype)
        tts = cls(Kokoro.load(folder, on.torch_device), Path(folder), on, dtype, windows)
        tts.capture()
        return tts

    def capture(self) -> None:
        """Capture the passes of a GPU, which would delay the first texts."""
        if isinstance(self.worker, BatchedWorker):
            self.worker.warm_up(self.worker.prepare(self._voice_sample(self.tables.names[0], SAMPLED_LENGTHS[-1])))

    def load_languages(self, voice: str | None = None) -> None:
        """Load the dictionaries of each language, and the statistics of its voice: else the first text waits for them.

        `voice` None: the default one of each language.
        """
        for text in WARM_UP_TEXTS:
            try:
                parts = list(self.parts(text, voice, SpeakingStyle()))
            except MissingDependencyError as error:
                logger.info("one language less: %s", error, exc_info=True)
                continue
            for voice_name in {part.voice for part in parts}:
                for length in SAMPLED_LENGTHS:
                    self.voice_statistics(voice_name, length)

    def close(self) -> None:
        """Take no more texts."""
        self.worker.close()

    @property
    def rate(self) -> int:
        """Sample rate of the output in Hz."""
        return RATE

    def stream(
        self,
        text: str,
        voice: str | Sound | None = None,
        style: SpeakingStyle | None = None,
        clock: Callable[[], float] | None = time.monotonic,
    ) -> Iterator[Samples]:
        """Speak a text, and yield audio while it is generated.  # pieces [1, time]

        `voice` is a name or a mixture of names; None is an American voice, or a Mandarin one for Chinese text. The
        audio does not depend on the clock.
        """
        for piece in self.speak(text, voice, style):
            yield piece.samples

    def say(self, text: str, voice: str | Sound | None = None, style: SpeakingStyle | None = None) -> Sound:
        """Speak a text, and return all of its audio."""
        return Sound(np.concatenate([piece.samples for piece in self.speak(text, voice, style)], axis=1), RATE)

    def speak(
        self, text: str, voice: str | Sound | None = None, style: SpeakingStyle | None = None
    ) -> Iterator[SpokenPiece]:
        """As `stream`, with the time of every word."""
        style = style or SpeakingStyle()
        parts = list(self.parts(text, voice, style))  # refuses what it cannot speak before the first sound
        return self._spoken(parts, style)

    def say_all(
        self, texts: Sequence[str], voice: str | None = None, style: SpeakingStyle | None = None
    ) -> list[Sound]:
        """Speak several texts at once, each as a whole: what one pass computes for all is shared."""
        return self.say_each([(text, voice, style or SpeakingStyle()) for text in texts])

    def say_each(self, requests: Sequence[tuple[str, str | None, SpeakingStyle]]) -> list[Sound]:
        """As `say_all`, every text in its own voice and style."""
        parts = [list(self.parts(text, voice, style)) for text, voice, style in requests]
        styles = [style for _, _, style in requests]
        flat = [self._phoneme_text(part, style) for each, style in zip(parts, styles, strict=True) for part in each]
        sounds = (made.samples.float().cpu().numpy() for made in self.worker.whole(flat))
        joined = []
        for each, style in zip(parts, styles, strict=True):
            pause = np.zeros((1, round(PAUSE * style.pause * RATE)), np.float32)
            pieces = [piece for _ in each for piece in (next(sounds), pause)]
            joined.append(Sound(np.concatenate(pieces, axis=1), RATE))
        return joined

    def parts(self, text: str, voice: str | Sound | None, style: SpeakingStyle) -> "Iterator[SentencePart]":
        """The sentences of a text with their phonemes and voice."""
        if isinstance(voice, Sound):
            raise InputError("Kokoro cannot imitate a recording; give the name of a voice or a mixture of names")
        if not SLOWEST <= style.speed <= FASTEST:
            raise InputError(f"speed must be {SLOWEST} to {FASTEST}, not {style.speed}")
        prepared = cleaned(text) if style.clean else text
        name = voice or self._default_voice(prepared)
        accent = next(iter(self.tables.mixture(name)))[0]
        found = False
        for sentence in sentences(prepared):
            for part in split_long(self._phonemise(sentence, accent, self.vocabulary.__contains__), MAX_PHONEMES):
                found = True
                yield SentencePart(part, name)
        if not found:
            raise NothingToSayError(f"there is nothing to say in {shown(text)}; give at least one word")

    def _default_voice(self, text: str) -> str:
        wanted = DEFAULT_VOICES[has_cjk(text)]
        return wanted if wanted in self.tables.names else self.tables.names[0]

    def _phoneme_text(self, part: "SentencePart", style: SpeakingStyle) -> PhonemeText:
        ids = [self.vocabulary[phoneme] for phoneme in part.phonemes.text]
        return PhonemeText(ids, self.tables.style(part.voice, len(ids)), style.speed, style.seed)

    def _spoken(self, parts: "list[SentencePart]", style: SpeakingStyle) -> Iterator[SpokenPiece]:
        spoken, started = 0.0, float("-inf")

        def generate(prepared: PreparedSpeech) -> GeneratedSound:
            return self.worker.generate(prepared, spoken - (time.monotonic() - started))

        for part in parts:
            spoken_text = self._phoneme_text(part, style)
            prepared = self.worker.prepare(spoken_text)
            durations = prepared.durations[0]
            start = max(0, 2 * durations[0] - ONSET)
            ends = cuts(breaks(part.phonemes.text, durations), prepared.features.shape[-1], self.windows, start)
            if len(ends) == 1:
                start, sounds = 0, iter([generate(prepared).samples[0].float().cpu()])
            else:
                known = self.voice_statistics(part.voice, len(spoken_text.ids))
                sounds = sound_in_windows(generate, prepared, ends, known, start)
            words = tuple(word_times(part.phonemes, durations, spoken - start / FEATURES_A_SECOND))
            for sound in sounds:
                started = max(started, time.monotonic() - spoken)
                yield SpokenPiece(sound.numpy()[None], words)
                spoken, words = spoken + len(sound) / RATE, ()
            pause = np.zeros((1, round(PAUSE * style.pause * RATE)), np.float32)
            spoken += pause.shape[1] / RATE
            if pause.shape[1]:
                yield SpokenPiece(pause)

    def voice_statistics(self, voice: str, phonemes: int) -> NormStatistics:
        """The statistics of a voice for a length of text, of which a window's norms take account.

        Those of the sampled lengths are computed when first used; between two of them they are interpolated.
        """
        length = min(max(phonemes, SAMPLED_LENGTHS[0]), SAMPLED_LENGTHS[-1])
        lower = next(each for each in reversed(SAMPLED_LENGTHS) if each <= length)
        below = self._sampled_statistics(voice, lower)
        if lower == length:
            return below
        upper = next(each for each in SAMPLED_LENGTHS if each > length)
        return below.towards(self._sampled_statistics(voice, upper), math.log(length / lower, upper / lower))

    def _sampled_statistics(self, voice: str, length: int) -> NormStatistics:
        key = voice, length
        if key not in self._voice_statistics:
            prepared = self.worker.prepare(self._voice_sample(voice, length))
            self._voice_statistics[key] = self.worker.generate(prepared).statistics
            while len(self._voice_statistics) > MAX_KNOWN_STATISTICS:
                self._voice_statistics.popitem(last=False)
        return self._voice_statistics[key]

    def _voice_sample(self, voice: str, length: int) -> PhonemeText:
        """The sample in the style of a text of so many phonemes."""
        ids = [self.vocabulary[phoneme] for phoneme in VOICE_SAMPLE if phoneme in self.vocabulary]
        return PhonemeText(ids, self.tables.style(voice, length))


@dataclass(frozen=True)
class SentencePart:
    """Phonemes that are spoken together, and the voice that speaks them."""

    phonemes: Phonemes
    voice: str


def breaks(spoken: str, durations: Sequence[int]) -> list[Break]:
    """The middles of pauses and of gaps between words, in features."""
    starts = [0, *accumulate(durations)]
    found = []
    for place, phoneme in enumerate(spoken, start=1):  # the durations begin with a boundary
        if phoneme in PAUSE_MARKS or phoneme == " ":
            found.append(Break(starts[place] + starts[place + 1], phoneme in PAUSE_MARKS))
    return found


def word_times(spoken: Phonemes, durations: Sequence[int], begin: float) -> Iterator[WordTime]:
    """The words of a part that begins at a time, by the durations of their phonemes."""
    starts = [0, *accumulate(durations)]
    for word in spoken.words:
        start, end = starts[word.start + 1], starts[word.end + 1]
        yield WordTime(word.text, begin + start * SECONDS_A_FRAME, begin + end * SECONDS_A_FRAME)


SECONDS_A_FRAME = 0.025
