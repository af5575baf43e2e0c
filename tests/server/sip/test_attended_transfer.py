"""Attended transfer: a call of ours that takes the place of another (REFER), and callers that do so (INVITE)."""

import asyncio
import re
from urllib.parse import unquote

import httpx
import numpy as np
import pytest

from tests.server.harness import DEADLINE, connected, eventually
from tests.server.scripted import pitch, tone, watermark
from tests.server.sip.callee import Callee, dial, found
from tests.server.sip.phone import LINE, Telephone, metric
from tests.server.sip.programs import program, running_program
from vivavoce.evaluation.machine import free_port

NOTIFY = "Event: refer", "Subscription-State: active", "Content-Type: message/sipfrag;version=2.0"


async def refer(server, call_id: str, **body) -> int:
    async with httpx.AsyncClient(base_url=server.http, timeout=30) as client:
        return (await client.post(f"/v1/realtime/calls/{call_id}/refer", json=body)).status_code


@pytest.fixture
async def server(served):
    return await served(sip={"dials": ("sip:*@127.0.0.1",)})


def call_of(server, phone):
    return next(call for call in server.app.state.server.sip.calls.values() if call.dialog.call_id == phone.call_id)


async def test_a_caller_is_connected_to_a_colleague_that_was_asked_before(server):
    async with Telephone(server) as caller, Callee(server) as colleague:
        await caller.invite()
        await eventually(lambda: call_of(server, caller).is_established, "the caller is served")
        incoming = call_of(server, caller).id
        outgoing = (await dial(server, colleague.uri)).json()["id"]
        ringing = await colleague.invited()
        colleague.respond(ringing, 180)
        assert await refer(server, incoming, replaces_call_id=outgoing) == 404, "it is not answered yet"
        colleague.respond(ringing, 200, body=colleague.offer())
        await colleague.request_of_server("ACK", None)
        assert await refer(server, incoming, replaces_call_id=incoming) == 400
        assert await refer(server, incoming) == 400
        assert await refer(server, outgoing, replaces_call_id=incoming) == 403, "callers are no targets"
        async with connected(server, f"?call_id={incoming}") as client:
            await client.until("session.created")
            referring = asyncio.create_task(refer(server, incoming, replaces_call_id=outgoing))
            request = await caller.request_of_server("REFER", 202)
            assert await referring == 200
            target, value = re.fullmatch(r"<(\S+)\?Replaces=(\S+)>", request.header("Refer-To")).groups()
            assert target == f"sip:bob@127.0.0.1:{colleague.port}"
            # as the colleague knows the dialog: its own tag first
            assert unquote(value) == f"{colleague.call_id};to-tag={colleague.tag};from-tag={colleague.to_tag}"
            for code in (100, 180, 200):
                caller.request("NOTIFY", *NOTIFY, body=f"SIP/2.0 {code} -\r\n")
                assert (await caller.response("NOTIFY")).code == 200
                assert (await client.until("viva.call.progress"))["status_code"] == code
            await caller.request_of_server("BYE")
        colleague.request("BYE")  # whose call with us was replaced
        assert (await colleague.response("BYE")).code == 200
        await eventually(lambda: not server.app.state.server.sip.calls, "both calls have ended")
        assert (await found(server, incoming))["reason"] == "transferred"
        assert (await found(server, outgoing))["reason"] == "callee"


async def test_another_caller_takes_the_place_of_one_and_the_conversation_goes_on(server):
    async with Telephone(server) as first, Telephone(server, "eve") as second:
        await first.invite()
        await eventually(lambda: call_of(server, first).is_established, "the caller is served")
        call = call_of(server, first)
        replaces = f"{first.call_id};to-tag={first.to_tag};from-tag={first.tag}"
        for wrong, code in (
            ("nothing;to-tag=1;from-tag=2", 481),
            (f"{first.call_id};to-tag={first.tag};from-tag={first.to_tag}", 481),
            (f"{replaces};early-only", 486),
            (first.call_id, 400),
            (f"{replaces}\r\nReplaces: {replaces}", 400),
        ):
            second.to_tag = ""
            assert (await second.invite(f"Replaces: {wrong}")).code == code, wrong
        assert call.dialog.call_id == first.call_id, "nothing has changed"
        second.to_tag = ""
        assert (await second.invite(f"Replaces: {replaces}", body=second.offer(formats="107"))).code == 488
        assert call.dialog.call_id == first.call_id and len(server.app.state.server.sip.calls) == 1
        async with connected(server, f"?call_id={call.id}") as client:
            await client.until("session.created")
            second.to_tag = ""
            answered = await second.invite(f"Replaces: {replaces}", "Require: replaces")
            assert answered.code == 200
            bye = await first.request_of_server("BYE")
            assert bye.header("Call-ID") == first.call_id
            (now,) = server.app.state.server.sip.calls.values()
            assert now is call and call.dialog.call_id == second.call_id and len(server.host.opened) == 1
            await second.speak(np.concatenate([tone(500, 0.5, LINE.rate), np.zeros(LINE.rate * 7 // 10, np.float32)]))
            done = (await client.until("response.done"))["response"]
            assert done["output"][0]["content"][0]["transcript"] == "You said: tone 500"
            assert abs(pitch(await second.hear(0.35), LINE.rate) - watermark("You said: tone 500")) < 5
            second.request("BYE")
            assert (await second.response("BYE")).code == 200
    await eventually(lambda: not server.app.state.server.sip.calls, "the call has ended")
    assert metric(server, 'calls_ended_total{provider="sip",reason="caller"}') == 1


async def test_a_replacement_needs_an_account_too(served):
    server = await served(sip={"accounts": ("ann:sesame",)})
    async with Telephone(server) as phone:
        assert (await phone.invite("Replaces: a;to-tag=1;from-tag=2")).code == 401


REPLACING = """<?xml version="1.0" encoding="us-ascii"?>
<scenario name="a call takes the place of another">
  <send retrans="500"><![CDATA[
    INVITE sip:viva@[remote_ip]:[remote_port] SIP/2.0
    Via: SIP/2.0/[transport] [local_ip]:[local_port];branch=[branch]
    From: <sip:eve@[local_ip]:[local_port]>;tag=[call_number]
    To: <sip:viva@[remote_ip]:[remote_port]>
    Call-ID: [call_id]
    CSeq: 1 INVITE
    Contact: sip:eve@[local_ip]:[local_port]
    Max-Forwards: 70
    Require: replaces
    Replaces: REPLACED
    Content-Type: application/sdp
    Content-Length: [len]

    v=0
    o=eve 1 1 IN IP4 [local_ip]
    s=-
    c=IN IP4 [media_ip]
    t=0 0
    m=audio [media_port] RTP/AVP 8
  ]]></send>
  <recv response="100" optional="true"/>
  <recv response="200" rrs="true"/>
  <send><![CDATA[
    ACK [next_url] SIP/2.0
    Via: SIP/2.0/[transport] [local_ip]:[local_port];branch=[branch]
    From: <sip:eve@[local_ip]:[local_port]>;tag=[call_number]
    [last_To:]
    Call-ID: [call_id]
    CSeq: 1 ACK
    Max-Forwards: 70
    Content-Length: 0

  ]]></send>
  <recv request="BYE" timeout="20000"/>
  <send><![CDATA[
    SIP/2.0 200 OK
    [last_Via:]
    [last_From:]
    [last_To:]
    [last_Call-ID:]
    [last_CSeq:]
    Content-Length: 0

  ]]></send>
</scenario>
"""


@pytest.mark.debian
async def test_sipp_takes_the_place_of_a_caller(server, tmp_path):
    host, port = server.app.state.server.sip.signalling.transports.local("udp")
    async with Telephone(server) as phone:
        await phone.invite()
        await eventually(lambda: call_of(server, phone).is_established, "the caller is served")
        call = call_of(server, phone)
        replaced = f"{phone.call_id};to-tag={phone.to_tag};from-tag={phone.tag}"
        (tmp_path / "replacing.xml").write_text(REPLACING.replace("REPLACED", replaced))
        options = (
            "-i",
            "127.0.0.1",
            "-p",
            str(free_port()),
            "-nostdin",
            "-trace_err",
            "-sf",
            "replacing.xml",
            "-m",
            "1",
        )
        async with running_program(tmp_path, program("sipp"), f"{host}:{port}", *options) as sipp:
            await phone.request_of_server("BYE")
            await eventually(lambda: call.media.settings.codec.name == "PCMA", "the media is sipp's")
            await call.media.session.close(1000, "hung up")
            assert await asyncio.wait_for(sipp.wait(), DEADLINE) == 0
