"""Calls of unmodified SIP programs: sipp's stock scenarios, baresip with each codec, linphone, kamailio in between."""

import numpy as np
import pytest

from tests.server.harness import eventually
from tests.server.scripted import pitch, watermark
from tests.server.sip.phone import metric, sideband
from tests.server.sip.programs import KAMAILIO_CONFIG, Baresip, Linphone, program, running_program, sipp
from vivavoce.evaluation.machine import free_port

pytestmark = pytest.mark.debian


def full(codec: str):
    return pytest.param(codec, marks=pytest.mark.full)


def address(server) -> str:
    host, port = server.app.state.server.sip.signalling.transports.local("udp")
    return f"{host}:{port}"


@pytest.mark.parametrize("transport", ["u1", "t1"])
async def test_the_stock_calls_of_sipp(served, tmp_path, transport):
    server = await served()
    stock = ("-sn", "uac", "-t", transport, "-m", "8", "-r", "20", "-d", "100")
    await sipp(tmp_path, address(server), *stock)
    await eventually(lambda: not server.app.state.server.sip.calls, "all calls have ended")
    assert metric(server, 'calls_ended_total{provider="sip",reason="caller"}') == 8


@pytest.mark.parametrize(
    "codec", ["opus/48000/2", "PCMA/8000/1", *(full(each) for each in ("G722/16000/1", "PCMU/8000/1"))]
)
async def test_baresip_asks_hears_the_answer_presses_keys_and_hangs_up(served, tmp_path, codec):
    server = await served()
    secure = ";mediaenc=srtp-mand" if codec.startswith("PCMA") else ""
    async with Baresip(tmp_path, codec, secure) as phone:
        await phone.command("dial", f"sip:viva@{address(server)}")
        await phone.event("CALL_ESTABLISHED")
        (call,) = server.app.state.server.sip.calls.values()
        assert call.media.settings.codec.name == codec.partition("/")[0]
        assert (call.media.settings.srtp is not None) == bool(secure)
        async with sideband(server, call.media.session) as client:
            await client.until("session.created")
            done = (await client.until("response.done"))["response"]
            assert done["output"][0]["content"][0]["transcript"] == "You said: tone 500"
            await client.until("output_audio_buffer.stopped")
            for key in "1#":
                await phone.command("sndcode", key)
                assert (await client.until("input_audio_buffer.dtmf_event_received"))["event"] == key
            await phone.command("hangup")
            assert await client.closed() == 1000
        await eventually(lambda: not server.app.state.server.sip.calls, "the call has ended")
        check_answer(*phone.heard())


def check_answer(heard: np.ndarray, rate: int) -> None:
    loud = np.flatnonzero(np.abs(heard) > 0.1)
    reply = heard[loud[0] : loud[-1]]
    assert 0.3 < len(reply) / rate < 0.6
    assert abs(pitch(reply, rate) - watermark("You said: tone 500")) < 8


async def test_linphone_asks_hears_the_answer_presses_a_key_and_hangs_up(served, tmp_path):
    server = await served()
    async with Linphone(tmp_path) as phone:
        phone.command(f"call sip:viva@{address(server)}")
        await phone.until("Media streams established")
        (call,) = server.app.state.server.sip.calls.values()
        async with sideband(server, call.media.session) as client:
            await client.until("session.created")
            done = (await client.until("response.done"))["response"]
            assert done["output"][0]["content"][0]["transcript"] == "You said: tone 500"
            await client.until("output_audio_buffer.stopped")
            phone.command("5")
            assert (await client.until("input_audio_buffer.dtmf_event_received"))["event"] == "5"
            phone.command("terminate")
            assert await client.closed() == 1000
        await eventually(lambda: not server.app.state.server.sip.calls, "the call has ended")
    assert metric(server, 'calls_ended_total{provider="sip",reason="caller"}') == 1
    check_answer(*phone.heard())


async def test_linphone_is_hung_up_on(served, tmp_path):
    server = await served()
    async with Linphone(tmp_path) as phone:
        phone.command(f"call sip:viva@{address(server)}")
        await phone.until("Media streams established")
        (call,) = server.app.state.server.sip.calls.values()
        await eventually(lambda: call.is_established, "the call is acknowledged")
        await call.media.session.close(1000, "hung up")
        await phone.until("ended")


async def test_baresip_holds_and_is_hung_up_on(served, tmp_path):
    server = await served()
    async with Baresip(tmp_path) as phone:
        await phone.command("dial", f"sip:viva@{address(server)}")
        await phone.event("CALL_ESTABLISHED")
        (call,) = server.app.state.server.sip.calls.values()
        await phone.command("hold")
        await eventually(lambda: call.media.settings.direction == "recvonly", "the call is held")
        await phone.command("resume")
        await eventually(lambda: call.media.settings.direction == "sendrecv", "the call is resumed")
        await call.media.session.close(1000, "hung up")
        await phone.event("CALL_CLOSED")
    await eventually(lambda: not server.app.state.server.sip.calls, "the call has ended")


async def test_a_call_through_kamailio_with_which_it_is_registered(served, tmp_path):
    port = free_port()
    (tmp_path / "kamailio.cfg").write_text(KAMAILIO_CONFIG.format(port=port))
    kamailio = (
        program("kamailio"),
        "-f",
        "kamailio.cfg",
        "-DD",
        "-E",
        "-P",
        str(tmp_path / "pid"),
        "-Y",
        str(tmp_path),
    )
    async with running_program(tmp_path, *kamailio):
        server = await served(
            sip={"registrar": f"sip:viva@127.0.0.1:{port}", "registrar_password": "sesame", "accounts": ("a:b",)}
        )
        await eventually(lambda: metric(server, "sip_registered") == 1, "it is registered")
        (folder := tmp_path / "phone").mkdir()
        async with Baresip(folder) as phone:
            for hangs_up in ("phone", "server"):
                await phone.command("dial", f"sip:viva@127.0.0.1:{port}")
                await phone.event("CALL_ESTABLISHED")
                (call,) = server.app.state.server.sip.calls.values()
                await eventually(lambda: call.media.session.connections, "the call is acknowledged")  # noqa: B023
                assert call.dialog.routes, "through the proxy"
                if hangs_up == "phone":
                    await phone.command("hangup")
                else:
                    await call.media.session.close(1000, "hung up")
                    await phone.event("CALL_CLOSED")
                await eventually(lambda: not server.app.state.server.sip.calls, "the call has ended")
        await server.app.state.server.sip.close()  # while the registrar answers
