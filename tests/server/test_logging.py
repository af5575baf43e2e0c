"""What a server logs and counts when something fails, and that nothing of it is what was said."""

import base64
import io
import json
import logging

import httpx
import numpy as np
import pytest

from tests.dialogue.voices import silence, talk
from tests.server.harness import RunningServer, connected, eventually
from tests.server.scripted import ScriptedHost
from tests.server.test_live_conversation import LiveHost, Voice
from vivavoce import log
from vivavoce.audio.resample import LiveResampler
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.interfaces import ChatEnd, ChatText
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue.moderation import CallableChecker, Moderation
from vivavoce.dialogue.reply import SpeakingOptions
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.errors import InputError, VivaError
from vivavoce.server.config import ServerOptions
from vivavoce.server.realtime.audio_formats import WireFormat, encode

MARKER = "xyzzy the marker sentence"
KEY = "a-key-that-must-not-be-logged"


class Recogniser:
    async def transcribe(self, samples, rate, language=None):
        if language == "de":
            raise RuntimeError("a kernel failed")
        return MARKER


class Chat:
    """Repeats what was said, or fails as a library would that quotes it."""

    async def reply(self, messages, settings):
        said = messages[-1]["content"]
        yield ChatText(f"You said: {said}. ")
        if "value" in said:
            raise ValueError(f"cannot parse {said!r}")
        if "endpoint" in said:
            raise VivaError(f"the chat endpoint answered 400: {said}")
        if "input" in said:
            raise InputError(f"this cannot be answered: {said}")
        yield ChatEnd("stop", 5, 7)


def refuse(text: str) -> None:
    if "moderated" in text:
        raise VivaError(f"no verdict on {text}")


class FailingHost(LiveHost):
    def open(self, settings, model):
        pipeline = CascadeBackend(WholeTurns(Recogniser()), Chat(), Voice())
        speaking = SpeakingOptions(moderation=Moderation(CallableChecker(refuse), passes_on_failure=True))
        return LiveConversation(pipeline, settings, DialogueOptions(speaking=speaking))


async def exceptions(server) -> dict[str, float]:
    """What /metrics counts, by logger."""
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as http:
        page = (await http.get(f"{server.http}/metrics")).text
    found = [line for line in page.splitlines() if line.startswith("viva_exceptions_total{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in found}


async def test_failures_are_counted_by_logger_and_callers_mistakes_are_not(running, caplog):
    server = await running(host=FailingHost(), api_keys=(KEY,))
    async with connected(server, key=KEY) as client:
        assert (await client.say("hello", output_modalities=["text"]))["status"] == "completed"
        await client.send("nonsense")
        await client.error()
        assert (await client.say("input", output_modalities=["text"]))["status"] == "failed"
        assert await exceptions(server) == {}
        for failing in ("value", "endpoint"):
            assert (await client.say(failing, output_modalities=["text"]))["status"] == "failed"
        await client.say("moderated", output_modalities=["text"])
        counted = await exceptions(server)
    assert counted.pop("vivavoce.cascade.backend") == 2
    assert counted.pop("vivavoce.dialogue.moderation") >= 1 and not counted
    logged = [record for record in caplog.records if record.exc_info]
    assert {record.name for record in logged} == {"vivavoce.cascade.backend", "vivavoce.dialogue.moderation"}
    assert "in reply" in logging.Formatter().formatException(logged[0].exc_info), "the traceback is whole"


async def test_the_counter_goes_with_its_server():
    names = ("vivavoce", "asyncio", "uvicorn")
    before = {name: list(logging.getLogger(name).handlers) for name in names}
    async with RunningServer(ScriptedHost(), ServerOptions()):
        assert all(len(logging.getLogger(name).handlers) == len(before[name]) + 1 for name in names)
    assert {name: logging.getLogger(name).handlers for name in names} == before


@pytest.mark.parametrize("format", ["text", "json"])
async def test_nothing_that_was_said_is_in_the_log_at_any_level(running, caplog, format):
    stream, level = io.StringIO(), logging.getLogger().level
    log.configure("debug", format, stream)
    try:
        server = await running(host=FailingHost(), api_keys=(KEY,))
        async with connected(server, key=KEY) as client:
            await _converse(client)
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as http:
            await http.get(f"{server.http}/v1/models/{MARKER}")
            await http.get(f"{server.http}/{MARKER}")
        await eventually(lambda: "closed" in stream.getvalue(), "the end of the session is logged")
    finally:
        log.remove()
        logging.getLogger().setLevel(level)
    written = stream.getvalue()
    assert written.count("Traceback") >= 3 and "recognition of a turn failed" in written
    ours = [record for record in caplog.records if record.name.startswith("vivavoce")]
    records = "\n".join(logging.Formatter("%(message)s %(args)s").format(record) for record in ours)
    assert len(ours) > 5
    for secret in (MARKER, "xyzzy", KEY, "resume_token"):
        assert secret not in written and secret not in records


async def _converse(client) -> None:
    audio = {"input": {"transcription": {"model": "any"}, "turn_detection": None}}
    session = {"type": "realtime", "instructions": MARKER, "output_modalities": ["text"], "audio": audio}
    await client.send("session.update", session=session)
    for text in ("hello", "value", "endpoint", "input", "moderated"):
        await client.say(f"{MARKER} {text}")
    await client.send(MARKER)
    await client.error()
    item = {"type": "message", "role": MARKER, "content": [{"type": "input_text", "text": MARKER}]}
    await client.send("conversation.item.create", item=item)
    await client.error()
    await client.send("conversation.item.delete", item_id=MARKER)
    await client.error()
    await client.socket.send(f'{{"type": "{MARKER}')
    await client.error()
    sound = LiveResampler(16_000, 24_000).forward(np.concatenate([silence(0.3), talk(1.0)]).astype("f")[None])[0]
    for language in ("en", "de"):
        audio["input"]["transcription"]["language"] = language
        await client.send("session.update", session=session)
        data = base64.b64encode(encode(sound, WireFormat())).decode()
        await client.send("input_audio_buffer.append", audio=data)
        await client.send("input_audio_buffer.commit")
        kinds = ("completed", "failed")
        await client.until(*(f"conversation.item.input_audio_transcription.{kind}" for kind in kinds))
        await client.send("response.create")
        await client.until("response.done")
    assert MARKER in json.dumps(client.events)
