"""Grammar-masked decoding: replies that are JSON of a schema, or words and well-formed tool calls.

A `Grammar` is immutable and part of a reply's `Generation`; a `Matcher` is its state in one sequence. Before a row is
drawn, the matcher says which ids of the first channel may follow; afterwards it is told which one did. The automata are
those of llguidance, whose limits bound the time and memory that a schema may cost.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vivavoce.engine.schema_limits import check_schema
from vivavoce.errors import InputError, MissingDependencyError

MAX_GRAMMAR_BYTES = 1024 * 1024  # of all tools together
MAX_PARALLEL_CALLS = 8
CACHED_GRAMMARS = 32
SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as models write JSON
LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,  # errors are shown and logged; a schema may be a secret of its owner
}
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
LIKE_TAGS = r"<\/?tool"  # no words have it: models that mistake the tag write "<tools>"

Bits = NDArray[np.int32]
"""One bit per id, the lowest first.  # [word]"""


class Matcher(Protocol):
    """The state of a grammar in one reply."""

    def allowed(self) -> Bits:
        """Which ids may follow. InputError where none may, or where the grammar exceeds its limits."""
        ...

    def accept(self, id: int) -> None:
        """Note the id that followed."""
        ...


class Grammar(Protocol):
    """What a reply may be."""

    def start(self) -> Matcher:
        """The state before the first id."""
        ...


@dataclass(frozen=True)
class CallSchema:
    """A tool as a grammar sees it."""

    name: str
    parameters: Mapping[str, Any]


class GrammarCompiler:
    """Compiles grammars for the ids of a model's tokenizer. The last grammars are cached."""

    def __init__(self, tokenizer_json: str, size: int, end: int) -> None:
        """`tokenizer_json` is a Hugging Face tokenizer, `size` the number of logits, `end` the id that ends a reply."""
        self._size = size
        self._tokenizer = _library().LLTokenizer(tokenizer_json, n_vocab=size, eos_token=end)
        self._compile = functools.lru_cache(CACHED_GRAMMARS)(self._compiled)

    def json(self, schema: Mapping[str, Any]) -> "CompiledGrammar":
        """Replies that are one JSON value of a schema. InputError for a schema that cannot be followed in full."""
        check_schema(schema, "the schema")
        return self._compile(f"start: %json {_dumped(schema, is_lenient=False)}", "the schema")

    def calls(
        self,
        tools: Sequence[CallSchema],
        is_required: bool = False,
        max_calls: int = MAX_PARALLEL_CALLS,
        otherwise: str | None = None,
    ) -> "CompiledGrammar":
        """Replies that are words, calls of these tools, or words and then calls; `is_required`: calls only.

        With `otherwise`, these are the only words, and no call follows them.

        A reply that begins with `{` is a call without tags, as small models write it; none begins with a code fence or
        another tag, in which they put calls too. Keywords of schemas that the library does not know are ignored; the
        arguments are valid JSON of the others.
        """
        _check_tools(tools)
        has_tags = bool(self._special(OPEN_CALL) and self._special(CLOSE_CALL))
        grammar = _call_grammar(tools, is_required, max_calls, has_tags, otherwise)
        return self._compile(grammar, "the schemas of the tools")

    def decision(
        self, tools: Sequence[CallSchema], otherwise: str, max_calls: int = MAX_PARALLEL_CALLS
    ) -> "CompiledGrammar":
        """Either the words `otherwise`, or lines of a tool's name and all of its arguments; each value may be null."""
        _check_tools(tools)
        lines = [
            f"tool_{index}: {json.dumps(tool.name + ' ', ensure_ascii=False)} %json "
            f"{_dumped(_nullable(tool.parameters), is_lenient=True)}"
            for index, tool in enumerate(tools)
        ]
        lines.append(f"call: {' | '.join(f'tool_{index}' for index in range(len(tools)))}")
        more = f'("\\n" call){{0,{max_calls - 1}}}' if max_calls > 1 else ""
        lines.append(f"start: {json.dumps(otherwise)} | call {more}")
        return self._compile("\n".join(lines), "the schemas of the tools")

    def _special(self, token: str) -> bool:
        ids = self._tokenizer.tokenize_str(token, parse_special=True)
        return len(ids) == 1 and self._tokenizer.is_special_token(ids[0])

    def _compiled(self, grammar: str, what: str) -> "CompiledGrammar":
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise InputError(f"{what} have {len(grammar)} characters; the limit is {MAX_GRAMMAR_BYTES}")
        library = _library()
        matcher = library.LLMatcher(
            self._tokenizer,
            library.LLMatcher.grammar_from_lark(grammar),
            log_level=0,
            limits=library.LLParserLimits(**LIMITS),
        )
        if matcher.is_error():
            raise InputError(f"{what} cannot be followed: {_first_line(matcher.get_error())}")
        compiled = CompiledGrammar(matcher, self._size)
        compiled.start().allowed()  # a schema without end, such as {"$ref": "#"}, compiles and allows nothing
        return compiled


class CompiledGrammar:
    """A `Grammar` of llguidance."""

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher, self._size = matcher, size

    def start(self) -> "GrammarMatcher":
        """The state before the first id."""
        return GrammarMatcher(self._matcher.deep_copy(), self._size)


class GrammarMatcher:
    """A `Matcher` of llguidance."""

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher = matcher
        self._words = -(-size // 32)

    def allowed(self) -> Bits:
        """Which ids may follow."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)[: self._words]
        if self._matcher.is_error():
            raise InputError(f"a constrained reply cannot go on: {_first_line(self._matcher.get_error())}")
        if not bits.any():
            raise InputError("a constrained reply cannot go on: no text follows its schema")
        return bits

    def accept(self, id: int) -> None:
        """Note the id that followed."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(id):
            raise InputError(f"a constrained reply has an id that its grammar excludes: {id}")


def is_available() -> bool:
    """Whether the library is installed."""
    try:
        _library()
    except MissingDependencyError:
        return False
    return True


def _call_grammar(
    tools: Sequence[CallSchema], is_required: bool, max_calls: int, has_tags: bool, otherwise: str | None
) -> str:
    """The grammar of words and calls. Tags that are tokens are named, others are text that ends the words."""
    tags = (OPEN_CALL, CLOSE_CALL) if has_tags else (json.dumps(OPEN_CALL), json.dumps(CLOSE_CALL))
    more = max_calls - 1
    repeat = f'("\\n" {{}}){{{{0,{more}}}}}' if more else ""
    lines = [
        f"tagged: {tags[0]} tag_rest",
        f'tag_rest: "\\n" body "\\n" {tags[1]}',
        f"calls: tagged {repeat.format('tagged')}",
        f"bare: body {repeat.format('body')}",
        f"body: {' | '.join(f'tool_{index}' for index in range(len(tools)))}",
    ]
    for index, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ', ensure_ascii=False)
        lines.append(f'tool_{index}: {head} %json {_dumped(_object_schema(tool.parameters), is_lenient=True)} "}}"')
    if is_required:
        return "\n".join([*lines, "start: calls"])
    if otherwise is not None:
        return "\n".join([*lines, f"start: {json.dumps(otherwise)} | calls"])
    lines.append(rf"TEXT: /[^{{`\s<](.|\n)*/ & ~/(.|\n)*{LIKE_TAGS}(.|\n)*/")
    if has_tags:
        return "\n".join([*lines, "start: TEXT calls? | calls | bare"])
    opened = rf"opened[lazy]: /[^{{`\s<](.|\n)*/ {tags[0]}"
    return "\n".join([*lines, opened, f"start: TEXT | opened tag_rest {repeat.format('tagged')} | calls | bare"])


def allows_null(schema: Any) -> bool:
    """Whether a schema itself says that null is a value."""
    if not isinstance(schema, Mapping):
        return False
    kinds = schema.get("type")
    is_kind = "null" in kinds if isinstance(kinds, list) else kinds == "null"
    return is_kind or None in schema.get("enum", ()) or any(map(allows_null, schema.get("anyOf", ())))


def _check_tools(tools: Sequence[CallSchema]) -> None:
    for tool in tools:
        check_schema(tool.parameters, f"the schema of tool {tool.name!r}")
        declared = tool.parameters.get("type", "object")
        if declared != "object" and not (isinstance(declared, list) and "object" in declared):
            raise InputError(f"the schema of tool {tool.name!r} cannot be followed: arguments are an object")


def _nullable(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of which each has a value, or null."""
    schema = _object_schema(parameters)
    properties = {name: {"anyOf": [each, {"type": "null"}]} for name, each in schema.get("properties", {}).items()}
    return {**schema, "properties": properties, "required": list(properties)}


def _object_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments are an object, also where a client sends an empty schema for a tool without any."""
    if not parameters:
        return {"type": "object", "additionalProperties": False}
    return {**parameters, "type": "object"}


def _dumped(schema: Mapping[str, Any], is_lenient: bool) -> str:
    return json.dumps({**schema, "x-guidance": {**SEPARATORS, "lenient": is_lenient}}, ensure_ascii=False)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise MissingDependencyError("JSON schemas need llguidance: pip install 'vivavoce[tools]'") from error
    return llguidance
