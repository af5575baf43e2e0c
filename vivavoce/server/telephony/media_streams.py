"""Media streams over WebSockets: `/v1/media-streams/PROVIDER/KEY`."""

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vivavoce.server.auth import Identity, Keys, check_origin, request_key
from vivavoce.server.realtime.sessions import Sessions
from vivavoce.server.rest.http import error_response
from vivavoce.server.telephony.asterisk_websocket import AsteriskWebSocket
from vivavoce.server.telephony.call import PhoneCaller, serve_call
from vivavoce.server.telephony.exotel import ExotelStream
from vivavoce.server.telephony.plivo import PlivoStream
from vivavoce.server.telephony.telnyx import TelnyxStream
from vivavoce.server.telephony.twilio import TwilioStream
from vivavoce.server.telephony.vonage import VonageEndpoint
from vivavoce.server.telephony.wire import MediaWire, WireMessage
from vivavoce.server.wire import WireError

if TYPE_CHECKING:
    from starlette.websockets import WebSocket

PATH = "/v1/media-streams/{provider}"
PROVIDERS: dict[str, Callable[[], MediaWire]] = {
    "twilio": TwilioStream,
    "telnyx": TelnyxStream,
    "plivo": PlivoStream,
    "vonage": VonageEndpoint,
    "exotel": ExotelStream,
    "asterisk": AsteriskWebSocket,
}
MEDIA_PROTOCOL = "media"  # the subprotocol that Asterisk offers


class MediaStreams:
    """The endpoint of the providers."""

    def __init__(self, sessions: Sessions, keys: Keys) -> None:
        self._sessions, self._keys = sessions, keys

    async def serve(self, websocket: "WebSocket") -> None:
        """Serve a stream; without a valid key nothing is opened."""
        try:
            wire, caller = self._admit(websocket)
        except WireError as error:
            await websocket.send_denial_response(error_response(error))
            return
        offered = websocket.scope.get("subprotocols", [])
        await websocket.accept(subprotocol=MEDIA_PROTOCOL if MEDIA_PROTOCOL in offered else None)
        await serve_call(SocketLine(websocket), wire, caller, self._sessions)

    def _admit(self, websocket: "WebSocket") -> tuple[MediaWire, PhoneCaller]:
        check_origin(websocket.headers, self._sessions.options)
        name, query = websocket.path_params["provider"], websocket.query_params
        key = websocket.path_params.get("key") or query.get("key") or header_key(websocket.headers)
        identity: Identity = self._keys.admit(key)
        if name not in PROVIDERS:
            raise WireError(f"there is no provider {name[:40]!r}; known are {', '.join(PROVIDERS)}", status=404)
        address = websocket.client.host if websocket.client else "unknown"
        return PROVIDERS[name](), PhoneCaller(address, query.get("model"), identity.session, identity.browser_key)


class SocketLine:
    """A WebSocket of a provider."""

    def __init__(self, websocket: "WebSocket") -> None:
        self._websocket = websocket

    async def receive(self) -> WireMessage | None:
        """The next message; None after the last one."""
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            return None
        text: str | None = message.get("text")
        data: bytes = message.get("bytes") or b""
        return data if text is None else text

    async def send(self, message: WireMessage) -> None:
        """Send a message; OSError where the provider has disconnected."""
        from starlette.websockets import WebSocketDisconnect

        try:
            if isinstance(message, bytes):
                await self._websocket.send_bytes(message)
            else:
                await self._websocket.send_text(message)
        except WebSocketDisconnect as error:
            raise ConnectionResetError("the provider has disconnected") from error

    async def close(self, code: int, reason: str) -> None:
        """Close the socket."""
        await self._websocket.close(code, reason)


def header_key(headers: Mapping[str, str]) -> str | None:
    """The key of a request: a bearer token, or the password of basic authentication."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return request_key(headers)
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2] or None
    except (binascii.Error, UnicodeDecodeError):
        return None
