"""A tool that makes HTTP requests to addresses which the operator named; everything that comes back is bounded.

A name is resolved here, and the connection goes to an address that was checked: a name that leads into the private
network, now or at the next look, is refused. Redirects are checked like the first address.
"""

import asyncio
import http.client
import ipaddress
import json
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from vivavoce.errors import InputError
from vivavoce.server.allowed_addresses import is_below
from vivavoce.server.tools.interface import BuiltInTool, CallingSession, object_schema, text_argument
from vivavoce.server.tools.markup import without_markup

MAX_SECONDS = 10.0
MAX_REDIRECTS = 3
MAX_BODY_BYTES = 64 * 1024  # the rest of a response is not read
MAX_SENT = 8192
MAX_URL = 2048
REDIRECTS = (301, 302, 303, 307, 308)
SAFE = "/%:=&?~+!$,;'@()*[]"  # characters of a URL that stay as they are
LOCAL_NAMES = ("localhost",)
CHARSETS = ("ascii", "iso-8859-1", "windows-1252", "gb2312", "gbk", "gb18030", "big5", "shift_jis", "euc-kr")


def http_request(addresses: Sequence[str], max_seconds: float = MAX_SECONDS) -> BuiltInTool:
    """The tool `http_request`, for these addresses and all paths below them; a host alone stands for `https://host`."""
    allowed = [_address(each) for each in addresses]
    listed = ", ".join(allowed)
    schema = object_schema(
        {
            "url": {"type": "string", "description": f"An address below {listed}"},
            "method": {"type": "string", "enum": ["GET", "POST"]},
            "body": {"type": "string", "description": "What is posted: JSON or plain text."},
        },
        "url",
    )

    async def run(arguments: Mapping[str, Any], session: CallingSession) -> str:
        method = text_argument(arguments, "method", 8, default="GET")
        if method not in ("GET", "POST"):
            raise InputError("method is GET or POST")
        body = text_argument(arguments, "body", MAX_SENT) if method == "POST" else None
        exchange = BoundedRequest(allowed, method, body, max_seconds)
        try:
            async with asyncio.timeout(max_seconds):
                return await asyncio.to_thread(exchange.run, text_argument(arguments, "url", MAX_URL))
        except TimeoutError as error:
            raise InputError(f"the server did not answer within {max_seconds:g} s") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise InputError(f"the request failed: {type(error).__name__}") from error
        finally:
            exchange.abort()

    return BuiltInTool("http_request", f"Reads a web address, or posts to it: {listed}", schema, run)


def _address(value: str) -> str:
    address = value if value.startswith(("http://", "https://")) else f"https://{value}"
    try:
        parts = urlsplit(address)
        is_valid = bool(parts.hostname) and (parts.port or 1) > 0 and not (parts.query or parts.fragment)
    except ValueError:
        is_valid = False
    if not is_valid or any(each.isspace() for each in value):
        raise InputError(f"--tool http takes hosts and addresses such as api.example.org, not {value!r}")
    return address.rstrip("/")


@dataclass
class BoundedRequest:
    """A request and its redirects. It runs on a thread; `abort` ends it from another."""

    allowed: Sequence[str]
    method: str
    body: str | None
    max_seconds: float
    _connection: "CheckedConnection | None" = None
    _is_aborted: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, url: str) -> str:
        """The status and text of the response."""
        try:
            return self._run(url)
        finally:
            with self._lock:
                self._close()

    def _run(self, url: str) -> str:
        for _ in range(MAX_REDIRECTS + 1):
            named = next((each for each in self.allowed if is_below(url, each)), None)
            if named is None:
                raise InputError("this address is not allowed; allowed are " + ", ".join(self.allowed))
            with self._request(url, _is_private_named(named)) as response:
                if response.status not in REDIRECTS:
                    return _text_of(response)
                url = urljoin(url, response.headers.get("location", ""))
                if response.status in (301, 302, 303):
                    self.method, self.body = "GET", None
        raise InputError(f"the address redirects more than {MAX_REDIRECTS} times")

    def abort(self) -> None:
        """Let the thread's next read fail."""
        with self._lock:
            self._is_aborted = True
            if self._connection is not None:
                self._connection.abort()

    def _request(self, url: str, may_be_private: bool) -> http.client.HTTPResponse:
        parts = urlsplit(url)
        connection = CheckedConnection(
            parts.hostname or "", parts.port, self.max_seconds, parts.scheme == "https", may_be_private
        )
        with self._lock:
            if self._is_aborted:
                raise InputError("the request was ended")
            self._close()
            self._connection = connection
        target = quote(parts.path or "/", safe=SAFE) + (f"?{quote(parts.query, safe=SAFE)}" if parts.query else "")
        headers = {"Accept-Encoding": "identity", "Accept": "application/json, text/*", "Connection": "close"}
        if self.body is not None:
            headers["Content-Type"] = "application/json" if _is_json(self.body) else "text/plain; charset=utf-8"
        connection.request(self.method, target, None if self.body is None else self.body.encode(), headers)
        return connection.getresponse()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class CheckedConnection(http.client.HTTPConnection):
    """A connection to an address that was checked when its name was resolved."""

    def __init__(self, host: str, port: int | None, timeout: float, is_secure: bool, may_be_private: bool) -> None:
        self.default_port = 443 if is_secure else 80
        super().__init__(host, port or self.default_port, timeout=timeout)
        self._is_secure, self._may_be_private = is_secure, may_be_private
        self._socket: socket.socket | None = None  # `sock` is None once the response has begun

    def connect(self) -> None:
        """Resolve the name, check the address and connect to it."""
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        addresses = [str(each[4][0]) for each in found]
        if not self._may_be_private and not all(ipaddress.ip_address(each).is_global for each in addresses):
            raise InputError("this address leads into a private network, which is not allowed")
        self.sock = self._socket = socket.create_connection((addresses[0], self.port), self.timeout)
        if self._is_secure:
            secure = ssl.create_default_context().wrap_socket(self._socket, server_hostname=self.host)
            self.sock = self._socket = secure

    def abort(self) -> None:
        """End reads that wait, on any thread."""
        if self._socket is not None:
            with suppress(OSError):  # it is not connected any more
                self._socket.shutdown(socket.SHUT_RDWR)


def _is_private_named(address: str) -> bool:
    """Whether the operator named an address itself, and not a name that may lead anywhere."""
    host = urlsplit(address).hostname or ""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host in LOCAL_NAMES
    return True


def _text_of(response: http.client.HTTPResponse) -> str:
    kind = response.headers.get_content_type()
    if response.headers.get("content-encoding", "identity") != "identity":
        raise InputError("the response is compressed, which was not asked for")
    if not kind.startswith("text/") and not kind.endswith(("json", "xml")):
        return f"Status {response.status}. The content is left out: it is {kind}, and not text."
    data = response.read(MAX_BODY_BYTES)
    text = data.decode(_charset(response), "replace")
    return f"Status {response.status}.\n{without_markup(text) if 'html' in kind else text}"


def _charset(response: http.client.HTTPResponse) -> str:
    named = response.headers.get_content_charset("utf-8")
    return named if named in CHARSETS else "utf-8"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
