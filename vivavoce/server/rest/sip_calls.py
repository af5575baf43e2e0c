"""HTTP of calls over SIP: accept, reject and refer, as the Realtime API of OpenAI has them; dial, keys and a list."""

from typing import TYPE_CHECKING, Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from vivavoce.server.auth import Identity
from vivavoce.server.realtime.session_types import SessionParams
from vivavoce.server.rest.http import json_body, json_response
from vivavoce.server.telephony.active_calls import ActiveCalls, CallObject
from vivavoce.server.wire import WireError

if TYPE_CHECKING:
    from vivavoce.server.sip.agent import UserAgent


class RejectRequest(Struct):
    """The body of a request to reject a call."""

    status_code: int | None = None


class ReferRequest(Struct):
    """The body of a request to transfer a call."""

    target_uri: str = ""
    replaces_call_id: str = ""
    """Our extension: another call, to whose peer this one is transferred (attended)."""


class KeysRequest(Struct):
    """The body of a request to press telephone keys."""

    digits: str


class CallList(Struct):
    """The telephone calls in progress."""

    data: list[CallObject]
    object: Literal["list"] = "list"


class SipCallsApi:
    """`/v1/realtime/calls`, `/v1/realtime/calls/dial`, and `accept`, `reject`, `refer` and `dtmf` of one call."""

    def __init__(self, agent: "UserAgent | None", calls: ActiveCalls) -> None:
        self._agent, self._calls = agent, calls

    async def dial(self, request: Request, caller: Identity) -> Response:
        """Place a call."""
        if self._agent is None:
            raise WireError("calls cannot be placed: SIP is not served", "sip_not_served", status=404)
        from vivavoce.server.sip.dialing import DialRequest, until_answered

        body = await json_body(request, DialRequest)
        call = await self._agent.dial(body)
        if body.wait_until_answered:
            await until_answered(call)
        headers = {"Location": f"/v1/realtime/calls/{call.id}"}
        return json_response(self._calls.find(call.id), 201, headers)

    async def list(self, request: Request, caller: Identity) -> Response:
        """The telephone calls in progress."""
        return json_response(CallList(self._calls.list()))

    async def find(self, request: Request, caller: Identity) -> Response:
        """A telephone call in progress, or one of the last that ended."""
        call_id = request.path_params["call_id"]
        call = self._calls.find(call_id)
        if call is None:
            raise WireError(f"there is no telephone call {call_id}", "call_not_found", status=404)
        return json_response(call)

    async def press_keys(self, request: Request, caller: Identity) -> Response:
        """Press telephone keys."""
        body = await json_body(request, KeysRequest)
        self._user_agent(request).press_keys(request.path_params["call_id"], body.digits)
        return Response(status_code=200)

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
        agent, call_id = self._user_agent(request), request.path_params["call_id"]
        if bool(body.target_uri) == bool(body.replaces_call_id):
            raise WireError("a transfer has either target_uri or replaces_call_id", param="target_uri")
        if body.replaces_call_id:
            await agent.connect(call_id, body.replaces_call_id)
        else:
            await agent.refer(call_id, body.target_uri)
        return Response(status_code=200)

    def _user_agent(self, request: Request) -> "UserAgent":
        if self._agent is None:
            call_id = request.path_params["call_id"]
            raise WireError(f"there is no call {call_id}: SIP is not served", "call_not_found", status=404)
        return self._agent
