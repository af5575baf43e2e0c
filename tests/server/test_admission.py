"""Who comes in: keys, browser keys, pages, limits; and what a full server says."""

import asyncio
import contextlib
import json
import time

import httpx
import openai
import pytest
import websockets
from websockets.exceptions import InvalidStatus

from tests.server.harness import connected, eventually
from tests.server.scripted import ScriptedHost
from vivavoce.dialogue.events import OverlapJudged, TurnIgnored
from vivavoce.errors import InputError
from vivavoce.server.admission import (
    MIN_SESSIONS,
    AdmissionController,
    LoopLoad,
    LoopMonitor,
    SessionCount,
)
from vivavoce.server.app import build_app
from vivavoce.server.config import ServerOptions
from vivavoce.server.realtime import sessions

KEY = "sk-test-1234567890"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_other_machines_are_not_let_in_without_a_key(host):
    with pytest.raises(InputError, match="key"):
        build_app(ScriptedHost(), ServerOptions(host=host))
    build_app(ScriptedHost(), ServerOptions(host=host, api_keys=(KEY,)))


def test_weak_keys_are_refused():
    for key in ("short", "with a space", "naïve-key-12345"):
        with pytest.raises(InputError, match="API key"):
            ServerOptions(api_keys=(key,)).check()


async def test_keys_open_and_wrong_keys_do_not(running, official):
    server = await running(api_keys=("another-key-123", KEY))
    for key in (None, "sk-wrong-000000000", KEY[:-1]):
        with pytest.raises(InvalidStatus) as refused:
            async with connected(server, key=key):
                pass
        assert refused.value.response.status_code == 401
        assert json.loads(refused.value.response.body)["error"]["code"] == "invalid_api_key"
    async with connected(server, key=KEY) as client:
        assert (await client.next())["type"] == "session.created"
    async with connected(server, subprotocols=["realtime", f"openai-insecure-api-key.{KEY}"]) as client:
        assert (await client.next())["type"] == "session.created"
    with pytest.raises(openai.AuthenticationError):
        await official(f"{server.http}/v1", "wrong").models.list()
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{server.http}/metrics")).status_code == 401
        assert (await http.get(f"{server.http}/healthz")).status_code == 200


async def test_a_browser_key_opens_the_session_it_is_bound_to(running, official):
    server = await running(api_keys=(KEY,))
    client = official(f"{server.http}/v1", KEY)
    session = {"type": "realtime", "instructions": "Only rhyme.", "output_modalities": ["text"]}
    expires = {"anchor": "created_at", "seconds": 60}
    secret = await client.realtime.client_secrets.create(session=session, expires_after=expires)
    assert secret.value.startswith("ek_") and secret.session.instructions == "Only rhyme."
    async with connected(server, key=secret.value) as browser:
        assert (await browser.next())["session"]["instructions"] == "Only rhyme."
        assert server.host.opened[-1].settings.instructions == "Only rhyme."
    other = official(f"{server.http}/v1", secret.value)
    with pytest.raises(openai.PermissionDeniedError):  # it makes no further keys
        await other.realtime.client_secrets.create(session=session)
    with pytest.raises(openai.BadRequestError):
        await client.realtime.client_secrets.create(session={"type": "realtime", "tools": "no list"})


async def test_a_browser_key_expires(running, official):
    server = await running(api_keys=(KEY,), browser_key_seconds=-1.0)
    client = official(f"{server.http}/v1", KEY)
    secret = await client.realtime.client_secrets.create()
    with pytest.raises(InvalidStatus):
        async with connected(server, key=secret.value):
            pass


async def test_browser_keys_as_the_beta_protocol_had_them(server):
    async with httpx.AsyncClient() as http:
        body = {"model": "gpt-4o-realtime-preview", "voice": "verse", "modalities": ["text"]}
        made = (await http.post(f"{server.http}/v1/realtime/sessions", json=body)).json()
    assert made["client_secret"]["value"].startswith("ek_") and made["output_modalities"] == ["text"]


@pytest.mark.parametrize(
    ("origin", "is_let_in"),
    [
        (None, True),
        ("http://localhost:3000", True),
        ("https://shop.example", True),
        ("https://evil.example", False),
        ("null", False),
    ],
)
async def test_pages_need_to_be_let_in(running, origin, is_let_in):
    server = await running(allowed_origins=("https://shop.example",))
    url = f"{server.ws}/v1/realtime"
    if is_let_in:
        async with websockets.connect(url, origin=origin):
            return
    with pytest.raises(InvalidStatus) as refused:
        async with websockets.connect(url, origin=origin):
            pass
    assert refused.value.response.status_code == 403


async def test_a_name_made_up_to_reach_loopback_is_refused(server):
    async with httpx.AsyncClient() as http:
        rebound = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}
        answer = await http.get(f"{server.http}/v1/models", headers=rebound)
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "unknown_host"


async def test_a_full_server_says_so_and_the_others_go_on(running, caplog):
    server = await running(max_sessions=1)
    async with connected(server) as first:
        await first.until("session.created")
        async with connected(server) as second:
            assert (await second.error())["code"] == "session_limit_reached"
            assert await second.closed() == 1013
        async with httpx.AsyncClient() as http:
            sdp = {"Content-Type": "application/sdp"}
            refused = await http.post(f"{server.http}/v1/realtime/calls", content="v=0\r\n", headers=sdp)
            assert refused.status_code == 503 and refused.headers["retry-after"]
        assert (await first.say("hello", output_modalities=["text"]))["status"] == "completed"
    (line,) = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert line == "a session was refused, session_limit_reached: 1 sessions are open, which is the limit"
    await eventually(lambda: not server.sessions, "the first left")
    async with connected(server) as third:
        await third.until("session.created")


async def test_refusals_are_counted_between_two_lines_of_the_log(caplog, monkeypatch):
    log = sessions.RefusalLog()
    for _ in range(5):
        log.note("overloaded", "the event loop is 90 ms late")
    log.note("capacity", "the cache is full")
    monkeypatch.setattr(sessions, "REFUSAL_LOG_SECONDS", 0.0)
    log.note("overloaded", "the event loop is 70 ms late")
    assert [record.getMessage() for record in caplog.records] == [
        "a session was refused, overloaded: the event loop is 90 ms late",
        "a session was refused, capacity: the cache is full",
        "a session was refused, overloaded: the event loop is 70 ms late (4 more since the last such line)",
    ]


async def test_where_the_models_are_full_a_session_without_a_client_gives_its_place(running):
    server = await running(host=ScriptedHost(room=1))
    async with connected(server) as gone:
        await gone.until("session.created")
        gone.socket.transport.abort()
    await eventually(lambda: not any(each.connections for each in server.sessions), "the server noticed")
    async with connected(server) as refused:
        assert (await refused.error())["code"] == "capacity"
    await eventually(lambda: not server.host.alive, "the other session ends")
    async with connected(server) as client:
        await client.until("session.created")


async def test_the_models_own_limit_is_the_same_error(running):
    server = await running(host=ScriptedHost(room=0))
    async with connected(server) as client:
        assert (await client.error())["code"] == "capacity"
        assert await client.closed() == 1013


async def test_a_waiting_session_gives_way_to_a_new_client(running):
    server = await running(max_sessions=1)
    async with connected(server) as first:
        await first.until("session.created")
        first.socket.transport.abort()
    await eventually(lambda: not any(session.connections for session in server.sessions), "the server noticed")
    async with connected(server) as second:
        await second.until("session.created")
    assert server.host.opened[0].is_closed


async def test_too_many_openings_from_one_address(running):
    server = await running(opens_per_minute=3)
    for _ in range(3):
        async with connected(server) as client:
            await client.until("session.created")
    async with connected(server) as client:
        assert (await client.error())["code"] == "rate_limit_exceeded"
        assert await client.closed() == 1013


async def test_sessions_are_refused_until_the_models_are_ready(running):
    server = await running(host=ScriptedHost(is_ready=False))
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{server.http}/healthz")).status_code == 200
        assert (await http.get(f"{server.http}/readyz")).status_code == 503
    async with connected(server) as client:
        assert (await client.error())["code"] == "server_not_ready"
    server.host.is_ready = True
    async with connected(server) as client:
        await client.until("session.created")


async def test_a_silent_client_is_sent_away(running):
    server = await running(idle_seconds=0.3)
    async with connected(server) as client:
        assert (await client.error())["code"] == "session_idle"
        assert await client.closed() == 1001
    await eventually(lambda: not server.host.alive, "its conversation is closed")


async def test_a_session_ends_at_its_time(running):
    server = await running(session_seconds=0.3)
    async with connected(server) as client:
        assert abs((await client.next())["session"]["expires_at"] - time.time()) < 10
        assert (await client.error())["code"] == "session_expired"
        assert await client.closed() == 1001


async def test_an_event_too_large(running):
    server = await running(max_event_bytes=100_000)
    async with connected(server) as client:
        await client.send("input_audio_buffer.append", audio="A" * 200_000)
        assert (await client.error())["code"] == "event_too_large"
        await client.send("input_audio_buffer.append", audio="A" * (3 << 20))
        assert await client.closed() == 1009
    async with connected(server) as client:
        await client.until("session.created")


async def test_uncommitted_audio_is_limited(running):
    server = await running(max_pending_bytes=1 << 20)
    async with connected(server) as client:
        await client.send("session.update", session={"audio": {"input": {"turn_detection": None}}})
        await client.until("session.updated")
        megabyte = "A" * (4 * 500_000 // 3 // 4 * 4)
        for _ in range(2):
            await client.send("input_audio_buffer.append", audio=megabyte)
        await client.send("input_audio_buffer.append", audio=megabyte)
        assert (await client.error())["code"] == "buffer_full"
        await client.send("input_audio_buffer.clear")
        await client.until("input_audio_buffer.cleared")
        await client.send("input_audio_buffer.append", audio=megabyte)
        await client.send("input_audio_buffer.commit")
        await client.until("input_audio_buffer.committed")


async def test_a_client_that_does_not_read_is_dropped_without_delaying_others(running):
    server = await running(stall_seconds=0.5, max_pending_bytes=4 << 20)
    async with connected(server, max_queue=1, close_timeout=0.1) as deaf, connected(server) as other:
        await deaf.until("session.created")
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x" * 500_000}]}
        for number in range(40):  # each is told twice, and nobody reads it
            await deaf.send("conversation.item.create", item=item | {"id": f"item_{number}"})
        for number in range(5):
            assert (await other.say(f"hello {number}", output_modalities=["text"]))["status"] == "completed"
        await eventually(lambda: sum(len(session.connections) for session in server.sessions) == 1, "it is dropped")
        assert (await other.say("still here", output_modalities=["text"]))["status"] == "completed"


async def test_nothing_said_is_logged_unless_asked(running, caplog):
    caplog.set_level("DEBUG")
    for log_content in (False, True):
        caplog.clear()
        server = await running(log_content=log_content)
        async with connected(server) as client:
            await client.say("a secret word", output_modalities=["text"])
        ours = [record.getMessage() for record in caplog.records if record.name.startswith(("vivavoce", "uvicorn"))]
        assert any("secret" in line for line in ours) is log_content


async def test_the_figures(server):
    async with connected(server) as client:
        await client.say("hello")
        await client.send("nonsense")
        await client.error()
        await eventually(lambda: next(iter(server.sessions)).encoder.main.is_idle, "the reply was heard")
        async with httpx.AsyncClient() as http:
            page = (await http.get(f"{server.http}/metrics")).text
    figures = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert figures["viva_sessions"] == "1.0"
    assert figures['viva_replies_total{reason="completed"}'] == "1.0"
    assert figures["viva_ttfa_seconds_count"] == "1.0"
    assert float(figures["viva_sound_sent_seconds_total"]) == pytest.approx(0.4)
    assert figures["viva_underruns_total"] == "0.0"
    assert figures['viva_errors_total{code="invalid_value"}'] == "1.0"
    assert figures["viva_kv_used_ratio"] == "0.25"
    assert {"viva_deadlines_missed_total", "viva_v2v_seconds_count", "viva_queue_depth"} <= figures.keys()
    assert float(figures["viva_event_loop_lag_seconds_count"]) > 0


async def test_verdicts_on_what_was_heard_are_counted(server):
    async with connected(server) as client:
        await client.until("conversation.created")
        for verdict in ("backchannel", "interruption", "backchannel"):
            server.host.opened[0].emit(OverlapJudged(verdict))
        for reason in ("not_addressed", "other_speaker", "not_addressed"):
            server.host.opened[0].emit(TurnIgnored("item_1", reason))
        for _ in range(3):
            await client.until("input_audio_buffer.cleared")
        async with httpx.AsyncClient() as http:
            page = (await http.get(f"{server.http}/metrics")).text
    assert 'viva_overlaps_total{verdict="backchannel"} 2.0' in page
    assert 'viva_overlaps_total{verdict="interruption"} 1.0' in page
    assert 'viva_turns_ignored_total{reason="not_addressed"} 2.0' in page


async def test_a_stopping_server_closes_with_a_code_for_a_reconnect(running):
    server = await running()
    async with connected(server) as client:
        await client.until("session.created")
        server._server.should_exit = True
        assert await client.closed() in (1001, 1012)
    await eventually(lambda: not server.host.alive, "its conversations are closed")


async def test_a_session_beyond_what_the_event_loop_bears_is_refused_and_the_others_go_on(running):
    server = await running(max_lag_ms=40.0)
    async with contextlib.AsyncExitStack() as stack:
        talking = [await stack.enter_async_context(connected(server)) for _ in range(MIN_SESSIONS)]
        for client in talking:
            assert (await client.next())["type"] == "session.created"
        async with asyncio.TaskGroup() as tasks:
            burning = tasks.create_task(late_callbacks(0.1))
            await eventually(lambda: server.app.state.server.loop_monitor.load.lag > 0.04, "no lag")
            async with connected(server) as refused:
                event = await refused.next()
                assert (event["type"], event["error"]["code"]) == ("error", "overloaded")
                assert await refused.closed() == 1013
            assert len(server.sessions) == MIN_SESSIONS
            burning.cancel()
        await eventually(lambda: server.app.state.server.loop_monitor.load.lag < 0.04, "still late")
        async with connected(server) as admitted:
            assert (await admitted.next())["type"] == "session.created"


async def late_callbacks(seconds: float) -> None:
    """Keeps the event loop from its other callbacks, as too many sessions do."""
    while True:
        time.sleep(seconds)
        await asyncio.sleep(0)


def test_sessions_without_an_answer_are_limited_until_others_were_answered():
    controller = AdmissionController(LoopMonitor(), ServerOptions())
    most = controller.max_unanswered
    assert controller.refusal(SessionCount(most - 1, most - 1)) is None
    assert "first answer" in controller.refusal(SessionCount(most, most))
    assert controller.refusal(SessionCount(3 * most, most)) is None


def test_load_is_extrapolated_to_one_more_session():
    controller = AdmissionController(LoopMonitor(), ServerOptions(max_lag_ms=50.0))
    controller.other_loops = lambda: {"door 1": LoopLoad(lag=0.008, worst_lag=0.02, busy=0.85)}
    assert controller.refusal(SessionCount(100, 0)) is None
    assert "door 1 is busy for 85%" in controller.refusal(SessionCount(10, 0))
