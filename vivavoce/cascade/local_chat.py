"""A small chat model in our own engine, where a chat endpoint would stand: words as they are drawn.

What a conversation has computed stays: the next reply forks the kept sequence that shares most with it, so that
instructions and earlier turns are read once.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
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
UNFINISHED = "\ufffd"  # what a decoder writes for a letter of which bytes are missing


@dataclass(frozen=True)
class LocalChatOptions:
    """How replies are written where the client does not say."""

    sampling: Sampling = Sampling(temperature=0.0, repetition_penalty=1.05)  # noqa: RUF009 - frozen
    max_output_tokens: int = 120
    """A reply that is spoken is short."""
    cache_rows: int = 8192
    kept: int = 8
    """Conversations whose past stays computed."""


class LocalChat:
    """A `ChatModel`. Use as `async with`: it owns the engine's thread. Tools are not offered to the model."""

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
        """The reply as it comes; leaving it stops it."""
        max_tokens = settings.max_output_tokens or self.options.max_output_tokens
        rows = self._fitting(messages, max_tokens)
        sequence = await self._opened(rows)
        text = _ReplyText(self.tokenizer)
        try:
            generation = Generation(settings.sampling or self.options.sampling, max_tokens, penalise_prompt=False)
            async with await self.engine.generate(sequence, generation) as reply:
                async for row in reply:
                    if self.core.model.ends(row):
                        continue
                    if passed := text.push(row[0]):
                        yield ChatText(passed)
            reason = "stop" if reply.finish == "stop" else "length"
        finally:
            await self._keep(sequence)
        if passed := text.flush():
            yield ChatText(passed)
        yield ChatEnd(reason, len(rows), text.tokens)

    async def read(self, messages: Sequence[dict[str, Any]]) -> None:
        """Have the beginning of conversations computed before there is one."""
        rows = self._fitting(messages, 1)
        sequence = await self._opened(rows)
        async with await self.engine.generate(sequence, Generation(GREEDY, max_new_rows=1)) as reply:
            async for _ in reply:
                pass
        await self.engine.rewind(sequence, len(rows))
        await self._keep(sequence)

    def _fitting(self, messages: Sequence[dict[str, Any]], max_tokens: int) -> list[Row]:
        """The messages as rows; where they are too many, the oldest that are no instructions are left out."""
        turns = [(str(message["role"]), str(message["content"])) for message in messages if message.get("content")]
        while True:
            rows = chat_rows(self.tokenizer, turns)
            oldest = next((device_info for device_info, turn in enumerate(turns[:-1]) if turn[0] != "system"), None)
            if len(rows) + max_tokens <= self.core.capacity or oldest is None:
                return rows
            del turns[oldest]

    async def _opened(self, rows: list[Row]) -> Rows:
        """A sequence of these rows, as far as possible from what is computed already."""
        shared = max(self._cached, key=lambda kept: rows_in_common(kept.rows, rows), default=None)
        length = 0 if shared is None else rows_in_common(shared.rows, rows)
        if shared is None or length == 0:
            return await self.engine.open(rows)
        self._cached.remove(shared)
        self._cached.append(shared)  # the one used last goes last
        sequence = await self.engine.fork(shared)
        await self.engine.rewind(sequence, length)
        await self.engine.append(sequence, rows[length:])
        return sequence

    async def _keep(self, sequence: Rows) -> None:
        self._cached.append(sequence)
        while len(self._cached) > self.options.kept:
            await self.engine.close(self._cached.pop(0))


class _ReplyText:
    """Tokens to text as they are drawn, without reasoning."""

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
        """What can be passed on after this token; may be empty."""
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
