"""Captions of spoken replies, and transcription by the speech-to-speech model itself."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from vivavoce.audio.io import Sound
from vivavoce.audio.level import rms_dbfs
from vivavoce.dialogue.backend import Piece, ReplyPlan, Spoke, Wrote
from vivavoce.dialogue.history import WORD, speaking_seconds
from vivavoce.dialogue.items import Samples
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.models.moss_speech.codec import DECODER_RATE
from vivavoce.models.moss_speech.prompt import Turn

if TYPE_CHECKING:
    from vivavoce.s2s.moss_speech import MossSpeechBackend


PAUSE_DBFS = -45.0
CAPTION_SECONDS, WAITING_SECONDS = 4.8, 1.6  # of sound in a caption at least; where sound waits for it
AHEAD_SECONDS = 1.0  # captions that are less far ahead of playback are brought forward
PARTIAL_SECONDS = 0.3  # of new sound between two captions of an unfinished segment
PARTIAL_ROWS_PER_SECOND = 6  # of speech: more tokens than are spoken
MIN_PARTIAL_ROWS = 2  # the last word is not certain, and left out


@dataclass
class Segment:
    """A part of a reply that is captioned as a whole: its sound and codes so far, and the words already emitted."""

    at: float
    """Seconds into the reply."""
    sound: list[Samples] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    samples: int = 0
    tried_samples: int = 0
    """Its length when it was captioned last."""
    words: list[str] = field(default_factory=list)

    def add(self, samples: Samples, codes: list[int]) -> None:
        """Add the next sound and its codes."""
        self.sound.append(samples)
        self.codes += codes
        self.samples += len(samples)

    def rows_left(self, seconds: float) -> int:
        """How many more rows of text its first seconds may have: what a model goes on to write was not said yet."""
        unsaid = max(0.0, seconds - speaking_seconds("".join(self.words)))
        return MIN_PARTIAL_ROWS + round(PARTIAL_ROWS_PER_SECOND * unsaid)

    def new_words(self, text: str, seconds: float, is_whole: bool) -> list[tuple[str, float]]:
        """The words of a transcript of its first seconds that were not emitted yet, and where each begins.

        Before the end of the segment a transcript that differs from the words emitted is not certain, the last word may
        be cut, and a language model may go on beyond the sound: words take at least the time to speak them.
        """
        words = WORD.findall(text)
        ends = [sum(map(len, words[: index + 1])) for index in range(len(words))]
        times = [seconds * end / ends[-1] for end in ends]
        if not is_whole:
            times = [max(at, speaking_seconds("".join(words[: index + 1]))) for index, at in enumerate(times)]
            is_certain = words[: len(self.words)] == self.words
            words = [word for word, end in zip(words[:-1], times, strict=False) if end < seconds] if is_certain else []
        begins = [0.0, *times]
        new = list(zip(words, begins, strict=False))[len(self.words) :]
        self.words += [word for word, _ in new]
        return [(word, self.at + begin) for word, begin in new]


class Captions:
    """Captions a spoken reply in segments; with `words_first` it also emits each segment's sound, after its text.

    A segment is captioned when it is complete. Where playback comes near its words, those of an unfinished segment are
    emitted too, so that a reply that is interrupted keeps the words that were heard.
    """

    def __init__(self, backend: "MossSpeechBackend", plan: ReplyPlan, put: Callable[[Piece], Awaitable[None]]) -> None:
        self._captioner = backend.options.captioner
        self.delays_sound = backend.options.words_first and self._captioner is not None
        self._words, self._language, self._put = backend.words, plan.settings.recognition.language, put
        seconds = WAITING_SECONDS if self.delays_sound else CAPTION_SECONDS
        self._min_samples = round((backend.options.caption_seconds or seconds) * DECODER_RATE)
        self._played = plan.played
        self._segment = Segment(0.0)
        self._upcoming: Sequence[int] = ()
        self._seconds_per_code = backend.policy.unit.frame_seconds / plan.settings.speed
        self._captioned = 0.0  # seconds of sound whose words were emitted
        self._last: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, samples: Samples, codes: list[int], upcoming: Sequence[int] = ()) -> None:
        """Add the next sound of the reply and its codes; starts a caption at a pause, or when the segment is long.

        `upcoming` are codes after it, whose sound is not made yet: by them words are known before they are heard.
        """
        if self._captioner is None:
            return
        segment, self._upcoming = self._segment, upcoming
        segment.add(samples, codes)
        pauses = rms_dbfs(samples[-DECODER_RATE // 12 :]) < PAUSE_DBFS
        if segment.samples >= 3 * self._min_samples or (segment.samples >= self._min_samples and pauses):
            self._caption_whole()
        elif self._is_urgent and segment.samples - segment.tried_samples >= PARTIAL_SECONDS * DECODER_RATE:
            self._start(segment, is_whole=False)

    @property
    def _is_urgent(self) -> bool:
        """Whether playback comes near words that are not known yet, and no caption is being made."""
        is_busy = self._last is not None and not self._last.done()
        return not is_busy and not self.delays_sound and self._captioned - self._played() < AHEAD_SECONDS

    async def finish(self) -> None:
        """Caption the rest, and wait until all captions have been emitted."""
        if self._segment.samples:
            self._caption_whole()
        if self._last is not None:
            await self._last

    def stop(self) -> None:
        """Cancel captions that have not been emitted."""
        for task in self._tasks:
            task.cancel()

    def _caption_whole(self) -> None:
        segment = self._segment
        self._segment = Segment(segment.at + segment.samples / DECODER_RATE)
        self._start(segment, is_whole=True)

    def _start(self, segment: Segment, is_whole: bool) -> None:
        sound, segment.tried_samples = np.concatenate(segment.sound), segment.samples
        caption = self._caption(segment, sound, list(segment.codes), is_whole, self._last)
        self._last = asyncio.get_running_loop().create_task(caption)
        self._tasks.add(self._last)
        self._last.add_done_callback(self._tasks.discard)

    async def _caption(
        self,
        segment: Segment,
        sound: Samples,
        codes: list[int],
        is_whole: bool,
        previous: "asyncio.Task[None] | None",
    ) -> None:
        seconds = len(sound) / DECODER_RATE
        if self._captioner is None or self._captioner == "model":
            upcoming = () if is_whole else self._upcoming
            seconds += len(upcoming) * self._seconds_per_code
            max_rows = None if is_whole else segment.rows_left(seconds)
            begins = "".join(segment.words).strip()
            text = await self._words.of_codes([*codes, *upcoming], self._urgency, begins, max_rows)
        else:
            text = await self._captioner.transcribe(sound, DECODER_RATE, self._language)
        if previous is not None:
            await previous
        text = f" {text}" if text and segment.at else text
        if self.delays_sound:  # the text is checked as a whole before its sound is emitted
            if text:
                await self._put(Wrote(text, segment.at))
            if len(sound):
                await self._put(Spoke(sound))
            return
        for word, at in segment.new_words(text, seconds, is_whole):
            self._captioned = max(at, self._captioned)
            await self._put(Wrote(word, self._captioned))
        if is_whole:
            self._captioned = segment.at + seconds

    @property
    def _urgency(self) -> float:
        """Seconds until playback comes to words that are not known yet, within limits."""
        return min(max(self._captioned - self._played(), MIN_URGENCY), WORDS_URGENCY)


WRITE_DOWN = "Write down what is said."
ROWS_PER_CODE = 2  # 80 ms of speech hold at most a few letters
MIN_ROWS = 16
MIN_URGENCY = 0.3  # seconds: for words that are about to be heard
WORDS_URGENCY = 1.5  # seconds: captions are less urgent than sound, so their rows join steps that sound needs


class MossSpeechTranscriber:
    """A `ReplyTranscriber` by the language model itself, on a sequence that is closed after each transcript."""

    def __init__(self, backend: "MossSpeechBackend", instructions: str = WRITE_DOWN) -> None:
        self._backend, self._instructions = backend, instructions

    async def transcribe(self, samples: Samples, rate: int, language: str | None = None) -> str:
        """The transcript of some sound."""
        sound = Sound(samples, rate).mono().resampled(self._backend.input_rate).samples[0]
        state = self._backend.codec.speech_encoder.initial_state()
        codes, _ = await self._backend.speech_encoder.do((state, torch.from_numpy(sound), True), urgency=1.0)
        return await self.of_codes(codes)

    async def of_codes(
        self, codes: Sequence[int], urgency: float = WORDS_URGENCY, begins: str = "", max_rows: int | None = None
    ) -> str:
        """The transcript of some speech codes, needed in `urgency` seconds; how it begins may be known already."""
        if not codes:
            return ""
        engine, prompt, model = self._backend.engine, self._backend.prompt, self._backend.model
        rows = prompt.turn(Turn("system", self._instructions)) + prompt.turn(Turn("user", codes))
        sequence = await engine.open(rows + prompt.open_reply("text") + prompt.text(begins))
        try:
            max_rows = MIN_ROWS + ROWS_PER_CODE * len(codes) if max_rows is None else max_rows
            async with await engine.generate(sequence, Generation(GREEDY, max_new_rows=max_rows)) as reply:
                reply.needed_by(asyncio.get_running_loop().time() + urgency)
                rows = [row async for row in reply]
        finally:
            await engine.close(sequence)
        written = self._backend.tokenizer.decode(model.written_ids(row for row in rows if not model.ends(row)))
        return f"{begins}{written}".strip()
