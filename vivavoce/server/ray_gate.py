"""Who may come to a fleet: keys, browser keys that every ingress knows, and how often an address may open a session."""

import hashlib
import logging
from typing import TYPE_CHECKING, Any

from vivavoce.errors import VivaError
from vivavoce.log import log_failure
from vivavoce.server.answers import error_answer
from vivavoce.server.app import Answer, Handler
from vivavoce.server.auth import BROWSER_KEY, Identity, Keys, check_place, key_of
from vivavoce.server.limits import OpenRate
from vivavoce.server.options import ServerOptions
from vivavoce.server.ray_roll import RemoteRegistry
from vivavoce.server.sessions import RETRY_AFTER_SECONDS
from vivavoce.server.wire_error import WireError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger(__name__)


class AdmissionGate:
    """Stands before an ingress."""

    def __init__(self, options: ServerOptions, roll: RemoteRegistry) -> None:
        self._options, self._roll = options, roll
        self._keys, self._rate = Keys(options), OpenRate(options.opens_per_minute)

    async def admit(self, headers: Any) -> Identity:
        """Who comes with these headers; WireError 401 or 403 for those who may not."""
        check_place(headers, self._options)
        key = key_of(headers)
        if key is None or not key.startswith(BROWSER_KEY):
            return self._keys.admit(key)
        session = await self._roll.key(digest(key))
        if session is None:
            raise WireError("this browser key is unknown or has expired", "invalid_api_key", status=401)
        return Identity(session, is_browser=True)

    def check_rate(self, client: Any) -> None:
        """WireError 429 for an address that opens too many sessions."""
        address = client.host if client else "unknown"
        if not self._rate.admits(address):
            message = f"{address} opened too many sessions; try again in {RETRY_AFTER_SECONDS} s"
            raise WireError(message, "rate_limit_exceeded", status=429, kind="server_error")

    def answering(self, answer: Handler) -> Answer:
        """The answer, for those who may have it; errors as the protocol says them."""

        async def guarded(request: "Request") -> "Response":
            try:
                return await answer(request, await self.admit(request.headers))
            except WireError as error:
                return error_answer(error)
            except VivaError as error:
                log_failure(logger, error, "a request was refused")
                return error_answer(WireError(str(error)))

        return guarded


def digest(key: str) -> str:
    """What the roll knows of a browser key."""
    return hashlib.sha256(key.encode("utf8", "surrogatepass")).hexdigest()
