"""Session timers (RFC 4028): a call whose refreshes stay away has lost its peer, and is ended."""

import asyncio
from collections.abc import Callable

from vivavoce.errors import InputError
from vivavoce.server.sip.addresses import split_parameters
from vivavoce.server.sip.messages import SipMessage, SipRequest, SipResponse

MIN_SECONDS = 90
MAX_MARGIN_SECONDS = 32.0  # before its end, at which a session is given up


class IntervalTooSmallError(InputError):
    """The peer wants to refresh the session more often than we allow."""


class SessionTimer:
    """The timer of one call; it runs where the peer asks for it."""

    def __init__(self, refresh: Callable[[], None], expired: Callable[[], None]) -> None:
        self._refresh, self._expired = refresh, expired
        self._timer: asyncio.TimerHandle | None = None
        self.seconds: int | None = None
        """The agreed interval; None: there is no timer."""

    def requested(self, request: SipRequest) -> list[tuple[str, str]]:
        """The headers of our response to an INVITE or UPDATE, which (re)starts the timer as the request asks."""
        seconds, supports = request.number("Session-Expires"), "timer" in request.tokens("Supported")
        if seconds is None:
            self.stop()
            return []
        if seconds < MIN_SECONDS and supports:
            raise IntervalTooSmallError(f"sessions are refreshed every {MIN_SECONDS} s or less often")
        seconds = max(seconds, MIN_SECONDS)
        refresher = _refresher(request) or ("uac" if supports else "uas")
        self._start(seconds, refreshes=refresher == "uas")
        headers = [("Session-Expires", f"{seconds};refresher={refresher}")]
        return [*headers, ("Require", "timer")] if refresher == "uac" else headers

    def agreed(self, response: SipResponse) -> None:
        """(Re)start the timer as the peer's response to our own request says."""
        seconds = response.number("Session-Expires")
        if seconds is None:
            self.stop()
        else:
            self._start(max(seconds, MIN_SECONDS), refreshes=_refresher(response) != "uas")

    def stop(self) -> None:
        """Stop it."""
        self.seconds = None
        if self._timer is not None:
            self._timer.cancel()

    def _start(self, seconds: int, refreshes: bool) -> None:
        self.stop()
        self.seconds = seconds
        delay = seconds / 2 if refreshes else seconds - min(MAX_MARGIN_SECONDS, seconds / 3)
        action = self._refresh if refreshes else self._expired
        self._timer = asyncio.get_running_loop().call_later(delay, action)


def _refresher(message: SipMessage) -> str | None:
    value = message.get("Session-Expires") or ""
    return split_parameters(value.partition(";")[2]).get("refresher", "").lower() or None
