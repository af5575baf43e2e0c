"""Many sessions one after another leave nothing behind; replies are traced where somebody traces."""

import asyncio
import gc
import weakref

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.server.harness import connected, eventually
from tests.server.scripted import ScriptedConversation
from vivavoce.server.realtime import sessions as cleanup
from vivavoce.server.realtime.encoder import EventEncoder
from vivavoce.server.realtime.session import RealtimeSession


def alive(*kinds: type) -> int:
    gc.collect()
    return sum(type(each) in kinds for each in gc.get_objects())


async def test_two_hundred_sessions_leave_nothing_behind(server):
    async def one(number: int) -> None:
        async with connected(server) as client:
            if number % 3 == 0:
                await client.say("hello", output_modalities=["text"])
            elif number % 3 == 1:
                await client.send("response.create")
                await client.until("response.output_audio.delta")
            else:
                await client.send("nonsense")
                await client.error()

    before = len(asyncio.all_tasks())
    for batch in range(25):
        await asyncio.gather(*(one(8 * batch + number) for number in range(8)))
    await eventually(lambda: not server.sessions and not server.host.alive, "all sessions are over")
    server.host.opened.clear()
    await eventually(lambda: len(asyncio.all_tasks()) <= before, "no task is left")
    kinds = RealtimeSession, EventEncoder, ScriptedConversation
    await eventually(lambda: alive(*kinds) == 0, "no session is left")  # a last callback may still hold one


async def test_a_session_that_ended_is_collected_though_python_does_not_look(running, monkeypatch):
    monkeypatch.setattr(cleanup, "CLEANUP_DELAY_SECONDS", 0.1)
    server = await running()
    gc.disable()
    try:
        async with connected(server) as client:
            await client.say("hello")
            (session,) = map(weakref.ref, server.sessions)
        server.host.opened.clear()
        await eventually(lambda: session() is None, "nothing of it is left")
    finally:
        gc.enable()
    await eventually(lambda: b"viva_sessions_tidied_total 1.0" in server.sessions.metrics.page()[0], "it is told")


async def test_replies_are_traced_without_their_words(server):
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    tracing = {"workflow_name": "desk", "group_id": "guest-7", "metadata": {"room": 12}}
    async with connected(server) as client:
        await client.send("session.update", session={"tracing": tracing})
        spoken = await client.say("a secret")
        await client.send("session.update", session={"tracing": None})
        await client.say("please fail")
    await eventually(lambda: len(exporter.get_finished_spans()) == 2, "both are traced")
    span, failed = exporter.get_finished_spans()
    assert span.name == "viva.reply" and span.attributes["viva.reply"] == spoken["id"]
    assert span.attributes["viva.end_reason"] == "completed" and [event.name for event in span.events] == [
        "first_sound"
    ]
    given = {"viva.workflow": "desk", "viva.group": "guest-7", "viva.metadata.room": "12"}
    assert given.items() <= span.attributes.items() and not given.keys() & failed.attributes.keys()
    assert failed.attributes["viva.end_reason"] == "failed"
    assert "secret" not in span.to_json()
