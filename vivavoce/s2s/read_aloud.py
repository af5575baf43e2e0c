"""Given texts in the voice of a speech-to-speech model, where the model was trained to read aloud."""

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from vivavoce.dialogue.items import Samples
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.models.moss_speech.model import AUDIO, TEXT
from vivavoce.models.moss_speech.prompt import Turn
from vivavoce.s2s.reply import ChunkedDecoder

if TYPE_CHECKING:
    from vivavoce.s2s.moss_speech import MossSpeechBackend

READ_ALOUD = "Read this aloud."
MIN_CODES = 50
CODES_PER_LETTER = 2  # at 12.5 codes a second, slower than anyone reads
URGENCY = 0.5  # seconds
LEAD = 0.5  # seconds of sound that a chunk may be later than the one before


class ReadAloud:
    """Reads texts aloud; their codes are generated once, and used only if they say the text."""

    def __init__(self, backend: "MossSpeechBackend") -> None:
        self._backend = backend
        self._codes: dict[str, list[int]] = {}
        self._lock = asyncio.Lock()

    async def can_read(self, text: str) -> bool:
        """Whether the model says these words and no others, by its own transcript."""
        async with self._lock:
            if text not in self._codes:
                codes = await self._generate(text)
                heard = await self._backend.words.of_codes(codes, URGENCY)
                self._codes[text] = codes if _letters(heard) == _letters(text) else []
        return bool(self._codes[text])

    async def speak(self, text: str, voice: str | None, speed: float) -> AsyncGenerator[Samples, None]:
        """The sound of a text that the model can read."""
        codes, decoder = self._codes[text], ChunkedDecoder(self._backend, voice, speed)
        while left := len(decoder.undecoded(codes)):
            size = decoder.ready(codes, True, LEAD)
            samples, _ = await decoder.decode(codes, size, size >= left, URGENCY)
            yield samples

    async def _generate(self, text: str) -> list[int]:
        """The codes of the text; none where the model does not come to an end."""
        engine, prompt = self._backend.engine, self._backend.prompt
        turns = (Turn("system", READ_ALOUD), Turn("user", text))
        rows = [row for turn in turns for row in prompt.turn(turn)]
        sequence = await engine.open(rows + prompt.open_reply("speech"))
        max_rows = MIN_CODES + CODES_PER_LETTER * len(text)
        try:
            async with await engine.generate(sequence, Generation(GREEDY, max_new_rows=max_rows)) as reply:
                reply.needed_by(asyncio.get_running_loop().time() + URGENCY)
                made = [row async for row in reply]
        finally:
            await engine.close(sequence)
        config = prompt.config
        codes: list[int] = []
        for row in made:
            if row[TEXT] != config.modality_pad_token_id or row[AUDIO] == config.eosp_token_id:
                return codes
            codes.append(row[AUDIO])
        return []


def _letters(text: str) -> str:
    return "".join(letter for letter in text.casefold() if letter.isalnum())
