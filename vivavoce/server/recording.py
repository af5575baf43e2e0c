"""Recordings of sessions: a stereo file, the user left and the replies right, and the words of both.

Both channels are on the server's clock. The user's audio is put where it arrived, and replies where their audio was
sent, from which moment on the client plays them; what an interruption kept from being played is left out.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from vivavoce.dialogue.history import text_of_part
from vivavoce.dialogue.items import AudioPart, Item, Message, Samples
from vivavoce.log import log_failure
from vivavoce.server.realtime.audio_formats import resampler

logger = logging.getLogger(__name__)

WRITE_SECONDS = 5.0
MAX_LAG_SECONDS = 0.5  # by which audio may arrive late and still follow the audio before it


class RecordedSide:
    """One side of a recording: samples at positions of the common clock."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._pending: Samples = np.zeros(0, np.float32)
        self._first = 0  # position of the first pending sample

    @property
    def end(self) -> int:
        """The position after the last sample."""
        return self._first + len(self._pending)

    def put(self, position: int, samples: Samples) -> None:
        """Put samples at a position, or after those that are there already."""
        gap = max(position - self.end, 0)
        self._pending = np.concatenate([self._pending, np.zeros(gap, np.float32), samples])

    def cut(self, position: int) -> None:
        """Drop the samples from a position on."""
        self._pending = self._pending[: max(position - self._first, 0)]

    def take(self, position: int) -> Samples:
        """Remove the samples before a position; silence where there are none."""
        count = max(position - self._first, 0)
        taken, self._pending = self._pending[:count], self._pending[count:]
        self._first += count
        return np.pad(taken, (0, count - len(taken)))


class SessionRecording:
    """The recording of one session; `now` is the clock of both channels, in seconds."""

    def __init__(self, folder: Path, session: str, rates: tuple[int, int], now: Callable[[], float]) -> None:
        input_rate, self._rate = rates
        self._now, self._began = now, now()
        self._user, self._reply = RecordedSide(self._rate), RecordedSide(self._rate)
        self._resampler = None if input_rate == self._rate else resampler(input_rate, self._rate)
        self._state: Any = None if self._resampler is None else self._resampler.initial_state()
        self._words = folder / f"{session}.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"{session}.wav"
        self.file.touch(mode=0o600)
        self._words.touch(mode=0o600)
        self._output = soundfile.SoundFile(self.file, "w", self._rate, 2, "PCM_16")

    @property
    def _position(self) -> int:
        return round((self._now() - self._began) * self._rate)

    def heard(self, samples: Samples) -> None:
        """The user's audio arrived: its last sample is now."""
        if self._resampler is not None:
            output, self._state = self._resampler.step(self._state, samples[None])
            samples = output[0]
        start = self._position - len(samples)
        is_continued = start - self._user.end < MAX_LAG_SECONDS * self._rate
        self._user.put(self._user.end if self._user.end and is_continued else start, samples)

    def said(self, samples: Samples) -> None:
        """Audio of a reply was sent: it is played from now on, or after what was sent before."""
        self._reply.put(self._position, samples)

    def cut(self) -> None:
        """What was not played until now will not be."""
        self._reply.cut(self._position)

    async def run(self) -> None:
        """Write what is final, now and then, until cancelled."""
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            try:
                self._write(self._position - self._rate)  # half a megabyte, into the page cache
            except OSError as error:
                log_failure(logger, error, "a recording could not be written")

    def finish(self, items: Sequence[Item]) -> None:
        """Write the rest, and the words."""
        self.cut()
        try:
            self._write(self._position)
            self._output.close()
            words = [line for item in items if (line := spoken_line(item)) is not None]
            self._words.write_text(json.dumps(words, ensure_ascii=False, indent=1), encoding="utf8")
        except OSError as error:
            log_failure(logger, error, "a recording could not be written")

    def _write(self, position: int) -> None:
        """Write both channels up to a position."""
        self._output.write(np.stack([self._user.take(position), self._reply.take(position)], axis=1))


def spoken_line(item: Item) -> dict[str, str] | None:
    """The words of an item of the history; None for tool calls and their results."""
    if not isinstance(item.content, Message):
        return None
    parts = [text_of_part(part) for part in item.content.parts]
    is_spoken = any(isinstance(part, AudioPart) for part in item.content.parts)
    return {
        "id": item.id,
        "role": item.content.role,
        "form": "speech" if is_spoken else "text",
        "text": " ".join(parts).strip(),
    }
