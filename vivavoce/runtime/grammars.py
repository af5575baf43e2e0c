"""The grammars of a model's replies, compiled on threads. The compiler, which takes seconds to make, is made once."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vivavoce.engine.constraints import MAX_PARALLEL_CALLS, CallSchema, CompiledGrammar, GrammarCompiler, is_available
from vivavoce.errors import InputError


class ReplyGrammars:
    """Grammars over the ids of one tokenizer."""

    def __init__(self, to_json: Callable[[], str] | None, size: int, end: int) -> None:
        """`to_json` gives the tokenizer in Hugging Face's format, None: it has another; `size` and `end` as in
        `GrammarCompiler`."""
        self._to_json, self._size, self._end = to_json, size, end
        self._compiler: GrammarCompiler | None = None
        self._lock = asyncio.Lock()

    @property
    def is_available(self) -> bool:
        """Whether replies can be masked: llguidance is installed, and the tokenizer is of a kind that it reads."""
        return self._to_json is not None and is_available()

    async def compiler(self) -> GrammarCompiler | None:
        """The compiler; None where nothing can be masked."""
        if not self.is_available:
            return None
        async with self._lock:
            if self._compiler is None:
                self._compiler = await asyncio.to_thread(self._new_compiler)
        return self._compiler

    async def json(self, schema: Mapping[str, Any]) -> CompiledGrammar:
        """Replies that are JSON of a schema."""
        compiler = await self.compiler()
        if compiler is None:
            raise InputError("this model cannot follow a JSON schema; install vivavoce[tools]")
        return await asyncio.to_thread(compiler.json, schema)

    async def calls(
        self, tools: Sequence[CallSchema], choice: str, is_parallel: bool | None, otherwise: str | None = None
    ) -> CompiledGrammar | None:
        """Replies under a choice of tools: `auto`, `required` or a name; None where nothing can be masked.

        With `otherwise`, a reply that calls nothing consists of these words.
        """
        compiler = await self.compiler()
        if compiler is None:
            return None
        offered = [tool for tool in tools if choice in ("auto", "required", tool.name)]
        if not offered:
            raise InputError(f"there is no tool {choice!r}, which tool_choice names")
        may_be_several = choice == "auto" if is_parallel is None else is_parallel
        max_calls = MAX_PARALLEL_CALLS if may_be_several else 1  # small models that must call do not stop
        return await asyncio.to_thread(compiler.calls, offered, choice != "auto", max_calls, otherwise)

    async def decision(
        self, tools: Sequence[CallSchema], is_parallel: bool | None, otherwise: str
    ) -> CompiledGrammar | None:
        """A decision on calls, written apart from the reply; None where nothing can be masked."""
        compiler = await self.compiler()
        if compiler is None:
            return None
        max_calls = 1 if is_parallel is False else MAX_PARALLEL_CALLS
        return await asyncio.to_thread(compiler.decision, tools, otherwise, max_calls)

    def _new_compiler(self) -> GrammarCompiler:
        assert self._to_json is not None
        return GrammarCompiler(self._to_json(), self._size, self._end)
