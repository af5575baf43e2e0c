"""The unmodified `openai` package against our server: only its base URL is changed."""

import asyncio
import base64

import numpy as np
import openai
import pytest
import websockets

from tests.server.harness import DEADLINE, drop_connections
from tests.server.scripted import ScriptedHost, pitch, tone, watermark
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.server.realtime.audio_formats import WireFormat, decode, encode

RATE = 24_000
USER = {"type": "message", "role": "user"}


def says(text: str) -> dict:
    return USER | {"content": [{"type": "input_text", "text": text}]}


@pytest.fixture
async def client(server):
    async with openai.AsyncOpenAI(base_url=f"{server.http}/v1", api_key="unused") as client:
        yield client


async def until(connection, kind: str, seen: list | None = None):
    async with asyncio.timeout(DEADLINE):
        async for event in connection:
            if seen is not None:
                seen.append(event)
            if event.type == kind:
                return event
    raise AssertionError(f"the connection ended before {kind}")


async def test_text_turn(client):
    async with client.realtime.connect(model="gpt-realtime") as connection:
        created = await connection.recv()
        assert created.type == "session.created" and created.session.model == "scripted-1"
        await connection.session.update(session={"type": "realtime", "output_modalities": ["text"]})
        updated = await until(connection, "session.updated")
        assert updated.session.output_modalities == ["text"]
        await connection.conversation.item.create(item=says("good morning"))
        await connection.response.create()
        done = await until(connection, "response.output_text.done")
        assert done.text == "You said: good morning"
        finished = await until(connection, "response.done")
        assert finished.response.status == "completed"
        assert finished.response.usage.output_token_details.audio_tokens == 11


async def test_audio_turn_with_server_voice_activity(client):
    async with client.realtime.connect(model="gpt-realtime") as connection:
        samples = np.concatenate([tone(500, 0.5, RATE), np.zeros(RATE // 2, np.float32)])
        for begin in range(0, len(samples), 2400):
            piece = base64.b64encode(encode(samples[begin : begin + 2400], WireFormat())).decode()
            await connection.input_audio_buffer.append(audio=piece)
        seen = []
        await until(connection, "response.done", seen)
        assert {"input_audio_buffer.speech_started", "input_audio_buffer.committed"} <= {event.type for event in seen}
        sound = b"".join(base64.b64decode(event.delta) for event in seen if event.type == "response.output_audio.delta")
        assert abs(pitch(decode(sound, WireFormat()), RATE) - watermark("You said: tone 500")) < 5


async def test_server_vad_without_values_waits_as_long_as_openais(running, official):
    server = await running(host=ScriptedHost(settings=ConversationSettings()))
    async with official(f"{server.http}/v1", "unused").realtime.connect(model="gpt-realtime") as connection:
        detection = (await connection.recv()).session.audio.input.turn_detection
        assert (detection.threshold, detection.prefix_padding_ms, detection.silence_duration_ms) == (0.5, 300, 500)
        await connection.session.update(
            session={"type": "realtime", "audio": {"input": {"turn_detection": {"type": "server_vad"}}}}
        )
        updated = (await until(connection, "session.updated")).session.audio.input.turn_detection
        assert updated == detection


async def test_audio_turn_committed_by_hand(client):
    async with client.realtime.connect(model="gpt-realtime") as connection:
        await connection.session.update(session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
        assert (await until(connection, "session.updated")).session.audio.input.turn_detection is None
        sound = base64.b64encode(encode(tone(600, 0.3, RATE), WireFormat())).decode()
        await connection.input_audio_buffer.append(audio=sound)
        await connection.input_audio_buffer.commit()
        seen = []
        item = (await until(connection, "conversation.item.done", seen)).item
        assert [event.type for event in seen] == [
            "input_audio_buffer.committed",
            "conversation.item.added",
            "conversation.item.done",
        ]
        assert item.content[0].type == "input_audio" and item.content[0].transcript is None
        await connection.conversation.item.retrieve(item_id=item.id)
        whole = (await until(connection, "conversation.item.retrieved")).item
        heard = decode(base64.b64decode(whole.content[0].audio), WireFormat())
        assert abs(pitch(heard, RATE) - 600) < 5 and abs(len(heard) / RATE - 0.3) < 0.01
        await connection.response.create()
        assert (await until(connection, "response.done")).response.status == "completed"


async def test_tool_call_and_its_output(client):
    tool = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": {"type": "object"}}
    async with client.realtime.connect(model="gpt-realtime") as connection:
        await connection.session.update(
            session={"type": "realtime", "tools": [tool], "output_modalities": ["text"], "tool_choice": "auto"}
        )
        await until(connection, "session.updated")
        await connection.conversation.item.create(item=says("the weather, please"))
        await connection.response.create()
        seen = []
        response = (await until(connection, "response.done", seen)).response
        call = response.output[0]
        arguments = "".join(event.delta for event in seen if event.type == "response.function_call_arguments.delta")
        assert call.type == "function_call" and call.name == "weather" and call.status == "completed"
        assert call.arguments == arguments == '{"place": "here"}'
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        await connection.conversation.item.create(item=output)
        await connection.response.create()
        assert (await until(connection, "response.output_text.done")).text == "You said: sunny"


async def test_interruption_truncate_and_retrieve(client):
    async with client.realtime.connect(model="gpt-realtime") as connection:
        await connection.conversation.item.create(item=says("a long one"))
        await connection.response.create()
        first = await until(connection, "response.output_audio.delta")
        loud = base64.b64encode(encode(tone(700, 0.2, RATE), WireFormat())).decode()
        await connection.input_audio_buffer.append(audio=loud)
        seen = []
        done = (await until(connection, "response.done", seen)).response
        assert done.status == "cancelled" and done.status_details.reason == "turn_detected"
        sent = sum(len(base64.b64decode(e.delta)) for e in seen if e.type == "response.output_audio.delta") / 2 / RATE
        assert sent < 10.0  # of the 20 seconds that were made, however late the server hears
        await connection.conversation.item.truncate(item_id=first.item_id, content_index=0, audio_end_ms=10)
        await until(connection, "conversation.item.truncated")
        await connection.conversation.item.retrieve(item_id=first.item_id)
        kept = (await until(connection, "conversation.item.retrieved")).item
        assert len(base64.b64decode(kept.content[0].audio)) <= 0.01 * RATE * 2 + 2


@pytest.mark.parametrize("resumes", [False, True])
async def test_a_dropped_connection_is_opened_again_by_the_client(client, server, resumes):
    """As it is, a new session begins; with the resume token in the query, the old one goes on."""
    query: dict[str, str] = {}
    options = {"on_reconnecting": lambda event: {"extra_query": query}, "initial_delay": 0.01}
    async with client.realtime.connect(model="gpt-realtime", **options) as connection:
        created = (await until(connection, "session.created")).session
        await connection.conversation.item.create(item=says("good evening"))
        await connection.response.create(response={"output_modalities": ["text"]})
        item = (await until(connection, "response.done")).response.output[0]
        if resumes:
            query |= {"session_id": created.id, "resume_token": created.viva["resume_token"]}
        drop_connections(server)
        again = await until(connection, "viva.session.resumed" if resumes else "session.created")
        session = again.session["id"] if isinstance(again.session, dict) else again.session.id
        assert (session == created.id) == resumes
        await connection.conversation.item.retrieve(item_id=item.id)
        if resumes:
            assert (await until(connection, "conversation.item.retrieved")).item.id == item.id
        else:
            assert (await until(connection, "error")).error.code == "item_retrieve_invalid_item_id"


async def test_cancel_delete_and_errors(client):
    async with client.realtime.connect(model="gpt-realtime") as connection:
        await connection.response.cancel()
        assert (await until(connection, "error")).error.code == "response_cancel_not_active"
        await connection.conversation.item.create(item=says("please wait"))
        await connection.response.create()
        await until(connection, "response.output_audio.delta")
        await connection.response.create(event_id="second")
        assert (await until(connection, "error")).error.event_id == "second"
        await connection.response.cancel()
        cancelled = (await until(connection, "response.done")).response
        assert cancelled.status_details.reason == "client_cancelled"
        await connection.conversation.item.delete(item_id=cancelled.output[0].id)
        assert (await until(connection, "conversation.item.deleted")).item_id == cancelled.output[0].id
        await connection.conversation.item.delete(item_id="nobody")
        assert "nobody" in (await until(connection, "error")).error.message


async def test_errors_have_the_codes_and_the_words_that_frameworks_look_for(client):
    async with client.realtime.connect(model="gpt-realtime") as connection:
        await connection.conversation.item.create(item=says("please wait") | {"id": "mine"})
        await connection.response.create()
        reply = (await until(connection, "response.created")).response.id

        async def refused(sending) -> tuple[str | None, str]:
            await sending
            error = (await until(connection, "error")).error
            assert error.type == "invalid_request_error"
            return error.code, error.message

        items = connection.conversation.item
        assert await refused(items.retrieve(item_id="nobody")) == (
            "item_retrieve_invalid_item_id",
            "Error retrieving item: the item with id 'nobody' does not exist.",
        )
        assert await refused(items.delete(item_id="nobody")) == (
            "item_delete_invalid_item_id",
            "Error deleting item: the item with id 'nobody' does not exist.",
        )
        assert await refused(items.truncate(item_id="nobody", content_index=0, audio_end_ms=5)) == (
            "item_truncate_invalid_item_id",
            "Error truncating item: the item with id 'nobody' does not exist.",
        )
        assert await refused(items.truncate(item_id="mine", content_index=0, audio_end_ms=5)) == (
            None,
            "Only model output audio messages can be truncated",
        )
        assert await refused(items.create(item=says("again") | {"id": "mine"})) == (
            "item_create_duplicate_item_id",
            "Error adding item: an item with id 'mine' already exists.",
        )
        assert await refused(items.create(item=says("after"), previous_item_id="nobody")) == (
            "item_create_invalid_previous_item_id",
            "Error adding item: the previous item with id 'nobody' does not exist.",
        )
        assert await refused(connection.response.create()) == (
            "conversation_already_has_active_response",
            f"Conversation already has an active response in progress: {reply}. "
            "Wait until the response is finished before creating a new one.",
        )
        await connection.response.cancel()
        await until(connection, "response.done")
        assert await refused(connection.response.cancel()) == (
            "response_cancel_not_active",
            "Cancellation failed: no active response found",
        )
        assert await refused(connection.input_audio_buffer.commit()) == (
            "input_audio_buffer_commit_empty",
            "Error committing input audio buffer: buffer too small. Expected at least 100ms of audio, but buffer only "
            "has 0.00ms of audio.",
        )
        assert await refused(connection.session.update(session={"type": "realtime", "max_output_tokens": 5000})) == (
            "integer_above_max_value",
            "Invalid 'session.max_output_tokens': integer above maximum value. Expected a value <= 4096, but got 5000 "
            "instead.",
        )
        assert await refused(connection.send({"type": "session.nope"})) == (
            "invalid_value",
            "Invalid value: 'session.nope'. Supported values are: 'session.update', 'transcription_session.update', "
            "'input_audio_buffer.append', 'input_audio_buffer.commit', 'input_audio_buffer.clear', "
            "'output_audio_buffer.clear', 'conversation.item.create', 'conversation.item.retrieve', "
            "'conversation.item.truncate', 'conversation.item.delete', 'response.create', 'response.cancel', and "
            "'viva.played'.",
        )


async def test_a_refused_tool_leaves_the_rest_of_an_update(client):
    function = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    mcp = {"type": "mcp", "server_label": "docs", "server_url": "https://example.org/mcp"}
    async with client.realtime.connect(model="gpt-realtime") as connection:
        await connection.session.update(
            session={"type": "realtime", "instructions": "Be kind.", "tools": [mcp, function]}, event_id="mine"
        )
        session = (await until(connection, "session.updated")).session
        assert session.instructions == "Be kind." and [tool.name for tool in session.tools] == ["weather"]
        error = (await until(connection, "error")).error
        assert (error.param, error.event_id) == ("session.tools[0].type", "mine")


async def test_parameters_are_refused_by_name_or_returned_in_the_session(client):
    async with client.realtime.connect(model="gpt-realtime") as connection:
        honoured = {"parallel_tool_calls": False, "reasoning": {"effort": "low"}, "tracing": {"workflow_name": "desk"}}
        honoured["audio"] = {"input": {"noise_reduction": {"type": "far_field"}}}
        ratio = {"type": "retention_ratio", "retention_ratio": 0.5, "token_limits": {"post_instructions": 900}}
        await connection.session.update(session={"type": "realtime", "truncation": ratio, **honoured})
        session = (await until(connection, "session.updated")).session
        assert session.parallel_tool_calls is False and session.reasoning.effort == "low"
        assert session.truncation.retention_ratio == 0.5 and session.tracing.workflow_name == "desk"
        reduction = session.audio.input.noise_reduction
        assert (reduction.type, reduction.strength) == ("far_field", 1.0)
        for refused, param in (
            ({"bogus_field": 1}, "session.bogus_field"),
            ({"prompt": {"id": "pmpt_1"}}, "session.prompt"),
            ({"audio": {"input": {"turn_detection": {"type": "semantic_vad", "threshold": 0.5}}}}, None),
        ):
            await connection.session.update(session={"type": "realtime", **refused})
            error = (await until(connection, "error")).error
            assert error.code == "unknown_parameter"
            assert error.param == (param or "session.audio.input.turn_detection.threshold")


async def test_requests_have_ids(client, server):
    listed = await client.models.with_raw_response.list()
    assert listed.headers["x-request-id"].startswith("req_")
    with pytest.raises(openai.NotFoundError) as refused:
        await client.models.retrieve("nobody")
    assert refused.value.request_id.startswith("req_") and refused.value.request_id != listed.headers["x-request-id"]
    async with websockets.connect(f"{server.ws}/v1/realtime") as connection:
        assert connection.response.headers["x-request-id"].startswith("req_")


async def test_the_models_are_listed(client):
    assert [model.id async for model in client.models.list()] == ["scripted-1", "scripted-2"]
    assert (await client.models.retrieve("scripted-2")).id == "scripted-2"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-realtime")
