"""Tables of names and values, as TOML and YAML have them, as dataclasses; one line says what is wrong with one."""

import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from vivavoce.errors import InputError, MissingDependencyError

Table = TypeVar("Table")


def read_table(file: Path) -> dict[str, Any]:
    """What a `.yaml` or `.yml` file holds, or one of TOML under any other name."""
    text = read_text(file, "configuration")
    try:
        content = _yaml().safe_load(text) or {} if file.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except MissingDependencyError:
        raise
    except Exception as error:  # each library has its own
        raise InputError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{file} holds no names and values")
    return content


def read_text(file: Path, what: str) -> str:
    """The text of a file; `what` it is, for the one line where it cannot be read."""
    try:
        return file.expanduser().read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the {what} file {str(file)!r} cannot be read ({error})") from error


def _yaml() -> Any:
    try:
        return import_module("yaml")
    except ImportError as error:
        raise MissingDependencyError("a YAML file needs pip install pyyaml; or write it as TOML") from error


def merged(given: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """One table over another, table by table; what is None in it says nothing."""
    result = dict(given)
    for name, value in over.items():
        if isinstance(value, Mapping):
            inner = result.get(name, {})
            result[name] = merged(inner if isinstance(inner, Mapping) else {}, value)
        elif value is not None:
            result[name] = value
    return result


def filled(kind: type[Table], given: Mapping[str, Any], where: str) -> Table:
    """A dataclass with these values; one line says which of them it does not take."""
    hints, known = get_type_hints(kind), [each.name for each in fields(kind)]  # type: ignore[arg-type]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise InputError(f"{where}: {unknown[0]!r} is none of {', '.join(known)}")
    return kind(**{name: _value(hints[name], value, f"{where}: {name}") for name, value in given.items()})


def _value(kind: Any, value: Any, where: str) -> Any:
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise InputError(f"{where} is a table of names and values, not {value!r}")
        return filled(kind, value, where)
    if get_origin(kind) in (Union, UnionType):
        options = [option for option in get_args(kind) if option is not type(None)]
        return None if value is None else _value(options[0], value, where)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise InputError(f"{where} is one of {', '.join(map(str, get_args(kind)))}, not {value!r}")
        return value
    if get_origin(kind) is tuple:
        listed = value if isinstance(value, list | tuple) else [value]
        return tuple(_value(get_args(kind)[0], each, where) for each in listed)
    return _plain(kind, value, where)


def _plain(kind: type, value: Any, where: str) -> Any:
    """A text, number, flag or path; numbers may be written without a point."""
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(f"{where} is to be {kind.__name__}, not {value!r}")
    return value
