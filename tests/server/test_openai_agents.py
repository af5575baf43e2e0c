"""The unmodified `openai-agents` package against our server, over its own WebSocket transport."""

import asyncio

import numpy as np
import pytest

from tests.server.harness import DEADLINE, drop_connections, eventually
from tests.server.scripted import pitch, tone, watermark
from vivavoce.server.realtime.audio_formats import WireFormat, decode, encode

RATE = 24_000


def weather(place: str) -> str:
    """Tell the weather."""
    return f"rain {place}"


def runner(**settings):
    from agents import function_tool  # a second to load, and every worker collects this file
    from agents.realtime import RealtimeAgent, RealtimeRunner

    agent = RealtimeAgent(name="guide", instructions="Be brief.", tools=[function_tool(weather)])
    return RealtimeRunner(agent, config={"model_settings": {"model_name": "gpt-realtime", **settings}})


def connection(server) -> dict:
    return {"api_key": "unused", "url": f"{server.ws}/v1/realtime?model=gpt-realtime"}


class Seen(list):
    """Events of a session, collected until one fits; errors of the client are failures."""

    async def until(self, session, fits):
        async with asyncio.timeout(DEADLINE):
            async for event in session:
                self.append(event)
                assert event.type != "error", event.error
                if fits(event):
                    return event
        raise AssertionError("the session ended")

    def audio(self) -> bytes:
        return b"".join(event.audio.data for event in self if event.type == "audio")


def is_raw(kind: str):
    """A server event that reached the client as it is."""

    def fits(event):
        return (
            event.type == "raw_model_event"
            and event.data.type == "raw_server_event"
            and event.data.data["type"] == kind
        )

    return fits


def is_type(kind: str):
    return lambda event: event.type == kind


async def test_text_turn_in_the_history(server):
    async with await runner().run(model_config=connection(server)) as session:
        await session.send_message("good evening")
        seen = Seen()
        await seen.until(session, is_raw("response.done"))
        last = [event for event in seen if event.type in ("history_updated", "history_added")][-1]
        history = last.history if last.type == "history_updated" else [last.item]
        assert history[-1].role == "assistant"
        assert history[-1].content[0].transcript == "You said: good evening"


async def test_audio_turn(server):
    async with await runner().run(model_config=connection(server)) as session:
        sound = np.concatenate([tone(500, 0.5, RATE), np.zeros(RATE // 2, np.float32)])
        for begin in range(0, len(sound), 2400):
            await session.send_audio(encode(sound[begin : begin + 2400], WireFormat()))
        seen = Seen()
        await seen.until(session, is_type("audio_end"))
        assert abs(pitch(decode(seen.audio(), WireFormat()), RATE) - watermark("You said: tone 500")) < 5


async def test_the_users_words_reach_the_history(server):
    settings = {"input_audio_transcription": {"model": "gpt-4o-mini-transcribe"}}
    async with await runner(**settings).run(model_config=connection(server)) as session:
        sound = np.concatenate([tone(500, 0.5, RATE), np.zeros(RATE // 2, np.float32)])
        await session.send_audio(encode(sound, WireFormat()))

        def is_understood(event):
            history = getattr(event, "history", None) or []
            parts = [part for item in history if getattr(item, "role", "") == "user" for part in item.content]
            return any(getattr(part, "transcript", None) == "tone 500" for part in parts)

        await Seen().until(session, is_understood)


async def test_tool_call_is_run_and_answered(server):
    async with await runner().run(model_config=connection(server)) as session:
        await session.send_message("the weather")
        seen = Seen()
        end = await seen.until(session, is_type("tool_end"))
        assert end.output == "rain here"
        await seen.until(session, lambda event: event.type == "audio_end")
        assert abs(pitch(decode(seen.audio(), WireFormat()), RATE) - watermark("You said: rain here")) < 5


async def test_barge_in_stops_the_sound(server):
    async with await runner().run(model_config=connection(server)) as session:
        await session.send_message("a long one")
        seen = Seen()
        await seen.until(session, is_type("audio"))
        await session.send_audio(encode(tone(700, 0.2, RATE), WireFormat()))
        await seen.until(session, is_type("audio_interrupted"))
        done = await seen.until(session, is_raw("response.done"))
        assert done.data.data["response"]["status"] == "cancelled"
        assert len(seen.audio()) / 2 / RATE < 2.0
        updates = [event for event in seen if event.type == "history_updated"]
        said = [item for item in updates[-1].history if getattr(item, "role", "") == "assistant"]
        assert said[-1].content[0].transcript.startswith("You said"), "the words that were heard are kept"


async def test_a_dropped_connection_ends_the_session_and_the_next_one_works(server):
    agent = runner()
    async with await agent.run(model_config=connection(server)) as session:
        await session.send_message("good evening")
        await Seen().until(session, is_raw("response.done"))
        drop_connections(server)
        await eventually(session.model._websocket_task.done, "the client noticed")
    async with await agent.run(model_config=connection(server)) as session:
        await session.send_message("good morning")
        done = await Seen().until(session, is_raw("response.done"))
        assert done.data.data["response"]["output"][0]["content"][0]["transcript"] == "You said: good morning"


async def test_interrupt_by_hand(server):
    async with await runner().run(model_config=connection(server)) as session:
        await session.send_message("a long one, wait")
        seen = Seen()
        await seen.until(session, is_type("audio"))
        await session.interrupt()
        done = await seen.until(session, is_raw("response.done"))
        assert done.data.data["response"]["status"] == "cancelled"


async def test_a_wrong_request_is_an_error_event_and_the_session_goes_on(server):
    async with await runner().run(model_config=connection(server)) as session:
        from agents.realtime.model_inputs import RealtimeModelSendRawMessage

        wrong = {"type": "conversation.item.delete", "other_data": {"item_id": "nonsense"}}
        await session.model.send_event(RealtimeModelSendRawMessage(message=wrong))
        async with asyncio.timeout(DEADLINE):
            async for event in session:
                if event.type == "error":
                    assert "nonsense" in str(event.error)
                    break
        await session.send_message("still there?")
        await Seen().until(session, is_type("audio_end"))


@pytest.fixture(autouse=True)
def no_tracing(monkeypatch):
    """The package would otherwise try to reach its maker's server."""
    from agents import set_tracing_disabled

    set_tracing_disabled(True)
