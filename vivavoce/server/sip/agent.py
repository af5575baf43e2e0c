"""The SIP user agent: takes requests, decides who may call, and has the calls in progress."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine
from ipaddress import ip_address
from typing import TYPE_CHECKING

from vivavoce.errors import InputError
from vivavoce.log import log_failure
from vivavoce.server.config import OpenRate, ServerOptions
from vivavoce.server.realtime.session_types import SessionParams
from vivavoce.server.sip.addresses import Uri
from vivavoce.server.sip.call import Parties, SipCall
from vivavoce.server.sip.dialing import Dialer, DialRequest
from vivavoce.server.sip.dialog import Dialog, DialogId
from vivavoce.server.sip.digest import Account, Authenticator
from vivavoce.server.sip.incoming import DECLINED, IncomingSipCall
from vivavoce.server.sip.media import PROVIDER
from vivavoce.server.sip.messages import SDP, SipRequest, SipResponse, new_tag
from vivavoce.server.sip.outgoing import OutgoingSipCall
from vivavoce.server.sip.registration import Registration
from vivavoce.server.sip.replaces import Replaces, refer_to
from vivavoce.server.sip.signalling import ALLOW, SUPPORTED, Signalling, settle
from vivavoce.server.sip.transactions import ServerTransaction
from vivavoce.server.sip.transport import Flow
from vivavoce.server.telephony.active_calls import CallObject
from vivavoce.server.telephony.records import CallRecord, printable
from vivavoce.server.webhooks import IncomingCall, SipHeader
from vivavoce.server.wire import WireError

if TYPE_CHECKING:
    from vivavoce.server.realtime.sessions import Sessions

logger = logging.getLogger(__name__)

REQUESTS_PER_MINUTE = 1200.0  # of one address, outside of calls
END_SECONDS = 3.0
KNOWN_EXTENSIONS = {"timer", "replaces"}
SECRET_HEADERS = ("authorization", "proxy-authorization")


class UserAgent:
    """One SIP user agent."""

    def __init__(self, sessions: "Sessions", options: ServerOptions) -> None:
        self.sessions, self.options = sessions, options.sip
        self.signalling = Signalling(
            self.options, _server_tls(options), self._received, sessions.metrics.sip_malformed.inc
        )
        self._networks, accounts = self.options.networks, self.options.account_table
        self._authenticator = Authenticator(accounts) if accounts else None
        self._is_local = all(ip_address(each.host).is_loopback for each in self.options.destinations)
        self._rate = OpenRate(REQUESTS_PER_MINUTE)
        self.dialer = Dialer(self.options)
        self.calls: dict[DialogId, SipCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._registration: Registration | None = None
        self.account: Account | None = None
        if self.options.registrar is not None:
            uri, password = Uri.parse(self.options.registrar), self.options.registrar_password
            self._registration = Registration(self.signalling, uri, password, self._note_registered)
            self.account = None if password is None else Account(uri.user, password)
        self._handlers: dict[str, Callable[[SipCall, ServerTransaction], None]] = {
            "INVITE": SipCall.renegotiate,
            "UPDATE": SipCall.renegotiate,
            "BYE": SipCall.hung_up,
            "INFO": SipCall.informed,
            "NOTIFY": SipCall.notified,
        }

    async def start(self) -> None:
        """Listen, and register where that is configured; InputError where an address cannot be bound."""
        try:
            await self.signalling.transports.start()
        except OSError as error:
            raise InputError(f"cannot listen for SIP on {', '.join(self.options.listen)}: {error}") from error
        logger.info("SIP listens on %s", ", ".join(map(str, self.options.destinations)))
        if self._registration is not None:
            self._registering = asyncio.create_task(self._registration.run())

    async def close(self) -> None:
        """End all calls and stop listening."""
        for call in list(self.calls.values()):
            call.end("server")
        await settle(*self._tasks, seconds=END_SECONDS)
        if self._registration is not None:
            self._registering.cancel()
            await asyncio.gather(self._registering, return_exceptions=True)
            await settle(asyncio.create_task(self._registration.end()), seconds=END_SECONDS)
        await self.signalling.close()

    # The API

    async def dial(self, request: DialRequest) -> OutgoingSipCall:
        """Place a call; WireError where it is not allowed, or the server is full."""
        outgoing = sum(isinstance(call, OutgoingSipCall) for call in self.calls.values())
        plan = self.dialer.plan(request, outgoing)
        try:
            flow = await self.signalling.transports.flow_to(plan.route.uri.destination)
        except OSError as error:
            message = f"the target cannot be reached: {type(error).__name__}"
            raise WireError(message, "unreachable", "target_uri", 502, "server_error") from error
        call = OutgoingSipCall(self, plan, flow)
        self._add(call)
        try:
            await call.open(flow)
        except BaseException:
            self._remove(call)
            self.sessions.calls.drop(call.id)
            raise
        self.spawn(call.place(flow))
        return call

    def pending(self, call_id: str) -> IncomingSipCall:
        """A call that waits to be accepted; WireError 404 where there is none."""
        found = self._found(call_id)
        if not isinstance(found, IncomingSipCall) or not found.is_pending:
            raise _not_found(call_id)
        return found

    def accept(self, call_id: str, params: SessionParams) -> None:
        """Answer a call."""
        self.pending(call_id).accept(params)

    def reject(self, call_id: str, code: int | None) -> None:
        """Refuse a call with a status code of SIP."""
        if code is not None and not 300 <= code < 700:
            raise WireError("status_code is a SIP status from 300 to 699", param="status_code")
        self.pending(call_id).reject(code or DECLINED)

    async def refer(self, call_id: str, target: str) -> None:
        """Transfer a call to a target of the allow-list (blind); WireError where that is not possible."""
        found = self.established(call_id)
        try:
            uri = Uri.parse(target)
        except InputError as error:
            raise WireError(f"target_uri is {error}", param="target_uri") from error
        if not self.options.allowed_targets.admits(uri):
            raise WireError("the server does not allow transfers to this target", "forbidden", "target_uri", 403)
        await found.transfer(f"<{uri}>")

    async def connect(self, call_id: str, other_id: str) -> None:
        """Transfer a call to the peer of another one, which it replaces (attended); WireError where it is refused.

        The other call has to be one that we have placed, or its peer a target of the allow-list.
        """
        found, other = self.established(call_id), self.established(other_id)
        if found is other:
            raise WireError("a call cannot be transferred to itself", param="replaces_call_id")
        is_allowed = other.direction == "outgoing" or self.options.allowed_targets.admits(other.dialog.target)
        if not is_allowed:
            raise WireError("the server does not allow transfers to this peer", "forbidden", "replaces_call_id", 403)
        await found.transfer(refer_to(other.dialog))

    def press_keys(self, call_id: str, digits: str) -> None:
        """Send telephone keys to the peer of a call."""
        self.established(call_id).media.send_digits(digits)

    def established(self, call_id: str) -> SipCall:
        """A call that was answered; WireError 404 where there is none."""
        found = self._found(call_id)
        if found is None or not found.is_established:
            raise _not_found(call_id)
        return found

    def _found(self, call_id: str) -> SipCall | None:
        return next((call for call in self.calls.values() if call.id == call_id), None)

    def announce(self, call: IncomingSipCall, invite: SipRequest, is_secure: bool) -> None:
        """Send the webhook of a call that waits to be accepted."""
        headers = [
            SipHeader(printable(name), printable(value))
            for name, value in invite.headers
            if name.lower() not in SECRET_HEADERS
        ]
        data = IncomingCall(call.id, headers, "srtp" if is_secure else "rtp")
        assert self.sessions.webhooks is not None
        self.sessions.webhooks.send("realtime.call.incoming", data)

    def ended(self, call: SipCall, record: CallRecord) -> None:
        """Forget a call."""
        self._remove(call)
        self.sessions.calls.end(record)
        self.sessions.metrics.calls_ended.labels(PROVIDER, record.reason).inc()
        self.sessions.call_records.write(record)

    def rename(self, call: SipCall, dialog: Dialog) -> None:
        """Give a call another dialog, by which its requests are found."""
        self._remove(call)
        call.dialog = dialog
        self.calls[dialog.id] = call

    def _add(self, call: SipCall) -> None:
        self.calls[call.dialog.id] = call
        self.sessions.calls.begin(call.id, lambda: CallObject.of(call.record(), call.status))

    def _remove(self, call: SipCall) -> None:
        if self.calls.get(call.dialog.id) is call:
            del self.calls[call.dialog.id]

    # Requests

    def _received(self, message: SipRequest | SipResponse, flow: Flow) -> None:
        if isinstance(message, SipResponse):
            self.signalling.transactions.response_received(message)
            return
        call = self._call_of(message)
        if message.method == "ACK":
            self._acknowledged(message, call)
            return
        transactions = self.signalling.transactions
        repeated = transactions.of_request(message)
        if repeated is not None:
            repeated.repeated()
        elif transactions.is_full or (call is None and not self._rate.admits(flow.remote[0])):
            logger.debug("a SIP request was dropped: there are too many")
        elif message.method == "CANCEL":
            self._cancelled(message, flow)
        elif call is not None:
            self._within(call, message, flow)
        elif message.to_address.tag:
            self._answer(message, flow, 481)
        elif message.method == "INVITE":
            self._invited(message, flow)
        elif message.method == "OPTIONS":
            self._answer(message, flow, 200, [("Allow", ALLOW), ("Accept", SDP), ("Supported", SUPPORTED)])
        else:
            self._answer(message, flow, 405, [("Allow", ALLOW)])

    def _call_of(self, request: SipRequest) -> SipCall | None:
        return self.calls.get((request.call_id, request.to_address.tag, request.from_address.tag))

    def _acknowledged(self, ack: SipRequest, call: SipCall | None) -> None:
        refused = self.signalling.transactions.of_request(ack, "INVITE")
        if refused is not None:
            refused.acknowledged()
        if call is not None:
            call.acknowledged(ack)

    def _cancelled(self, request: SipRequest, flow: Flow) -> None:
        invite = self.signalling.transactions.of_request(request, "INVITE")
        if invite is None:
            self._answer(request, flow, 481)
            return
        self.signalling.transactions.open(request, flow).respond(request.response(200, new_tag()))
        for call in self.calls.values():
            if not invite.is_answered and isinstance(call, IncomingSipCall) and call.invite is invite:
                call.cancelled()

    def _within(self, call: SipCall, request: SipRequest, flow: Flow) -> None:
        handler = self._handlers.get(request.method)
        if request.method == "OPTIONS":
            self._answer(request, flow, 200, [("Allow", ALLOW), ("Accept", SDP), ("Supported", SUPPORTED)])
        elif handler is None:
            self._answer(request, flow, 405, [("Allow", ALLOW)])
        elif not call.dialog.is_in_order(request):
            self._answer(request, flow, 500)
        else:
            call.dialog.received(request, flow)
            handler(call, self.signalling.transactions.open(request, flow))

    def _invited(self, request: SipRequest, flow: Flow) -> None:
        """Take a new call, or refuse it."""
        source = flow.remote[0]
        unknown = request.tokens("Require") - KNOWN_EXTENSIONS
        if unknown:
            self._answer(request, flow, 420, [("Unsupported", ", ".join(sorted(unknown)))])
        elif request.uri.scheme == "tel":
            self._answer(request, flow, 416)
        elif not self._is_admitted(request, source):
            is_known = self._authenticator is not None
            challenge = [self._authenticator.challenge(source)] if self._authenticator is not None else []
            self._answer(request, flow, 401 if is_known else 403, challenge)
        elif sum(call.parties.source == source for call in self.calls.values()) >= self.options.calls_per_source:
            self.sessions.metrics.calls_ended.labels(PROVIDER, "too_many_calls").inc()
            self._answer(request, flow, 486)
        elif request.get("Replaces") is not None:
            self._replaced(request, flow)
        else:
            parties = Parties(str(request.from_address.uri), str(request.uri), source)
            call = IncomingSipCall(self, Dialog.of_request(request, flow), parties)
            self._add(call)
            self.spawn(call.answer(self.signalling.transactions.open(request, flow)))

    def _replaced(self, request: SipRequest, flow: Flow) -> None:
        """Continue a call with the sender of an INVITE that replaces its peer."""
        try:
            replaces = Replaces.of(request)
        except InputError:
            self._answer(request, flow, 400)
            return
        call = None if replaces is None else self.calls.get(replaces.dialog)
        if replaces is None or call is None or not call.is_established:
            self._answer(request, flow, 481)
        elif replaces.is_early_only:
            self._answer(request, flow, 486)
        else:
            parties = Parties(str(request.from_address.uri), str(request.uri), flow.remote[0])
            transaction = self.signalling.transactions.open(request, flow)
            call.replace_peer(transaction, Dialog.of_request(request, flow), parties)

    def _is_admitted(self, request: SipRequest, source: str) -> bool:
        address, registration = ip_address(source), self._registration
        if any(address in network for network in self._networks):
            return True
        if registration is not None and registration.address == source:
            return True
        if self._authenticator is not None:
            return self._authenticator.admits(request, source)
        return self._is_local and not self._networks and registration is None

    def _answer(self, request: SipRequest, flow: Flow, code: int, headers: list[tuple[str, str]] | None = None) -> None:
        """Answer without a transaction: there is nothing to remember."""
        self.signalling.answer(request, flow, request.response(code, new_tag(), headers or []))

    def _note_registered(self, is_registered: bool) -> None:
        self.sessions.metrics.sip_registered.set(is_registered)

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run something that outlasts the request, and is awaited when the server ends."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log_failure(logger, error, "a call over SIP failed")


def _server_tls(options: ServerOptions) -> ssl.SSLContext | None:
    if options.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(options.tls_cert, options.tls_key)
    return context


def _not_found(call_id: str) -> WireError:
    return WireError(f"there is no call {call_id}", "call_not_found", status=404)
