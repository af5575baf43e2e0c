"""Summaries that a chat model writes: of its own conversations, and of those of a speech-to-speech model."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from vivavoce.cascade.chat_messages import chat_messages, text_of
from vivavoce.cascade.interfaces import ChatModel, ChatText, LimitedChatModel
from vivavoce.dialogue.items import Item
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.dialogue.summary import (
    FULL,
    HIGH,
    MAX_TOKENS,
    SUMMARISE,
    RunningSummary,
    estimated_tokens,
    item_tokens,
)

DEFAULT_CONTEXT = 20_000  # tokens of a chat endpoint, whose limit is not known
MAX_LINE = 2000  # characters of a message that are summed up

SpokenWords = Callable[[Sequence[Item]], Awaitable[dict[str, str]]]


class ChatSummaryWriter:
    """A `SummaryWriter`: a chat model reads the conversation as text."""

    def __init__(self, chat: ChatModel) -> None:
        self._chat = chat
        self.context = chat.context_tokens if isinstance(chat, LimitedChatModel) else DEFAULT_CONTEXT

    async def write(self, items: Sequence[Item], spoken: Mapping[str, str], earlier: str) -> str:
        """The summary of these items and of the `earlier` one."""
        conversation = "\n".join(map(_line, chat_messages(items, "", dict(spoken))))[: int(4 * HIGH * self.context)]
        before = [f"The summary so far: {earlier}"] if earlier else []
        lines = [*before, "The conversation:", conversation, "Write the summary now."]
        request = [{"role": "system", "content": SUMMARISE}, {"role": "user", "content": "\n".join(lines)}]
        max_tokens = min(MAX_TOKENS, self.context // 8)
        settings = ConversationSettings(modality="text", max_output_tokens=max_tokens)
        pieces: list[str] = []
        async for piece in self._chat.reply(request, settings):
            if isinstance(piece, ChatText):
                pieces.append(piece.text)
        return "".join(pieces)


class ChatSummary(RunningSummary):
    """The summary of one conversation of a chat model, by this model."""

    def __init__(self, chat: ChatModel, spoken_words: SpokenWords) -> None:
        """`spoken_words` gives the transcripts of spoken items."""
        super().__init__()
        self._writer, self._spoken_words = ChatSummaryWriter(chat), spoken_words

    def messages(self, past: Sequence[Item], instructions: str, spoken: dict[str, str]) -> list[dict[str, Any]]:
        """A history as chat messages, its first part summed up where there is a summary."""
        return chat_messages(self.uncovered(past), self.after(instructions), spoken)

    def follow(self, past: Sequence[Item], settings: ConversationSettings, is_busy: bool) -> None:
        """Start to sum up where a history is long, unless the chat model `is_busy` or nothing may be left out."""
        self.forget_deleted(past)
        if is_busy or not settings.truncation.is_allowed:
            return
        limit, length = self._writer.context, estimated_tokens(self.text)
        if items := self.due(past, item_tokens, length, limit):
            is_addition = length <= FULL * limit
            self.start(items, self._written(items, "" if is_addition else self.text), is_addition)

    async def _written(self, items: Sequence[Item], earlier: str) -> str:
        return await self._writer.write(items, await self._spoken_words(items), earlier)


def _line(message: dict[str, Any]) -> str:
    """A message in the text that is summed up."""
    calls = [f"{call['function']['name']} {call['function']['arguments']}" for call in message.get("tool_calls", ())]
    text = text_of(message) if message["content"] else "; ".join(calls)
    return f"{message['role']}: {text[:MAX_LINE]}"
