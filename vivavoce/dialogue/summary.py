"""Summaries of long conversations: when a history nears its limit, a model sums its first part up in the background.

From then on prompts have the summary in place of those turns. The next turns are summed up by themselves, and that is
added; only a summary that is long is written anew, for a model that copies its own summary loses facts each time. Where
the model fails, the history stays as it is, and the oldest turns are dropped as they are without summaries.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from vivavoce.dialogue.history import MAX_ITEMS, written
from vivavoce.dialogue.items import Item, Message, ToolCall
from vivavoce.errors import VivaError
from vivavoce.log import log_failure

logger = logging.getLogger(__name__)

HIGH, LOW = 0.6, 0.25  # shares of the limit: above the first, turns are summed up until the rest is below the second
FULL = 0.15  # share of the limit from which on a summary is written anew, instead of being added to
GROWTH = 1.2  # of a history after a failure, before the next attempt
MAX_TOKENS = 500
MAX_CHARACTERS = 4000
MAX_SECONDS = 120.0
SUMMARISE = (
    "Sum up the conversation between a user and an assistant for the assistant's memory, in the language of the "
    "conversation. Keep all names, numbers, dates, places, wishes, decisions and open questions, also those of the "
    "summary so far. Write short sentences, and nothing else."
)
EARLIER = "What was said earlier in this conversation, summed up:"


class SummaryWriter(Protocol):
    """A model that sums up conversations."""

    async def write(self, items: Sequence[Item], spoken: Mapping[str, str], earlier: str) -> str:
        """The summary of these items and of the `earlier` one; `spoken` has the transcripts of spoken items."""
        ...


class RunningSummary:
    """The summary of one conversation, and which of its items are in it."""

    def __init__(self, on_change: Callable[[], None] | None = None) -> None:
        """`on_change` is called when there is a new summary."""
        self.text = ""
        self._on_change = on_change
        self._next_attempt = 0.0
        self._covered: list[str] = []  # ids of items
        self._task: asyncio.Task[None] | None = None

    def uncovered(self, past: Sequence[Item]) -> list[Item]:
        """The items of a history that are not in the summary."""
        covered = set(self._covered)
        return [item for item in past if item.id not in covered]

    def after(self, instructions: str) -> str:
        """Instructions followed by the summary, where there is one."""
        return f"{instructions}\n\n{EARLIER}\n{self.text}".strip() if self.text else instructions

    def forget_deleted(self, past: Sequence[Item]) -> None:
        """Drop a summary of items that the client has deleted; those dropped from the front of a full history stay."""
        if not self._covered or len(past) >= MAX_ITEMS:
            return
        known = {item.id for item in past}
        if any(id not in known for id in self._covered):
            self.text, self._covered, self._next_attempt = "", [], 0.0
            if self._task is not None:
                self._task.cancel()

    def due(self, past: Sequence[Item], length: Callable[[Item], int], summary_length: int, limit: int) -> list[Item]:
        """The items to be summed up now: none, unless the history is long. Lengths and limit are tokens or rows."""
        if self.is_running:
            return []
        rest = self.uncovered(past)
        lengths = list(map(length, rest))
        total = sum(lengths) + summary_length
        if total <= max(HIGH * limit, self._next_attempt):
            return []
        count = _whole_turns(rest, lengths, LOW * limit)
        if count:
            self._next_attempt = GROWTH * total
        return rest[:count]

    def start(self, items: Sequence[Item], writing: Awaitable[str], is_addition: bool) -> None:
        """Let `writing` sum up these items in the background, in addition to the summary so far or in place of it."""
        self._task = asyncio.get_running_loop().create_task(self._sum_up(items, writing, is_addition))

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def is_running(self) -> bool:
        """Whether a summary is being written."""
        return self._task is not None and not self._task.done()

    async def _sum_up(self, items: Sequence[Item], writing: Awaitable[str], is_addition: bool) -> None:
        try:
            async with asyncio.timeout(MAX_SECONDS):
                text = (await writing).strip()
            if not text:
                raise VivaError("the model wrote an empty summary")
        except Exception as error:  # the history stays; it is tried again when it has grown
            log_failure(logger, error, "a conversation could not be summed up")
            return
        self.text = (_with_lines(self.text, text) if is_addition else text)[:MAX_CHARACTERS]
        self._next_attempt = 0.0
        self._covered += [item.id for item in items]
        if self._on_change is not None:
            self._on_change()


def _with_lines(text: str, addition: str) -> str:
    """A summary with the lines of another that it does not have yet."""
    known = text.splitlines()
    return "\n".join([*known, *(line for line in addition.splitlines() if line not in known)])


def _whole_turns(rest: Sequence[Item], lengths: Sequence[int], low: float) -> int:
    """How many items are summed up: whole turns, so that what is left, about `low`, begins with a user."""
    left, starts = sum(lengths), 0
    for index, item in enumerate(rest):
        if index and isinstance(item.content, Message) and item.content.role == "user":
            starts = index
            if left <= low:
                break
        left -= lengths[index]
    return starts


def estimated_tokens(text: str) -> int:
    """About as many tokens as a text has: four bytes each."""
    return len(text.encode()) // 4 + 1


def item_tokens(item: Item) -> int:
    """About as many tokens as an item has; a turn whose transcript is not known is taken to be short."""
    hosted = item.content.hosted if isinstance(item.content, ToolCall) else None
    return estimated_tokens(written(item)) + estimated_tokens((hosted and hosted.output) or "") + 4
