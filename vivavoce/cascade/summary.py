"""Summaries of long conversations: when a history nears the limit of the chat model, the model sums its first part up.

It does so in the background. From then on prompts have the summary in place of those turns. Where the model fails, the
history stays as it is, and the oldest turns are dropped as they are without summaries.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from vivavoce.cascade.chat_messages import chat_messages, text_of
from vivavoce.cascade.interfaces import ChatModel, ChatText, LimitedChatModel
from vivavoce.dialogue.events import ConversationSettings, Item, Message, ToolCall
from vivavoce.dialogue.history import MAX_ITEMS, written
from vivavoce.errors import VivaError
from vivavoce.log import log_failure

logger = logging.getLogger(__name__)

DEFAULT_CONTEXT = 20_000  # tokens of a chat endpoint, whose limit is not known
HIGH, LOW = 0.6, 0.25  # shares of the context: above the first, turns are summed up until the rest is below the second
GROWTH = 1.2  # of a history after a failure, before the next attempt
MAX_TOKENS = 500
MAX_CHARACTERS = 4000
MAX_LINE = 2000  # characters of a message that are summed up
MAX_SECONDS = 120.0
SUMMARISE = (
    "Sum up the conversation between a user and an assistant for the assistant's memory, in the language of the "
    "conversation. Keep all names, numbers, dates, places, wishes, decisions and open questions, also those of the "
    "summary so far. Write short sentences, and nothing else."
)
EARLIER = "What was said earlier in this conversation, summed up:"

SpokenWords = Callable[[Sequence[Item]], Awaitable[dict[str, str]]]


class RunningSummary:
    """The summary of one conversation, and which of its items are in it."""

    def __init__(self, chat: ChatModel, spoken_words: SpokenWords) -> None:
        """`spoken_words` gives the transcripts of spoken items."""
        self._chat, self._spoken_words = chat, spoken_words
        limit = chat.context_tokens if isinstance(chat, LimitedChatModel) else DEFAULT_CONTEXT
        self._high, self._low, self._max_tokens = HIGH * limit, LOW * limit, min(MAX_TOKENS, limit // 8)
        self._next_attempt = 0.0
        self._text = ""
        self._covered: list[str] = []  # ids of items
        self._task: asyncio.Task[None] | None = None

    def messages(self, past: Sequence[Item], instructions: str, spoken: dict[str, str]) -> list[dict[str, Any]]:
        """A history as chat messages, its first part summed up where there is a summary."""
        if not self._text:
            return chat_messages(past, instructions, spoken)
        covered = set(self._covered)
        rest = [item for item in past if item.id not in covered]
        return chat_messages(rest, f"{instructions}\n\n{EARLIER}\n{self._text}".strip(), spoken)

    def follow(self, past: Sequence[Item], settings: ConversationSettings, is_busy: bool) -> None:
        """Start to sum up where a history is long, unless the chat model `is_busy` or nothing may be left out."""
        self._forget_deleted(past)
        if is_busy or not settings.truncation.is_allowed or self._is_running:
            return
        covered = set(self._covered)
        rest = [item for item in past if item.id not in covered]
        lengths = [_tokens(item) for item in rest]
        total = sum(lengths) + estimated_tokens(self._text)
        if total > max(self._high, self._next_attempt) and (count := self._count(rest, lengths)):
            self._next_attempt = GROWTH * total
            self._task = asyncio.get_running_loop().create_task(self._sum_up(rest[:count]))

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def _is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def _forget_deleted(self, past: Sequence[Item]) -> None:
        """Drop a summary of items that the client has deleted; those dropped from the front of a full history stay."""
        if not self._covered or len(past) >= MAX_ITEMS:
            return
        known = {item.id for item in past}
        if any(id not in known for id in self._covered):
            self._text, self._covered, self._next_attempt = "", [], 0.0
            if self._task is not None:
                self._task.cancel()

    def _count(self, rest: Sequence[Item], lengths: Sequence[int]) -> int:
        """How many items are summed up: whole turns, so that what is left begins with a user."""
        left, starts = sum(lengths), 0
        for index, item in enumerate(rest):
            if index and isinstance(item.content, Message) and item.content.role == "user":
                starts = index
                if left <= self._low:
                    break
            left -= lengths[index]
        return starts

    async def _sum_up(self, items: Sequence[Item]) -> None:
        try:
            async with asyncio.timeout(MAX_SECONDS):
                text = await self._written(items)
            if not text:
                raise VivaError("the chat model wrote an empty summary")
        except Exception as error:  # the history stays; it is tried again when it has grown
            log_failure(logger, error, "a conversation could not be summed up")
            return
        self._text, self._next_attempt = text, 0.0
        self._covered += [item.id for item in items]

    async def _written(self, items: Sequence[Item]) -> str:
        messages = chat_messages(items, "", await self._spoken_words(items))
        conversation = "\n".join(map(_line, messages))[: int(4 * self._high)]
        before = [f"The summary so far: {self._text}"] if self._text else []
        lines = [*before, "The conversation:", conversation, "Write the summary now."]
        request = [{"role": "system", "content": SUMMARISE}, {"role": "user", "content": "\n".join(lines)}]
        settings = ConversationSettings(modality="text", max_output_tokens=self._max_tokens)
        pieces: list[str] = []
        async for piece in self._chat.reply(request, settings):
            if isinstance(piece, ChatText):
                pieces.append(piece.text)
        return "".join(pieces).strip()[:MAX_CHARACTERS]


def estimated_tokens(text: str) -> int:
    """About as many tokens as a text has: four bytes each."""
    return len(text.encode()) // 4 + 1


def _tokens(item: Item) -> int:
    """About as many tokens as an item has; a turn whose transcript is not known is taken to be short."""
    hosted = item.content.hosted if isinstance(item.content, ToolCall) else None
    return estimated_tokens(written(item)) + estimated_tokens((hosted and hosted.output) or "") + 4


def _line(message: dict[str, Any]) -> str:
    """A message in the text that is summed up."""
    calls = [f"{call['function']['name']} {call['function']['arguments']}" for call in message.get("tool_calls", ())]
    text = text_of(message) if message["content"] else "; ".join(calls)
    return f"{message['role']}: {text[:MAX_LINE]}"
