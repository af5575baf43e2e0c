"""The protocol errors of JSON that does not fit its types, in the words and with the codes that stock clients know."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from vivavoce.server.wire import WireError

_PROBLEM = re.compile(r"(?P<problem>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?", re.DOTALL)
_STEPS = re.compile(r"\[(\d+)\]|([^.\[\]]+)")

TYPE_NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a decimal",
    "bool": "a boolean",
    "object": "an object",
    "array": "an array",
    "null": "null",
}
LENGTH_NAMES = {"str": "string", "array": "array", "object": "object"}


def invalid_json(error: Exception) -> WireError:
    """The error of a message that is not JSON."""
    detail = "It is nested too deeply." if isinstance(error, RecursionError) else str(error)
    return WireError(f"Invalid event: failed to parse JSON value. {detail}", "invalid_json")


def unknown_event_type(kind: object, known: Iterable[str]) -> WireError:
    """The error of an event of a type that does not exist, or of none."""
    if kind is None:
        return WireError("Missing required parameter: 'type'.", "missing_required_parameter", "type")
    if not isinstance(kind, str):
        return WireError("Invalid type for 'type': expected a string.", "invalid_type", "type")
    return WireError(f"Invalid value: {kind!r}. Supported values are: {listed(list(known))}.", param="type")


def unknown_parameter(param: str) -> WireError:
    """The error of a field that does not exist, or that this server does not honour."""
    return WireError(f"Unknown parameter: '{param}'.", "unknown_parameter", param)


@dataclass(frozen=True)
class Problem:
    """A problem that msgspec found: where, and in which message."""

    param: str
    """The path of the field in the event."""
    path: str
    """Its path in the class."""
    kind: type
    message: str | bytes

    def inner(self, name: str) -> str:
        """The path of a field of this one."""
        return f"{self.param}.{name}" if self.param else name

    @property
    def value(self) -> Any:
        """The value at fault; None where it cannot be found."""
        try:
            value = msgspec.json.decode(self.message)
            for index, name in _STEPS.findall(self.path):
                value = value[int(index)] if index else value[name]
        except (msgspec.DecodeError, ValueError, RecursionError, LookupError, TypeError):  # an index of a dictionary
            return None
        return value


def refusal(error: msgspec.ValidationError, kind: type, prefix: str = "", message: str | bytes = "") -> WireError:
    """The error of JSON that is not of this class, from msgspec's "Expected `str`, got `int` - at `$.item.id`"."""
    found = _PROBLEM.fullmatch(str(error))
    text, path = (found["problem"], found["path"] or "") if found else (str(error), "")
    path = path.replace("[...]", "")
    problem = Problem(".".join(name for name in (prefix, path) if name), path, kind, message)
    for pattern, build in _REFUSALS:
        if match := pattern.fullmatch(text):
            return build(problem, match)
    return WireError(f"Invalid '{problem.param}': {text}.", param=problem.param)


def _missing(problem: Problem, match: re.Match[str]) -> WireError:
    param = problem.inner(match[1])
    return WireError(f"Missing required parameter: '{param}'.", "missing_required_parameter", param)


def _unknown(problem: Problem, match: re.Match[str]) -> WireError:
    return unknown_parameter(problem.inner(match[1]))


def _wrong_type(problem: Problem, match: re.Match[str]) -> WireError:
    subject = f"'{problem.param}'" if problem.param else "the JSON value"
    expected = [TYPE_NAMES.get(name, name) for name in match[1].split(" | ") if name != "null"]
    types = expected[0] if len(expected) == 1 else f"one of {', '.join(expected[:-1])} or {expected[-1]}"
    got = TYPE_NAMES.get(match[2], match[2])
    message = f"Invalid type for {subject}: expected {types}, but got {got} instead."
    return WireError(message, "invalid_type", problem.param)


def _wrong_value(problem: Problem, match: re.Match[str]) -> WireError:
    known = listed(_supported(problem.kind, problem.path))
    return WireError(f"Invalid value: {match[1]}. Supported values are: {known}.", param=problem.param)


def _out_of_range(problem: Problem, match: re.Match[str]) -> WireError:
    kind, comparison, limit = "integer" if match[1] == "int" else "decimal", match[2], match[3]
    is_above, value = comparison.startswith("<"), problem.value
    code = f"{kind}_{'above_max' if is_above else 'below_min'}_value"
    words = f"{kind} {'above maximum' if is_above else 'below minimum'} value. Expected a value {comparison} {limit}"
    got = "" if value is None else f", but got {value} instead"
    return WireError(f"Invalid '{problem.param}': {words}{got}.", code, problem.param)


def _wrong_length(problem: Problem, match: re.Match[str]) -> WireError:
    name, limit, value = LENGTH_NAMES[match[1]], match[3], problem.value
    article = "a" if name == "string" else "an"
    if match[2] == ">=":
        words = f"empty {name}. Expected {article} {name} with minimum length {limit}, but got an empty {name} instead"
        return WireError(f"Invalid '{problem.param}': {words}.", f"empty_{name}", problem.param)
    words = f"{name} too long. Expected {article} {name} with maximum length {limit}"
    got = f", but got {article} {name} with length {len(value)} instead" if isinstance(value, str | list | dict) else ""
    return WireError(f"Invalid '{problem.param}': {words}{got}.", f"{name}_above_max_length", problem.param)


def _wrong_base64(problem: Problem, match: re.Match[str]) -> WireError:
    message = f"Invalid '{problem.param}'. Expected base64-encoded audio bytes but got an invalid value."
    return WireError(message, param=problem.param)


_REFUSALS: tuple[tuple[re.Pattern[str], Callable[[Problem, re.Match[str]], WireError]], ...] = (
    (re.compile(r"Object missing required field `(.*)`"), _missing),
    (re.compile(r"Object contains unknown field `(.*)`", re.DOTALL), _unknown),
    (re.compile(r"Expected `(.*)`, got `(.*)`"), _wrong_type),
    (re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL), _wrong_value),
    (re.compile(r"Expected `(int|float)` (<=|>=|<|>) (.*)"), _out_of_range),
    (re.compile(r"Expected `(str|array|object)` of length (<=|>=) (\d+)"), _wrong_length),
    (re.compile(r".*base64.*"), _wrong_base64),
)


def listed(values: Sequence[object]) -> str:
    """Values in a sentence: 'a', 'b', and 'c'."""
    shown = [repr(value) for value in values]
    if len(shown) < 3:
        return " and ".join(shown)
    return f"{', '.join(shown[:-1])}, and {shown[-1]}"


def _supported(kind: type, path: str) -> list[object]:
    """The literals that a type accepts at a path such as `session.tools[0].type`."""
    types = list(_alternatives(_type_info(kind)))
    for step in re.findall(r"\[|[^.\[\]]+(?!\])", path):
        types = [inner for type_ in types for inner in _inside(type_, step)]
    return [value for type_ in types if isinstance(type_, inspect.LiteralType) for value in type_.values]


@cache
def _type_info(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def _alternatives(type_: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(type_, inspect.Metadata):
        yield from _alternatives(type_.type)
    elif isinstance(type_, inspect.UnionType):
        for each in type_.types:
            yield from _alternatives(each)
    else:
        yield type_


def _inside(type_: inspect.Type, step: str) -> Iterable[inspect.Type]:
    if isinstance(type_, inspect.ListType) and step == "[":
        return _alternatives(type_.item_type)
    if isinstance(type_, inspect.StructType):
        if step == type_.tag_field:
            return [inspect.LiteralType((type_.tag,))]
        return [inner for field in type_.fields if field.encode_name == step for inner in _alternatives(field.type)]
    return []
