"""Calls to unmodified SIP programs: sipp's stock answerer, one of its scenarios with a password, and baresip."""

import asyncio
import contextlib
import socket

import numpy as np
import pytest

from tests.server.harness import DEADLINE, connected, eventually
from tests.server.scripted import pitch, watermark
from tests.server.sip.callee import dial, found
from tests.server.sip.phone import metric
from tests.server.sip.programs import Baresip, program, running_program
from vivavoce.evaluation.machine import free_port

pytestmark = pytest.mark.debian

LOCAL = {"dials": ("sip:*@127.0.0.1", "tel:+4930*"), "dials_per_minute": 1000.0, "max_outgoing_calls": 64}

CHALLENGE = """<?xml version="1.0" encoding="us-ascii"?>
<scenario name="a password is asked for">
  <recv request="INVITE" crlf="true"/>
  <send><![CDATA[
    SIP/2.0 401 Unauthorized
    [last_Via:]
    [last_From:]
    [last_To:];tag=[call_number]a
    [last_Call-ID:]
    [last_CSeq:]
    WWW-Authenticate: Digest realm="pbx", nonce="47ebe028cda119c35d4877b383027d28da013815", algorithm=MD5
    Content-Length: 0

  ]]></send>
  <recv request="ACK"/>
  <recv request="INVITE">
    <action>
      <verifyauth assign_to="right" username="ann" password="sesame"/>
    </action>
  </recv>
  <nop hide="true" test="right" next="admitted"/>
  <nop><action><error message="the password is wrong"/></action></nop>
  <label id="admitted"/>
  <send><![CDATA[
    SIP/2.0 486 Busy Here
    [last_Via:]
    [last_From:]
    [last_To:];tag=[call_number]b
    [last_Call-ID:]
    [last_CSeq:]
    Content-Length: 0

  ]]></send>
  <recv request="ACK"/>
</scenario>
"""


@contextlib.asynccontextmanager
async def answering(folder, port: int, *arguments: str):
    """Run sipp as the called side."""
    command = (program("sipp"), "-i", "127.0.0.1", "-p", str(port), "-nostdin", "-trace_err", *arguments)
    async with running_program(folder, *command) as process:
        async with asyncio.timeout(DEADLINE):
            while not is_bound(port):
                await asyncio.sleep(0.02)
        yield process


def is_bound(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


async def test_the_stock_answerer_of_sipp(served, tmp_path):
    server, port = await served(sip=LOCAL), free_port()
    async with answering(tmp_path, port, "-sn", "uas", "-m", "8") as sipp:
        calls = [await dial(server, f"sip:bob{n}@127.0.0.1:{port}", wait_until_answered=True) for n in range(8)]
        assert [call.json()["status"] for call in calls] == ["answered"] * 8
        for call in list(server.app.state.server.sip.calls.values()):
            await call.media.session.close(1000, "hung up")
        assert await asyncio.wait_for(sipp.wait(), DEADLINE) == 0
    assert metric(server, 'calls_dialled_total{outcome="answered"}') == 8


async def test_sipp_checks_our_password(served, tmp_path):
    port = free_port()
    server = await served(sip=LOCAL | {"trunk": f"sip:127.0.0.1:{port}", "trunk_account": "ann:sesame"})
    (tmp_path / "challenge.xml").write_text(CHALLENGE)
    async with answering(tmp_path, port, "-sf", "challenge.xml", "-m", "1") as sipp:
        call = (await dial(server, "tel:+4930123")).json()
        assert await asyncio.wait_for(sipp.wait(), DEADLINE) == 0, [e.read_text() for e in tmp_path.glob("*errors.log")]
    await eventually(lambda: not server.app.state.server.sip.calls, "the call has ended")
    assert (await found(server, call["id"]))["reason"] == "busy"


@pytest.mark.parametrize("codec", ["PCMA/8000/1", pytest.param("opus/48000/2", marks=pytest.mark.full)])
async def test_baresip_is_called_asks_hears_the_answer_and_presses_keys(served, tmp_path, codec):
    server = await served(sip=LOCAL)
    async with Baresip(tmp_path, codec) as phone:
        call = (await dial(server, f"sip:ann@{phone.address}", dtmf="12")).json()
        await phone.event("CALL_INCOMING")
        async with connected(server, f"?call_id={call['id']}") as client:
            await client.until("session.created")
            await phone.command("accept")
            done = (await client.until("response.done"))["response"]
            assert done["output"][0]["content"][0]["transcript"] == "You said: tone 500"
            await client.until("output_audio_buffer.stopped")
            await phone.command("sndcode", "7")
            assert (await client.until("input_audio_buffer.dtmf_event_received"))["event"] == "7"
            await phone.command("hangup")
            assert (await client.until("viva.call.ended"))["reason"] == "callee"
        await eventually(lambda: not server.app.state.server.sip.calls, "the call has ended")
        last = await found(server, call["id"])
        assert last["codec"] == codec.partition("/")[0] and last["reason"] == "callee"
        heard, rate = phone.heard()
    loud = np.flatnonzero(np.abs(heard) > 0.1)
    reply = heard[loud[-1] - rate * 3 // 10 : loud[-1]]
    assert abs(pitch(reply, rate) - watermark("You said: tone 500")) < 8


async def test_baresip_declines(served, tmp_path):
    server = await served(sip=LOCAL)
    async with Baresip(tmp_path) as phone:
        call = (await dial(server, f"sip:ann@{phone.address}")).json()
        await phone.event("CALL_INCOMING")
        await phone.command("hangup")
        await eventually(lambda: not server.app.state.server.sip.calls, "the call has ended")
        assert (await found(server, call["id"]))["reason"] in ("busy", "declined")
        again = (await dial(server, f"sip:ann@{phone.address}", ringing_timeout=1)).json()
        await phone.event("CALL_INCOMING")
        await phone.event("CALL_CLOSED")
        await eventually(lambda: not server.app.state.server.sip.calls, "the call has ended")
        assert (await found(server, again["id"]))["reason"] == "no_answer"
