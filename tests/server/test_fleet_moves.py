"""What becomes of a session whose replica is lost, hangs or is to go."""

import asyncio
import base64

import numpy as np
import pytest
from websockets.utils import accept_key

from tests.server.fleets import INNER_KEY, RATE, said, texts
from tests.server.harness import connected, eventually
from tests.server.scripted import pitch, tone
from tests.server.test_resume import resuming, vanish
from vivavoce.server.cluster import router
from vivavoce.server.cluster.registry import ReplicaReport
from vivavoce.server.realtime.audio_formats import WireFormat, decode

pytest.importorskip("aiohttp", reason="an ingress needs what comes with Ray Serve: pip install 'vivavoce[ray]'")


async def test_a_lost_replica_is_reported_and_the_session_continues(fleet_of):
    fleet = await fleet_of(4, 4)
    async with connected(fleet) as client, connected(fleet) as other:
        await other.until("session.created")
        await client.send("session.update", session={"instructions": "Be brief."})
        await client.until("session.updated")
        session = client.events[0]["session"]["id"]
        assert await said(client, "a table for three") == "You said: a table for three"
        await started_again(client, "a long one")
        dead = fleet.home_of(session)
        fleet.kill(dead)
        assert (await client.error())["code"] == "replica_lost"
        done = (await client.until("response.done"))["response"]
        assert done["status"] == "failed" and done["status_details"]["error"]["code"] == "replica_lost"
        assert await said(client, "still here") == "You said: still here"
        assert fleet.home_of(session) != dead
        items = await texts(client)
        assert items[:2] == [("user", "a table for three"), ("assistant", "You said: a table for three")]
        assert items[2] == ("user", "a long one") and items[3][0] == "assistant"
        assert items[4:] == [("user", "still here"), ("assistant", "You said: still here")]
        alive = fleet.behind[fleet.home_of(session)][1]
        assert alive.host.opened[-1].settings.instructions == "Be brief."
        assert await said(other, "me too") == "You said: me too"
        assert not other.of_type("error")
        assert {event["response"]["conversation_id"] for event in client.of_type("response.done")} == {
            f"conv_{session[5:]}"
        }


def first_socket_without_answers(app):
    """The application, which hears nothing from the first socket that it accepts from now on."""
    sockets = []

    async def serve(scope, receive, send):
        is_first = scope["type"] == "websocket" and not sockets
        if is_first:
            sockets.append(scope)

        async def without_messages():
            message = await receive()
            while message["type"] == "websocket.receive":
                message = await receive()
            return message

        await app(scope, without_messages if is_first else receive, send)

    return serve


async def test_a_session_that_could_not_be_restored_at_once_holds_no_second_place(fleet_of, monkeypatch):
    monkeypatch.setattr(router, "ANSWER_SECONDS", 0.5)
    fleet = await fleet_of(1, 1)
    async with connected(fleet) as client:
        session = (await client.until("session.created"))["session"]["id"]
        assert await said(client, "a table for three") == "You said: a table for three"
        dead = fleet.home_of(session)
        (other,) = set(fleet.behind) - {dead}
        replica = fleet.behind[other][1]
        config = replica._server.config
        config.loaded_app = first_socket_without_answers(config.loaded_app)
        fleet.kill(dead)
        assert (await client.error())["code"] == "replica_lost"
        assert await said(client, "still here") == "You said: still here"
        assert len(replica.host.opened) == 2 and len(replica.sessions) == 1


async def hang(reader, writer) -> None:
    """A server that accepts a socket and says nothing on it, not even when it is closed."""
    request = (await reader.readuntil(b"\r\n\r\n")).decode()
    key = next(line.split(": ")[1] for line in request.split("\r\n") if line.lower().startswith("sec-websocket-key"))
    accept = f"Sec-WebSocket-Accept: {accept_key(key)}\r\n\r\n"
    writer.write(f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{accept}".encode())
    await reader.read()
    writer.close()


async def test_a_replica_that_hangs_delays_a_new_session_by_its_own_time_only(fleet_of, monkeypatch, caplog):
    monkeypatch.setattr(router, "ANSWER_SECONDS", 0.5)
    fleet = await fleet_of(2)
    async with await asyncio.start_server(hang, "127.0.0.1", 0) as hanging:
        url = "http://{}:{}".format(*hanging.sockets[0].getsockname())
        fleet.registry.report(ReplicaReport("hanging", "speech", url, INNER_KEY, 100, 0, 0))
        await eventually(lambda: len(fleet.registry.replicas()) == 2, "both are known")
        busy = fleet.registry.admit("speech", {"hanging"})
        assert busy.replica == "speech-0"  # so that the other is less occupied
        async with asyncio.timeout(5), connected(fleet) as client:
            await client.until("session.created")
    assert "replica hanging did not take a session" in caplog.text


async def started_again(client, text: str) -> None:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    await client.send("conversation.item.create", item=item)
    await client.send("response.create")
    for _ in range(3):
        await client.until("response.output_audio.delta")


async def test_what_was_spoken_and_heard_comes_along(fleet_of):
    fleet = await fleet_of(4, 4)
    async with connected(fleet) as client:
        session = (await client.until("session.created"))["session"]["id"]
        await client.speak(np.concatenate([tone(500, 0.4, RATE), tone(500, 0.4, RATE) * 0]))
        await client.until("response.done")
        spoken = client.of_type("input_audio_buffer.committed")[0]["item_id"]
        await client.speak(tone(900, 0.4, RATE))
        began = await client.until("input_audio_buffer.speech_started")
        fleet.kill(fleet.home_of(session))
        assert (await client.error())["code"] == "replica_lost"
        await client.speak(tone(900, 0.4, RATE) * 0)
        ended = await client.until("input_audio_buffer.speech_stopped")
        assert ended["audio_end_ms"] > began["audio_start_ms"] > 300
        await client.until("response.done")
        second = client.of_type("input_audio_buffer.committed")[-1]["item_id"]
        assert second != spoken
        for item, frequency in ((spoken, 500), (second, 900)):
            await client.send("conversation.item.retrieve", item_id=item)
            part = (await client.until("conversation.item.retrieved"))["item"]["content"][0]
            sound = decode(base64.b64decode(part["audio"]), WireFormat())
            assert abs(pitch(sound, RATE) - frequency) < 10


async def test_what_a_replica_took_and_did_not_answer_is_asked_of_the_next(fleet_of):
    fleet = await fleet_of(4, 4)
    async with connected(fleet) as client:
        session = (await client.until("session.created"))["session"]["id"]
        home = fleet.behind[fleet.home_of(session)][1]
        for held in home.sessions:
            held.log._append = lambda payload, size, numbers: None  # what it tells reaches nobody any more
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a table for three"}]}
        await client.send("conversation.item.create", item=item)
        await client.send("response.create", response={"output_modalities": ["text"]})
        await eventually(lambda: len(home.host.opened[-1].items) >= 1, "it was taken")
        fleet.kill(fleet.home_of(session))
        assert (await client.error())["code"] == "replica_lost"
        done = (await client.until("response.done"))["response"]
        assert done["output"][0]["content"][0]["text"] == "You said: a table for three"


async def test_a_client_that_comes_back_finds_its_session_opened_again(fleet_of):
    fleet = await fleet_of(4, 4)
    async with connected(fleet) as client:
        session = (await client.until("session.created"))["session"]
        await said(client, "a table for three")
        vanish(client)
    home = fleet.home_of(session["id"])
    await eventually(lambda: not any(each.connections for each in fleet.behind[home][1].sessions), "it noticed")
    fleet.kill(home)
    query = resuming(session["id"], session["viva"]["resume_token"], client.events[-1]["event_id"])
    async with connected(fleet, query) as again:
        assert (await again.next())["session"]["id"] == session["id"]
        assert await said(again, "and on") == "You said: and on"
        host = fleet.behind[fleet.home_of(session["id"])][1].host
        assert len(host.opened[-1].items) == 4


async def test_sessions_leave_a_replica_that_is_to_go_when_they_are_quiet(fleet_of):
    fleet = await fleet_of(4, 4)
    async with connected(fleet) as quiet, connected(fleet) as other:
        await said(quiet, "a table for three")
        await other.until("session.created")
        id = quiet.events[0]["session"]["id"]
        leaving = fleet.home_of(id)
        await started_again(quiet, "a long one")
        fleet.draining.add(leaving)
        while quiet.sound() and len(quiet.of_type("response.output_audio.delta")) < 12:
            await quiet.next()
        assert fleet.home_of(id) == leaving  # it speaks
        await quiet.send("response.cancel")
        await quiet.until("response.done")
        await eventually(lambda: fleet.home_of(id) != leaving, "it left")
        await eventually(lambda: not fleet.behind[leaving][1].sessions, "nobody is left")
        assert await said(quiet, "still here") == "You said: still here"
        assert not quiet.of_type("error")
        items = fleet.behind[fleet.home_of(id)][1].host.opened[-1].items
        assert len(items) == 6


async def test_a_session_without_another_place_stays(fleet_of):
    fleet = await fleet_of(1)
    async with connected(fleet) as client:
        await said(client, "a table for three")
        fleet.draining.add("speech-0")
        await asyncio.sleep(0.6)
        assert await said(client, "still here") == "You said: still here"
        assert not client.of_type("error")
