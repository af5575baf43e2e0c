"""Damaged responses to our INVITEs, and damaged INVITEs with Replaces: nothing fails."""

import random
import resource

import pytest

from tests.server.harness import eventually
from tests.server.sip.callee import Callee, dial
from tests.server.sip.phone import Telephone, metric

CODES = [100, 180, 183, 200, 302, 401, 407, 422, 486, 487, 503, 699]
HEADERS = [
    'WWW-Authenticate: Digest realm="x", nonce="n", qop="auth"',
    "Contact: <sip:bob@127.0.0.1:1>, <sip:*@127.0.0.1>",
    "Record-Route: <sip:127.0.0.1;lr>",
    "Session-Expires: 90;refresher=uac",
    "Allow: INVITE, UPDATE",
]


def damaged(chance: random.Random, text: str) -> bytes:
    data = bytearray(text.encode())
    for _ in range(chance.randrange(0, 6)):
        at = chance.randrange(len(data))
        data[at : at + chance.randrange(6)] = chance.randbytes(chance.randrange(6))
    return bytes(data)


@pytest.mark.parametrize("count", [1_000, pytest.param(100_000, marks=pytest.mark.full)])
async def test_damaged_responses_do_no_harm(served, quick_timers, count):
    chance = random.Random(11)
    options = {"dials": ("sip:*@127.0.0.1",), "dials_per_minute": 1e6, "max_outgoing_calls": 1000}
    server = await served(sip=options)
    agent, sizes = server.app.state.server.sip, []
    async with Callee(server) as phone:
        for number in range(count):
            if number % 250 == 0:
                await dial(server, phone.uri, ringing_timeout=5)
                invite = await phone.invited()
            code, body = chance.choice(CODES), phone.offer() if chance.random() < 0.5 else ""
            kinds = ["Content-Type: application/sdp", f"Contact: <{phone.uri}>"]
            lines = (
                f"SIP/2.0 {code} -",
                *(f"{line};tag=t{number % 7}" if line.startswith("To:") else line for line in invite.copied()),
                *chance.sample(HEADERS, 2),
                *kinds,
                f"Content-Length: {len(body)}",
            )
            phone.send(damaged(chance, "\r\n".join((*lines, "", body))))
            if number % 50 == 49:
                await phone.round_trip()
            if number % (count // 5) == count // 5 - 1:
                sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        assert metric(server, "sip_malformed_total") > count / 20
        for call in list(agent.calls.values()):
            call.end("server")
        await eventually(lambda: not agent.calls and not len(server.sessions), "all calls have ended")
        assert metric(server, "exceptions_total") == 0
        assert sizes[-1] - sizes[1] < 30_000, f"memory grows: {sizes} KiB"
    async with Callee(server) as phone:
        await dial(server, phone.uri)
        await phone.answered()
        await eventually(lambda: len(agent.calls) == 1, "calls are placed as before")


async def test_damaged_replacements_do_no_harm(served):
    chance = random.Random(12)
    server = await served()
    async with Telephone(server) as phone, Telephone(server, "eve") as other:
        await phone.invite()
        (call,) = server.app.state.server.sip.calls.values()
        await eventually(lambda: call.is_established, "the call is served")
        value = f"{phone.call_id};to-tag=wrong;from-tag={phone.tag};early-only"
        for number in range(1_000):
            text = damaged(chance, value).decode("latin1").replace("\r", "").replace("\n", "")
            other.to_tag = ""
            other.request("INVITE", f"Replaces: {text}", body=other.offer())
            if number % 20 == 19:
                await phone.round_trip()
        assert metric(server, "exceptions_total") == 0
        assert call.dialog.call_id == phone.call_id and len(server.app.state.server.sip.calls) == 1
