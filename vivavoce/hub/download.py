"""Download one URL into a file: resumed where it was interrupted, within a call and across calls."""

import base64
import http.client
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit, urlunsplit
from urllib.request import Request, urlopen

from vivavoce.errors import VivaError

CHUNK = 1 << 18
TIMEOUT_S = 30.0
RETRY_DELAYS_S = (0.2, 1.0, 3.0)  # after a connection that brought nothing new
MAX_PAGE = 32 << 20
RANGE_NOT_SATISFIABLE = 416
PARTIAL_CONTENT = 206
TEMPORARY = {429, 500, 502, 503, 504}
BROKEN = (OSError, http.client.HTTPException)

Report = Callable[[str, int, int | None], None]
"""Called with a label, the bytes on disk and the bytes in all, where they are known."""


class DownloadError(VivaError):
    """A URL could not be read; `is_unreachable` if its host could not even be connected to."""

    def __init__(self, message: str, is_unreachable: bool = False) -> None:
        super().__init__(message)
        self.is_unreachable = is_unreachable


def read_text(address: str, token: str | None = None) -> str:
    """The text at a URL."""
    try:
        with _open(address, token=token) as reply:
            content: bytes = reply.read(MAX_PAGE)
    except BROKEN as error:
        raise _explained(address, error) from error
    return content.decode("utf8", errors="replace")


def download(address: str, target: Path, label: str, report: Report, token: str | None = None) -> None:
    """Write what is at a URL to `target`; bytes that are there already are not requested again."""
    failures = 0
    while True:
        before = target.stat().st_size if target.exists() else 0
        try:
            _continue(address, target, label, report, token)
            return
        except BROKEN as error:
            explained = _explained(address, error)
            came = target.stat().st_size - before if target.exists() else 0
            failures = 0 if came > 0 else failures + 1
            is_refused = isinstance(error, HTTPError) and error.code not in TEMPORARY
            if is_refused or explained.is_unreachable or failures > len(RETRY_DELAYS_S):
                raise explained from error
            time.sleep(RETRY_DELAYS_S[failures - 1] if failures else 0)


def _continue(address: str, target: Path, label: str, report: Report, token: str | None) -> None:
    """One request for the bytes that are missing."""
    have = target.stat().st_size if target.exists() else 0
    try:
        reply = _open(address, have, token)
    except HTTPError as error:
        error.close()
        if error.code != RANGE_NOT_SATISFIABLE or not have:
            raise
        size = (error.headers.get("Content-Range") or "").rpartition("/")[2]
        if size == str(have):
            report(label, have, have)
            return
        target.unlink()
        have, reply = 0, _open(address, 0, token)
    with reply:
        if reply.status != PARTIAL_CONTENT:
            have = 0  # the server sends all of it again
        length = reply.headers.get("Content-Length")
        total = have + int(length) if length is not None else None
        with target.open("ab" if have else "wb") as stream:
            report(label, have, total)
            while chunk := reply.read(CHUNK):
                stream.write(chunk)
                have += len(chunk)
                report(label, have, total)
    if total is not None and have < total:
        raise ConnectionError(f"the connection ended after {have} of {total} bytes")


def _open(address: str, start: int = 0, token: str | None = None) -> Any:
    parts = urlsplit(address)
    request = Request(without_secrets(address), headers={"User-Agent": "vivavoce", "Accept-Encoding": "identity"})
    if parts.username is not None:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        token = f"Basic {base64.b64encode(secret).decode()}"
    elif token:
        token = f"Bearer {token}"
    if token:
        request.add_unredirected_header("Authorization", token)  # not for the host that a redirect names
    if start:
        request.add_header("Range", f"bytes={start}-")
    return urlopen(request, timeout=TIMEOUT_S)


def without_secrets(address: str) -> str:
    """A URL without user name and password."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _explained(address: str, error: Exception) -> DownloadError:
    host = urlsplit(without_secrets(address)).netloc or "the file"
    if isinstance(error, HTTPError):
        return DownloadError(f"{host} answers {error.code} for {urlsplit(address).path}")
    reason = getattr(error, "reason", None) or error
    is_unreachable = isinstance(error, URLError)
    return DownloadError(f"{host} {'cannot be reached' if is_unreachable else 'broke off'} ({reason})", is_unreachable)
