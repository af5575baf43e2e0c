"""LiveKit's OpenAI realtime model against our server, unmodified: turn, barge-in with its words, tool, reconnect."""

import asyncio

import pytest

from tests.server.harness import DEADLINE, drop_connections, eventually
from tests.server.scripted import tone
from tests.server.stock_clients import stock_client
from vivavoce.dialogue.items import TextPart
from vivavoce.server.realtime.audio_formats import WireFormat, encode

pytestmark = pytest.mark.full
RATE = 24_000


@pytest.fixture
async def session(server):
    realtime = stock_client("livekit.plugins.openai").realtime
    model = realtime.RealtimeModel(base_url=f"{server.http}/v1", api_key="unused", model="gpt-realtime")
    session = model.session()
    session.errors = []
    session.on("error", session.errors.append)
    yield session
    await session.aclose()
    await model.aclose()


async def words_of(generation) -> str:
    async for message in generation.message_stream:
        return "".join([text async for text in message.text_stream])
    return ""


async def ask(session, text: str):
    """The reply to a text, once it has begun."""
    from livekit.agents.llm import ChatContext

    context = session.chat_ctx.copy() if session.chat_ctx.items else ChatContext.empty()
    context.add_message(role="user", content=text)
    await asyncio.wait_for(session.update_chat_ctx(context), DEADLINE)
    return await asyncio.wait_for(session.generate_reply(), DEADLINE)


async def test_a_turn_and_an_interruption(session):
    reply = await ask(session, "good evening")
    assert await asyncio.wait_for(words_of(reply), DEADLINE) == "You said: good evening"
    reply = await ask(session, "a long one")
    message = await asyncio.wait_for(anext(aiter(reply.message_stream)), DEADLINE)
    await asyncio.wait_for(anext(aiter(message.audio_stream)), DEADLINE)
    started = asyncio.Event()
    session.on("input_speech_started", lambda event: started.set())
    from livekit import rtc

    data = encode(tone(700, 0.3, RATE), WireFormat())
    session.push_audio(rtc.AudioFrame(data, RATE, 1, len(data) // 2))
    await asyncio.wait_for(started.wait(), DEADLINE)
    session.truncate(message_id=message.message_id, modalities=["audio"], audio_end_ms=100)
    async with asyncio.timeout(DEADLINE):
        words = "".join([text async for text in message.text_stream])
    assert words.startswith("You said")
    assert not session.errors


async def test_a_tool_is_called_and_answered(session):
    from livekit.agents import function_tool
    from livekit.agents.llm import FunctionCallOutput

    @function_tool
    async def weather(place: str) -> str:
        """Tell the weather."""
        return "rain"

    await asyncio.wait_for(session.update_tools([weather]), DEADLINE)
    reply = await ask(session, "the weather, please")
    async with asyncio.timeout(DEADLINE):
        call = await anext(aiter(reply.function_stream))
    assert (call.name, call.arguments) == ("weather", '{"place": "here"}')
    context = session.chat_ctx.copy()
    context.items.append(FunctionCallOutput(call_id=call.call_id, name="weather", output="rain", is_error=False))
    await asyncio.wait_for(session.update_chat_ctx(context), DEADLINE)
    answer = await asyncio.wait_for(session.generate_reply(), DEADLINE)
    assert await asyncio.wait_for(words_of(answer), DEADLINE) == "You said: rain"
    assert not session.errors


async def test_it_reconnects_and_its_history_comes_along(session, server):
    reply = await ask(session, "good evening")
    assert await asyncio.wait_for(words_of(reply), DEADLINE) == "You said: good evening"
    reconnected = asyncio.Event()
    session.on("session_reconnected", lambda event: reconnected.set())
    drop_connections(server)
    await asyncio.wait_for(reconnected.wait(), DEADLINE)
    await eventually(lambda: len(session.chat_ctx.items) == 2, "its history is on the server again")
    reply = await ask(session, "good morning")
    assert await asyncio.wait_for(words_of(reply), DEADLINE) == "You said: good morning"
    conversation = server.host.alive[-1]  # the first one can still be resumed
    said = [part.text for item in conversation.items for part in item.content.parts if isinstance(part, TextPart)]
    assert said[:2] == ["good evening", "You said: good evening"]
