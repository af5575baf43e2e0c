"""`viva serve --tool-model`: mini-speech talks, and a chat model in another process decides on its tool calls."""

import base64
import json

import numpy as np
import openai
import pytest

from tests.hosting.processes import chat_server, viva_serve
from tests.hosting.test_cascade import one_turn
from vivavoce import hub
from vivavoce.audio.io import float_to_pcm16, read
from vivavoce.dialogue.fillers import FILLERS

RATE = 24_000
TOOL = {"type": "function", "name": "breakfast", "description": "Breakfast hours", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def address():
    with (
        chat_server() as chat,
        viva_serve("--model", "mini-speech", "--tool-model", chat, VIVA_CHAT_KEY="chat-secret") as address,
    ):
        yield address


async def ask(connection, name="15-breakfast"):
    sound = read(hub.BUNDLED / "questions" / f"{name}.opus").resampled(RATE).mono().samples[0]
    await connection.input_audio_buffer.append(audio=base64.b64encode(float_to_pcm16(sound)).decode())
    await connection.input_audio_buffer.commit()
    await connection.response.create()
    return await one_turn(connection)


@pytest.mark.full
async def test_while_a_tool_works_the_speech_model_fills_the_silence():
    with (
        chat_server() as chat,
        viva_serve(
            *("--model", "mini-speech", "--tool-model", chat, "--filler-seconds", "0.3"), VIVA_CHAT_KEY="chat-secret"
        ) as address,
    ):
        async with (
            openai.AsyncOpenAI(api_key="any", base_url=f"http://{address}/v1", max_retries=0) as client,
            client.realtime.connect(model="mini-speech") as connection,
        ):
            manual = {"input": {"turn_detection": None}}
            await connection.session.update(session={"type": "realtime", "tools": [TOOL], "audio": manual})
            turns = [await ask(connection)]
            while turns[-1].response.metadata != {"viva": "filler"} or not is_call(turns):
                turns.append(await one_turn(connection))
            filler = turns[-1]
            assert filler.response.status == "completed" and filler.words.strip() in FILLERS["en"]
            assert np.abs(np.frombuffer(filler.sound, np.int16)).max() > 1000
            (call,) = next(turn.response.output for turn in turns if turn.arguments)
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "seven to ten"}
            await connection.conversation.item.create(item=output)
            await connection.response.create()
            answer = await one_turn(connection)
            while answer.response.metadata == {"viva": "filler"}:
                answer = await one_turn(connection)
            assert answer.response.status == "completed" and len(answer.sound) > RATE // 2


def is_call(turns) -> bool:
    """Whether one of these turns has called a tool."""
    return any(turn.arguments for turn in turns)


@pytest.mark.full
async def test_a_spoken_question_becomes_a_call_and_its_output_is_followed_by_speech(address):
    async with (
        openai.AsyncOpenAI(api_key="any", base_url=f"http://{address}/v1", max_retries=0) as client,
        client.realtime.connect(model="mini-speech") as connection,
    ):
        manual = {"input": {"turn_detection": None}}
        await connection.session.update(session={"type": "realtime", "tools": [TOOL], "audio": manual})
        (call,) = (await ask(connection)).response.output
        assert (call.type, call.name) == ("function_call", "breakfast") and json.loads(call.arguments) == {"seats": 3}
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "seven to ten"}
        await connection.conversation.item.create(item=output)
        await connection.response.create()
        answer = await one_turn(connection)
        assert answer.response.status == "completed" and len(answer.sound) > RATE // 2
        free = {"type": "realtime", "tools": [TOOL], "tool_choice": "none"}
        await connection.session.update(session=free)
        spoken = await ask(connection)
        assert [item.type for item in spoken.response.output] == ["message"] and "seven" in spoken.words
        await connection.session.update(session={"type": "realtime", "tools": [{**TOOL, "name": "helicopter"}]})
        spoken = await ask(connection)
        assert [item.type for item in spoken.response.output] == ["message"] and "seven" in spoken.words
