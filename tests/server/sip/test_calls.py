"""Calls over SIP with a telephone of its own sockets: a turn, hold, keys, transfer, both hang-ups, and refusals."""

import asyncio
import json

import numpy as np
import pytest

from tests.server.harness import eventually
from tests.server.scripted import pitch, tone, watermark
from tests.server.sip.phone import LINE, Telephone, metric, sideband
from vivavoce.errors import InputError
from vivavoce.server.config import ServerOptions
from vivavoce.server.sip import call as sip_call
from vivavoce.server.sip import session_timer
from vivavoce.server.sip.options import SipOptions


async def test_a_turn_keys_and_the_hang_up_of_the_caller(served, tmp_path):
    records = tmp_path / "calls.jsonl"
    server = await served(call_records=str(records))
    async with Telephone(server) as phone:
        answered = await phone.invite()
        assert answered.code == 200 and "m=audio" in answered.body and "a=rtpmap:0 PCMU/8000" in answered.body
        await eventually(lambda: metric(server, 'calls{provider="sip"}') == 1, "the call is counted")
        async with sideband(server, phone.session) as client:
            await client.until("session.created")
            await phone.speak(np.concatenate([tone(500, 0.5, LINE.rate), np.zeros(LINE.rate * 7 // 10, np.float32)]))
            while (done := (await client.until("response.done"))["response"])["status"] == "cancelled":
                pass  # a packet that was sent late has cut the turn in two
            assert done["output"][0]["content"][0]["transcript"] == "You said: tone 500"
            assert abs(pitch(await phone.hear(0.35), LINE.rate) - watermark("You said: tone 500")) < 5
            phone.request("INFO", "Content-Type: application/dtmf-relay", body="Signal=5\r\nDuration=160\r\n")
            assert (await phone.response("INFO")).code == 200
            assert (await client.until("input_audio_buffer.dtmf_event_received"))["event"] == "5"
            phone.request("BYE")
            assert (await phone.response("BYE")).code == 200
            assert await client.closed() == 1000
    await eventually(lambda: not len(server.sessions) and not server.app.state.server.sip.calls, "all has ended")
    assert metric(server, 'calls_ended_total{provider="sip",reason="caller"}') == 1
    assert metric(server, 'calls{provider="sip"}') == 0
    (line,) = records.read_text().splitlines()
    record = json.loads(line)
    assert record["caller"] == "sip:ann@phone1" and record["provider_call_id"] == phone.call_id
    assert record["reason"] == "caller" and record["codec"] == "PCMU" and 1 < record["duration_seconds"] < 60


async def test_a_session_that_ends_hangs_up(served):
    server = await served()
    async with Telephone(server) as phone:
        await phone.invite()
        async with sideband(server, phone.session) as client:
            await client.until("session.created")
            await phone.session.close(1000, "hung up")
        bye = await phone.request_of_server("BYE")
        assert bye.header("Call-ID") == phone.call_id and bye.header("To").endswith(f"tag={phone.tag}")
        await eventually(lambda: not phone.agent.calls, "the call has ended")


async def test_a_server_that_stops_hangs_up(served):
    server = await served()
    async with Telephone(server) as phone:
        await phone.invite()
        closing = asyncio.create_task(server.app.state.server.sip.close())
        await phone.request_of_server("BYE")
        await closing


async def test_hold_stops_both_ways_and_resumes(served):
    server = await served()
    async with Telephone(server) as phone:
        await phone.invite()
        (call,) = phone.agent.calls.values()
        held = await phone.invite(body=phone.offer("sendonly"))
        assert held.code == 200 and "a=recvonly" in held.body
        await eventually(lambda: server.host.opened[0].is_paused, "replies wait")
        before = server.host.opened[0].total_ms
        await phone.speak(tone(500, 0.3, LINE.rate))
        assert server.host.opened[0].total_ms - before < 100, "music on hold is not heard"
        resumed = await phone.invite(body=phone.offer())
        assert "a=sendrecv" in resumed.body and not server.host.opened[0].is_paused
        assert call.media.session is phone.session, "it is the same session"


async def test_media_that_cannot_be_used_is_refused_and_changes_nothing(served):
    server = await served()
    async with Telephone(server) as phone:
        assert (await phone.invite(body=phone.offer(formats="3 4"))).code == 488
        phone.to_tag = ""
        assert (await phone.invite()).code == 200
        assert (await phone.invite(body=phone.offer(formats="3 4"))).code == 488
        (call,) = phone.agent.calls.values()
        assert call.media.session.id in {each.id for each in server.sessions}, "the call goes on"


async def test_a_call_without_an_offer_gets_one(served):
    server = await served()
    async with Telephone(server) as phone:
        branch = phone.request("INVITE")
        answered = await phone.response("INVITE")
        assert "a=rtpmap:111 opus/48000/2" in answered.body and "a=rtpmap:9 G722/8000" in answered.body
        phone.to_tag = answered.header("To").partition(";tag=")[2]
        phone.request("ACK", body=phone.offer(), branch=f"{branch}a")
        await eventually(lambda: phone.session.connections, "the call is served")
        (call,) = phone.agent.calls.values()
        assert call.media.settings.codec.name == "PCMU" and call.media.settings.remote == ("127.0.0.1", phone.rtp_port)


async def test_lost_messages_are_sent_again(served, quick_timers):
    server = await served()
    async with Telephone(server) as phone:
        branch = phone.request("INVITE", body=phone.offer())
        phone.request("INVITE", body=phone.offer(), branch=branch, sequence=1)  # the same one: not a second call
        answers = [await phone.response("INVITE") for _ in range(4)]
        assert len({each.header("To") for each in answers}) == 1, "one dialog"
        assert len(server.host.opened) == 1
        phone.to_tag = answers[0].header("To").partition(";tag=")[2]
        phone.request("ACK")
        await eventually(lambda: phone.session.connections, "the call is served")
        await phone.session.close(1000, "hung up")
        first = await phone.request_of_server("BYE", None)
        second = await phone.request_of_server("BYE", 200)
        assert first.lines == second.lines


async def test_a_call_that_is_not_acknowledged_ends(served, quick_timers):
    server = await served()
    async with Telephone(server) as phone:
        phone.request("INVITE", body=phone.offer())
        await phone.response("INVITE")
        await phone.request_of_server("BYE")
        await eventually(lambda: not phone.agent.calls, "the call has ended")
        assert not len(server.sessions)
        assert metric(server, 'calls_ended_total{provider="sip",reason="unacknowledged"}') == 1


async def test_calls_of_one_source_are_limited(served):
    server = await served(sip={"calls_per_source": 1})
    async with Telephone(server) as phone, Telephone(server) as other:
        assert (await phone.invite()).code == 200
        assert (await other.invite()).code == 486
        phone.request("BYE")
        await phone.response("BYE")
        await eventually(lambda: not phone.agent.calls, "the first call has ended")
        other.to_tag = ""
        assert (await other.invite()).code == 200


async def test_a_full_server_refuses(served):
    server = await served(max_sessions=1)
    async with Telephone(server) as phone, Telephone(server) as other:
        assert (await phone.invite()).code == 200
        assert (await other.invite()).code == 503


async def test_other_requests(served):
    server = await served()
    async with Telephone(server) as phone:
        phone.request("OPTIONS")
        options = await phone.response("OPTIONS")
        assert options.code == 200 and "INVITE" in options.header("Allow")
        phone.request("SUBSCRIBE")
        assert (await phone.response("SUBSCRIBE")).code == 405
        phone.to_tag = "unknown"
        phone.request("BYE")
        assert (await phone.response("BYE")).code == 481
        phone.to_tag = ""
        phone.request("INVITE", "Require: 100rel", body=phone.offer())
        refused = await phone.response("INVITE")
        assert refused.code == 420 and refused.header("Unsupported") == "100rel"
        await phone.invite()
        phone.request("BYE", sequence=1)
        assert (await phone.response("BYE")).code == 500, "an old request"


async def test_a_peer_cannot_make_the_server_call_anyone(served):
    allowed = ("sip:*@127.0.0.1",)
    server = await served(sip={"dials": allowed, "targets": allowed})
    async with Telephone(server) as phone:
        for is_within_a_call in (False, True):
            if is_within_a_call:
                await phone.invite()
            phone.request("REFER", f"Refer-To: <sip:bob@127.0.0.1:{phone.port}>")
            refused = await phone.response("REFER")
            assert refused.code == 405 and "REFER" not in refused.header("Allow")
            assert len(phone.agent.calls) == is_within_a_call, "no other call was placed"


async def test_a_session_timer_ends_a_call_that_is_not_refreshed(served, monkeypatch):
    monkeypatch.setattr(session_timer, "MIN_SECONDS", 1)
    server = await served()
    async with Telephone(server) as phone:
        answered = await phone.invite("Supported: timer", "Session-Expires: 1")
        assert answered.header("Session-Expires") == "1;refresher=uac" and answered.header("Require") == "timer"
        await phone.request_of_server("BYE")
        await eventually(lambda: not phone.agent.calls, "the call has ended")
        assert metric(server, 'calls_ended_total{provider="sip",reason="expired"}') == 1


async def test_the_server_refreshes_a_session_where_it_is_asked_to(served, monkeypatch):
    monkeypatch.setattr(session_timer, "MIN_SECONDS", 1)
    server = await served()
    async with Telephone(server) as phone:
        await phone.invite("Supported: timer", "Allow: INVITE, UPDATE", "Session-Expires: 1;refresher=uas")
        for _ in range(2):
            update = await phone.request_of_server("UPDATE", 200, "Session-Expires: 1;refresher=uac")
            assert update.header("Session-Expires") == "1;refresher=uac"
        phone.request("BYE")
        assert (await phone.response("BYE")).code == 200


async def test_a_telephone_without_update_is_refreshed_by_an_invite(served, monkeypatch):
    monkeypatch.setattr(session_timer, "MIN_SECONDS", 1)
    server = await served()
    async with Telephone(server) as phone:
        await phone.invite("Supported: timer", "Allow: INVITE", "Session-Expires: 1;refresher=uas")
        for _ in range(2):
            invite = await phone.request_of_server("INVITE", None)
            assert "m=audio" in invite.body and "PCMU" in invite.body
            kind = "Content-Type: application/sdp", "Session-Expires: 1;refresher=uac"
            phone.answer(invite, 200, *kind, body=phone.offer())
            ack = await phone.request_of_server("ACK", None)
            assert ack.header("CSeq").split(" ")[0] == invite.header("CSeq").split(" ")[0]


async def test_too_short_a_session_interval_is_refused(served):
    server = await served()
    async with Telephone(server) as phone:
        refused = await phone.invite("Supported: timer", "Session-Expires: 60")
        assert refused.code == 422 and refused.header("Min-SE") == "90"


async def test_a_call_that_has_lost_its_media_ends(served, monkeypatch):
    monkeypatch.setattr(sip_call, "MEDIA_SECONDS", 0.2)
    monkeypatch.setattr(sip_call, "WATCH_SECONDS", 0.05)
    server = await served()
    async with Telephone(server) as phone:
        await phone.invite()
        await phone.request_of_server("BYE")
        await eventually(lambda: not phone.agent.calls, "the call has ended")
        assert metric(server, 'calls_ended_total{provider="sip",reason="no_media"}') == 1


@pytest.mark.parametrize(
    ("sip", "message"),
    [
        ({"listen": ("0.0.0.0:5060",)}, "--sip-account"),
        ({"listen": ("example.com:5060",)}, "IP address"),
        ({"listen": ("tls:127.0.0.1:5061",)}, "--tls-cert"),
        ({"listen": ("127.0.0.1",), "answers": "webhook"}, "--webhook-url"),
        ({"listen": ("127.0.0.1",), "allow": ("10.0.0.300",)}, "network"),
        ({"listen": ("127.0.0.1",), "accounts": ("hunter2-without-a-name",)}, "name:password"),
        ({"listen": ("127.0.0.1",), "targets": ("sip:*@*",)}, "sip:\\*@example.com"),
        ({"listen": ("127.0.0.1",), "rtp_ports": "5-1"}, "range"),
        ({"targets": ("tel:+49*",)}, "--sip"),
    ],
)
def test_options_that_must_not_be_served(sip, message):
    with pytest.raises(InputError, match=message) as error:
        ServerOptions(sip=SipOptions(**sip)).check()
    assert "hunter2" not in str(error.value)
