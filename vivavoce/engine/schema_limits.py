"""Limits of JSON schemas, which clients send: a schema beyond them is refused before it is compiled."""

import json
from collections.abc import Mapping
from typing import Any

from vivavoce.errors import InputError

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 32


def check_schema(schema: Mapping[str, Any], what: str) -> None:
    """Raise InputError for a schema that is too large or nested too deeply to be compiled."""
    if _is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise InputError(f"{what} is nested more than {MAX_SCHEMA_DEPTH} levels deep")
    size = len(json.dumps(schema))
    if size > MAX_SCHEMA_BYTES:
        raise InputError(f"{what} has {size} characters of JSON; the limit is {MAX_SCHEMA_BYTES}")


def _is_deeper(value: object, levels: int) -> bool:
    """Whether lists and objects are nested in each other more often; looks no deeper than that."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return levels < 0 or any(_is_deeper(each, levels - 1) for each in inner)
