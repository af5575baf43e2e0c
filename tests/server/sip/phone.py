"""A telephone with a UDP socket for SIP and one for RTP: sends what a test tells it to, and says what it receives."""

import asyncio
import re
import secrets
import struct

import numpy as np

from tests.server.harness import DEADLINE, connected
from vivavoce.server.realtime.audio_formats import MU_LAW, WireFormat, decode, encode

LINE = WireFormat(MU_LAW, 8_000)
PACKET = 160
REPEAT_SECONDS = 2.0


class Received:
    """A SIP message as text."""

    def __init__(self, data: bytes) -> None:
        head, _, self.body = data.decode("utf8", "replace").partition("\r\n\r\n")
        self.line, *self.lines = head.split("\r\n")

    @property
    def code(self) -> int:
        """Of a response; 0 for a request."""
        return int(self.line.split(" ")[1]) if self.line.startswith("SIP/2.0") else 0

    @property
    def method(self) -> str:
        """Of a request, or of the request that was answered."""
        return self.header("CSeq").split(" ")[1]

    def header(self, name: str) -> str:
        return next((line.partition(": ")[2] for line in self.lines if line.lower().startswith(f"{name.lower()}:")), "")

    def copied(self) -> list[str]:
        """The headers of a response to this request."""
        return [line for line in self.lines if re.match("(Via|From|To|Call-ID|CSeq):", line)]


class Datagrams(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.received: asyncio.Queue[bytes] = asyncio.Queue()

    def datagram_received(self, data: bytes, address) -> None:
        self.received.put_nowait(data)


class Telephone:
    """One caller, with one call at a time."""

    def __init__(self, server, user: str = "ann", port: int = 0) -> None:
        self.server, self.user, self.port = server, user, port
        self.agent = server.app.state.server.sip
        self.call_id = f"{secrets.token_hex(8)}@phone"
        self.tag, self.to_tag, self.sequence = secrets.token_hex(4), "", 0
        self.target = ""

    async def __aenter__(self):
        loop = asyncio.get_running_loop()
        address = self.agent.signalling.transports.local("udp")
        self._sip, signalling = await loop.create_datagram_endpoint(Datagrams, ("127.0.0.1", self.port), address)
        self._rtp, media = await loop.create_datagram_endpoint(Datagrams, ("127.0.0.1", 0))
        self._messages, self._packets = signalling.received, media.received
        self.port = self._sip.get_extra_info("sockname")[1]
        self.rtp_port = self._rtp.get_extra_info("sockname")[1]
        self._rtp_number, self.target = 0, f"sip:viva@127.0.0.1:{address[1]}"
        self.heard: list[bytes] = []
        return self

    async def __aexit__(self, *error) -> None:
        if error[0] is None and any(call.dialog.call_id == self.call_id for call in self.agent.calls.values()):
            self.request("BYE")
            await self.response("BYE")
        self._sip.close()
        self._rtp.close()

    # SIP

    def send(self, data: str | bytes) -> None:
        self._sip.sendto(data.encode() if isinstance(data, str) else data)

    def request(self, method: str, *headers: str, body: str = "", branch: str = "", sequence: int | None = None) -> str:
        """A request of this call; the branch that it was sent with."""
        if sequence is None and method not in ("ACK", "CANCEL"):
            self.sequence += 1
        branch = branch or f"z9hG4bK{secrets.token_hex(6)}"
        tag = f";tag={self.to_tag}" if self.to_tag else ""
        kind = (
            ()
            if not body or any(each.startswith("Content-Type") for each in headers)
            else ("Content-Type: application/sdp",)
        )
        lines = [
            f"{method} {self.target} SIP/2.0",
            f"Via: SIP/2.0/UDP 127.0.0.1:{self.port};branch={branch};rport",
            f'From: "Ann" <sip:{self.user}@phone1>;tag={self.tag}',
            f"To: <sip:viva@example.com>{tag}",
            f"Call-ID: {self.call_id}",
            f"CSeq: {sequence or self.sequence} {method}",
            f"Contact: <sip:{self.user}@127.0.0.1:{self.port}>",
            "Max-Forwards: 70",
            *headers,
            *kind,
        ]
        self.send("\r\n".join((*lines, f"Content-Length: {len(body)}", "", body)))
        return branch

    async def next(self) -> Received:
        return Received(await asyncio.wait_for(self._messages.get(), DEADLINE))

    async def response(self, method: str = "", final: bool = True) -> Received:
        """The next (final) response, to a request of this method if one is named."""
        while True:
            message = await self.next()
            if message.code >= (200 if final else 100) and method in ("", message.method):
                return message

    async def request_of_server(self, method: str, code: int | None = 200, *headers: str) -> Received:
        """The next request of the server, answered with this code."""
        while True:
            message = await self.next()
            if message.line.startswith(f"{method} "):
                if code is not None:
                    self.answer(message, code, *headers)
                return message

    def answer(self, request: Received, code: int, *headers: str, body: str = "") -> None:
        lines = (f"SIP/2.0 {code} OK", *request.copied(), *headers, f"Content-Length: {len(body)}", "", body)
        self.send("\r\n".join(lines))

    async def round_trip(self) -> None:
        """Wait until the server has handled what was sent before, within a call."""
        branch = self.request("OPTIONS", sequence=1)
        async with asyncio.timeout(DEADLINE):
            while True:
                try:
                    async with asyncio.timeout(REPEAT_SECONDS):
                        while branch not in Received(await self._messages.get()).header("Via"):
                            pass
                    return
                except TimeoutError:  # UDP may lose packets where many are sent at once, also while others arrive
                    self.request("OPTIONS", branch=branch, sequence=1)

    async def invite(self, *headers: str, body: str | None = None) -> Received:
        """Call; the final response, which is acknowledged."""
        branch = self.request("INVITE", *headers, body=self.offer() if body is None else body)
        final = await self.response("INVITE")
        self.to_tag = final.header("To").partition(";tag=")[2]
        if final.code < 300:
            self.target = re.search("<(.*)>", final.header("Contact"))[1]
            self.media_port = int(re.search(r"m=audio (\d+)", final.body)[1])
        self.request("ACK", branch="" if final.code < 300 else branch)
        return final

    def offer(self, direction: str = "sendrecv", formats: str = "0 101") -> str:
        return (
            f"v=0\r\no=ann 1 1 IN IP4 127.0.0.1\r\ns=-\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\n"
            f"m=audio {self.rtp_port} RTP/AVP {formats}\r\na=rtpmap:101 telephone-event/8000\r\na={direction}\r\n"
        )

    @property
    def session(self):
        (call,) = self.agent.calls.values()
        return call.media.session

    # RTP

    def rtp(self, payload: bytes, payload_type: int = 0) -> None:
        self._rtp_number += 1
        header = struct.pack(">BBHII", 0x80, payload_type, self._rtp_number, self._rtp_number * PACKET, 7)
        self._rtp.sendto(header + payload, ("127.0.0.1", self.media_port))

    async def speak(self, samples: np.ndarray) -> None:
        """Say samples of 8 kHz in their time."""
        data = encode(samples, LINE)
        for begin in range(0, len(data) - PACKET + 1, PACKET):
            self.rtp(data[begin : begin + PACKET])
            await asyncio.sleep(0.02)

    async def hear(self, seconds: float) -> np.ndarray:
        """The next audio that is not silence, of this length."""
        heard = np.zeros(0, np.float32)
        while len(heard) < seconds * LINE.rate:
            packet = await asyncio.wait_for(self._packets.get(), DEADLINE)
            samples = decode(packet[12:], LINE) if packet[1] & 0x7F == 0 else np.zeros(0, np.float32)
            if len(heard) or np.abs(samples).max(initial=0) > 0.05:
                heard = np.concatenate([heard, samples])
        return heard


def sideband(server, session):
    """A client of the Realtime protocol beside a call."""
    return connected(server, f"?call_id={session.id.replace('sess_', 'rtc_', 1)}")


def metric(server, name: str) -> float:
    lines = server.app.state.server.metrics.page()[0].decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"viva_{name}"))
