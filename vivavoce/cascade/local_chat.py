"""A local chat model in the engine, in place of a chat endpoint.

Sequences stay cached after a reply: the next one forks the cached sequence with the longest common prefix, so that
instructions and earlier turns are prefilled once.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from vivavoce import hub
from vivavoce.cascade.call_decision import BIASES, NO_CALL, decided_calls, decision_messages, is_undecided
from vivavoce.cascade.chat_messages import tool_schema
from vivavoce.cascade.interfaces import ChatCall, ChatEnd, ChatPiece, ChatText
from vivavoce.cascade.sentences import CLOSE_TAG, OPEN_TAG, ReasoningFilter
from vivavoce.cascade.tool_calls import CLOSE_CALL, OPEN_CALL, ToolCallReader, forced_start
from vivavoce.device import pick, resolve_dtype
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.engine.constraints import CallSchema, Grammar
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation, Sampling
from vivavoce.engine.sequence import Sequence as Rows
from vivavoce.engine.sequence import rows_in_common
from vivavoce.errors import InputError, VivaError
from vivavoce.implementations import choose_chat_model
from vivavoce.models.chat_template import ChatTokenizer
from vivavoce.models.interface import Row
from vivavoce.models.llama import TURN_ENDS, Llama, bundled_smollm2, chat_file
from vivavoce.nn.quantised import to_int8
from vivavoce.runtime.async_engine import AsyncEngine
from vivavoce.runtime.grammars import ReplyGrammars

logger = logging.getLogger(__name__)

BUNDLED = "smollm2"
MAX_UNREAD_TOKENS = 64  # a reply whose reader waits, for playback or for a client, is paused beyond these
MAX_HELD_TOKENS = 16  # the same of a reply that is held until calls are decided on
SMALL_HIDDEN = 3072  # of models with up to about three billion parameters; larger ones are left to their template
SPARE_SECONDS = 0.8  # deadline of prompts that are read in advance: later than that of all other work
OTHER_ENDS = (" a", " b")  # after which prompts with the same words differ
UNFINISHED = "\ufffd"  # decoded for a character whose bytes are incomplete
Decision = tuple[list[ChatCall], ChatEnd]
"""The calls of a user's turn, and how their decision ended."""


@dataclass(frozen=True)
class LocalChatOptions:
    """Defaults of replies, and limits of the cache."""

    sampling: Sampling = Sampling(temperature=0.0, repetition_penalty=1.05)  # noqa: RUF009 - frozen
    max_output_tokens: int = 120
    """Short, as replies are spoken."""
    max_json_tokens: int = 512
    """Of replies that follow a schema or may call tools: JSON that is cut is worth nothing."""
    cache_rows: int = 8192
    cached_sequences: int = 8
    """Conversations whose sequence stays in the cache."""
    decides_apart: bool = True
    """Whether the decision to call tools has a prompt of its own."""


class LocalChat:
    """A `ChatModel`. Use as `async with`. Tools are offered to models whose template has a place for them.

    Where llguidance is installed, calls are masked by the schemas of the tools, so that they are always valid.
    """

    def __init__(self, engine: Engine, tokenizer: ChatTokenizer, options: LocalChatOptions | None = None) -> None:
        self.options = options or LocalChatOptions()
        self.core, self.tokenizer = engine, tokenizer
        self.engine = AsyncEngine(engine)
        self._cached: list[Rows] = []
        self._prompts: list[Rows] = []  # of replies that have not begun
        end = next((id for id in map(tokenizer.id_of, TURN_ENDS) if id is not None), None)
        to_json = None if end is None else tokenizer.to_json
        self._grammars = ReplyGrammars(to_json, engine.model.vocabularies[0], end or 0)

    @classmethod
    def load(cls, name: str = BUNDLED, device: str = "auto", options: LocalChatOptions | None = None) -> "LocalChat":
        """`smollm2` from its package, a `.gguf` file, or a folder or hub id of a Llama-type model."""
        options = options or LocalChatOptions()
        device_info = pick(device)
        dtype = resolve_dtype("auto", device_info)
        source = chat_source(name)
        choice = choose_chat_model(device_info, source.is_file())
        model, tokenizer = Llama.load(source, device_info.torch_device, dtype, choice.is_packed)
        if not choice.is_packed and choose_chat_model(device_info, False, model.sizes.hidden_size).is_int8:
            to_int8(model.model)
        options = replace(options, decides_apart=options.decides_apart and model.sizes.hidden_size <= SMALL_HIDDEN)
        how = "apart from replies" if options.decides_apart else "within replies"
        logger.info("%s decides on tool calls %s (hidden size %d)", name, how, model.sizes.hidden_size)
        return cls(Engine(model, device_info, dtype, EngineLimits(cache_rows=options.cache_rows)), tokenizer, options)

    async def __aenter__(self) -> Self:
        await self.engine.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.engine.close_engine()

    async def reply(
        self, messages: Sequence[dict[str, Any]], settings: ConversationSettings
    ) -> AsyncGenerator[ChatPiece]:
        """Stream the reply; closing the iterator stops it.

        Where the decision on calls is made apart, the reply is generated beside it, and held until nothing is called.
        """
        decision: asyncio.Task[Decision] | None = None
        if decision_rows := self._decision_rows(messages, settings):
            decision = asyncio.create_task(self._decide(decision_rows, settings))
            settings = replace(settings, tools=())
        try:
            async with aclosing(self._generate(messages, settings, decision)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            if decision is not None and not decision.done():
                decision.cancel()
                await asyncio.wait([decision])

    async def _generate(
        self,
        messages: Sequence[dict[str, Any]],
        settings: ConversationSettings,
        decision: "asyncio.Task[Decision] | None",
    ) -> AsyncGenerator[ChatPiece]:
        """The calls that were decided on, or the reply."""
        decided = ChatEnd("stop")
        max_tokens, tools = self._max_tokens(settings), self._tools(settings)
        grammar = await self._grammar(settings, bool(tools))
        start = forced_start(settings.tool_choice) if tools and grammar is None else ""
        rows = self._rows(messages, max_tokens, tools)
        rows += [(token,) for token in self.tokenizer.encode(start)]
        sequence, cached = await self._open(rows)
        text = _ReplyText(self.tokenizer, [tool["function"]["name"] for tool in tools], start)
        try:
            sampling = settings.sampling or self.options.sampling
            if settings.temperature is not None:
                sampling = replace(sampling, temperature=settings.temperature)
            generation = Generation(sampling, max_tokens, penalise_prompt=False, grammar=grammar)
            max_unread = MAX_UNREAD_TOKENS if decision is None else MAX_HELD_TOKENS
            async with await self.engine.generate(sequence, generation, max_unread) as reply:
                if decision is not None:
                    calls, decided = await decision
                    if calls:
                        for call in calls:
                            yield call
                        yield decided
                        return
                async for row in reply:
                    if self.core.model.ends(row):
                        continue
                    for piece in text.push(row[0]):
                        yield piece
            reason = "stop" if reply.finish == "stop" else "length"
        finally:
            await self._cache(sequence)
        for piece in text.flush():
            yield piece
        read, written = len(rows) + decided.prompt_tokens, text.tokens + decided.completion_tokens
        yield ChatEnd(reason, read, written, cached + decided.cached_tokens)

    @property
    def context_tokens(self) -> int:
        """Tokens of a prompt and its reply together."""
        return self.core.capacity

    @property
    def offers_tools(self) -> bool:
        """Whether the model's template can render tools."""
        return self.tokenizer.offers_tools

    def open_prompt(self) -> "PromptSequence":
        """The prompt of a new conversation."""
        return PromptSequence(self)

    @property
    def follows_schemas(self) -> bool:
        """Whether replies can be masked."""
        return self._grammars.is_available

    async def load_compiler(self) -> None:
        """Make the compiler of grammars before the first reply needs it."""
        await self._grammars.compiler()

    async def _grammar(self, settings: ConversationSettings, has_tools: bool) -> Grammar | None:
        """What the reply may be, by its schema or by the tools it may call."""
        if settings.output_schema is not None:
            return await self._grammars.json(settings.output_schema)
        if not has_tools:
            return None
        return await self._grammars.calls(_schemas(settings), settings.tool_choice, settings.parallel_tool_calls)

    def _decision_rows(self, messages: Sequence[dict[str, Any]], settings: ConversationSettings) -> list[Row]:
        """The prompt of the decision on calls; empty where none is made apart from the reply, or it does not fit."""
        may_decide = self.options.decides_apart and self.follows_schemas and is_undecided(messages)
        if not may_decide or settings.tool_choice != "auto" or not self._is_offered_tools(settings):
            return []
        rows = self.tokenizer.rows(decision_messages(messages, settings.tools))
        return rows if len(rows) + self._max_tokens(settings) <= self.core.capacity else []

    async def _decide(self, rows: list[Row], settings: ConversationSettings) -> Decision:
        """The calls of the user's turn, and how their decision ended."""
        grammar = await self._grammars.decision(_schemas(settings), settings.parallel_tool_calls, NO_CALL)
        biases = tuple((self.tokenizer.encode(text)[0], bias) for text, bias in BIASES.items())
        generation = Generation(GREEDY, self._max_tokens(settings), grammar=grammar, biases=biases)
        sequence, cached = await self._open(rows)
        written: list[int] = []
        try:
            async with await self.engine.generate(sequence, generation, MAX_UNREAD_TOKENS) as reply:
                async for row in reply:
                    if not self.core.model.ends(row):
                        written.append(row[0])
        finally:
            await self._cache(sequence)
        reason = "stop" if reply.finish == "stop" else "length"
        calls = list(decided_calls(self.tokenizer.decode(written), settings.tools))
        return calls, ChatEnd(reason, len(rows), len(written), cached)

    async def read(self, messages: Sequence[dict[str, Any]]) -> None:
        """Prefill messages that conversations start with."""
        rows = self._rows(messages, 1)
        sequence, _ = await self._open(rows)
        async with await self.engine.generate(sequence, Generation(GREEDY, max_new_rows=1)) as reply:
            async for _ in reply:
                pass
        await self.engine.rewind(sequence, len(rows))
        await self._cache(sequence)

    def _max_tokens(self, settings: ConversationSettings) -> int:
        """The limit of a reply: tool calls and JSON may be longer than what is spoken."""
        writes_json = self._is_offered_tools(settings) or settings.output_schema is not None
        default = self.options.max_json_tokens if writes_json else self.options.max_output_tokens
        return settings.max_output_tokens or default

    def _tools(self, settings: ConversationSettings) -> list[dict[str, Any]]:
        """The tools that a reply is offered."""
        return [tool_schema(tool) for tool in settings.tools] if self._is_offered_tools(settings) else []

    def _is_offered_tools(self, settings: ConversationSettings) -> bool:
        may_call = settings.tool_choice != "none" and settings.output_schema is None
        return self.offers_tools and may_call and bool(settings.tools)

    def prompt_starts(
        self, messages: Sequence[dict[str, Any]], words: str, settings: ConversationSettings
    ) -> list[list[Row]]:
        """The rows that all prompts share whose next user message begins with these words, or nearly all of them.

        First those of the decision on calls, if there is one, then those of the reply.
        """
        ends = [[*messages, {"role": "user", "content": words + end}] for end in OTHER_ENDS]
        decisions = [self._decision_rows(each, settings) for each in ends]
        if all(decisions):
            settings = replace(settings, tools=())
        replies = [self._rows(each, self._max_tokens(settings), self._tools(settings)) for each in ends]
        return [
            first[: rows_in_common(first, other)]
            for first, other in (decisions, replies)
            if rows_in_common(first, other)
        ]

    def _rows(
        self, messages: Sequence[dict[str, Any]], max_tokens: int, tools: Sequence[dict[str, Any]] = ()
    ) -> list[Row]:
        """The messages as rows; the oldest turns that are not instructions are dropped where they do not fit."""
        kept = [message for message in messages if message.get("content") or message.get("tool_calls")]
        while True:
            rows = self.tokenizer.rows(kept, tools)
            oldest = next((index for index, message in enumerate(kept[:-1]) if message["role"] != "system"), None)
            if len(rows) + max_tokens <= self.core.capacity or oldest is None:
                return rows
            del kept[oldest]
            while oldest < len(kept) - 1 and kept[oldest]["role"] == "tool":  # without its call it means nothing
                del kept[oldest]

    async def _open(self, rows: list[Row]) -> tuple[Rows, int]:
        """A sequence of these rows, forked from the known one with the longest common prefix, and its length."""
        known = [*self._cached, *self._prompts]
        shared = max(known, key=lambda each: rows_in_common(each.rows, rows), default=None)
        length = 0 if shared is None else rows_in_common(shared.rows, rows)
        if shared is None or length == 0:
            return await self.engine.open(rows), 0
        if shared in self._cached:
            self._cached.remove(shared)
            self._cached.append(shared)  # least recently used first
        return await self.engine.fork_at(shared, length, rows[length:]), length

    async def _cache(self, sequence: Rows) -> None:
        self._cached.append(sequence)
        while len(self._cached) > self.options.cached_sequences:
            await self.engine.close(self._cached.pop(0))


class PromptSequence:
    """A `ChatPrompt`: sequences that a decision and a reply are forked from. Their prefill has the lowest priority."""

    def __init__(self, chat: LocalChat) -> None:
        self._chat = chat
        self._sequences: list[Rows] = []

    async def read(self, messages: Sequence[dict[str, Any]], words: str, settings: ConversationSettings) -> None:
        """Read the messages and the first words of the user's next one, unless a reply is generated now."""
        chat, engine = self._chat, self._chat.engine
        if any(each.is_generating for each in list(chat.core.scheduler.sequences.values())):
            return
        starts = chat.prompt_starts(messages, words, settings)
        while len(self._sequences) > len(starts):
            await self._close_last()
        for sequence, rows in zip(self._sequences, starts, strict=False):
            await engine.replace_rows(sequence, rows)
        for rows in starts[len(self._sequences) :]:
            sequence, _ = await chat._open(rows)
            self._sequences.append(sequence)
            chat._prompts.append(sequence)
        for order, sequence in enumerate(self._sequences):
            engine.due_by(sequence, time.monotonic() + (1 + order) * SPARE_SECONDS)

    async def close(self) -> None:
        """Close the sequences."""
        while self._sequences:
            await self._close_last()

    async def _close_last(self) -> None:
        sequence = self._sequences.pop()
        self._chat._prompts.remove(sequence)
        await self._chat.engine.close(sequence)


def _schemas(settings: ConversationSettings) -> list[CallSchema]:
    return [CallSchema(tool.name, tool.parameters) for tool in settings.tools]


def chat_source(name: str) -> Path:
    """The file or folder of a chat model."""
    if name == BUNDLED:
        return bundled_smollm2()
    local = Path(name).expanduser()
    if local.exists():
        return chat_file(local)
    try:
        return chat_file(hub.resolve(name))
    except VivaError as error:
        where = f"give an address, {BUNDLED}, a .gguf file, a folder or a hub id"
        raise InputError(f"there is no chat model {name!r}; {where} ({error})") from error


class _ReplyText:
    """Decodes sampled tokens to text and calls incrementally, without reasoning."""

    def __init__(self, tokenizer: ChatTokenizer, tools: Sequence[str], start: str) -> None:
        self.tokens = 0
        self._tokenizer = tokenizer
        self._reasoning = ReasoningFilter()
        self._calls = ToolCallReader(tools) if tools else None
        self._run: list[int] = []  # tokens since the last tag
        self._decoded = ""
        self._pieces(start)
        # Tags that are special tokens are left out by the decoder, so they are recognised by their ids.
        ids = {tokenizer.id_of(tag): tag for tag in (OPEN_TAG, CLOSE_TAG, OPEN_CALL, CLOSE_CALL)}
        self._tags = {id: tag for id, tag in ids.items() if id is not None and not tokenizer.decode([id])}

    def push(self, token: int) -> list[ChatPiece]:
        """What this token completes; may be empty."""
        self.tokens += 1
        if token in self._tags:
            self._run, self._decoded = [], ""
            return self._pieces(self._tags[token])
        self._run.append(token)
        text = self._tokenizer.decode(self._run)
        if len(text) <= len(self._decoded) or text.endswith(UNFINISHED):
            return []
        new, self._decoded = text[len(self._decoded) :], text
        return self._pieces(new)

    def flush(self) -> list[ChatPiece]:
        """The rest, after the last token."""
        pieces = self._of_text(self._reasoning.flush())
        return pieces + (self._calls.flush() if self._calls else [])

    def _pieces(self, text: str) -> list[ChatPiece]:
        return self._of_text(self._reasoning.push(text))

    def _of_text(self, text: str) -> list[ChatPiece]:
        if not text:
            return []
        return self._calls.push(text) if self._calls else [ChatText(text)]
