"""HTTP of the Realtime API: WebRTC calls and browser keys."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vivavoce.server.auth import Identity, Keys
from vivavoce.server.realtime.client_events import session_params
from vivavoce.server.realtime.session import Opening
from vivavoce.server.realtime.session_config import Configuration
from vivavoce.server.realtime.sessions import Sessions, served_model
from vivavoce.server.realtime.webrtc import open_call
from vivavoce.server.rest.http import MAX_BODY, json_body, json_object, json_response, read_body
from vivavoce.server.wire_error import WireError

Wire = dict[str, Any]
MIN_KEY_SECONDS, MAX_KEY_SECONDS = 10, 7200


class CallsApi:
    """`/v1/realtime/calls` and `/v1/realtime/client_secrets`."""

    def __init__(self, sessions: Sessions, keys: Keys) -> None:
        self.sessions, self.keys = sessions, keys

    async def create(self, request: Request, caller: Identity) -> Response:
        """Open a call: takes an SDP offer, returns the SDP answer and the location of the call."""
        offer, params = await _offer(request)
        session = session_params((caller.session or {}) | params)
        model = served_model(self.sessions, request.query_params.get("model") or session.model or None)
        opening = Opening(model, session.type or "realtime", session)
        address = request.client.host if request.client else "unknown"
        opened, answer = await open_call(self.sessions, opening, offer, address)
        call_id = opened.id.replace("sess_", "rtc_", 1)
        headers = {"Location": f"/v1/realtime/calls/{call_id}"}
        return Response(answer, 201, headers, "application/sdp")

    async def hang_up(self, request: Request, caller: Identity) -> Response:
        """End a call."""
        call_id = request.path_params["call_id"]
        session = self.sessions.find(call_id)
        if session is None or not session.is_call:
            raise WireError(f"there is no call {call_id}", "call_not_found", status=404)
        await session.close(1000, "hung up")
        return Response(status_code=200)

    async def client_secret(self, request: Request, caller: Identity) -> Response:
        """A browser key bound to a session."""
        body = await json_body(request)
        key, expires_at, session = self._mint(caller, body.get("session") or {}, _seconds(body.get("expires_after")))
        return json_response({"value": key, "expires_at": expires_at, "session": session})

    async def legacy_session(self, request: Request, caller: Identity) -> Response:
        """A browser key as the beta protocol had it."""
        body = await json_body(request)
        secret = body.pop("client_secret", None)
        seconds = _seconds(secret.get("expires_after") if isinstance(secret, dict) else None)
        if request.url.path.endswith("/transcription_sessions"):
            body = {"type": "transcription", **body}
        key, expires_at, session = self._mint(caller, body, seconds)
        return json_response(session | {"client_secret": {"value": key, "expires_at": expires_at}})

    def _mint(self, caller: Identity, given: Any, seconds: float | None) -> tuple[str, int, Wire]:
        if caller.is_browser:
            raise WireError("a browser key cannot make others; use an API key", "invalid_api_key", status=403)
        params = session_params(given)
        kind = params.type or "realtime"
        model = served_model(self.sessions, params.model or None)
        session = Configuration(self.sessions.host, model, kind, params).session
        key, expires_at = self.keys.mint(given | {"type": kind, "model": model}, seconds)
        session = msgspec.structs.replace(session, id=f"sess_{key[3:15]}", expires_at=0)
        return key, expires_at, msgspec.to_builtins(session)


async def _offer(request: Request) -> tuple[str, Wire]:
    """The SDP and the session parameters of a request: a raw SDP, or a form with both."""
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        async with request.form(max_files=2, max_fields=4, max_part_size=MAX_BODY) as form:
            sdp, session = [await _part(form.get(name)) for name in ("sdp", "session")]
    else:
        sdp, session = (await read_body(request)).decode("utf8", "replace"), ""
    if not sdp.strip():
        raise WireError("there is no SDP offer", "invalid_sdp", "sdp")
    return sdp, json_object(session) if session.strip() else {}


async def _part(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else (await value.read()).decode("utf8", "replace")


def _seconds(expires_after: Any) -> float | None:
    if expires_after is None:
        return None
    seconds = expires_after.get("seconds") if isinstance(expires_after, dict) else None
    if not isinstance(seconds, int) or not MIN_KEY_SECONDS <= seconds <= MAX_KEY_SECONDS:
        limits = f"{MIN_KEY_SECONDS} to {MAX_KEY_SECONDS}"
        raise WireError(f"expires_after.seconds must be {limits}, not {seconds!r}", param="expires_after.seconds")
    return float(seconds)
