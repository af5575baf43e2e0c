"""The summary of a long conversation on MOSS-Speech, written beside it: by a chat model or in a text branch."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vivavoce.dialogue.history import written
from vivavoce.dialogue.items import AudioPart, Item, Message
from vivavoce.dialogue.summary import FULL, MAX_TOKENS, SUMMARISE, RunningSummary, SummaryWriter
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.engine.sequence import Sequence as EngineSequence
from vivavoce.engine.sequence import rows_in_common
from vivavoce.errors import VivaError
from vivavoce.log import log_failure
from vivavoce.models.interface import Row
from vivavoce.models.moss_speech.prompt import Turn

if TYPE_CHECKING:
    from vivavoce.s2s.moss_speech import MossSpeechBackend

logger = logging.getLogger(__name__)

MAX_SHARE = 0.25  # of the rows of a conversation that its summary may have
URGENCY = 1.5  # seconds: for words that only the summary needs
ROW_SECONDS = 0.02  # until the next row of a summary is due: its rows join steps that sound needs
ADDITION = f"{SUMMARISE} Leave out what the summary so far has. Write the summary now."
REWRITE = f"{SUMMARISE} Write the summary now."

TurnContent = list[int] | str
"""The codes of a spoken turn, or its words."""


@dataclass(frozen=True)
class HistoryRows:
    """A history as the model reads it."""

    items: Sequence[Item]
    rows: Mapping[str, list[Row]]
    """By item."""
    system: list[Row]
    """The instructions, with the summary so far."""
    contents: Mapping[str, TurnContent]
    """Codes or words of spoken items."""
    room: int
    """Rows that a conversation may have."""


class SpeechSummary(RunningSummary):
    """The summary of one conversation."""

    def __init__(self, backend: "MossSpeechBackend", on_change: Callable[[], None]) -> None:
        super().__init__(on_change)
        self._backend = backend
        self._branch: EngineSequence | None = None

    async def follow(self, history: HistoryRows, sequence: EngineSequence | None) -> None:
        """Start to sum up where a history is long. `sequence` has the rows of the conversation."""
        length = len(self._backend.prompt.text(self.text))
        items = self.due(history.items, lambda item: len(history.rows[item.id]), length, history.room)
        if not items:
            return
        is_addition = length <= FULL * history.room
        max_rows = round(MAX_SHARE * history.room) - (length if is_addition else 0)
        writer = self._backend.options.summary_writer
        if writer is not None:
            writing = self._by_chat(writer, items, history.contents, "" if is_addition else self.text, max_rows)
        else:
            max_rows = min(MAX_TOKENS, max_rows)
            try:
                await self._open_branch(history, items, ADDITION if is_addition else REWRITE, max_rows, sequence)
            except VivaError as error:  # the cache is full: it is tried again when the history has grown
                log_failure(logger, error, "the text branch of a summary could not start")
                return
            writing = self._by_branch(max_rows)
        self.start(items, writing, is_addition)

    async def close(self) -> None:
        """Stop."""
        await super().close()
        await self._close_branch()

    async def _by_chat(
        self,
        writer: SummaryWriter,
        items: Sequence[Item],
        contents: Mapping[str, TurnContent],
        earlier: str,
        max_rows: int,
    ) -> str:
        spoken = {item.id: await self._words(item, contents.get(item.id, "")) for item in items}
        text = await writer.write(items, spoken, earlier)
        tokenizer = self._backend.tokenizer
        return tokenizer.decode(tokenizer.encode(text.strip())[:max_rows])

    async def _words(self, item: Item, content: TurnContent) -> str:
        """The words of an item; a turn that was not transcribed is recognised now, from its sound or codes."""
        if written(item) or not isinstance(item.content, Message):
            return written(item)
        if isinstance(content, str) and content:
            return content
        audio = next((part for part in item.content.parts if isinstance(part, AudioPart)), None)
        if audio is not None and len(audio.samples):
            return await self._backend.transcriber.transcribe(audio.samples, audio.rate)
        return await self._backend.words.of_codes([code for code in content if isinstance(code, int)], URGENCY)

    async def _open_branch(
        self,
        history: HistoryRows,
        items: Sequence[Item],
        request: str,
        max_rows: int,
        sequence: EngineSequence | None,
    ) -> None:
        """Fork the conversation's sequence after the items that are summed up; the oldest are left out if need be."""
        prompt, engine = self._backend.prompt, self._backend.engine
        end = prompt.turn(Turn("system", request)) + prompt.open_reply("text")
        room = history.room - len(history.system) - len(end) - max_rows
        turns = [history.rows[item.id] for item in items]
        while turns and sum(map(len, turns)) > room:
            del turns[0]
        rows = history.system + [row for turn in turns for row in turn] + end
        same = 0 if sequence is None else rows_in_common(sequence.rows, rows)
        await self._close_branch()
        self._branch = await (
            engine.open(rows) if sequence is None or not same else engine.fork_at(sequence, same, rows[same:])
        )

    async def _by_branch(self, max_rows: int) -> str:
        assert self._branch is not None
        model, engine, rows = self._backend.model, self._backend.engine, list[Row]()
        try:
            generation = Generation(GREEDY, max_new_rows=max_rows)
            async with await engine.generate(self._branch, generation) as reply:
                async for row in reply:
                    rows.append(row)
                    reply.needed_by(asyncio.get_running_loop().time() + ROW_SECONDS)
        finally:
            await self._close_branch()
        return self._backend.tokenizer.decode(model.written_ids(row for row in rows if not model.ends(row)))

    async def _close_branch(self) -> None:
        branch, self._branch = self._branch, None
        if branch is not None:
            with suppress(VivaError):  # the engine was closed first
                await self._backend.engine.close(branch)
