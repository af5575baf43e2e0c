"""Outgoing calls over SIP: the INVITE, challenges, redirections, early media, what has answered, and giving up."""

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vivavoce.audio.answering_machine import Answer
from vivavoce.errors import InputError
from vivavoce.log import log_failure
from vivavoce.server.realtime import server_events as events
from vivavoce.server.realtime.session_types import SessionParams
from vivavoce.server.sip.addresses import SipAddress, Uri
from vivavoce.server.sip.call import Parties, SipCall
from vivavoce.server.sip.dialing import DialPlan, Route
from vivavoce.server.sip.dialog import Dialog
from vivavoce.server.sip.digest import authorization
from vivavoce.server.sip.messages import SDP, Headers, SipRequest, SipResponse
from vivavoce.server.sip.signalling import ALLOW, CHALLENGES, SUPPORTED, USER_AGENT, Signalling, local_host
from vivavoce.server.sip.transactions import ClientTransaction
from vivavoce.server.sip.transport import Flow
from vivavoce.server.telephony.active_calls import CallStatus
from vivavoce.server.telephony.call_progress import CallProgress
from vivavoce.server.telephony.records import CallRecord
from vivavoce.server.wire import WireError

if TYPE_CHECKING:
    from vivavoce.server.sip.agent import UserAgent

logger = logging.getLogger(__name__)

MAX_CHALLENGES, MAX_REDIRECTIONS = 2, 3
REASONS = {  # of calls that are refused, by their status code
    **{401: "unauthorized", 407: "unauthorized", 403: "forbidden", 408: "no_response", 480: "unavailable"},
    **{404: "not_found", 410: "not_found", 484: "not_found", 604: "not_found", 486: "busy", 600: "busy"},
    **{603: "declined", 607: "declined", 608: "declined", 487: "cancelled"},
    **{415: "not_acceptable", 488: "not_acceptable", 606: "not_acceptable", 503: "congestion"},
}
TONE_REASONS = {"busy": "busy", "congestion": "congestion", "special information": "unavailable"}


@dataclass(frozen=True)
class DialFailure:
    """Why a call was not answered; the status code where a response says so."""

    reason: str
    code: int | None = None


class DialFailedError(Exception):
    """A call was not answered."""

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.failure = DialFailure(reason, code)


class OutgoingSipCall(SipCall):
    """A call that we have placed. Its session is open while it rings, so that there is one once it is answered."""

    direction = "outgoing"
    peer_reason = "callee"

    def __init__(self, agent: "UserAgent", plan: DialPlan, flow: Flow) -> None:
        own = plan.route.own or f"<sip:viva@{agent.options.public_host or local_host(flow)}>"
        parties = Parties(str(SipAddress.parse(own).uri), plan.request.target_uri, flow.remote[0])
        super().__init__(agent, Dialog.to(plan.route.uri, own), parties, plan.route.account)
        self._plan, self._own, self._max_seconds = plan, own, plan.max_seconds
        self._status: CallStatus = "dialing"
        self._ring_until = asyncio.get_running_loop().time() + plan.request.ringing_timeout
        self._progress: CallProgress | None = None
        self._failure: DialFailure | None = None
        self._released: set[str] = set()  # tags of answers that were not wanted
        self.answered: asyncio.Future[DialFailure | None] = asyncio.get_running_loop().create_future()
        """Done once the call was answered, with None, or has failed."""

    @property
    def status(self) -> CallStatus:
        return self._status

    async def open(self, flow: Flow) -> None:
        """Open the session and its media; WireError where the server is full."""
        try:
            await self._open_media(self._plan.request.session or SessionParams(), flow)
        except BaseException:
            await self.media.close()
            raise
        media, policy = self.media, self._plan.request.answering_machine
        media.is_waiting = True
        progress = CallProgress(media.stream.rate, policy, media.feed, self._heard_tone, self._heard_answer)
        self._progress, media.on_heard = progress, progress.hear

    async def place(self, flow: Flow) -> None:
        """Call, and serve the call until it ends. Every failure ends this call only."""
        try:
            await self._dial(flow)
            self._note_answered()
            reason = await self._talk()
        except DialFailedError as error:
            self._failure, reason = error.failure, error.failure.reason
        except (WireError, InputError) as error:
            reason = (error.code if isinstance(error, WireError) else None) or "failed"
            logger.info("an outgoing call has failed: %s", reason)
        except OSError as error:
            reason = "unreachable"
            logger.info("the target of a call cannot be reached: %s", type(error).__name__)
        except Exception as error:
            reason = "failed"
            log_failure(logger, error, "an outgoing call failed")
        is_confirmed = self.is_established
        self._note_failure(reason)
        await self._close(reason, is_confirmed)

    # Signalling

    async def _dial(self, flow: Flow) -> None:
        """Send INVITEs until one is answered; DialFailedError where the call is refused or given up."""
        route, credentials = self._plan.route, list[tuple[str, str]]()
        challenges = redirections = 0
        while True:
            transaction = self._invite(route.uri, flow, credentials)
            response = await self._final(transaction)
            if response.is_success:
                await self._confirm(transaction, response)
                return
            if response.code in CHALLENGES and route.account is not None and challenges < MAX_CHALLENGES:
                challenges += 1
                header = authorization(route.account, transaction.request, response)
                if header is not None:
                    credentials = [each for each in credentials if each[0] != header[0]] + [header]
                    continue
            if 300 <= response.code < 400 and redirections < MAX_REDIRECTIONS:
                redirections += 1
                route, credentials = self._redirected(response), []
                self._account = route.account
                flow = await self._agent.signalling.transports.flow_to(route.uri.destination)
                continue
            raise DialFailedError(reason_of(response.code), response.code)

    def _redirected(self, response: SipResponse) -> Route:
        contacts = [SipAddress.parse(each).uri for each in response.all("Contact") if each != "*"]
        route = self._agent.dialer.redirected(contacts)
        if route is None:
            raise DialFailedError("redirect_refused", response.code)
        return route

    def _invite(self, uri: Uri, flow: Flow, credentials: Headers) -> ClientTransaction:
        signalling, dialog = self._agent.signalling, self.dialog
        dialog.target = uri
        request = dialog.request("INVITE", signalling.via(flow))
        request.headers += [
            ("Contact", signalling.contact(flow)),
            ("Allow", ALLOW),
            ("Supported", SUPPORTED),
            ("User-Agent", USER_AGENT),
            *self._plan.headers,
            *credentials,
        ]
        request.set_body(self.media.local.offer().encode(), SDP)
        transaction = signalling.transactions.start(request, flow)
        transaction.on_provisional = self._progressed
        transaction.on_other_answer = lambda response: self._start(self._release(response, transaction))
        return transaction

    def _progressed(self, response: SipResponse) -> None:
        """Take a provisional response; its SDP, if any, is that of early media."""
        if response.code == 100:
            return
        self._status = "ringing"
        try:
            if (sdp := response.sdp) is not None:
                self.media.configure(self.media.local.answered(sdp))
                self._status = "early_media"
        except (WireError, InputError) as error:
            logger.info("the early media of a call cannot be used: %s", error)
        self._report(self._status, response.code)

    async def _final(self, transaction: ClientTransaction) -> SipResponse:
        """The final response; DialFailedError where the call ends, or has rung for too long, before."""
        final = asyncio.ensure_future(transaction.final())
        seconds = self._ring_until - asyncio.get_running_loop().time()
        waited: set[asyncio.Future[Any]] = {final, self._ended}
        await asyncio.wait(waited, timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED)
        if final.done():
            return final.result()
        has_rung = self._status != "dialing"
        reason = self._ended.result() if self._ended.done() else "no_answer" if has_rung else "no_response"
        await self.media.close()
        await self._cancel(transaction, final)
        raise DialFailedError(reason)

    async def _cancel(self, transaction: ClientTransaction, final: "asyncio.Future[SipResponse]") -> None:
        """Cancel an INVITE; a call that is answered nevertheless is hung up."""
        timeout = self._agent.signalling.timers.timeout
        waited: set[asyncio.Future[Any]] = {transaction.provisional, final}
        await asyncio.wait(waited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not final.done() and transaction.provisional.done():
            self._agent.signalling.transactions.start(transaction.cancel_request(), transaction.flow)
            await asyncio.wait({final}, timeout=timeout)
        if not final.done():
            final.cancel()
            transaction.abandon()
        elif final.result().is_success:
            await self._release(final.result(), transaction)

    async def _release(self, response: SipResponse, transaction: ClientTransaction) -> None:
        """Acknowledge and hang up an answer that is not wanted."""
        dialog = replace(self.dialog)
        dialog.answered(response, transaction.flow)
        is_repeated, tag = response.to_address.tag in self._released, response.to_address.tag
        self._released.add(tag)
        try:
            ack, flow = await ack_of(self._agent.signalling, dialog, transaction)
            if tag == transaction.answered_tag:
                transaction.acknowledge(ack, flow)
            else:
                flow.send(ack.encode())
            if not is_repeated:
                await self._agent.signalling.within(dialog, "BYE", account=self._account)
        except (OSError, InputError) as error:  # the peer is gone, or its Record-Route or Contact is malformed
            logger.info("an answer could not be released: %s", type(error).__name__)

    async def _confirm(self, transaction: ClientTransaction, response: SipResponse) -> None:
        """Take the answer: the dialog, the ACK, and the media."""
        dialog = replace(self.dialog)
        dialog.answered(response, transaction.flow)
        self._agent.rename(self, dialog)
        self._peer_allows = response.tokens("Allow")
        transaction.acknowledge(*await ack_of(self._agent.signalling, self.dialog, transaction))
        self._established.set_result(None)
        self._timer.agreed(response)
        if (sdp := response.sdp) is not None:
            self.media.configure(self.media.local.answered(sdp))
        elif self.media.settings is None:
            raise WireError("the answer of a call has no SDP", "invalid_sdp")

    def _note_answered(self) -> None:
        assert self._progress is not None
        self._times.note_answer()
        self._status = "answered"
        self._progress.note_answer()
        self.media.is_waiting = not self._progress.is_open
        if self._plan.request.dtmf:
            self.media.send_digits(self._plan.request.dtmf)
        self._agent.sessions.metrics.calls_dialled.labels("answered").inc()
        self._report("answered", 200)
        self.answered.set_result(None)

    def _note_failure(self, reason: str) -> None:
        if not self.answered.done():
            self._agent.sessions.metrics.calls_dialled.labels(reason).inc()
            self.answered.set_result(self._failure or DialFailure(reason))

    # What is heard

    def _heard_tone(self, tone: str) -> None:
        """The network plays a tone: ringing goes on, anything else means that the call has failed."""
        self._report(tone.replace(" ", "_"))
        if (reason := TONE_REASONS.get(tone)) is not None:
            self.end(reason)

    def _heard_answer(self, answer: Answer) -> None:
        assert self._progress is not None
        self._agent.sessions.metrics.calls_answered_by.labels(answer).inc()
        self.media.session.send(events.VivaCallAnsweredBy(answer))
        if answer in ("machine", "beep") and self._plan.request.answering_machine == "hang_up":
            self.end("answering_machine")
        self.media.is_waiting = not self._progress.is_open

    def _report(self, status: str, code: int | None = None) -> None:
        self.media.session.send(events.VivaCallProgress(status, code))

    def record(self, reason: str = "") -> CallRecord:
        record = super().record(reason)
        if self._progress is not None and self._progress.answer is not None:
            record.answered_by = self._progress.answer
        if self._failure is not None and self._failure.code is not None:
            record.status_code = self._failure.code
        return record


async def ack_of(signalling: Signalling, dialog: Dialog, transaction: ClientTransaction) -> tuple[SipRequest, Flow]:
    """The ACK of an answered INVITE, with its credentials, as RFC 3261 has it, and its way."""
    flow, number = await signalling.flow_of(dialog), transaction.request.cseq[0]
    ack = dialog.request("ACK", signalling.via(flow), number)
    ack.headers += [each for each in transaction.request.headers if each[0].endswith("uthorization")]
    return ack, flow


def reason_of(code: int) -> str:
    """The reason of a refused call, as records and errors have it."""
    if 300 <= code < 400:
        return "redirect_refused"
    return REASONS.get(code, "server_error" if 500 <= code < 600 else "refused")
