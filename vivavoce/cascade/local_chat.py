"""A local chat model in the engine, in place of a chat endpoint.

Sequences stay cached after a reply: the next one forks the cached sequence with the longest common prefix, so that
instructions and earlier turns are prefilled once.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from vivavoce.cascade.backend import ChatEnd, ChatPiece, ChatText
from vivavoce.cascade.sentences import CLOSE_TAG, OPEN_TAG, ReasoningFilter
from vivavoce.device import pick, resolve_dtype
from vivavoce.dialogue.events import ConversationSettings
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation, Sampling
from vivavoce.engine.sequence import Sequence as Rows
from vivavoce.engine.sequence import rows_in_common
from vivavoce.errors import InputError
from vivavoce.implementations import choose_chat_model
from vivavoce.models.interface import Row
from vivavoce.models.llama import Llama, bundled_smollm2, chat_rows
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.nn.quantised import to_int8
from vivavoce.runtime.async_engine import AsyncEngine

BUNDLED = "smollm2"
MAX_UNREAD_TOKENS = 64  # a reply whose reader waits, for playback or for a client, is paused beyond these
UNFINISHED = "\ufffd"  # decoded for a character whose bytes are incomplete


@dataclass(frozen=True)
class LocalChatOptions:
    """Defaults of replies, and limits of the cache."""

    sampling: Sampling = Sampling(temperature=0.0, repetition_penalty=1.05)  # noqa: RUF009 - frozen
    max_output_tokens: int = 120
    """Short, as replies are spoken."""
    cache_rows: int = 8192
    cached_sequences: int = 8
    """Conversations whose sequence stays in the cache."""


class LocalChat:
    """A `ChatModel`. Use as `async with`. Tools are not offered to the model."""

    def __init__(self, engine: Engine, tokenizer: TextTokenizer, options: LocalChatOptions | None = None) -> None:
        self.options = options or LocalChatOptions()
        self.core, self.tokenizer = engine, tokenizer
        self.engine = AsyncEngine(engine)
        self._cached: list[Rows] = []

    @classmethod
    def load(cls, name: str = BUNDLED, device: str = "auto", options: LocalChatOptions | None = None) -> "LocalChat":
        """`smollm2` from its package, a `.gguf` file, or a folder of a Llama-type model; int8 on a CPU where faster."""
        options = options or LocalChatOptions()
        device_info = pick(device)
        dtype = resolve_dtype("auto", device_info)
        source = bundled_smollm2() if name == BUNDLED else Path(name).expanduser()
        if not source.exists():
            raise InputError(f"there is no chat model {name!r}; give an address, {BUNDLED}, a .gguf file or a folder")
        model, tokenizer = Llama.load(source, device_info.torch_device, dtype)
        if choose_chat_model(device_info, model.sizes.hidden_size).is_int8:
            to_int8(model.model)
        return cls(Engine(model, device_info, dtype, EngineLimits(cache_rows=options.cache_rows)), tokenizer, options)

    async def __aenter__(self) -> Self:
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.engine.close_engine()

    async def reply(
        self, messages: Sequence[dict[str, Any]], settings: ConversationSettings
    ) -> AsyncIterator[ChatPiece]:
        """Stream the reply; closing the iterator stops it."""
        max_tokens = settings.max_output_tokens or self.options.max_output_tokens
        rows = self._rows(messages, max_tokens)
        cached = max((rows_in_common(known.rows, rows) for known in self._cached), default=0)
        sequence = await self._open(rows)
        text = _ReplyText(self.tokenizer)
        try:
            sampling = settings.sampling or self.options.sampling
            if settings.temperature is not None:
                sampling = replace(sampling, temperature=settings.temperature)
            generation = Generation(sampling, max_tokens, penalise_prompt=False)
            async with await self.engine.generate(sequence, generation, MAX_UNREAD_TOKENS) as reply:
                async for row in reply:
                    if self.core.model.ends(row):
                        continue
                    if passed := text.push(row[0]):
                        yield ChatText(passed)
            reason = "stop" if reply.finish == "stop" else "length"
        finally:
            await self._cache(sequence)
        if passed := text.flush():
            yield ChatText(passed)
        yield ChatEnd(reason, len(rows), text.tokens, cached)

    async def read(self, messages: Sequence[dict[str, Any]]) -> None:
        """Prefill messages that conversations start with."""
        rows = self._rows(messages, 1)
        sequence = await self._open(rows)
        async with await self.engine.generate(sequence, Generation(GREEDY, max_new_rows=1)) as reply:
            async for _ in reply:
                pass
        await self.engine.rewind(sequence, len(rows))
        await self._cache(sequence)

    def _rows(self, messages: Sequence[dict[str, Any]], max_tokens: int) -> list[Row]:
        """The messages as rows; the oldest that are not instructions are dropped where they do not fit."""
        turns = [(str(message["role"]), str(message["content"])) for message in messages if message.get("content")]
        while True:
            rows = chat_rows(self.tokenizer, turns)
            oldest = next((index for index, turn in enumerate(turns[:-1]) if turn[0] != "system"), None)
            if len(rows) + max_tokens <= self.core.capacity or oldest is None:
                return rows
            del turns[oldest]

    async def _open(self, rows: list[Row]) -> Rows:
        """A sequence of these rows, forked from the cached one with the longest common prefix."""
        shared = max(self._cached, key=lambda cached: rows_in_common(cached.rows, rows), default=None)
        length = 0 if shared is None else rows_in_common(shared.rows, rows)
        if shared is None or length == 0:
            return await self.engine.open(rows)
        self._cached.remove(shared)
        self._cached.append(shared)  # least recently used first
        sequence = await self.engine.fork(shared)
        await self.engine.rewind(sequence, length)
        await self.engine.append(sequence, rows[length:])
        return sequence

    async def _cache(self, sequence: Rows) -> None:
        self._cached.append(sequence)
        while len(self._cached) > self.options.cached_sequences:
            await self.engine.close(self._cached.pop(0))


class _ReplyText:
    """Decodes sampled tokens to text incrementally, without reasoning."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokens = 0
        self._tokenizer = tokenizer
        self._reasoning = ReasoningFilter()
        self._run: list[int] = []  # tokens since the last tag
        self._decoded = ""
        # Tags that are special tokens are left out by the decoder, so they are recognised by their ids.
        ids = {tokenizer.id_of(tag): tag for tag in (OPEN_TAG, CLOSE_TAG)}
        self._tags = {id: tag for id, tag in ids.items() if id is not None and not tokenizer.decode([id])}

    def push(self, token: int) -> str:
        """The text that this token completes; may be empty."""
        self.tokens += 1
        if token in self._tags:
            self._run, self._decoded = [], ""
            return self._reasoning.push(self._tags[token])
        self._run.append(token)
        text = self._tokenizer.decode(self._run)
        if len(text) <= len(self._decoded) or text.endswith(UNFINISHED):
            return ""
        new, self._decoded = text[len(self._decoded) :], text
        return self._reasoning.push(new)

    def flush(self) -> str:
        """The rest, after the last token."""
        return self._reasoning.flush()
