"""JSON as it may be on the wire: finite numbers, whole characters, not nested without end."""

import json
import math
from typing import Any

from vivavoce.server.wire_error import WireError

SURROGATE = "\\ud"  # how an escaped half of a pair begins


def parsed(message: str) -> Any:
    """The value of a message; WireError where it has none that could be sent back."""
    try:
        value = json.loads(message, parse_float=_finite, parse_constant=_finite)
        if SURROGATE in message or "\\uD" in message:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise WireError("the message is nested too deeply", "invalid_json") from None
    except ValueError as error:
        raise WireError(f"the message is not JSON: {error}", "invalid_json") from None
    return value


def _finite(written: str) -> float:
    number = float(written)
    if not math.isfinite(number):
        raise ValueError(f"{written} is no finite number")
    return number
