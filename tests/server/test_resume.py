"""A client that was cut off comes back, and nothing is lost or told twice."""

import asyncio
import base64

import pytest

from tests.server.harness import Client, connected, eventually
from tests.server.scripted import pitch, tone, watermark
from vivavoce.server.realtime.audio_formats import WireFormat, decode, encode

RATE = 24_000


def vanish(client: Client) -> None:
    """Cut the connection as a broken network does: without a word."""
    client.socket.transport.abort()


async def started(client: Client, text: str) -> tuple[str, str]:
    """A session in which a long reply is being spoken; its id and token."""
    session = (await client.until("session.created"))["session"]
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    await client.send("conversation.item.create", item=item)
    await client.send("response.create")
    await client.until("response.output_audio.delta")
    return session["id"], session["viva"]["resume_token"]


def resuming(session: str, token: str, last: str | None) -> str:
    return f"?session_id={session}&resume_token={token}" + (f"&last_event_id={last}" if last else "")


def numbers(client: Client) -> list[int]:
    events = [event for event in client.events if event["type"] != "viva.session.resumed"]
    return [int(event["event_id"].rpartition("_")[2]) for event in events]


async def test_nothing_is_lost(server):
    async with connected(server) as client:
        session, token = await started(client, "something")
        vanish(client)
    await eventually(lambda: not any(each.connections for each in server.sessions), "the server noticed")
    async with connected(server, resuming(session, token, client.events[-1]["event_id"])) as again:
        resumed = await again.next()
        assert resumed["type"] == "viva.session.resumed" and resumed["session"]["id"] == session
        assert resumed["lost_events"] == 0
        await again.until("response.done")
        both = numbers(client) + numbers(again)
        assert both == list(range(1, len(both) + 1))
        sound = decode(client.sound() + again.sound(), WireFormat())
        assert len(sound) == round(0.4 * RATE)
        assert abs(pitch(sound, RATE) - watermark("You said: something")) < 5
        assert (await again.say("and on", output_modalities=["text"]))["status"] == "completed"


async def test_events_that_were_sent_but_never_arrived_are_sent_again(server):
    async with connected(server) as client:
        session, token = await started(client, "something")
        await client.until("response.done")
        known = client.events[4]["event_id"]  # as if all after it had been lost on the way
        vanish(client)
    await eventually(lambda: not any(each.connections for each in server.sessions), "the server noticed")
    async with connected(server, resuming(session, token, known)) as again:
        await again.until("response.done")
        assert again.events[1:] == client.events[5:]


async def test_sound_waits_for_the_listener(server):
    async with connected(server) as client:
        session, token = await started(client, "a long one")
        vanish(client)
    await eventually(lambda: not any(each.connections for each in server.sessions), "the server noticed")
    output = next(iter(server.sessions)).encoder.main
    held = output.held_seconds
    assert held > 15
    await asyncio.sleep(0.3)
    assert output.held_seconds == held
    async with connected(server, resuming(session, token, client.events[-1]["event_id"])) as again:
        await again.until("response.output_audio.delta")
        assert output.held_seconds < held


async def test_the_client_learns_what_of_its_sound_arrived(server):
    async with connected(server) as client:
        session = (await client.until("session.created"))["session"]
        await client.speak(tone(500, 0.3, RATE))
        await client.send("session.update", session={}, event_id="my_last")
        await client.until("session.updated")
        vanish(client)
    await eventually(lambda: not any(each.connections for each in server.sessions), "the server noticed")
    query = resuming(session["id"], session["viva"]["resume_token"], client.events[-1]["event_id"])
    async with connected(server, query) as again:
        resumed = await again.next()
        assert resumed["last_client_event_id"] == "my_last"
        assert resumed["received_audio_ms"] == pytest.approx(300, abs=10)  # but for the resampler's lag
        silence = base64.b64encode(encode(tone(500, 0.5, RATE) * 0, WireFormat())).decode()
        await again.send("input_audio_buffer.append", audio=silence)
        assert (await again.until("response.done"))["response"]["status"] == "completed"


async def test_a_second_connection_takes_over_from_the_first(server):
    async with connected(server) as client:
        session, token = await started(client, "a long one")
        async with connected(server, resuming(session, token, client.events[-1]["event_id"])) as again:
            await again.until("response.output_audio.delta")
            assert await client.closed() == 4001
    assert len(server.host.opened) == 1


async def test_a_wrong_token_opens_nothing(server):
    async with connected(server) as client:
        session, _ = await started(client, "a long one")
        for query in (resuming(session, "wrong", None), resuming("sess_none", "wrong", None)):
            async with connected(server, query) as thief:
                assert (await thief.error())["code"] == "session_gone"
                await thief.socket.wait_closed()
                assert thief.socket.close_code == 1008
        await client.until("response.output_audio.delta")


async def test_a_session_without_a_client_ends_after_the_resume_time(running):
    server = await running(resume_seconds=0.2)
    async with connected(server) as client:
        session, token = await started(client, "a long one")
        vanish(client)
    await eventually(lambda: not server.sessions and not server.host.alive, "the session ends")
    async with connected(server, resuming(session, token, None)) as late:
        assert (await late.error())["code"] == "session_gone"


async def test_a_deliberate_close_ends_the_session(server):
    async with connected(server) as client:
        await started(client, "a long one")
    await eventually(lambda: not server.sessions and not server.host.alive, "the session ends")
