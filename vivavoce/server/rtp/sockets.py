"""The UDP sockets of a stream: RTP on an even port, RTCP on the next."""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable

from vivavoce.errors import InputError
from vivavoce.server.rtp.source import Address
from vivavoce.server.rtp.srtp import MAX_PACKET_BYTES

logger = logging.getLogger(__name__)

BATCH = 64  # packets read at once; other work of the event loop comes between batches
RECEIVE_BUFFER = 1 << 16

OnDatagram = Callable[[bytes, Address, bool], None]
"""Takes a datagram, its source, and whether it came to the RTCP port."""


class RtpSockets:
    """A pair of bound sockets, read by the event loop."""

    def __init__(self, rtp: socket.socket, rtcp: socket.socket, on_datagram: OnDatagram) -> None:
        self._rtp, self._rtcp, self._on_datagram = rtp, rtcp, on_datagram
        self.port: int = rtp.getsockname()[1]
        self.failed_sends = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(rtp.fileno(), self._read, rtp)
        self._loop.add_reader(rtcp.fileno(), self._read, rtcp)

    @classmethod
    def open(cls, host: str, port_range: tuple[int, int], on_datagram: OnDatagram) -> "RtpSockets":
        """Sockets at a random free pair of ports; InputError where there is none."""
        first, last = port_range
        ports = range(first + first % 2, last, 2)
        start = secrets.randbelow(len(ports)) if ports else 0
        for index in range(len(ports)):
            pair = _bind_pair(host, ports[(start + index) % len(ports)])
            if pair is not None:
                return cls(*pair, on_datagram)
        raise InputError(f"no two consecutive UDP ports of {host} are free in {first} to {last}")

    def read(self) -> None:
        """Read what has arrived; the event loop would do so a little later."""
        self._read(self._rtp)

    def send(self, data: bytes, address: Address, is_rtcp: bool) -> None:
        """Send a datagram; a failure is counted, as a packet lost on the way is not noticed either."""
        try:
            (self._rtcp if is_rtcp else self._rtp).sendto(data, address)
        except OSError:
            self.failed_sends += 1
            logger.debug("a datagram was not sent", exc_info=True)

    def close(self) -> None:
        """Close both sockets."""
        for each in (self._rtp, self._rtcp):
            self._loop.remove_reader(each.fileno())
            each.close()

    def _read(self, source: socket.socket) -> None:
        for _ in range(BATCH):
            try:
                data, address = source.recvfrom(MAX_PACKET_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:  # an ICMP error of an earlier send
                logger.debug("a datagram was refused", exc_info=True)
                continue
            self._on_datagram(data, (address[0], address[1]), source is self._rtcp)


def _bind_pair(host: str, port: int) -> tuple[socket.socket, socket.socket] | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound: list[socket.socket] = []
    for each in (port, port + 1):
        one = socket.socket(family, socket.SOCK_DGRAM)
        bound.append(one)
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        try:
            one.bind((host, each))
        except OSError:
            for opened in bound:
                opened.close()
            return None
    return bound[0], bound[1]
