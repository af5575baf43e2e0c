"""Registration with a registrar (RFC 3261, section 10), which then passes calls on to us."""

import asyncio
import logging
import secrets
from collections.abc import Callable

from vivavoce.errors import InputError
from vivavoce.log import FailureLog
from vivavoce.server.sip.addresses import Uri, host_port
from vivavoce.server.sip.dialog import MAX_FORWARDS
from vivavoce.server.sip.digest import Account
from vivavoce.server.sip.messages import SipRequest, SipResponse, new_tag
from vivavoce.server.sip.signalling import USER_AGENT, Signalling

logger = logging.getLogger(__name__)

EXPIRES_SECONDS = 300
MIN_EXPIRES_SECONDS = 30
RETRY_SECONDS = 30.0


class Registration:
    """Keeps us registered; what fails is tried again."""

    def __init__(self, signalling: Signalling, uri: Uri, password: str | None, changed: Callable[[bool], None]) -> None:
        self._signalling, self._uri, self._changed = signalling, uri, changed
        self._account = None if password is None else Account(uri.user, password)
        self._call_id, self._tag, self._sequence = secrets.token_hex(12), new_tag(), 0
        self._failures = FailureLog(logger)
        self.address: str | None = None
        """The IP address of the registrar."""
        self.is_registered = False

    async def run(self) -> None:
        """Register, and again before it expires, until cancelled."""
        while True:
            seconds = RETRY_SECONDS
            try:
                seconds = await self._register(EXPIRES_SECONDS) / 2
                self._note(True)
            except (OSError, InputError) as error:
                self._note(False)
                self._failures.log(error, "the registration has failed; it is tried again")
            await asyncio.sleep(seconds)

    async def end(self) -> None:
        """Remove the registration."""
        if self.is_registered:
            self._note(False)
            try:
                await self._register(0)
            except (OSError, InputError) as error:
                self._failures.log(error, "the registration could not be removed")

    def _note(self, is_registered: bool) -> None:
        if is_registered != self.is_registered:
            self.is_registered = is_registered
            self._changed(is_registered)
            logger.info("SIP is %s", "registered" if is_registered else "not registered")

    async def _register(self, expires: int) -> int:
        """Send a REGISTER; the seconds for which it is granted."""
        flow = await self._signalling.transports.flow_to(self._uri.destination)
        self.address = flow.remote[0]

        def build() -> SipRequest:
            self._sequence += 1
            home = self._uri.host if self._uri.port is None else host_port(self._uri.host, self._uri.port)
            own = f"<sip:{self._uri.user}@{home}>"
            headers = [
                ("Via", self._signalling.via(flow)),
                ("Max-Forwards", MAX_FORWARDS),
                ("From", f"{own};tag={self._tag}"),
                ("To", own),
                ("Call-ID", self._call_id),
                ("CSeq", f"{self._sequence} REGISTER"),
                ("Contact", self._signalling.contact(flow, self._uri.user or "viva")),
                ("Expires", str(expires)),
                ("User-Agent", USER_AGENT),
            ]
            return SipRequest("REGISTER", Uri.parse(f"sip:{home}"), headers)

        transaction = await self._signalling.exchange(build, flow, self._account)
        response = await transaction.final()
        if not response.is_success:
            raise InputError(f"the registrar has answered with {response.code}")
        return max(_granted(response), MIN_EXPIRES_SECONDS)


def _granted(response: SipResponse) -> int:
    """The seconds that a registrar has granted: of our Contact, or of the response."""
    for value in response.all("Contact"):
        _, found, rest = value.lower().partition(";expires=")
        digits = rest.partition(";")[0].strip()
        if found and digits.isdecimal() and len(digits) < 9:
            return int(digits)
    return response.number("Expires") or EXPIRES_SECONDS
