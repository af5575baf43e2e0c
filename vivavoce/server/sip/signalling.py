"""Sending SIP: the sockets and the transactions of a user agent, its addresses, and requests with credentials."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from ipaddress import ip_address

from vivavoce.server.sip.addresses import Transport, host_port
from vivavoce.server.sip.dialog import Dialog, via_header
from vivavoce.server.sip.digest import Account, authorization
from vivavoce.server.sip.messages import SipRequest, SipResponse
from vivavoce.server.sip.options import SipOptions
from vivavoce.server.sip.transactions import ClientTransaction, Timers, Transactions
from vivavoce.server.sip.transport import Flow, Receive, Transports, response_flow

USER_AGENT = "vivavoce"
SUPPORTED = "timer, replaces"
ALLOW = "INVITE, ACK, CANCEL, BYE, OPTIONS, UPDATE, INFO, NOTIFY"
TIMERS = Timers()
CHALLENGES = (401, 407)

BuildRequest = Callable[[], SipRequest]
"""Makes a request with a new branch and a new sequence number."""


class Signalling:
    """What a user agent sends with."""

    def __init__(
        self,
        options: SipOptions,
        server_tls: ssl.SSLContext | None,
        receive: Receive,
        malformed: Callable[[], None],
    ) -> None:
        self._public_host = options.public_host
        self.transports = Transports(options.destinations, server_tls, receive, malformed)
        self.timers = TIMERS
        self.transactions = Transactions(self.timers)

    def media_hosts(self, flow: Flow) -> tuple[str, str]:
        """The address to bind for media of a peer, and the one that the peer is told."""
        return flow.local[0], self._public_host or local_host(flow)

    def via(self, flow: Flow) -> str:
        """A Via header of ours."""
        return via_header(flow.transport, *self._address(flow))

    def contact(self, flow: Flow, user: str = "viva") -> str:
        """Our Contact header."""
        return f"<sip:{user}@{host_port(*self._address(flow))};transport={flow.transport}>"

    def answer(self, request: SipRequest, flow: Flow, response: SipResponse) -> None:
        """Answer a request without a transaction."""
        response.add("Server", USER_AGENT)
        response_flow(request, flow).send(response.encode())

    async def exchange(self, build: BuildRequest, flow: Flow, account: Account | None) -> ClientTransaction:
        """Send a request; once more with credentials where it is challenged. The transaction has its final response."""
        transaction = self.transactions.start(build(), flow)
        response = await transaction.final()
        if response.code not in CHALLENGES or account is None:
            return transaction
        header = authorization(account, transaction.request, response)
        if header is None:
            return transaction
        request = build()
        request.add(*header)
        transaction = self.transactions.start(request, flow)
        await transaction.final()
        return transaction

    async def flow_of(self, dialog: Dialog) -> Flow:
        """The way to the peer of a dialog; OSError where there is none."""
        if dialog.flow is not None and dialog.flow.is_open:
            return dialog.flow
        return await self.transports.flow_to(dialog.next_hop)

    async def within(
        self,
        dialog: Dialog,
        method: str,
        headers: Sequence[tuple[str, str]] = (),
        body: str | None = None,
        account: Account | None = None,
    ) -> ClientTransaction:
        """Send a request within a dialog; OSError where the peer cannot be reached."""
        flow = await self.flow_of(dialog)

        def build() -> SipRequest:
            request = dialog.request(method, self.via(flow))
            request.headers += [("Contact", self.contact(flow)), ("User-Agent", USER_AGENT), *headers]
            if body is not None:
                request.set_body(body.encode(), "application/sdp")
            return request

        return await self.exchange(build, flow, account)

    async def close(self) -> None:
        """Stop all timers and close all sockets."""
        self.transactions.close()
        await self.transports.close()

    def _address(self, flow: Flow) -> tuple[str, int]:
        transport: Transport = flow.transport
        listening = self.transports.local(transport)
        port = flow.local[1] if listening is None else listening[1]
        return self._public_host or local_host(flow), port


def local_host(flow: Flow) -> str:
    """Our address as a peer sees it, where there is no NAT; no packet is sent to find it."""
    host = flow.local[0]
    if not ip_address(host).is_unspecified:
        return host
    with socket.socket(socket.AF_INET6 if ":" in flow.remote[0] else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(flow.remote)
        except OSError:
            return host
        return str(probe.getsockname()[0])


async def settle(*tasks: "asyncio.Task[None]", seconds: float) -> None:
    """Wait for tasks, but not longer than this; those that are left are cancelled."""
    if not tasks:
        return
    _, pending = await asyncio.wait(tasks, timeout=seconds)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
