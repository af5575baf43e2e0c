"""HTTP of calls over SIP: accept, reject and transfer, as the Realtime API of OpenAI has them."""

from typing import TYPE_CHECKING

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from vivavoce.server.auth import Identity
from vivavoce.server.realtime.session_types import SessionParams
from vivavoce.server.rest.http import json_body
from vivavoce.server.wire import WireError

if TYPE_CHECKING:
    from vivavoce.server.sip.agent import UserAgent


class RejectRequest(Struct):
    """The body of a request to reject a call."""

    status_code: int | None = None


class ReferRequest(Struct):
    """The body of a request to transfer a call."""

    target_uri: str


class SipCallsApi:
    """`/v1/realtime/calls/{call_id}/accept`, `reject` and `refer`."""

    def __init__(self, agent: "UserAgent | None") -> None:
        self._agent = agent

    async def accept(self, request: Request, caller: Identity) -> Response:
        """Answer an incoming call with a session."""
        params = await json_body(request, SessionParams, "session")
        self._user_agent(request).accept(request.path_params["call_id"], params)
        return Response(status_code=200)

    async def reject(self, request: Request, caller: Identity) -> Response:
        """Refuse an incoming call."""
        body = await json_body(request, RejectRequest)
        self._user_agent(request).reject(request.path_params["call_id"], body.status_code)
        return Response(status_code=200)

    async def refer(self, request: Request, caller: Identity) -> Response:
        """Transfer a call."""
        body = await json_body(request, ReferRequest)
        await self._user_agent(request).refer(request.path_params["call_id"], body.target_uri)
        return Response(status_code=200)

    def _user_agent(self, request: Request) -> "UserAgent":
        if self._agent is None:
            call_id = request.path_params["call_id"]
            raise WireError(f"there is no call {call_id}: SIP is not served", "call_not_found", status=404)
        return self._agent
