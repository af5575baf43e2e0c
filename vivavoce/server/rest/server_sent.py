"""Server-sent events of `/v1/audio/*`."""

import msgspec
from msgspec import Struct


class StreamEvent(Struct, tag_field="type"):
    pass


def sse(event: StreamEvent) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
