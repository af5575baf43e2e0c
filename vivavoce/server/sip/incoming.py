"""Incoming calls over SIP: how an INVITE is answered, announced, accepted and rejected."""

import asyncio
import logging
from typing import TYPE_CHECKING

from vivavoce.errors import InputError
from vivavoce.log import log_failure
from vivavoce.server.realtime.session_types import SessionParams
from vivavoce.server.sip.call import CallEndedError, Parties, SipCall, SipRefusalError, status_of
from vivavoce.server.sip.dialog import Dialog
from vivavoce.server.sip.sdp import Description
from vivavoce.server.sip.session_timer import MIN_SECONDS, IntervalTooSmallError
from vivavoce.server.sip.transactions import ServerTransaction
from vivavoce.server.sip.transport import Flow
from vivavoce.server.telephony.active_calls import CallStatus
from vivavoce.server.wire import WireError

if TYPE_CHECKING:
    from vivavoce.server.sip.agent import UserAgent

logger = logging.getLogger(__name__)

DECLINED = 603


class IncomingSipCall(SipCall):
    """A call that a peer has placed."""

    direction = "incoming"
    peer_reason = "caller"

    def __init__(self, agent: "UserAgent", dialog: Dialog, parties: Parties) -> None:
        super().__init__(agent, dialog, parties, agent.account)
        self._accepted: asyncio.Future[SessionParams] = asyncio.get_running_loop().create_future()

    @property
    def is_pending(self) -> bool:
        """Whether the call waits to be accepted."""
        return not self._accepted.done() and not self._ended.done()

    @property
    def status(self) -> CallStatus:
        return "answered" if self._accepted.done() else "ringing"

    async def answer(self, transaction: ServerTransaction) -> None:
        """Answer an INVITE, and serve the call until it ends. Every failure ends this call only."""
        self.invite, request = transaction, transaction.request
        self._peer_allows = request.tokens("Allow")
        transaction.on_unacknowledged = lambda: self.end("unacknowledged")
        is_confirmed = False
        try:
            offer = self._checked_offer(request)
            transaction.respond(request.response(100))
            params = await self._acceptance(transaction, offer)
            headers = self._timer.requested(request)
            sdp = await self._open(params, transaction.flow, offer)
            self._times.note_answer()
            transaction.respond(self._response(transaction, 200, headers, sdp))
            is_confirmed = True
            await self._until(self._established)
            reason = await self._talk()
        except CallEndedError:
            reason = self._ended.result()
            transaction.respond(self._response(transaction, 487 if reason == "cancelled" else 480))
        except SipRefusalError as refusal:
            reason = refusal.reason
            transaction.respond(self._response(transaction, refusal.code))
        except IntervalTooSmallError:
            reason = "refused"
            transaction.respond(self._response(transaction, 422, [("Min-SE", str(MIN_SECONDS))]))
        except (WireError, InputError) as error:
            reason = (error.code if isinstance(error, WireError) else None) or "refused"
            transaction.respond(self._response(transaction, status_of(error)))
        except Exception as error:
            reason = "failed"
            log_failure(logger, error, "a call over SIP failed")
            transaction.respond(self._response(transaction, 500))
        await self._close(reason, is_confirmed)

    async def _acceptance(self, transaction: ServerTransaction, offer: str | None) -> SessionParams:
        """The session of the call: the default one, or that of the request which accepts it."""
        if self._agent.options.answers == "auto":
            self._accepted.set_result(SessionParams())
            return SessionParams()
        transaction.respond(self._response(transaction, 180))
        is_secure = offer is not None and Description.parse(offer).audio.is_secure
        self._agent.announce(self, transaction.request, is_secure)
        try:
            async with asyncio.timeout(self._agent.options.ring_seconds):
                return await self._until(self._accepted)
        except TimeoutError:
            raise SipRefusalError(480, "not_accepted") from None

    def accept(self, params: SessionParams) -> None:
        """Answer the call with this session."""
        self._accepted.set_result(params)

    def reject(self, code: int = DECLINED) -> None:
        """Refuse the call."""
        self._accepted.set_exception(SipRefusalError(code, "rejected"))

    async def _open(self, params: SessionParams, flow: Flow, offer: str | None) -> str:
        """Open the session and its media; the SDP of our response."""
        await self._open_media(params, flow)
        if offer is None:
            self._awaits_answer = True
            return self.media.local.offer()
        answer, settings = self.media.local.answer(offer)
        self.media.configure(settings)
        return answer

    def cancelled(self) -> None:
        """The caller has given up before we answered."""
        self.end("cancelled")
