"""Captions of spoken replies, and transcription by the speech-to-speech model itself."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vivavoce.audio.io import Sound
from vivavoce.audio.level import rms_dbfs
from vivavoce.dialogue.backend import Piece, ReplyPlan, Spoke, Wrote
from vivavoce.dialogue.events import Samples
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.models.moss_speech.codec import DECODER_RATE
from vivavoce.models.moss_speech.prompt import Turn

if TYPE_CHECKING:
    from vivavoce.s2s.moss_speech import MossSpeechBackend


PAUSE_DBFS = -45.0


class Captions:
    """Captions a spoken reply in segments; with `words_first` it also emits each segment's sound, after its text."""

    def __init__(self, backend: "MossSpeechBackend", plan: ReplyPlan, put: Callable[[Piece], Awaitable[None]]) -> None:
        self._captioner = backend.options.captioner
        self.delays_sound = backend.options.words_first and self._captioner is not None
        self._words, self._language, self._put = backend.words, plan.settings.language, put
        self._min_samples = round(backend.options.caption_seconds * DECODER_RATE)
        self._sound: list[Samples] = []
        self._codes: list[int] = []
        self._captioned = 0  # samples
        self._last: asyncio.Task[None] | None = None

    def add(self, samples: Samples, codes: list[int]) -> None:
        """Add the next sound of the reply and its codes; starts a caption at a pause, or when the segment is long."""
        if self._captioner is None:
            return
        self._sound.append(samples)
        self._codes += codes
        length = sum(map(len, self._sound))
        pauses = rms_dbfs(samples[-DECODER_RATE // 12 :]) < PAUSE_DBFS
        if length >= 3 * self._min_samples or (length >= self._min_samples and pauses):
            self._caption_buffered()

    async def finish(self) -> None:
        """Caption the rest, and wait until all captions have been emitted."""
        if self._sound:
            self._caption_buffered()
        if self._last is not None:
            await self._last

    def stop(self) -> None:
        """Cancel captions that have not been emitted."""
        if self._last is not None:
            self._last.cancel()

    def _caption_buffered(self) -> None:
        sound, codes = np.concatenate(self._sound), self._codes
        at, self._captioned = self._captioned / DECODER_RATE, self._captioned + len(sound)
        self._sound, self._codes = [], []
        self._last = asyncio.get_running_loop().create_task(self._caption(sound, codes, at, self._last))

    async def _caption(
        self, sound: Samples, codes: list[int], at: float, previous: "asyncio.Task[None] | None"
    ) -> None:
        if self._captioner is None or self._captioner == "model":
            text = await self._words.of_codes(codes)
        else:
            text = await self._captioner.transcribe(sound, DECODER_RATE, self._language)
        if previous is not None:
            await previous
        if text:
            await self._put(Wrote(text if at == 0 else f" {text}", at))
        if self.delays_sound and len(sound):
            await self._put(Spoke(sound))


WRITE_DOWN = "Write down what is said."
ROWS_PER_CODE = 2  # 80 ms of speech hold at most a few letters
MIN_ROWS = 16
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

    async def of_codes(self, codes: Sequence[int]) -> str:
        """The transcript of some speech codes."""
        if not codes:
            return ""
        engine, prompt, model = self._backend.engine, self._backend.prompt, self._backend.model
        rows = prompt.turn(Turn("system", self._instructions)) + prompt.turn(Turn("user", codes))
        sequence = await engine.open(rows + prompt.open_reply("text"))
        try:
            max_rows = MIN_ROWS + ROWS_PER_CODE * len(codes)
            async with await engine.generate(sequence, Generation(GREEDY, max_new_rows=max_rows)) as reply:
                reply.needed_by(asyncio.get_running_loop().time() + WORDS_URGENCY)
                rows = [row async for row in reply]
        finally:
            await engine.close(sequence)
        return self._backend.tokenizer.decode(model.written_ids(row for row in rows if not model.ends(row))).strip()
