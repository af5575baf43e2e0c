"""HTTP of the Realtime API: WebRTC calls and browser keys."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import UNSET, Meta, Struct
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from vivavoce.server.auth import Identity, Keys
from vivavoce.server.mcp.allowed import AllowedServers
from vivavoce.server.realtime.client_events import decode_object
from vivavoce.server.realtime.prompts import prompt_folder
from vivavoce.server.realtime.session import Opening, RealtimeSession
from vivavoce.server.realtime.session_changes import overridden
from vivavoce.server.realtime.session_config import Configuration, without_secrets
from vivavoce.server.realtime.session_types import SessionObject, SessionParams
from vivavoce.server.realtime.sessions import Sessions, served_model
from vivavoce.server.realtime.webrtc import LocalCaller, NewCaller, WebRtcCall, open_call
from vivavoce.server.rest.http import MAX_BODY, decode_body, json_body, json_response, read_body
from vivavoce.server.wire import JsonObject, WireError

if TYPE_CHECKING:
    from vivavoce.server.doors.engine import EngineChannel


class ExpiresAfter(Struct):
    """How long a browser key is valid."""

    seconds: Annotated[int, Meta(ge=10, le=7200)] | None = None


class ClientSecretRequest(Struct):
    """The body of a request for a browser key."""

    session: SessionParams | None = None
    expires_after: ExpiresAfter | None = None

    @property
    def seconds(self) -> int | None:
        """Seconds for which the key is requested."""
        return None if self.expires_after is None else self.expires_after.seconds


class LegacySecretRequest(Struct):
    """The beta protocol's field beside the fields of the session."""

    client_secret: ClientSecretRequest | None = None


class ClientSecret(Struct):
    """A browser key."""

    value: str
    expires_at: int


class ClientSecretResponse(ClientSecret):
    """A browser key and the session it is bound to."""

    session: SessionObject


class CallsApi:
    """`/v1/realtime/calls` and `/v1/realtime/client_secrets`."""

    def __init__(self, sessions: Sessions, keys: Keys) -> None:
        self.sessions, self.keys = sessions, keys

    async def create(self, request: Request, caller: Identity) -> Response:
        """Open a call: takes an SDP offer, returns the SDP answer and the location of the call."""
        offer, params = await _offer(request)
        session = overridden(caller.session or SessionParams(), params)
        model = served_model(self.sessions, request.query_params.get("model") or session.model or None)
        opening = Opening(model, session.type or "realtime", session, opened_with=caller.browser_key)
        address = request.client.host if request.client else "unknown"
        opened, answer = await open_call(self.sessions, opening, offer, address, self._new_caller(request))
        call_id = opened.id.replace("sess_", "rtc_", 1)
        headers = {"Location": f"/v1/realtime/calls/{call_id}"}
        return Response(answer, 201, headers, "application/sdp")

    def _new_caller(self, request: Request) -> NewCaller:
        """Makes the peer in the door process that has received the request, or here."""
        door: EngineChannel | None = request.scope.get("viva.door")
        if door is not None:
            return door.new_caller
        return partial(LocalCaller, self.sessions.options)

    async def renegotiate(self, request: Request, caller: Identity) -> Response:
        """Answer a later SDP offer of a call, as when its caller adds or stops a track."""
        session = self._call(request, caller)
        offer, _ = await _offer(request)
        if not isinstance(session.encoder.output, WebRtcCall):
            raise WireError("a telephone call has no SDP", "invalid_sdp", "sdp")
        return Response(await session.encoder.output.caller.answer(offer), 200, media_type="application/sdp")

    async def hang_up(self, request: Request, caller: Identity) -> Response:
        """End a call."""
        await self._call(request, caller).close(1000, "hung up")
        return Response(status_code=200)

    def _call(self, request: Request, caller: Identity) -> RealtimeSession:
        """The call of a request; a browser key only finds those that were opened with it."""
        call_id = request.path_params["call_id"]
        session = self.sessions.find(call_id)
        is_own = session is not None and (not caller.is_browser or session.opened_with == caller.browser_key)
        if session is None or not session.is_call or not is_own:
            raise WireError(f"there is no call {call_id}", "call_not_found", status=404)
        return session

    async def client_secret(self, request: Request, caller: Identity) -> Response:
        """A browser key bound to a session."""
        body = await json_body(request, ClientSecretRequest)
        secret, session = self._mint(body.session or SessionParams(), body.seconds)
        return json_response(ClientSecretResponse(secret.value, secret.expires_at, session))

    async def legacy_session(self, request: Request, caller: Identity) -> Response:
        """A browser key by the beta protocol, whose body is the session itself."""
        data = await read_body(request)
        params = decode_body(data, SessionParams, "session")
        if params.type is UNSET and request.url.path.endswith("/transcription_sessions"):
            params.type = "transcription"
        requested = decode_body(data, LegacySecretRequest).client_secret or ClientSecretRequest()
        secret, session = self._mint(params, requested.seconds)
        body: JsonObject = msgspec.to_builtins(session)
        return json_response(body | {"client_secret": secret})

    def _mint(self, params: SessionParams, seconds: int | None) -> tuple[ClientSecret, SessionObject]:
        kind = params.type or "realtime"
        model = served_model(self.sessions, params.model or None)
        allowed_mcp = AllowedServers.read(self.sessions.options.allow_mcp)
        prompts = prompt_folder(self.sessions.options)
        session = without_secrets(Configuration(self.sessions.host, model, kind, params, prompts, allowed_mcp).session)
        key, expires_at = self.keys.mint(msgspec.structs.replace(params, type=kind, model=model), seconds)
        session = msgspec.structs.replace(session, id=f"sess_{key[3:15]}", expires_at=0)
        return ClientSecret(key, expires_at), session


async def _offer(request: Request) -> tuple[str, SessionParams]:
    """The SDP and the session parameters of a request: the SDP alone, or a form with both."""
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        async with request.form(max_files=2, max_fields=4, max_part_size=MAX_BODY) as form:
            sdp, session = [await _part(form.get(name)) for name in ("sdp", "session")]
    else:
        sdp, session = (await read_body(request)).decode("utf8", "replace"), ""
    if not sdp.strip():
        raise WireError("there is no SDP offer", "invalid_sdp", "sdp")
    return sdp, decode_object(session, SessionParams, "session") if session.strip() else SessionParams()


async def _part(value: UploadFile | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else (await value.read()).decode("utf8", "replace")
