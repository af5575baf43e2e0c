"""A telephone that is called: takes the INVITE of the server, and answers it as a test says."""

import asyncio
import re
import secrets

import httpx

from tests.server.harness import DEADLINE
from tests.server.sip.phone import Received, Telephone
from vivavoce.server.rtp.dtmf_events import DIGITS


class Callee(Telephone):
    """A telephone that waits for the server to call it."""

    @property
    def uri(self) -> str:
        return f"sip:bob@127.0.0.1:{self.port}"

    async def invited(self) -> Received:
        """The next new INVITE, which is not repeated once a response was sent."""
        invite = await self.request_of_server("INVITE", None)
        self.call_id = invite.header("Call-ID")
        self.tag, self.to_tag = secrets.token_hex(4), invite.header("From").partition(";tag=")[2]
        self.target = re.search("<(.*)>", invite.header("Contact"))[1]
        if invite.body:
            self.media_port = int(re.search(r"m=audio (\d+)", invite.body)[1])
        return invite

    def respond(self, invite: Received, code: int, *headers: str, body: str = "", tag: str = "") -> None:
        """A response with our tag."""
        contact = f"Contact: <sip:bob@127.0.0.1:{self.port}>"
        kind = ("Content-Type: application/sdp",) if body else ()
        lines = [
            f"{line};tag={tag or self.tag}" if line.startswith("To:") and ";tag=" not in line else line
            for line in invite.copied()
        ]
        if not any(each.startswith("Contact") for each in headers):
            headers = (contact, *headers)
        head = (f"SIP/2.0 {code} -", *lines, *headers, *kind)
        self.send("\r\n".join((*head, f"Content-Length: {len(body)}", "", body)))

    async def answered(self, *headers: str) -> Received:
        """Take a call: ringing, the answer, and the ACK of the server, which is returned."""
        invite = await self.invited()
        self.respond(invite, 180)
        self.respond(invite, 200, *headers, body=self.offer())
        return await self.request_of_server("ACK", None)

    async def keys(self, count: int) -> str:
        """The next keys that the server presses."""
        pressed: dict[bytes, str] = {}
        while len(pressed) < count:
            packet = await asyncio.wait_for(self._packets.get(), DEADLINE)
            if packet[1] & 0x7F == 101 and packet[13] & 0x80:
                pressed[packet[4:8]] = DIGITS[packet[12]]
        return "".join(pressed.values())


async def dial(server, target: str, key: str | None = None, **body) -> httpx.Response:
    """Ask the server to place a call."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=server.http, headers=headers, timeout=30) as client:
        return await client.post("/v1/realtime/calls/dial", json={"target_uri": target, **body})


async def found(server, call_id: str, key: str | None = None) -> dict:
    """A call as the server describes it."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=server.http, headers=headers) as client:
        return (await client.get(f"/v1/realtime/calls/{call_id}")).json()
