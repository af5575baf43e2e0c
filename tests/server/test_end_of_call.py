"""Calls that the server ends: after silence, and after a goodbye of either side."""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.server.harness import DEADLINE, eventually
from tests.server.phones import TwilioPhone
from tests.server.sip.phone import Telephone
from tests.server.sip.phone import sideband as call_events
from vivavoce.audio.io import Sound
from vivavoce.bench.serve_sounds import one_turn_questions
from vivavoce.bench.telephone_server import RecordedHost
from vivavoce.bench.turn_sounds import RATE as QUESTION_RATE
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.errors import InputError
from vivavoce.server.config import ServerOptions
from vivavoce.server.sip.options import SipOptions
from vivavoce.server.telephony.end_of_call import ends_with_phrase

RATE = 8_000


def silence(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE), np.float32)


def question() -> np.ndarray:
    spoken = Sound(one_turn_questions(1.6)[0], QUESTION_RATE).resampled(RATE).samples[0]
    return np.concatenate([spoken, silence(1.0)])


@asynccontextmanager
async def meanwhile(speaking):
    """A caller speaks while the block runs."""
    line = asyncio.create_task(speaking)
    try:
        yield
    finally:
        line.cancel()
        await asyncio.gather(line, return_exceptions=True)  # the server may have closed the line


@pytest.fixture
async def served(running, tmp_path):
    """A server with recorded replies, whose turns are the real ones."""
    host = RecordedHost(DialogueOptions())
    await host.warm_up()

    async def serve(**options):
        return await running(host=host, media_streams=True, call_records=str(tmp_path / "calls.jsonl"), **options)

    return serve


async def reason_of_end(server) -> str:
    await eventually(lambda: not len(server.sessions), "the session ended with the call")
    records = Path(server.options.call_records)
    await eventually(lambda: records.exists() and records.read_text(), "the call is recorded")
    return json.loads(records.read_text())["reason"]


async def test_a_call_ends_after_silence_that_prompts_do_not_break(served):
    server = await served(call_silence_seconds=1.0, call_silence_prompts=1)
    async with TwilioPhone(server) as caller, caller.sideband() as sideband:
        async with meanwhile(caller.speak(silence(DEADLINE), is_paced=True)):
            await sideband.until("input_audio_buffer.timeout_triggered")
        await sideband.until("output_audio_buffer.stopped")
        await caller.speak(question())  # the caller answers
        await sideband.until("input_audio_buffer.speech_started")
        await sideband.until("output_audio_buffer.stopped")
        async with meanwhile(caller.speak(silence(DEADLINE), is_paced=True)):
            await sideband.until("input_audio_buffer.timeout_triggered")
        await sideband.until("output_audio_buffer.stopped")
        assert len(server.sessions) == 1, "one prompt after the answer"
        async with meanwhile(caller.speak(silence(DEADLINE), is_paced=True)):
            assert await sideband.closed() == 1000
    assert await reason_of_end(server) == "silence"


async def test_silence_is_off_by_default(served):
    server = await served()
    async with TwilioPhone(server) as caller, caller.sideband() as sideband:
        await caller.speak(silence(3.0))
        await caller.speak(question())
        await sideband.until("response.done")
        assert "input_audio_buffer.timeout_triggered" not in {event["type"] for event in sideband.events}


async def test_a_client_may_have_the_model_speak_after_silence_without_an_end_of_the_call(served):
    server = await served(call_silence_prompts=0)
    async with TwilioPhone(server) as caller, caller.sideband() as sideband:
        detection = {"type": "server_vad", "idle_timeout_ms": 1_000}
        session = {"type": "realtime", "audio": {"input": {"turn_detection": detection}}}
        await sideband.send("session.update", session=session)
        await sideband.until("session.updated")
        async with meanwhile(caller.speak(silence(DEADLINE), is_paced=True)):
            await sideband.until("input_audio_buffer.timeout_triggered")
        await sideband.until("output_audio_buffer.stopped")
        assert len(server.sessions) == 1


async def test_a_call_over_sip_ends_after_silence(served):
    server = await served(
        sip=SipOptions(listen=("127.0.0.1:0",), rtp_ports="20000-29999"),
        call_silence_seconds=1.0,
        call_silence_prompts=0,
    )
    async with Telephone(server) as phone:
        await phone.invite()
        async with call_events(server, phone.session) as client:
            async with meanwhile(phone.speak(silence(DEADLINE))):
                ended = await client.until("viva.call.ended")
            assert ended["reason"] == "silence"
            await phone.request_of_server("BYE")
    assert await reason_of_end(server) == "silence"


@pytest.mark.parametrize("phrase", ["a recording", "A question!"], ids=["of the reply", "of the caller"])
async def test_a_call_ends_after_a_goodbye_was_heard(served, phrase):
    server = await served(call_end_phrases=("see you", phrase))
    async with TwilioPhone(server) as caller, caller.sideband() as sideband:
        session = {"type": "realtime", "audio": {"input": {"transcription": {"model": "whisper-1"}}}}
        await sideband.send("session.update", session=session)
        await sideband.until("session.updated")
        await caller.speak(question())
        await sideband.until("output_audio_buffer.stopped")
        assert await sideband.closed() == 1000
        assert len(caller.sound) > 1.9 * RATE, "the reply was heard to its end"
    assert await reason_of_end(server) == "server"


def test_phrases_are_the_last_words_of_a_turn():
    for text in ("Goodbye.", "Thank you, good-bye!", "Okay. GOODBYE", "好的，再見。"):
        assert ends_with_phrase(text, ("goodbye", "good bye", "再見")), text
    for text in ("", "Say goodbye to him", "a nongoodbye", "再見到你很高興"):
        assert not ends_with_phrase(text, ("goodbye", "再見")), text
    assert not ends_with_phrase("anything", ())


@pytest.mark.parametrize(
    "options", [{"call_silence_seconds": 0.1}, {"call_silence_prompts": -1}, {"call_end_phrases": (" ! ",)}]
)
def test_options_without_a_meaning_are_refused(options):
    with pytest.raises(InputError, match="--call-"):
        ServerOptions(**options).check()
