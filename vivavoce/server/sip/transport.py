"""The sockets of SIP: UDP, TCP and TLS. A flow is what messages of one peer arrive on, and are sent back on."""

import asyncio
import contextlib
import logging
import re
import ssl
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from vivavoce.errors import InputError
from vivavoce.log import log_failure
from vivavoce.server.sip.addresses import DEFAULT_PORTS, Destination, Transport
from vivavoce.server.sip.messages import SipRequest, SipResponse, StreamReader, parse

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
MAX_CONNECTIONS_PER_SOURCE = 32
MAX_UNSENT_BYTES = 256 << 10
CONNECT_SECONDS = 5.0
PORT_ATTEMPTS = 8  # a port that is free for UDP may be in use for TCP
IDLE_SECONDS = 600.0  # after which a TCP connection without messages is closed

SocketAddress = tuple[str, int]


class Flow(Protocol):
    """A way to a peer."""

    transport: Transport
    local: SocketAddress
    remote: SocketAddress

    @property
    def is_open(self) -> bool: ...

    def send(self, data: bytes) -> None:
        """Send a message; what cannot be sent is lost, as it may be on the network."""
        ...


Receive = Callable[[SipRequest | SipResponse, Flow], None]


class MessageReceiver:
    """Parses what arrives, and passes it on. A failure ends nothing but the message."""

    def __init__(self, receive: Receive, malformed: Callable[[], None]) -> None:
        self._receive, self._malformed = receive, malformed

    def take(self, data: bytes, flow: Flow) -> None:
        """Take one message."""
        if not data.strip(b"\r\n\0"):  # a keep-alive
            return
        try:
            message = parse(data)
        except InputError:
            self._malformed()
            logger.debug("a malformed SIP message", exc_info=True)
            return
        try:
            if isinstance(message, SipRequest):
                note_source(message, flow)
            self._receive(message, flow)
        except Exception as error:
            log_failure(logger, error, "a SIP message could not be handled")


class UdpFlow:
    """A peer of a UDP socket."""

    transport: Transport = "udp"
    is_open = True

    def __init__(self, socket: asyncio.DatagramTransport, local: SocketAddress, remote: SocketAddress) -> None:
        self._socket, self.local, self.remote = socket, local, remote

    def to_port(self, port: int) -> "UdpFlow":
        """A way to another port of the peer."""
        return UdpFlow(self._socket, self.local, (self.remote[0], port))

    def send(self, data: bytes) -> None:
        """Send a datagram."""
        if not self._socket.is_closing():
            self._socket.sendto(data, self.remote)


class UdpSocket(asyncio.DatagramProtocol):
    """A UDP socket that listens."""

    def __init__(self, receiver: MessageReceiver) -> None:
        self._receiver = receiver

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.socket = cast(asyncio.DatagramTransport, transport)
        self.local: SocketAddress = transport.get_extra_info("sockname")[:2]

    def flow(self, remote: SocketAddress) -> UdpFlow:
        return UdpFlow(self.socket, self.local, remote)

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        self._receiver.take(data, self.flow(address[:2]))

    def error_received(self, error: Exception) -> None:
        logger.debug("a SIP datagram could not be sent: %s", type(error).__name__)


class StreamConnection(asyncio.Protocol):
    """A TCP or TLS connection."""

    def __init__(self, transport: Transport, receiver: MessageReceiver, connections: "set[StreamConnection]") -> None:
        self.transport: Transport = transport
        self._receiver, self._connections = receiver, connections
        self._reader = StreamReader()
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.Transport, transport)
        self.local: SocketAddress = transport.get_extra_info("sockname")[:2]
        self.remote: SocketAddress = transport.get_extra_info("peername")[:2]
        of_source = sum(each.remote[0] == self.remote[0] for each in self._connections)
        if len(self._connections) >= MAX_CONNECTIONS or of_source >= MAX_CONNECTIONS_PER_SOURCE:
            self._socket.abort()
            return
        self._connections.add(self)
        self._note_activity()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        if self._idle is not None:
            self._idle.cancel()

    def data_received(self, data: bytes) -> None:
        self._note_activity()
        try:
            messages = self._reader.feed(data)
        except InputError:
            logger.debug("a SIP connection was closed", exc_info=True)
            self._socket.abort()
            return
        for message in messages:
            self._receiver.take(message, self)

    @property
    def is_open(self) -> bool:
        return not self._socket.is_closing()

    def send(self, data: bytes) -> None:
        """Send a message; a peer that does not read is disconnected."""
        if self.is_open:
            self._socket.write(data)
            self._note_activity()
            if self._socket.get_write_buffer_size() > MAX_UNSENT_BYTES:
                self._socket.abort()

    def close(self) -> None:
        self._socket.close()

    def _note_activity(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.close)


class Transports:
    """The sockets that a user agent listens on, and the connections it opens."""

    def __init__(
        self,
        listen: Sequence[Destination],
        server_tls: ssl.SSLContext | None,
        receive: Receive,
        malformed: Callable[[], None],
    ) -> None:
        self._listen, self._server_tls = listen, server_tls
        self.receiver = MessageReceiver(receive, malformed)
        self.udp: list[UdpSocket] = []
        self._servers: list[tuple[Transport, asyncio.Server]] = []
        self._connections: set[StreamConnection] = set()

    async def start(self) -> None:
        """Listen; OSError where an address cannot be bound. TCP takes the port of UDP where that is chosen freely."""
        is_chosen = any(where.transport == "udp" and not where.port for where in self._listen)
        for attempts_left in reversed(range(PORT_ATTEMPTS if is_chosen else 1)):
            try:
                return await self._bind()
            except OSError:  # also where the port that was chosen for UDP is in use for TCP
                await self.close()
                self.udp, self._servers = [], []
                if not attempts_left:
                    raise

    async def _bind(self) -> None:
        loop = asyncio.get_running_loop()
        for where in self._listen:
            if where.transport == "udp":
                _, udp = await loop.create_datagram_endpoint(
                    lambda: UdpSocket(self.receiver), local_addr=(where.host, where.port)
                )
                self.udp.append(udp)
                continue
            port = where.port or (self.udp[-1].local[1] if self.udp and where.transport == "tcp" else 0)
            context = self._server_tls if where.transport == "tls" else None
            server = await loop.create_server(self._new_connection(where.transport), where.host, port, ssl=context)
            self._servers.append((where.transport, server))

    def local(self, transport: Transport) -> SocketAddress | None:
        """Where it listens."""
        if transport == "udp":
            return self.udp[0].local if self.udp else None
        servers = [server for kind, server in self._servers if kind == transport]
        return servers[0].sockets[0].getsockname()[:2] if servers else None

    async def flow_to(self, destination: Destination) -> Flow:
        """A way to a destination; OSError where there is none."""
        address = await resolve(destination)
        if destination.transport == "udp":
            of_family = [udp for udp in self.udp if (":" in udp.local[0]) == (":" in address[0])]
            if not of_family:
                raise OSError("there is no UDP socket of the address family")
            return of_family[0].flow(address)
        for connection in self._connections:
            if connection.is_open and (connection.transport, connection.remote) == (destination.transport, address):
                return connection
        tls = ssl.create_default_context() if destination.transport == "tls" else None
        async with asyncio.timeout(CONNECT_SECONDS):
            _, opened = await asyncio.get_running_loop().create_connection(
                self._new_connection(destination.transport),
                *address,
                ssl=tls,
                server_hostname=destination.host if tls is not None else None,
            )
        return opened

    async def close(self) -> None:
        """Close all sockets."""
        for udp in self.udp:
            udp.socket.close()
        for _, server in self._servers:
            server.close()
        for connection in list(self._connections):
            connection.close()
        for _, server in self._servers:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_SECONDS):
                    await server.wait_closed()

    def _new_connection(self, transport: Transport) -> Callable[[], StreamConnection]:
        return lambda: StreamConnection(transport, self.receiver, self._connections)


async def resolve(destination: Destination) -> SocketAddress:
    """The first IP address of a destination; OSError where it has none. There is no look-up of SRV records."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(destination.host, destination.port)
    except UnicodeError as error:  # an empty label, or one that is too long
        raise OSError("not a host name") from error
    return str(found[0][4][0]), int(found[0][4][1])


def note_source(request: SipRequest, flow: Flow) -> None:
    """Write where a request came from into its topmost Via (RFC 3581), so that the response finds the way back."""
    index = next(index for index, (name, _) in enumerate(request.headers) if name.lower() == "via")
    value = request.headers[index][1]
    top, comma, rest = value.partition(",")
    top = re.sub(r";\s*rport\s*(?=;|$)", f";rport={flow.remote[1]}", top, flags=re.IGNORECASE)
    if request.via.host != flow.remote[0] or "rport" in request.via.parameters:
        top = f"{top};received={flow.remote[0]}"
    request.headers[index] = ("Via", top + comma + rest)


def response_flow(request: SipRequest, flow: Flow) -> Flow:
    """The way of responses: back to the source; over UDP without rport, to the port that the Via names."""
    if not isinstance(flow, UdpFlow) or "rport" in request.via.parameters:
        return flow
    return flow.to_port(request.via.port or DEFAULT_PORTS["udp"])
