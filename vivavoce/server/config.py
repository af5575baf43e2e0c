"""What the one who runs the server may choose."""

import asyncio
import socket
from collections import OrderedDict
from dataclasses import dataclass
from ipaddress import ip_address

from vivavoce.errors import InputError
from vivavoce.log import LogFormat, LogLevel

MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class ServerOptions:
    """Loopback, no key and moderate limits unless told otherwise."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    """Browser origins besides our own page and loopback; "*" admits all."""
    allowed_hosts: tuple[str, ...] = ()
    """Names this server is called by besides its address and loopback; "*" admits all."""
    browser_key_seconds: float = 600.0

    most_sessions: int = 64
    opens_per_minute: float = 120.0
    """Sessions one client address may open in a minute."""
    most_event_bytes: int = 15 * MEBIBYTE
    most_pending_bytes: int = 16 * MEBIBYTE
    """Sound waiting for a commit, and events waiting for a reader."""
    most_upload_bytes: int = 64 * MEBIBYTE
    idle_seconds: float = 300.0
    session_seconds: float | None = None
    resume_seconds: float = 30.0
    stall_seconds: float = 15.0
    """How long a client may leave its socket unread, or what it is sending unfinished."""
    events_per_second: float = 500.0
    sound_per_second: float = 20.0
    """Seconds of sound taken in a second, after a burst of a few minutes; the rest waits in the socket."""

    lead_ms: int = 300
    """How far ahead of the listener sound is sent at most, after the first piece at once."""
    least_lead_ms: int = 60
    """The same at least: to it is added by how much the client's own sound comes unevenly."""
    piece_ms: int = 40
    call_lead_ms: int = 60
    """The same for WebRTC, whose own clock paces the packets."""
    call_piece_ms: int = 20
    ice_servers: tuple[str, ...] = ()
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    log_content: bool = False
    """Only for finding faults: the events, without their sound, go to the log."""

    def check(self) -> None:
        """Raise InputError for what must not be served."""
        if not self.api_keys and not is_loopback(self.host):
            raise InputError(
                f"binding to {self.host} lets other machines in without a key; give --api-key, or bind 127.0.0.1"
            )
        if any(len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise InputError("an API key needs at least 8 printable ASCII characters without spaces")

    def check_address(self) -> None:
        """Raise InputError, before anything is loaded, where nobody can listen at this address."""
        try:
            family, kind, _, _, address = socket.getaddrinfo(
                self.host.strip("[]"), self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(address)
        except OSError as error:
            raise InputError(
                f"cannot listen on {self.host}:{self.port}: {error.strerror}; give another --port or --host"
            ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


MOST_ADDRESSES = 4096


class Bucket:
    """Fills at `rate` up to `burst`; who takes more than is there waits until it is paid back."""

    def __init__(self, rate: float, burst: float) -> None:
        self.rate, self.burst = rate, burst
        self._level, self._at = burst, _now()

    def take(self, amount: float) -> float:
        """Take it; seconds to wait before going on."""
        now = _now()
        self._level = min(self.burst, self._level + (now - self._at) * self.rate) - amount
        self._at = now
        return max(-self._level / self.rate, 0.0)

    def try_take(self, amount: float) -> bool:
        """Take it if it is there."""
        if self.take(amount) == 0:
            return True
        self._level += amount
        return False


class OpenRate:
    """How often each address may open a session; the addresses seen last are remembered."""

    def __init__(self, per_minute: float) -> None:
        self._per_minute = per_minute
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def admits(self, address: str) -> bool:
        """Whether this address may open one more now."""
        bucket = self._buckets.pop(address, None) or Bucket(self._per_minute / 60, self._per_minute)
        self._buckets[address] = bucket
        if len(self._buckets) > MOST_ADDRESSES:
            self._buckets.popitem(last=False)
        return bucket.try_take(1)


def _now() -> float:
    return asyncio.get_running_loop().time()
