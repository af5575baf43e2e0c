"""SIP transactions (RFC 3261, section 17): retransmissions and their timers, and which response belongs where."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from vivavoce.server.sip.messages import PHRASES, SipRequest, SipResponse
from vivavoce.server.sip.transport import Flow, response_flow

logger = logging.getLogger(__name__)

MAX_TRANSACTIONS = 4096  # of servers; beyond, new requests are dropped, and their senders repeat them

Key: TypeAlias = tuple[str, str, int | None, str]


@dataclass(frozen=True)
class Timers:
    """The base times of RFC 3261, in seconds."""

    t1: float = 0.5
    """Estimated round-trip time: the first retransmission."""
    t2: float = 4.0
    """The longest time between two retransmissions."""

    @property
    def timeout(self) -> float:
        """How long an answer is awaited."""
        return 64 * self.t1


class Retransmission:
    """Sends a message again and again, at intervals that double, until it is stopped or has timed out."""

    def __init__(self, flow: Flow, timers: Timers, max_interval: float, timed_out: Callable[[], None]) -> None:
        self._flow, self._timers, self._max = flow, timers, max_interval
        self._timed_out = timed_out
        self._timers_set: list[asyncio.TimerHandle] = []

    def start(self, data: bytes, is_repeated: bool) -> None:
        """Send; repeat where the transport may lose the message."""
        self.stop()
        self._flow.send(data)
        loop = asyncio.get_running_loop()
        self._timers_set = [loop.call_later(self._timers.timeout, self._end)]
        if is_repeated:
            self._schedule(data, self._timers.t1)

    def stop(self) -> None:
        """Do not send again, and do not time out."""
        for timer in self._timers_set:
            timer.cancel()
        self._timers_set.clear()

    def _schedule(self, data: bytes, interval: float) -> None:
        def send() -> None:
            self._flow.send(data)
            self._timers_set.pop()
            self._schedule(data, min(2 * interval, self._max))

        self._timers_set.append(asyncio.get_running_loop().call_later(interval, send))

    def _end(self) -> None:
        self.stop()
        self._timed_out()


class ServerTransaction:
    """A request of a peer, and our last response to it."""

    def __init__(self, request: SipRequest, flow: Flow, timers: Timers, ended: Callable[[], None]) -> None:
        self.request, self.flow = request, flow
        self._back = response_flow(request, flow)
        self._timers, self._ended = timers, ended
        self._last: bytes | None = None
        self._is_final = False
        self.on_unacknowledged: Callable[[], None] | None = None
        """Called where a final response to an INVITE is not acknowledged."""
        self._retransmission = Retransmission(self._back, timers, timers.t2, self._unacknowledged)
        self._linger: asyncio.TimerHandle | None = None

    @property
    def is_answered(self) -> bool:
        """Whether a final response was sent."""
        return self._is_final

    def respond(self, response: SipResponse) -> None:
        """Send a response; a final one to an INVITE is repeated until it is acknowledged."""
        if self._is_final:
            return
        self._last, self._is_final = response.encode(), response.is_final
        if self._is_final and self.request.method == "INVITE":
            is_repeated = self.flow.transport == "udp" or response.is_success
            self._retransmission.start(self._last, is_repeated)
            return
        self._back.send(self._last)
        if self._is_final:
            self._end_later()

    def repeated(self) -> None:
        """The request has arrived again."""
        if self._last is not None:
            self._back.send(self._last)

    def acknowledged(self) -> None:
        """An ACK has arrived; later ones are absorbed."""
        if self._is_final and self._linger is None:
            self._retransmission.stop()
            self._end_later()

    def close(self) -> None:
        """Stop all timers."""
        self._retransmission.stop()
        if self._linger is not None:
            self._linger.cancel()

    def _end_later(self) -> None:
        """Requests that arrive again are still answered for a while."""
        seconds = self._timers.timeout if self.flow.transport == "udp" else 0.0
        self._linger = asyncio.get_running_loop().call_later(seconds, self._ended)

    def _unacknowledged(self) -> None:
        self._ended()
        if self.on_unacknowledged is not None:
            self.on_unacknowledged()


class ClientTransaction:
    """A request of ours, and the responses to it."""

    def __init__(self, request: SipRequest, flow: Flow, timers: Timers, ended: Callable[[], None]) -> None:
        self.request, self.flow = request, flow
        self._timers, self._ended = timers, ended
        self._is_invite = request.method == "INVITE"
        self._ack: tuple[bytes, Flow] | None = None
        self.on_provisional: Callable[[SipResponse], None] | None = None
        self.on_other_answer: Callable[[SipResponse], None] | None = None
        """Called where another telephone answers an INVITE that a proxy has sent to several."""
        self.provisional: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once a response says that the request has arrived; before, it cannot be cancelled."""
        self._final: asyncio.Future[SipResponse] = asyncio.get_running_loop().create_future()
        max_interval = timers.timeout if self._is_invite else timers.t2
        self._retransmission = Retransmission(flow, timers, max_interval, self._timed_out)
        self._linger: asyncio.TimerHandle | None = None

    def send(self) -> None:
        """Send the request, again where it is not answered."""
        self._retransmission.start(self.request.encode(), self.flow.transport == "udp")

    async def final(self) -> SipResponse:
        """The final response; one with 408 where none has arrived."""
        return await asyncio.shield(self._final)

    @property
    def answered_tag(self) -> str:
        """The tag of the peer that has sent the final response."""
        return self._final.result().to_address.tag

    def received(self, response: SipResponse) -> None:
        """Take a response."""
        if not response.is_final:
            if self._is_invite:  # the final response may take long, and comes again until it is acknowledged
                self._retransmission.stop()
            if not self.provisional.done():
                self.provisional.set_result(None)
            if self.on_provisional is not None and not self._final.done():
                self.on_provisional(response)
            return
        if self._final.done():
            self._received_again(response)
            return
        self._retransmission.stop()
        if self._is_invite and not response.is_success:
            self.acknowledge(self._ack_of_refusal(response))
        self._final.set_result(response)
        self._linger = asyncio.get_running_loop().call_later(self._timers.timeout, self._ended)

    def acknowledge(self, ack: SipRequest, flow: Flow | None = None) -> None:
        """Send the ACK of a final response, and again whenever that arrives again."""
        self._ack = ack.encode(), flow or self.flow
        self._send_ack()

    def cancel_request(self) -> SipRequest:
        """The CANCEL of an INVITE, which has its branch and its number."""
        return self._same_hop("CANCEL", self.request.get("To") or "")

    def close(self) -> None:
        """Stop all timers."""
        self._retransmission.stop()
        if self._linger is not None:
            self._linger.cancel()
        self._final.cancel()

    def abandon(self) -> None:
        """Give up a request that was cancelled and is not answered."""
        self.close()
        self._ended()

    def _received_again(self, response: SipResponse) -> None:
        is_other = response.is_success and response.to_address.tag != self.answered_tag
        if not is_other:
            self._send_ack()
        elif self.on_other_answer is not None:
            self.on_other_answer(response)

    def _send_ack(self) -> None:
        if self._ack is not None:
            data, flow = self._ack
            flow.send(data)

    def _ack_of_refusal(self, response: SipResponse) -> SipRequest:
        """The ACK of a response other than 2xx belongs to the transaction of the INVITE."""
        return self._same_hop("ACK", response.get("To") or "")

    def _same_hop(self, method: str, to: str) -> SipRequest:
        """An ACK or a CANCEL, which follows the INVITE through every proxy."""
        kept = ("from", "call-id", "route", "max-forwards")
        headers = [("Via", self.request.all("Via")[0])]
        headers += [(name, value) for name, value in self.request.headers if name.lower() in kept]
        headers += [("To", to), ("CSeq", f"{self.request.cseq[0]} {method}")]
        return SipRequest(method, self.request.uri, headers)

    def _timed_out(self) -> None:
        self._ended()
        if not self._final.done():
            self._final.set_result(SipResponse(408, PHRASES[408], list(self.request.headers)))


class Transactions:
    """All transactions of a user agent."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._servers: dict[Key, ServerTransaction] = {}
        self._clients: dict[tuple[str, str], ClientTransaction] = {}

    def __len__(self) -> int:
        return len(self._servers) + len(self._clients)

    @property
    def is_full(self) -> bool:
        return len(self._servers) >= MAX_TRANSACTIONS

    def open(self, request: SipRequest, flow: Flow) -> ServerTransaction:
        """A new transaction for a request of a peer."""
        key = _key(request)

        def ended() -> None:
            self._servers.pop(key, None)

        self._servers[key] = ServerTransaction(request, flow, self._timers, ended)
        return self._servers[key]

    def of_request(self, request: SipRequest, method: str | None = None) -> ServerTransaction | None:
        """The transaction of a request that has arrived again; with `method`, that of the request it refers to."""
        return self._servers.get(_key(request, method))

    def start(self, request: SipRequest, flow: Flow) -> ClientTransaction:
        """Send a request."""
        key = (request.via.branch, request.method)

        def ended() -> None:
            self._clients.pop(key, None)

        started = self._clients[key] = ClientTransaction(request, flow, self._timers, ended)
        started.send()
        return started

    def response_received(self, response: SipResponse) -> None:
        """Pass a response to its transaction; without one it is dropped."""
        client = self._clients.get((response.via.branch, response.cseq[1]))
        if client is not None:
            client.received(response)

    def close(self) -> None:
        """Stop all timers."""
        for server in self._servers.values():
            server.close()
        for client in self._clients.values():
            client.close()
        self._servers.clear()
        self._clients.clear()


def _key(request: SipRequest, method: str | None = None) -> Key:
    via = request.via
    return via.branch, via.host, via.port, method or request.method
