"""What a stretch of speech says, told by the same language model: for captions, moderation and the user's words."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from vivavoce.audio.sound import Sound
from vivavoce.dialogue.interface import Samples
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.models.moss_speech_prompt import Turn

if TYPE_CHECKING:
    from vivavoce.pipelines.moss_speech import MossSpeechBackend

WRITE_DOWN = "Write down what is said."
ROWS_PER_CODE = 2  # speech has at most a few letters in 80 ms
FEWEST_ROWS = 16
WORDS_URGENCY = 1.5  # seconds: nobody waits for words as for sound, so they are made in steps that sound needs


class MossSpeechTranscriber:
    """A `Transcriber`, on a sequence of its own that is gone when the words are there."""

    def __init__(self, pipeline: "MossSpeechBackend", instructions: str = WRITE_DOWN) -> None:
        self._pipeline, self._instructions = pipeline, instructions

    async def transcribe(self, samples: Samples, rate: int, language: str | None = None) -> str:
        """What was said."""
        sound = Sound(samples, rate).mono().resampled(self._pipeline.input_rate).samples[0]
        state = self._pipeline.codec.ear.initial_state()
        codes, _ = await self._pipeline.ear.do((state, torch.from_numpy(sound), True), urgency=1.0)
        return await self.of_codes(codes)

    async def of_codes(self, codes: Sequence[int]) -> str:
        """What these codes say."""
        if not codes:
            return ""
        engine, prompt, model = self._pipeline.engine, self._pipeline.prompt, self._pipeline.model
        rows = prompt.turn(Turn("system", self._instructions)) + prompt.turn(Turn("user", codes))
        sequence = await engine.open(rows + prompt.open_reply("text"))
        try:
            most = FEWEST_ROWS + ROWS_PER_CODE * len(codes)
            async with await engine.generate(sequence, Generation(GREEDY, max_new_rows=most)) as reply:
                reply.needed_by(asyncio.get_running_loop().time() + WORDS_URGENCY)
                made = [row async for row in reply]
        finally:
            await engine.close(sequence)
        return self._pipeline.tokenizer.decode(model.written_ids(row for row in made if not model.ends(row))).strip()
