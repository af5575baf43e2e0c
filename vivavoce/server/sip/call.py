"""A call over SIP once its dialog exists: how it is changed, transferred and ended."""

import asyncio
import logging
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from vivavoce.errors import InputError
from vivavoce.log import log_failure
from vivavoce.server.realtime import server_events as events
from vivavoce.server.realtime.session import Opening
from vivavoce.server.realtime.session_types import SessionParams
from vivavoce.server.realtime.sessions import served_model
from vivavoce.server.sip.addresses import SipAddress
from vivavoce.server.sip.dialog import Dialog
from vivavoce.server.sip.digest import Account
from vivavoce.server.sip.media import PROVIDER, CallMedia
from vivavoce.server.sip.messages import SDP, SipRequest, SipResponse
from vivavoce.server.sip.sdp import Description
from vivavoce.server.sip.session_timer import MIN_SECONDS, IntervalTooSmallError, SessionTimer
from vivavoce.server.sip.signalling import ALLOW, SUPPORTED, USER_AGENT
from vivavoce.server.sip.transactions import ServerTransaction
from vivavoce.server.sip.transport import Flow
from vivavoce.server.telephony.active_calls import CallStatus
from vivavoce.server.telephony.end_of_call import EndOfCall
from vivavoce.server.telephony.records import CallRecord, CallTimes, printable
from vivavoce.server.wire import WireError

if TYPE_CHECKING:
    from vivavoce.server.sip.agent import UserAgent

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

WATCH_SECONDS = 1.0
MEDIA_SECONDS = 60.0  # without a packet of the peer, after which a call has lost it
BYE_SECONDS = 5.0

_SIGNAL = re.compile(r"^\s*Signal\s*=\s*([0-9*#A-D])\s*$", re.IGNORECASE | re.MULTILINE)
_FRAGMENT = re.compile(rb"SIP/2\.0 ([1-6]\d\d) ")


class CallEndedError(Exception):
    """The call has ended while something was awaited."""


class SipRefusalError(Exception):
    """A call that is not answered: the status code of the response, and the reason of the record."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


@dataclass(frozen=True)
class Parties:
    """Who calls whom, as the INVITE names them, and the address of the peer."""

    caller: str
    called: str
    source: str


class SipCall(ABC):
    """One call, from its INVITE to its record."""

    direction: Literal["incoming", "outgoing"]
    peer_reason: str
    """Why the call has ended where the peer hung up."""

    def __init__(self, agent: "UserAgent", dialog: Dialog, parties: Parties, account: Account | None) -> None:
        """`account` answers challenges of the peer."""
        self._agent, self.dialog, self.parties, self._account = agent, dialog, parties, account
        self._name = secrets.token_hex(12)
        self._times = CallTimes()
        loop = asyncio.get_running_loop()
        self._established: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[str] = loop.create_future()
        self.invite: ServerTransaction | None = None
        """The last INVITE of the peer."""
        self._awaits_answer = False
        self._peer_allows: set[str] = set()
        self._max_seconds = float("inf")
        self._timer = SessionTimer(self._start_refresh, lambda: self.end("expired"))
        self._tasks: set[asyncio.Task[None]] = set()
        self.media = CallMedia(lambda: self.end("server"))

    @property
    def id(self) -> str:
        """As the API names it."""
        return f"rtc_{self._name}"

    @property
    def is_established(self) -> bool:
        """Whether the call was answered, and both sides know it."""
        return self._established.done()

    @property
    @abstractmethod
    def status(self) -> CallStatus:
        """As the API names it."""
        ...

    # Media and session

    async def _open_media(self, params: SessionParams, flow: Flow) -> None:
        """Open the session and its media; WireError where the server is full."""
        agent, media = self._agent, self.media
        model = served_model(agent.sessions, params.model or None)
        silence = agent.sessions.options.call_silence_seconds
        opening = Opening(model, params.type or "realtime", params, id=f"sess_{self._name}", silence_seconds=silence)
        hosts, is_secure = agent.signalling.media_hosts(flow), agent.options.needs_srtp
        await media.open(agent.sessions, opening, self.parties.source, hosts, is_secure, self.id)
        media.session.on_closed.append(lambda: self.end("server"))
        EndOfCall(media.session, self.end)
        media.session.send(events.VivaCallStarted(PROVIDER, printable(self.dialog.call_id), ""))

    async def _talk(self) -> str:
        """Serve an answered call until it ends; why it ended."""
        self.media.attach()
        calls = self._agent.sessions.metrics.calls.labels(PROVIDER)
        calls.inc()
        try:
            while not self._ended.done():
                await asyncio.wait({self._ended}, timeout=WATCH_SECONDS)
                if self.media.silent_seconds > MEDIA_SECONDS:
                    self.end("no_media")
                elif self._times.seconds > self._max_seconds:
                    self.end("max_duration")
        finally:
            calls.dec()
        return self._ended.result()

    # The end

    def end(self, reason: str) -> None:
        """End the call; the first reason counts."""
        if not self._ended.done():
            self._ended.set_result(reason)

    async def _close(self, reason: str, is_confirmed: bool) -> None:
        self.end(reason)
        self._timer.stop()
        for task in self._tasks:
            task.cancel()
        record = self.record(reason)
        if self.media.is_open:
            code = record.status_code or None
            self.media.session.send(events.VivaCallEnded(reason, code))
        try:
            says_goodbye = is_confirmed and reason != self.peer_reason
            await asyncio.gather(*([self._say_goodbye(self.dialog)] if says_goodbye else []), self.media.close())
        finally:
            self._agent.ended(self, record)

    async def _say_goodbye(self, dialog: Dialog) -> None:
        try:
            async with asyncio.timeout(BYE_SECONDS):
                await self._agent.signalling.within(dialog, "BYE", account=self._account)
        except (OSError, TimeoutError) as error:
            logger.info("the end of a call was not confirmed: %s", type(error).__name__)

    def record(self, reason: str = "") -> CallRecord:
        """The call as it is stored, and as the API describes it."""
        record = CallRecord(
            call_id=self.id,
            provider=PROVIDER,
            provider_call_id=printable(self.dialog.call_id),
            caller=printable(self.parties.caller),
            called=printable(self.parties.called),
            direction=self.direction,
            source=self.parties.source,
            started_at=self._times.started_at,
            duration_seconds=self._times.seconds,
            reason=reason,
        )
        if self.media.settings is not None:
            record.codec = self.media.settings.codec.name
        return record

    # Requests of the peer within the call

    def acknowledged(self, ack: SipRequest) -> None:
        """Take an ACK; where we made the offer, it has the answer."""
        if self.invite is None or self.invite.request.cseq[0] != ack.cseq[0]:
            return
        self.invite.acknowledged()
        if self._awaits_answer:
            self._awaits_answer = False
            try:
                self.media.configure(self.media.local.answered(ack.sdp or ""))
            except (WireError, InputError) as error:
                logger.info("the answer of a caller cannot be used: %s", error)
                self.end("invalid_sdp")
        if not self.is_established:
            self._established.set_result(None)

    def hung_up(self, transaction: ServerTransaction) -> None:
        """The peer has ended the call."""
        transaction.respond(self._response(transaction, 200))
        self.end(self.peer_reason)

    def renegotiate(self, transaction: ServerTransaction) -> None:
        """Answer an INVITE or UPDATE within the call: a refresh, hold, or other media."""
        self._negotiate(transaction)

    def replace_peer(self, transaction: ServerTransaction, dialog: Dialog, parties: Parties) -> None:
        """Continue the conversation with the sender of an INVITE with Replaces, and hang up on the peer so far."""
        before = self.dialog
        self._agent.rename(self, dialog)
        if self._negotiate(transaction):
            self.parties, self._peer_allows = parties, transaction.request.tokens("Allow")
            self._agent.spawn(self._say_goodbye(before))
        else:
            self._agent.rename(self, before)

    def _negotiate(self, transaction: ServerTransaction) -> bool:
        """Answer an offer, or make one; whether the request was accepted."""
        request = transaction.request
        if self._awaits_answer or not self.is_established:
            transaction.respond(self._response(transaction, 491))
            return False
        try:
            headers, offer = self._timer.requested(request), self._checked_offer(request)
            sdp: str | None = None
            if offer is not None:
                sdp, settings = self.media.local.answer(offer)
                self.media.configure(settings)
            elif request.method == "INVITE":
                sdp, self._awaits_answer = self.media.local.offer(), True
        except IntervalTooSmallError:
            transaction.respond(self._response(transaction, 422, [("Min-SE", str(MIN_SECONDS))]))
            return False
        except SipRefusalError as refusal:
            transaction.respond(self._response(transaction, refusal.code))
            return False
        except (WireError, InputError) as error:
            transaction.respond(self._response(transaction, status_of(error)))
            return False
        if request.method == "INVITE":
            self.invite = transaction
            transaction.on_unacknowledged = lambda: self.end("unacknowledged")
        transaction.respond(self._response(transaction, 200, headers, sdp))
        return True

    def informed(self, transaction: ServerTransaction) -> None:
        """Take an INFO, with which some telephones send the keys that are pressed."""
        match = _SIGNAL.search(transaction.request.body.decode("latin1"))
        kind = (transaction.request.get("Content-Type") or "").partition(";")[0].strip().lower()
        if kind == "application/dtmf-relay" and match is not None and self.is_established:
            self.media.note_digit(match[1].upper())
        transaction.respond(self._response(transaction, 200))

    # Transfer

    async def transfer(self, refer_to: str) -> None:
        """Ask the peer to call another address instead (REFER); WireError where it refuses."""
        headers = [("Refer-To", refer_to), ("Referred-By", f"<{SipAddress.parse(self.dialog.local).uri}>")]
        try:
            sent = await self._agent.signalling.within(self.dialog, "REFER", headers, account=self._account)
            code = (await sent.final()).code
        except OSError as error:
            logger.info("the peer of a transfer cannot be reached: %s", type(error).__name__)
            code = 503
        if code >= 300:
            message = f"the peer has refused the transfer with {code}"
            raise WireError(message, "transfer_refused", status=502, kind="server_error")

    def notified(self, transaction: ServerTransaction) -> None:
        """Take the progress of a transfer; once it has succeeded, the call ends."""
        request = transaction.request
        if (request.get("Event") or "").partition(";")[0].strip().lower() != "refer":
            transaction.respond(self._response(transaction, 489))
            return
        transaction.respond(self._response(transaction, 200))
        match = _FRAGMENT.match(request.body)
        code = int(match[1]) if match is not None else 100
        if self.is_established:
            self.media.session.send(events.VivaCallProgress("transfer", code))
        if 200 <= code < 300:
            self.end("transferred")
        elif code >= 300 and self.is_established:
            self.media.session.send_error(WireError(f"the transfer has failed with {code}", "transfer_failed"))

    # Session timer

    def _start_refresh(self) -> None:
        self._start(self._refresh())

    async def _refresh(self) -> None:
        """Refresh the session, by an UPDATE; by an INVITE with the same media for a peer without it."""
        assert self.media.settings is not None
        is_update = "update" in self._peer_allows
        method, offer = (
            ("UPDATE", None) if is_update else ("INVITE", self.media.local.offer([self.media.settings.codec]))
        )
        headers = [("Supported", SUPPORTED), ("Session-Expires", f"{self._timer.seconds};refresher=uac")]
        signalling, account = self._agent.signalling, self._account
        try:
            sent = await signalling.within(self.dialog, method, headers, offer, account)
            response = await sent.final()
            if not response.is_success:
                self.end("expired")
                return
            self._timer.agreed(response)
            if not is_update:
                sent.acknowledge(self.dialog.request("ACK", signalling.via(sent.flow), sent.request.cseq[0]))
                self.media.configure(self.media.local.answered(response.sdp or ""))
        except (OSError, InputError, WireError) as error:
            log_failure(logger, error, "a call could not be refreshed")
            self.end("expired")

    def _checked_offer(self, request: SipRequest) -> str | None:
        """The SDP of an INVITE, which may have none; SipRefusalError where there is no audio that we could take."""
        try:
            offer = request.sdp
        except InputError:
            raise SipRefusalError(415, "unsupported_media") from None
        if offer is not None:
            audio = Description.parse(offer).audio
            if self._agent.options.needs_srtp and not audio.is_secure:
                raise SipRefusalError(488, "not_encrypted")
        return offer

    def _response(
        self,
        transaction: ServerTransaction,
        code: int,
        headers: Sequence[tuple[str, str]] = (),
        sdp: str | None = None,
    ) -> SipResponse:
        contact = ("Contact", self._agent.signalling.contact(transaction.flow))
        extra = [contact, ("Allow", ALLOW), ("Supported", SUPPORTED), ("Server", USER_AGENT), *headers]
        routes = [each for each in transaction.request.headers if each[0].lower() == "record-route"]
        response = transaction.request.response(code, self.dialog.local_tag, [*routes, *extra])
        if sdp is not None:
            response.set_body(sdp.encode(), SDP)
        return response

    async def _until(self, future: "asyncio.Future[Value]") -> Value:
        """The result of a future; CallEndedError where the call ends before."""
        futures: set[asyncio.Future[Any]] = {future, self._ended}
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if self._ended.done():
            raise CallEndedError
        return future.result()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def status_of(error: WireError | InputError) -> int:
    """The status code of SIP for a call that is refused."""
    if isinstance(error, WireError) and error.code == "invalid_sdp":
        return 488
    if isinstance(error, WireError) and error.status in (429, 503):
        return 503 if error.status == 503 else 486
    return 400
