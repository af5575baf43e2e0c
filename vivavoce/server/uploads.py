"""Files in forms."""

from collections.abc import Mapping
from typing import Any

from vivavoce.server.wire_error import WireError


async def uploaded(form: Mapping[str, Any], name: str, most_bytes: int) -> bytes:
    """The bytes of a form's file; WireError where there is none, or too much of it."""
    upload = form.get(name)
    if upload is None or isinstance(upload, str):
        raise WireError(f"there is no {name}", "missing_file", name)
    data = bytes(await upload.read(most_bytes + 1))
    if len(data) > most_bytes:
        raise WireError(f"a file of more than {most_bytes >> 20} MiB", "file_too_large", name, 413)
    return data
