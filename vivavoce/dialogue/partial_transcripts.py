"""Transcripts of a turn while it lasts."""

import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from vivavoce.audio.vad import WINDOW_SECONDS
from vivavoce.dialogue.history import WORD
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.joined_turns import OpenTurn
from vivavoce.log import log_failure

logger = logging.getLogger(__name__)


class PartialTranscripts:
    """Transcribes the open turn again and again; words that two successive transcripts share are reported."""

    def __init__(
        self,
        transcribe: Callable[[Samples], Awaitable[str]],
        report: Callable[[str, str], None],
        start: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._transcribe, self._report, self._start = transcribe, report, start
        self._turn: OpenTurn | None = None
        self._is_busy = False
        self._transcribed = 0  # windows of the turn
        self._words: list[str] = []
        self._agreed: list[str] = []

    def turn_grew(self, turn: OpenTurn, every: float) -> None:
        """Transcribe the turn if `every` seconds of it are new, and no transcript is being made."""
        if turn is not self._turn:
            self._turn, self._transcribed, self._words, self._agreed = turn, 0, [], []
        if not self._is_busy and (len(turn.windows) - self._transcribed) * WINDOW_SECONDS >= every:
            self._is_busy, self._transcribed = True, len(turn.windows)
            self._start(self._update(turn, turn.sound))

    def end(self) -> None:
        """Report nothing more of the open turn."""
        self._turn = None

    async def _update(self, turn: OpenTurn, sound: Samples) -> None:
        try:
            words = WORD.findall(await self._transcribe(sound))
        except Exception as error:  # the turn is transcribed once more at its end
            log_failure(logger, error, "transcription of an open turn failed")
            return
        finally:
            self._is_busy = False
        if turn is not self._turn:
            return
        agreed = common_prefix(self._words, words)
        self._words = words
        if len(agreed) > len(self._agreed) and agreed[: len(self._agreed)] == self._agreed:
            self._agreed = agreed
            self._report(turn.item, "".join(agreed))


def common_prefix(first: list[str], second: list[str]) -> list[str]:
    """The words that both begin with."""
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return first[:same]
