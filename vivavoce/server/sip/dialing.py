"""Placing calls over SIP: what may be dialled, by which way, and how often."""

import asyncio
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from vivavoce.errors import InputError
from vivavoce.server.config import OpenRate
from vivavoce.server.realtime.session_types import SessionParams
from vivavoce.server.rtp.dtmf_events import check_digits
from vivavoce.server.sip.addresses import Uri, host_port
from vivavoce.server.sip.digest import Account
from vivavoce.server.sip.messages import Headers
from vivavoce.server.sip.options import SEPARATORS, SipOptions
from vivavoce.server.telephony.call_progress import AnsweringMachinePolicy
from vivavoce.server.wire import WireError

if TYPE_CHECKING:
    from vivavoce.server.sip.outgoing import OutgoingSipCall

RINGING_SECONDS = 45.0
MAX_HEADER_COUNT = 16
ANY = "any"  # the address of the rate that all dialled calls share

_HEADER_NAME = re.compile(r"[Xx]-[A-Za-z0-9-]{1,60}")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]{0,256}")


class DialRequest(Struct, kw_only=True):
    """The body of a request to place a call."""

    target_uri: str
    """sip:user@host, sips:user@host or tel:+number, which has to be within the allow-list."""
    session: SessionParams | None = None
    """Of the conversation, as for `accept`."""
    headers: dict[str, str] = {}
    """X- headers of the INVITE."""
    dtmf: str = ""
    """Keys that are pressed once the call is answered."""
    ringing_timeout: Annotated[float, Meta(ge=1, le=300)] = RINGING_SECONDS
    """Seconds after which a call that is not answered is given up."""
    max_call_duration: Annotated[float, Meta(ge=1)] | None = None
    """Seconds; the server's limit holds too."""
    wait_until_answered: bool = False
    """Whether the response comes when the call was answered, or has failed."""
    answering_machine: AnsweringMachinePolicy = "report"


@dataclass(frozen=True)
class Route:
    """Where an INVITE is sent, and with which name and password."""

    uri: Uri
    own: str
    """Our address."""
    account: Account | None


@dataclass(frozen=True)
class DialPlan:
    """A call that may be placed."""

    route: Route
    request: DialRequest
    headers: Headers = field(default_factory=list)
    max_seconds: float = 0.0


class Dialer:
    """Checks what is to be dialled against the allow-list and the limits, which guard against toll fraud."""

    def __init__(self, options: SipOptions) -> None:
        self._options, self._allowed = options, options.allowed_dials
        self._rate = OpenRate(options.dials_per_minute)
        self._trunk = Uri.parse(options.trunk) if options.trunk is not None else None
        self._registrar = Uri.parse(options.registrar) if options.registrar is not None else None

    def plan(self, request: DialRequest, outgoing_calls: int) -> DialPlan:
        """How a call is placed; WireError where it must not be, or cannot be."""
        try:
            uri, keys = Uri.parse(request.target_uri), check_digits(request.dtmf)
        except InputError as error:
            raise WireError(f"target_uri is {error}", param="target_uri") from error
        except ValueError as error:
            raise WireError(str(error), param="dtmf") from error
        headers = _checked_headers(request.headers)
        if not self._allowed.admits(uri):
            raise WireError("the server does not allow calls to this target", "forbidden", "target_uri", 403)
        if outgoing_calls >= self._options.max_outgoing_calls:
            message = f"{outgoing_calls} outgoing calls are in progress, which is the limit"
            raise WireError(message, "too_many_calls", status=429)
        route = self.route(uri)
        if not self._rate.admits(ANY):
            raise WireError("too many calls were placed in the last minute", "rate_limit_exceeded", status=429)
        request.dtmf = keys
        limit = self._options.max_outgoing_seconds
        return DialPlan(route, request, headers, min(limit, request.max_call_duration or limit))

    def redirected(self, contacts: list[Uri]) -> Route | None:
        """The way to the first contact of a redirection that may be dialled; None where there is none."""
        allowed = (uri for uri in contacts if self._allowed.admits(uri))
        return next((self.route(uri) for uri in allowed), None)

    def route(self, uri: Uri) -> Route:
        """The way to a target; a number is called through the trunk, or the registrar."""
        home = self._trunk or self._registrar
        if uri.scheme == "tel":
            if home is None:
                raise WireError("a tel: target needs --sip-trunk or --sip-registrar", param="target_uri")
            address = home.host if home.port is None else host_port(home.host, home.port)
            transport = "" if home.transport == "udp" else f";transport={home.transport}"
            uri = Uri.parse(f"{home.scheme}:{uri.user.translate(SEPARATORS)}@{address}{transport};user=phone")
        for known, account in self._known():
            if known.destination == uri.destination:
                user = known.user or (account.user if account is not None else "viva")
                return Route(uri, f"<sip:{user}@{known.host}>", account)
        return Route(uri, "", None)

    def _known(self) -> list[tuple[Uri, Account | None]]:
        """Servers that we have a name and a password for; they are sent to no other."""
        known: list[tuple[Uri, Account | None]] = []
        if self._trunk is not None:
            account = self._options.trunk_account
            known.append((self._trunk, None if account is None else Account.parse(account)))
        if self._registrar is not None:
            password = self._options.registrar_password
            known.append((self._registrar, None if password is None else Account(self._registrar.user, password)))
        return known


async def until_answered(call: "OutgoingSipCall") -> None:
    """Wait until a call is answered; WireError with the reason where it is not."""
    await asyncio.wait({call.answered})
    if (failure := call.answered.result()) is not None:
        code = "" if failure.code is None else f" ({failure.code})"
        message = f"the call was not answered: {failure.reason}{code}"
        raise WireError(message, failure.reason, status=502, kind="server_error")


def _checked_headers(headers: dict[str, str]) -> Headers:
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise WireError("headers of a call are X- names with printable ASCII values", param="headers")
    if len(headers) > MAX_HEADER_COUNT:
        raise WireError(f"a call has at most {MAX_HEADER_COUNT} headers", param="headers")
    return list(headers.items())
