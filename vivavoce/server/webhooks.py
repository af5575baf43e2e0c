"""Webhooks: signed POST requests that tell another server of sessions that start and end, and of calls to accept.

They are signed as OpenAI signs its own (Standard Webhooks), so `client.webhooks.unwrap` of its packages verifies them.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import http.client
import logging
import secrets
import time
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, Struct, UnsetType

from vivavoce.errors import InputError
from vivavoce.log import log_failure

logger = logging.getLogger(__name__)

SECRET_PREFIX = "whsec_"
MAX_WAITING = 1000
TIMEOUT_SECONDS = 10.0
RETRY_SECONDS = (1.0, 5.0, 25.0)


class SessionData(Struct):
    """The session of an event; the last three when it has ended."""

    id: str
    model: str
    transport: str
    duration_seconds: float | UnsetType = UNSET
    close_code: int | UnsetType = UNSET
    reason: str | UnsetType = UNSET


class SipHeader(Struct):
    """A header of an INVITE."""

    name: str
    value: str


class IncomingCall(Struct):
    """A call over SIP that waits to be accepted."""

    call_id: str
    sip_headers: list[SipHeader]
    sip_media_security: Literal["rtp", "srtp"]


EventType: TypeAlias = Literal["session.started", "session.ended", "realtime.call.incoming"]


class WebhookEvent(Struct):
    """The body of a request."""

    id: str
    created_at: int
    type: EventType
    data: SessionData | IncomingCall
    object: Literal["event"] = "event"


def signing_key(secret: str) -> bytes:
    """The bytes of a secret: base64 after `whsec_`; InputError where it is not."""
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError("a webhook secret is base64, usually after whsec_") from error
    if len(key) < 16:
        raise InputError("a webhook secret needs at least 16 bytes, in base64")
    return key


def signed_headers(event_id: str, body: bytes, key: bytes, now: int) -> dict[str, str]:
    """The headers by which a receiver knows the sender."""
    signed = f"{event_id}.{now}.".encode() + body
    signature = base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    return {
        "Content-Type": "application/json",
        "webhook-id": event_id,
        "webhook-timestamp": str(now),
        "webhook-signature": f"v1,{signature}",
    }


class Webhooks:
    """Sends events one after another, in the background; one that cannot be delivered is tried again, then dropped."""

    def __init__(self, url: str, secret: str) -> None:
        self._address, self._key = urlsplit(url), signing_key(secret)
        self._waiting: asyncio.Queue[WebhookEvent] = asyncio.Queue(MAX_WAITING)

    def send(self, type: EventType, data: SessionData | IncomingCall) -> None:
        """Queue an event."""
        event = WebhookEvent(f"evt_{secrets.token_hex(12)}", int(time.time()), type, data)
        try:
            self._waiting.put_nowait(event)
        except asyncio.QueueFull:
            logger.warning("a webhook was dropped: %d wait already", MAX_WAITING)

    async def run(self) -> None:
        """Deliver until cancelled."""
        while True:
            event = await self._waiting.get()
            try:
                await self._deliver(event)
            finally:
                self._waiting.task_done()

    async def finish(self, seconds: float) -> None:
        """Wait until all events are delivered, but not longer than this."""
        try:
            async with asyncio.timeout(seconds):
                await self._waiting.join()
        except TimeoutError:
            logger.warning("%d webhooks were not delivered before the end", self._waiting.qsize() + 1)

    async def _deliver(self, event: WebhookEvent) -> None:
        body = msgspec.json.encode(event)
        for wait in (*RETRY_SECONDS, None):
            try:
                await asyncio.to_thread(self._post, event.id, body)
                return
            except (OSError, http.client.HTTPException) as error:
                log_failure(logger, error, "a webhook could not be delivered")
                if wait is not None:
                    await asyncio.sleep(wait)

    def _post(self, event_id: str, body: bytes) -> None:
        is_secure = self._address.scheme == "https"
        kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        connection = kind(self._address.hostname or "", self._address.port, timeout=TIMEOUT_SECONDS)
        try:
            query = f"?{self._address.query}" if self._address.query else ""
            headers = signed_headers(event_id, body, self._key, int(time.time()))
            connection.request("POST", (self._address.path or "/") + query, body, headers)
            with connection.getresponse() as response:
                if response.status >= 300:
                    raise OSError(f"the webhook was answered with {response.status}")
        finally:
            connection.close()
