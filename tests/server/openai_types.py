"""Values that the `openai` package's types accept and refuse, generated from the types themselves."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from openai.types.realtime import RealtimeClientEvent, RealtimeServerEvent
from pydantic import BaseModel

Model = type[BaseModel]

SAMPLES: dict[str, Any] = {  # values of documented ranges, where the type alone says less
    "audio": base64.b64encode(bytes(4)).decode(),
    "content_index": 0,
    "prefix_padding_ms": 300,
    "silence_duration_ms": 500,
    "idle_timeout_ms": 6000,
    "threshold": 0.5,
    "speed": 1.25,
    "retention_ratio": 0.8,
}
TEXT = {"type": "input_text", "text": "text"}
PLAIN: dict[str, dict[str, Any]] = {  # what a plain value has although it is optional
    "realtime_conversation_item_system_message.Content": TEXT,
    "realtime_conversation_item_user_message.Content": TEXT,
    "realtime_conversation_item_assistant_message.Content": {"type": "output_text", "text": "text"},
    "realtime_function_tool.RealtimeFunctionTool": {"name": "text"},
}


@dataclass(frozen=True)
class Sample:
    """A value, and the path from its event to the one choice in it that is not the plainest."""

    value: Any
    path: str


def events(union: Any) -> dict[str, Model]:
    """The models of a union of events, by their type."""
    models = get_args(get_args(union)[0])
    return {get_args(model.model_fields["type"].annotation)[0]: model for model in models}


CLIENT_EVENTS, SERVER_EVENTS = events(RealtimeClientEvent), events(RealtimeServerEvent)


def required(model: Model) -> set[str]:
    return {name for name, field in model.model_fields.items() if field.is_required()}


@cache
def accepted(model: Model, path: str = "", expanded: frozenset[Model] = frozenset()) -> tuple[Sample, ...]:
    """The plainest value of a model, then those with one optional field or one other choice in it."""
    plain = dict(PLAIN.get(f"{model.__module__.rpartition('.')[2]}.{model.__name__}", {}))
    others: list[tuple[str, Sample]] = []
    for name, field in model.model_fields.items():
        first, *rest = _choices(field.annotation, name, f"{path}.{name}".lstrip("."), expanded | {model})
        if field.is_required():
            plain[name] = first.value
        else:
            rest = [first, *rest]
        others += [(name, sample) for sample in rest]
    return (Sample(plain, path), *(Sample(plain | {name: sample.value}, sample.path) for name, sample in others))


def refused(model: Model) -> Iterator[Sample]:
    """Values in which one field is missing or of another type; some of them the model accepts after all."""
    seen: set[str] = set()
    for whole in accepted(model):
        for sample in _broken(whole.value, model, ""):
            if sample.path not in seen:
                seen.add(sample.path)
                yield sample


def _broken(value: dict[str, Any], model: Model, path: str) -> Iterator[Sample]:
    for name, field in model.model_fields.items():
        at = f"{path}.{name}".lstrip(".")
        if name in value and field.is_required():
            yield Sample({key: kept for key, kept in value.items() if key != name}, f"{at} missing")
        if name not in value:
            continue
        for wrong in (None, 7.5, "nonsense", True, ["nonsense"], {"nonsense": 7}):
            yield Sample(value | {name: wrong}, f"{at} = {wrong!r}")
        for inner, around, place in _models_in(field.annotation, value[name], at):
            for sample in _broken(around.value, inner, place):
                yield Sample(value | {name: _put(value[name], sample.value)}, sample.path)


def _models_in(annotation: Any, value: Any, path: str) -> Iterator[tuple[Model, Sample, str]]:
    """The model that a value is of, through lists and dictionaries of one."""
    if isinstance(value, list | dict) and not _models_of(annotation) and value:
        for inner in _alternatives(annotation):
            if get_origin(inner) in (list, dict):
                entry = value[0] if isinstance(value, list) else next(iter(value.values()))
                yield from _models_in(get_args(inner)[-1], entry, f"{path}[]")
        return
    for model in _models_of(annotation):
        if isinstance(value, dict) and _is_of(value, model):
            yield model, Sample(value, path), f"{path}<{model.__name__}>"


def _put(outer: Any, value: Any) -> Any:
    """The broken value where the whole one was."""
    if isinstance(outer, list):
        return [_put(outer[0], value)] if isinstance(outer[0], list) else [value]
    if isinstance(outer, dict) and list(outer) == ["key"]:
        return {"key": value}
    return value


def _is_of(value: dict[str, Any], model: Model) -> bool:
    try:
        model.model_validate(value)
    except ValueError:
        return False
    return set(value) <= set(model.model_fields)


def _models_of(annotation: Any) -> list[Model]:
    return [inner for inner in _alternatives(annotation) if isinstance(inner, type) and issubclass(inner, BaseModel)]


def _alternatives(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [each for inner in get_args(annotation) for each in _alternatives(inner)]
    return [annotation]


def _choices(annotation: Any, name: str, path: str, expanded: frozenset[Model]) -> list[Sample]:
    found: list[Sample] = []
    for inner in _alternatives(annotation):
        found += _values(inner, name, path, expanded)
    return found


def _values(annotation: Any, name: str, path: str, expanded: frozenset[Model]) -> list[Sample]:
    origin = get_origin(annotation)
    if origin is Literal:
        return [Sample(value, f"{path}={value}") for value in get_args(annotation)]
    if origin is list:
        inner = _choices(get_args(annotation)[0], name, f"{path}[]", expanded)
        return [Sample([sample.value], sample.path) for sample in inner]
    if origin is dict:
        inner = _choices(get_args(annotation)[1], name, f"{path}[]", expanded)
        return [Sample({"key": sample.value}, sample.path) for sample in inner]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        assert annotation not in expanded, f"{annotation} contains itself"
        return list(accepted(annotation, f"{path}<{annotation.__name__}>", expanded))
    if annotation is bool:
        return [Sample(value, f"{path}={value}") for value in (True, False)]
    plain = {str: "text", int: 5, float: 0.5, object: {"any": [1]}, NoneType: None}
    value = SAMPLES.get(name, plain[annotation]) if annotation in (str, int, float) else plain[annotation]
    return [Sample(value, f"{path}:{getattr(annotation, '__name__', annotation)}")]
