"""Options of a server, the reader of option tables (TOML, YAML, flags), and the rate limits the options set."""

import asyncio
import functools
import importlib.util
import logging
import socket
import ssl
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from ipaddress import ip_address
from pathlib import Path
from types import UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from uuid import UUID

from vivavoce.cores import usable_cores
from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.log import LogFormat, LogLevel
from vivavoce.server.mcp.allowed import AllowedServers
from vivavoce.server.sip.options import SipOptions
from vivavoce.server.tools.selection import selected_tools

logger = logging.getLogger(__name__)

Table = TypeVar("Table")
Value = TypeVar("Value")

MEBIBYTE = 1 << 20
MAX_ADDRESSES = 4096
MIN_CORES_FOR_DOORS = 8
ENGINE_CORES = 4  # left to the event loop, the model and the audio front end
MAX_DEFAULT_DOORS = 8

# Former names of options, accepted for one release in configuration files and as keyword arguments.
FORMER_NAMES = {
    "most_sessions": "max_sessions",
    "most_event_bytes": "max_event_bytes",
    "most_pending_bytes": "max_pending_bytes",
    "most_upload_bytes": "max_upload_bytes",
    "least_lead_ms": "min_lead_ms",
    "least_slack_ms": "min_slack_ms",
    "least": "min_replicas",
    "most": "max_replicas",
    "longest_seconds": "max_seconds",
}


class FormerName(Generic[Value]):
    """Reads an option under its former name; for one release."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Value:
        """The value of the option under its present name."""
        value: Value = getattr(instance, self._name)
        return value


def accept_former_names(options: type[Table]) -> type[Table]:
    """Class decorator: the constructor of a dataclass takes `FORMER_NAMES` too, and logs each use."""
    construct = options.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        # A former name wins over the present one: `dataclasses.replace` passes both.
        former = {name: value for name, value in kwargs.items() if _present_name(options, name) != name}
        present = {name: value for name, value in kwargs.items() if name not in former}
        construct(self, *args, **(present | with_present_names(options, former, options.__name__)))

    options.__init__ = __init__  # type: ignore[method-assign]
    return options


def with_present_names(options: type, values: Mapping[str, object], where: str) -> dict[str, object]:
    """A table with former option names replaced by the present ones; each is logged as deprecated."""
    result: dict[str, object] = {}
    for name, value in values.items():
        present = _present_name(options, name)
        if present != name:
            logger.warning("%s: the option %r is deprecated, it is now called %r", where, name, present)
        if present in result:
            raise InputError(f"{where}: {present!r} is set twice, once under a former name")
        result[present] = value
    return result


def _present_name(options: type, name: str) -> str:
    known = {each.name for each in fields(options)}
    renamed = FORMER_NAMES.get(name)
    return renamed if name not in known and renamed in known else name


@accept_former_names
@dataclass(frozen=True)
class ServerOptions:
    """Options of one server. By default it listens on loopback, without keys."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    """Browser origins besides our own page and loopback; "*" admits all."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names of this server besides its address and loopback; "*" admits all."""
    browser_key_seconds: float = 600.0
    tls_cert: str | None = None
    """A PEM file with the certificate chain, for HTTPS and WSS."""
    tls_key: str | None = None
    """A PEM file with its private key, where the certificate's file does not hold it."""

    doors: int | None = None
    """Door processes that serve the sockets; 0: none, None: by the number of cores."""
    max_sessions: int = 64
    opens_per_minute: float = 120.0
    """Sessions that one client address may open in a minute."""
    max_lag_ms: float = 50.0
    """Lateness of the event loop from which on new sessions are refused."""
    max_speech_load: float = 0.97
    """Share of a CPU that the replies of a speech-to-speech model may take if all sessions are answered at the same
    time; a session beyond that is refused."""
    max_event_bytes: int = 15 * MEBIBYTE
    max_pending_bytes: int = 16 * MEBIBYTE
    """Audio waiting for a commit, and events not yet read by the client."""
    max_upload_bytes: int = 64 * MEBIBYTE
    max_audio_seconds: float = 7200.0
    """Length of an uploaded recording once it is decoded."""
    idle_seconds: float = 300.0
    session_seconds: float | None = None
    resume_seconds: float = 30.0
    drain_seconds: float = 20.0
    """How long replies and requests in progress may go on when the server is told to stop."""
    stall_seconds: float = 15.0
    """How long a client may leave its socket unread, or a request body unfinished."""
    head_seconds: float = 10.0
    """How long a request's line and headers may take, and a WebSocket's handshake."""
    max_pending_connections: int = 512
    """Connections that have not sent a whole request; beyond, the oldest are closed."""
    max_pending_per_address: int = 128
    events_per_second: float = 500.0
    sound_per_second: float = 20.0
    """Seconds of audio accepted per second, after a burst of a few minutes; the rest waits in the socket."""

    lead_ms: int = 400
    """Upper limit of how far ahead of playback audio is sent, after the first chunk."""
    min_lead_ms: int = 200
    """Lower limit of the lead: a stall of the event loop that is longer empties the players of all clients. The
    measured jitter of the client's own audio is added to it."""
    piece_ms: int = 40
    call_lead_ms: int = 60
    """Lead of WebRTC calls, whose own clock paces the packets."""
    call_piece_ms: int = 20
    ice_servers: tuple[str, ...] = ()
    allow_mcp: tuple[str, ...] = ()
    """MCP servers that clients may name: addresses, and programs as `name=command`."""
    tools: tuple[str, ...] = ()
    """Built-in tools of all sessions, such as `clock` and `folder=DIR`."""
    embedding: str | None = None
    """The embedding model with which `folder=DIR` is searched, beside its words."""
    media_streams: bool = False
    """Whether telephony providers may connect, at `/v1/media-streams/PROVIDER`."""
    audiosocket: int | None = None
    """The TCP port for Asterisk's AudioSocket."""
    audiosocket_tokens: tuple[str, ...] = ()
    """The UUIDs that Asterisk may name; without any, all are admitted."""
    sip: SipOptions = field(default_factory=SipOptions)
    call_records: str | None = None
    """A file to which a line of JSON is appended for each telephone call; None: nothing is stored."""
    call_silence_seconds: float | None = None
    """Silence of a telephone call after which the model speaks; None: it waits for the caller."""
    call_silence_prompts: int = 2
    """How often it speaks until the caller answers; the silence after that ends the call."""
    call_end_phrases: tuple[str, ...] = ()
    """Words such as "goodbye" at the end of a turn of either side, after which a telephone call ends."""
    greeting: str | None = None
    """What a session is greeted with before the user has spoken."""
    greeting_instructions: str | None = None
    """How the model is to greet, in words of its own."""
    greeting_may_be_interrupted: bool = True
    prompts: str | None = None
    """A folder of stored prompts: files of instructions that sessions name by id; None: there are none."""
    webhook_url: str | None = None
    """Is sent `session.started` and `session.ended`."""
    webhook_secret: str | None = None
    """Signs them: base64, usually after `whsec_`."""
    record: str | None = None
    """A folder for recordings and transcripts of all sessions; None: nothing is stored."""
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    log_content: bool = False
    """For debugging only: log the events, without their audio."""

    most_sessions = FormerName[int]("max_sessions")
    most_event_bytes = FormerName[int]("max_event_bytes")
    most_pending_bytes = FormerName[int]("max_pending_bytes")
    most_upload_bytes = FormerName[int]("max_upload_bytes")
    least_lead_ms = FormerName[int]("min_lead_ms")

    def check(self) -> None:
        """Raise InputError for options that must not be served."""
        if not self.api_keys and not is_loopback(self.host):
            raise InputError(
                f"binding to {self.host} admits other machines without a key; set --api-key, or bind 127.0.0.1"
            )
        if self.doors is not None and self.doors < 0:
            raise InputError(f"the number of doors is 0 or more, not {self.doors}")
        if any(len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise InputError("an API key needs at least 8 printable ASCII characters without spaces")
        self._check_certificate()
        if self.prompts is not None and not Path(self.prompts).is_dir():
            raise InputError(f"there is no folder {self.prompts!r} for --prompts")
        if AllowedServers.read(self.allow_mcp) and importlib.util.find_spec("mcp") is None:
            raise MissingDependencyError("--allow-mcp needs the package mcp: pip install 'vivavoce[mcp]'")
        selected_tools(self.tools, self.embedding)
        if self.greeting is not None and self.greeting_instructions is not None:
            raise InputError("give --greeting or --greeting-instructions, not both")
        if (self.webhook_url is None) != (self.webhook_secret is None):
            raise InputError("webhooks need --webhook-url and --webhook-secret: they are signed")
        if self.webhook_url is not None and not self.webhook_url.startswith(("http://", "https://")):
            raise InputError("the address of --webhook-url begins with http:// or https://")

        self._check_calls()
        self._check_audiosocket()
        self.sip.check(self.tls_cert is not None, self.webhook_url is not None)

    def _check_calls(self) -> None:
        seconds = self.call_silence_seconds
        if seconds is not None and not 1 <= seconds <= 600:
            raise InputError(f"--call-silence-seconds is 1 to 600, not {seconds:g}")
        if self.call_silence_prompts < 0:
            raise InputError(f"--call-silence-prompts is 0 or more, not {self.call_silence_prompts}")
        if any(not any(map(str.isalnum, phrase)) for phrase in self.call_end_phrases):
            raise InputError("--call-end-phrase needs words")

    def _check_audiosocket(self) -> None:
        if self.audiosocket is None:
            if self.audiosocket_tokens:
                raise InputError("--audiosocket-token needs --audiosocket, the port for Asterisk")
            return
        if not 0 <= self.audiosocket <= 65_535 or self.audiosocket == self.port != 0:
            raise InputError(f"--audiosocket is a TCP port of its own, not {self.audiosocket}")
        if not self.audiosocket_tokens and (self.api_keys or not is_loopback(self.host)):
            raise InputError("AudioSocket has no API keys: set --audiosocket-token to a secret UUID for the dialplan")
        try:
            for token in self.audiosocket_tokens:
                UUID(token)
        except ValueError as error:  # the token is a secret
            raise InputError("--audiosocket-token is a UUID, as AudioSocket() of the dialplan takes it") from error

    def _check_certificate(self) -> None:
        if self.tls_cert is None:
            if self.tls_key is not None:
                raise InputError("--tls-key needs --tls-cert, the certificate it belongs to")
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key, password="")
        except (OSError, ssl.SSLError) as error:  # the message of OpenSSL does not quote the files
            where = self.tls_cert if self.tls_key is None else f"{self.tls_cert} and {self.tls_key}"
            raise InputError(f"no certificate and key in {where}: {error}; both are PEM, without a password") from error

    def address(self, port: int) -> str:
        """An address of this server that can be opened on this machine; `port` is the one that it listens on."""
        host = self.host.strip("[]") or "0.0.0.0"
        with suppress(ValueError):  # the name of a host
            if ip_address(host).is_unspecified:
                host = "127.0.0.1" if ip_address(host).version == 4 else "::1"
        scheme = "http" if self.tls_cert is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def door_count(self) -> int:
        """The number of door processes: on a machine with few cores one process is quicker."""
        if self.doors is not None:
            return self.doors
        cores = usable_cores()
        is_possible = hasattr(socket, "AF_UNIX") and cores >= MIN_CORES_FOR_DOORS
        return min((cores - ENGINE_CORES) // 2, MAX_DEFAULT_DOORS) if is_possible else 0

    def check_address(self) -> None:
        """Raise InputError where this address cannot be bound; called before models are loaded."""
        try:
            family, kind, _, _, address = socket.getaddrinfo(
                self.host.strip("[]"), self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            raise InputError(
                f"cannot listen on {self.host}:{self.port}: {error.strerror}; choose another --port or --host"
            ) from error


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# Tables of options


def read_options(kind: type[Table], values: Mapping[str, object], where: str) -> Table:
    """A dataclass of options with these values; InputError for an unknown name or a wrong value."""
    hints, known = get_type_hints(kind), [each.name for each in fields(kind)]  # type: ignore[arg-type]
    values = with_present_names(kind, values, where)
    unknown = [name for name in values if name not in known]
    if unknown:
        raise InputError(f"{where}: unknown option {unknown[0]!r}; known are {', '.join(known)}")
    return kind(**{name: _value(hints[name], value, f"{where}: {name}") for name, value in values.items()})


def _value(kind: Any, value: object, where: str) -> object:
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise InputError(f"{where} must be a table of names and values, not {value!r}")
        return read_options(kind, value, where)
    origin, choices = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        types = [each for each in choices if each is not type(None)]
        return None if value is None else _value(types[0], value, where)
    if origin is Literal:
        if value not in choices:
            raise InputError(f"{where} must be one of {', '.join(map(str, choices))}, not {value!r}")
        return value
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_value(choices[0], each, where) for each in items)
    return _scalar(origin or kind, value, where)


def _scalar(kind: type, value: object, where: str) -> object:
    """A text, number, flag, path or plain mapping; an integer is accepted for a float."""
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(f"{where} must be {kind.__name__}, not {value!r}")
    return value


# Rate limits


class Bucket:
    """A token bucket: fills at `rate` tokens a second up to `burst`; it may be overdrawn by one take."""

    def __init__(self, rate: float, burst: float) -> None:
        self.rate, self.burst = rate, burst
        self._level, self._updated_at = burst, _now()

    def take(self, amount: float, now: float | None = None) -> float:
        """Take tokens; the seconds to wait until the bucket is no longer overdrawn."""
        now = _now() if now is None else now
        level = self._level + (now - self._updated_at) * self.rate
        self._level = (level if level < self.burst else self.burst) - amount
        self._updated_at = now
        return -self._level / self.rate if self._level < 0 else 0.0

    def try_take(self, amount: float) -> bool:
        """Take tokens if there are enough."""
        if self.take(amount) == 0:
            return True
        self._level += amount
        return False


class OpenRate:
    """Limits how often each client address may open a session; an LRU of token buckets."""

    def __init__(self, per_minute: float) -> None:
        self._per_minute = per_minute
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def admits(self, address: str) -> bool:
        """Whether this address may open one more session now."""
        bucket = self._buckets.pop(address, None) or Bucket(self._per_minute / 60, self._per_minute)
        self._buckets[address] = bucket
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        return bucket.try_take(1)


def _now() -> float:
    return asyncio.get_running_loop().time()
