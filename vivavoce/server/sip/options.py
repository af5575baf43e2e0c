"""Options of SIP: where it listens, whose calls it takes, where it registers, what it dials and transfers to."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Literal
from urllib.parse import unquote

from vivavoce.errors import InputError
from vivavoce.server.sip.addresses import DEFAULT_PORTS, TRANSPORTS, Destination, Transport, Uri
from vivavoce.server.sip.digest import Account

SEPARATORS = str.maketrans("", "", "-.()")  # that are written into telephone numbers
RESERVED_PARAMETERS = {"maddr", "method", "ttl"}  # that would send a request elsewhere, or change it


@dataclass(frozen=True)
class SipOptions:
    """Options of the SIP user agent. Without an address to listen on there is none."""

    listen: tuple[str, ...] = ()
    """Addresses such as 127.0.0.1:5060 (UDP and TCP), udp:…, tcp:… or tls:…, which uses the server's certificate."""
    accounts: tuple[str, ...] = ()
    """name:password of those who may call from anywhere."""
    allow: tuple[str, ...] = ()
    """Addresses and networks whose calls need no account."""
    registrar: str | None = None
    """sip:user@registrar to register with; its calls need no account."""
    registrar_password: str | None = None
    public_host: str | None = None
    """The IP address that peers reach this server at, where it is behind NAT."""
    rtp_ports: str = "10000-20000"
    calls_per_source: int = 16
    """Calls of one address at a time."""
    targets: tuple[str, ...] = ()
    """Patterns such as sip:*@example.com or tel:+4930*: to whom calls may be transferred."""
    dials: tuple[str, ...] = ()
    """Patterns such as those of `targets`: what may be dialled; without any there are no outgoing calls."""
    trunk: str | None = None
    """sip:host or sip:user@host through which telephone numbers are called; None: the registrar."""
    trunk_account: str | None = None
    """name:password at the trunk."""
    max_outgoing_calls: int = 4
    """Outgoing calls at a time."""
    dials_per_minute: float = 10.0
    max_outgoing_seconds: float = 3600.0
    """Of one outgoing call, since its answer."""
    answers: Literal["auto", "webhook"] = "auto"
    """Whether calls are answered at once, or after `realtime.call.incoming` was sent and accepted."""
    ring_seconds: float = 30.0
    """How long a call waits to be accepted."""
    needs_srtp: bool = False
    """Whether calls without encrypted audio are refused."""

    def check(self, has_certificate: bool, has_webhook: bool) -> None:
        """Raise InputError for options that must not be served."""
        if not self.listen:
            if self.accounts or self.allow or self.registrar or self.targets or self.dials or self.trunk:
                raise InputError("the options of SIP need --sip, the address to listen on")
            return
        where, networks, accounts = self.destinations, self.networks, self.account_table
        _ = self.allowed_targets, self.allowed_dials, self.port_range
        self._check_trunk()
        if any(each.transport == "tls" for each in where) and not has_certificate:
            raise InputError("--sip tls:… needs --tls-cert")
        if self.answers == "webhook" and not has_webhook:
            raise InputError("--sip-answers webhook needs --webhook-url and --webhook-secret")
        is_public = any(not ip_address(each.host).is_loopback for each in where)
        if is_public and not (networks or accounts or self.registrar):
            raise InputError("SIP on another address than loopback needs --sip-account, --sip-allow or --sip-registrar")
        if self.registrar is not None and Uri.parse(self.registrar).scheme == "tel":
            raise InputError("--sip-registrar is sip:user@host")
        if self.public_host is not None:
            _address(self.public_host, "--sip-public-host")

    @property
    def destinations(self) -> list[Destination]:
        """Where it listens."""
        return [each for text in self.listen for each in _destinations(text)]

    @property
    def networks(self) -> "list[IPv4Network | IPv6Network]":
        """Whose calls need no account."""
        try:
            return [ip_network(each, strict=False) for each in self.allow]
        except ValueError as error:
            raise InputError(f"--sip-allow is an address or a network such as 10.0.0.0/8: {error}") from error

    @property
    def account_table(self) -> dict[str, Account]:
        return {account.user: account for account in map(Account.parse, self.accounts)}

    @property
    def allowed_targets(self) -> "AllowedTargets":
        return AllowedTargets([TargetPattern.parse(each) for each in self.targets])

    @property
    def allowed_dials(self) -> "AllowedTargets":
        return AllowedTargets([TargetPattern.parse(each) for each in self.dials])

    def _check_trunk(self) -> None:
        if self.trunk is not None and Uri.parse(self.trunk).scheme == "tel":
            raise InputError("--sip-trunk is sip:host or sip:user@host")
        if self.trunk_account is not None:
            Account.parse(self.trunk_account)
        if self.max_outgoing_calls < 1 or self.dials_per_minute <= 0 or self.max_outgoing_seconds <= 0:
            raise InputError("the limits of outgoing calls are above 0; without --sip-dial there are none")

    @property
    def port_range(self) -> tuple[int, int]:
        """The first and the last port for RTP."""
        first, _, last = self.rtp_ports.partition("-")
        if not (first.isdecimal() and last.isdecimal() and 1024 <= int(first) < int(last) <= 65_535):
            raise InputError(f"--sip-rtp-ports is a range such as 10000-20000, not {self.rtp_ports!r}")
        return int(first), int(last)


def _destinations(text: str) -> list[Destination]:
    kind, colon, rest = text.partition(":")
    named: list[Transport] = [each for each in TRANSPORTS if each == kind.lower()] if colon else []
    transports: list[Transport] = named or ["udp", "tcp"]
    address = rest if named else text
    host, colon, port = address.rpartition(":")
    if address.endswith("]") or not colon:  # without a port
        host, port = address, str(DEFAULT_PORTS[transports[0]])
    host = host.strip("[]") if host != "localhost" else "127.0.0.1"
    _address(host, "--sip")
    if not port.isdecimal() or int(port) > 65_535:
        raise InputError(f"--sip is an address such as 127.0.0.1:5060 or tls:10.0.0.1:5061, not {text!r}")
    return [Destination(transport, host, int(port)) for transport in transports]


def _address(text: str, name: str) -> None:
    try:
        ip_address(text)
    except ValueError as error:
        raise InputError(f"{name} needs an IP address, not {text!r}") from error


@dataclass(frozen=True)
class TargetPattern:
    """A pattern of URIs; * stands for any characters of a user or of a number, and for subdomains of a host."""

    scheme: str
    user: str
    host: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> "TargetPattern":
        """The pattern; InputError where it is none."""
        scheme, _, rest = text.partition(":")
        if scheme == "tel" and rest:
            return cls("tel", rest.translate(SEPARATORS), "", None)
        user, at, address = rest.rpartition("@")
        host, colon, port = address.rpartition(":")
        host, port = (host, port) if colon and not address.endswith("]") else (address, "")
        is_valid = scheme in ("sip", "sips") and at and host and (not port or port.isdecimal())
        if not is_valid or host.strip("*") in ("", "."):
            raise InputError(f"an allowed target is like sip:*@example.com or tel:+4930*, not {text!r}")
        return cls(scheme, user, host.strip("[]").lower(), int(port) if port else None)

    def matches(self, uri: Uri) -> bool:
        """Whether the pattern covers a URI."""
        if uri.scheme != self.scheme:
            return False
        if self.scheme == "tel":
            return fnmatchcase(uri.user.translate(SEPARATORS), _only_stars(self.user))
        is_host = fnmatchcase(uri.host, _only_stars(self.host)) and self.port in (None, uri.port)
        return is_host and fnmatchcase(unquote(uri.user), _only_stars(self.user))


@dataclass(frozen=True)
class AllowedTargets:
    """Addresses that calls may be placed or transferred to; without patterns, to none."""

    patterns: list[TargetPattern]

    def admits(self, uri: Uri) -> bool:
        """Whether a call may be placed or transferred to a URI."""
        is_plain = not RESERVED_PARAMETERS & set(uri.parameters) and "?" not in uri.text
        return is_plain and any(pattern.matches(uri) for pattern in self.patterns)


def _only_stars(pattern: str) -> str:
    """A pattern of fnmatch in which * alone is special."""
    return pattern.replace("[", "[[]").replace("?", "[?]")
