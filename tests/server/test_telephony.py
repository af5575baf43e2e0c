"""Telephone calls over the shapes of providers: a turn, keys, marks and clears at barge-in, and hostile messages."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import websockets
from openai.types.realtime import InputAudioBufferDtmfEventReceivedEvent
from websockets.exceptions import InvalidStatus

from tests.server.harness import DEADLINE, connected, eventually
from tests.server.phones import PHONES, TOKEN, AudioSocketPhone, Phone, TwilioPhone, VonagePhone, payload
from tests.server.scripted import ScriptedHost, pitch, tone, watermark
from vivavoce.errors import InputError
from vivavoce.server.config import ServerOptions
from vivavoce.server.telephony import call as telephony

KEY = "key-of-the-provider"
BY_NAME = pytest.mark.parametrize("phone", PHONES, ids=lambda phone: phone.__name__)


@pytest.fixture
async def exchange(running, tmp_path):
    records = str(tmp_path / "calls.jsonl")
    return await running(call_records=records, media_streams=True, audiosocket=0, audiosocket_tokens=(str(TOKEN),))


def question(phone: Phone) -> np.ndarray:
    rate = phone.format.rate
    return np.concatenate([tone(500, 0.5, rate), np.zeros(rate // 2, np.float32)])


async def gauge(server, name: str) -> float:
    page, _ = server.app.state.server.metrics.page()
    lines = [line.rsplit(" ", 1) for line in page.decode().splitlines() if line.startswith(f"viva_{name}")]
    return sum(float(value) for _, value in lines)


async def ask_for_a_long_reply(sideband) -> None:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "long"}]}
    await sideband.send("conversation.item.create", item=item)
    await sideband.send("response.create")


@BY_NAME
async def test_a_turn_a_key_and_the_end_of_a_call(exchange, phone):
    async with phone(exchange) as caller, caller.sideband() as sideband:
        await caller.speak(question(caller))
        done = (await sideband.until("response.done"))["response"]
        assert done["output"][0]["content"][0]["transcript"] == "You said: tone 500"
        await sideband.until("output_audio_buffer.stopped")
        seconds = lambda: len(caller.sound) / caller.format.rate  # noqa: E731
        await caller.until(lambda: seconds() >= 0.4)
        assert (
            abs(
                pitch(caller.sound[: round(0.4 * caller.format.rate)], caller.format.rate)
                - watermark("You said: tone 500")
            )
            < 5
        )
        assert seconds() <= 0.4 + caller_packet(caller), "only the last packet is padded"
        if caller.has_marks:
            await caller.until(lambda: caller.marks and caller.marks[-1][1] == seconds())
            assert all(later - earlier > 0.0999 for (_, earlier), (_, later) in pairwise(caller.marks[:-1]))
        await caller.press("#")
        pressed = await sideband.until("input_audio_buffer.dtmf_event_received")
        assert InputAudioBufferDtmfEventReceivedEvent.model_validate(pressed, strict=True).event == "#"
        assert await gauge(exchange, f'calls{{provider="{caller.provider}"}}') == 1
        if caller.stop() is not None:
            await caller.send(caller.stop())
        else:
            await caller.disconnect()
        assert await sideband.closed() == 1000
    await eventually(lambda: not len(exchange.sessions), "the session ended with the call")
    await eventually(lambda: exchange.host.opened[0].is_closed, "and its conversation")
    ended = f'calls_ended_total{{provider="{caller.provider}",reason="caller"}}'
    assert await gauge(exchange, ended) == 1 and await gauge(exchange, "calls{") == 0
    record = json.loads(Path(exchange.options.call_records).read_text())
    assert (record["provider"], record["reason"]) == (caller.provider, "caller") and record["duration_seconds"] > 0


def caller_packet(caller: Phone) -> float:
    return 0.1 if caller.provider == "exotel" else 0.02 + 1e-6


@pytest.mark.parametrize("phone", [each for each in PHONES if each.has_marks], ids=lambda phone: phone.__name__)
async def test_an_interrupted_reply_keeps_what_the_marks_say_was_heard(exchange, phone):
    async with phone(exchange) as caller, caller.sideband() as sideband:
        caller.answers_marks = False
        await ask_for_a_long_reply(sideband)
        await caller.until(lambda: len(caller.marks) >= 4)
        heard, seconds = caller.marks[2]
        await caller.send(caller.played(heard))
        (conversation,) = exchange.host.opened
        await eventually(lambda: conversation._last.played_ms == round(seconds * 1000), "the mark is reported")
        await caller.until(lambda: len(caller.marks) >= 8)  # more is sent, and was not heard
        await caller.speak(tone(700, 0.2, caller.format.rate))
        await caller.until(lambda: caller.clears == 1)
        cut = await sideband.until("conversation.item.truncated")
        assert cut["audio_end_ms"] == round(seconds * 1000)
        for name, _ in caller.marks:  # a provider returns all marks when it has cleared
            await caller.send(caller.played(name))
        await caller.speak(np.zeros(caller.format.rate // 2, np.float32))
        await sideband.until("response.done")
        reply = next(item for item in conversation.items if item.id == cut["item_id"])
        assert len(reply.content.parts[0].samples) == round(seconds * 1000) * 16


async def test_without_marks_the_clock_of_the_server_says_what_was_heard(exchange):
    async with AudioSocketPhone(exchange) as caller, caller.sideband() as sideband:
        await ask_for_a_long_reply(sideband)
        await caller.until(lambda: len(caller.heard) >= 30)
        await caller.speak(tone(700, 0.2, 8_000))
        cut = await sideband.until("conversation.item.truncated")
        heard = 20 * len(caller.heard)
        assert 400 < cut["audio_end_ms"] <= heard
        count = len(caller.heard)
        await caller.press("1")
        await sideband.until("input_audio_buffer.dtmf_event_received")
        assert len(caller.heard) <= count + 3, "little was sent ahead, and nothing after"


async def test_a_key_is_needed_before_anything_is_opened(running):
    server = await running(media_streams=True, api_keys=(KEY,))
    url = f"{server.ws}/v1/media-streams/twilio"
    wrong = [("", {}), ("/wrong-key", {}), ("?key=wrong-key", {}), ("", {"Authorization": "Basic !"})]
    for suffix, headers in wrong:
        with pytest.raises(InvalidStatus) as refused:
            await websockets.connect(url + suffix, additional_headers=headers)
        assert refused.value.response.status_code == 401
    basic = {"Authorization": f"Basic {payload(f'user:{KEY}'.encode())}"}
    for suffix, headers in (f"/{KEY}", {}), (f"?key={KEY}", {}), ("", basic):
        async with websockets.connect(url + suffix, additional_headers=headers):
            pass
    with pytest.raises(InvalidStatus) as refused:
        await websockets.connect(f"{server.ws}/v1/media-streams/nobody/{KEY}")
    assert refused.value.response.status_code == 404
    assert not server.host.opened


async def test_a_browser_key_brings_the_session_of_a_call(running, official):
    server = await running(media_streams=True, api_keys=(KEY,))
    session = {"type": "realtime", "instructions": "Be short.", "audio": {"output": {"voice": "ben"}}}
    secret = await official(f"{server.http}/v1", KEY).realtime.client_secrets.create(session=session)
    async with TwilioPhone(server, secret.value) as caller:
        settings = server.host.opened[0].settings
        assert (settings.instructions, settings.voice) == ("Be short.", "ben")
        assert caller.session.session_object().audio.input.format.type == "audio/pcmu"


async def test_it_is_off_by_default(server):
    with pytest.raises(InvalidStatus):
        await websockets.connect(f"{server.ws}/v1/media-streams/twilio")
    assert server.app.state.server.audiosocket is None


HOSTILE = {
    "no JSON": "hello",
    "no object": "[1, 2]",
    "deep": "[" * 50_000,
    "no event": "{}",
    "binary": b"\x00\xff" * 10,
    "audio that is no base64": json.dumps({"event": "media", "media": {"payload": "*"}}),
    "no audio": json.dumps({"event": "media"}),
    "a second start": json.dumps(list(TwilioPhone(None).opening())[1]),
    "no key of a telephone": json.dumps({"event": "dtmf", "dtmf": {"digit": "55"}}),
    "a large message": json.dumps({"event": "media", "media": {"payload": "A" * 100_000}}),
    "much audio": json.dumps({"event": "media", "media": {"payload": payload(b"\xff" * 20_000)}}),
}


@pytest.mark.parametrize("message", HOSTILE.values(), ids=HOSTILE)
async def test_a_malformed_message_ends_its_own_call_only(exchange, message):
    async with TwilioPhone(exchange) as other, TwilioPhone(exchange) as caller, other.sideband() as sideband:
        await caller.send(message)
        code, reason = await caller.closed()
        assert code == 1008 and reason
        await other.speak(question(other))
        await sideband.until("response.done")
        assert len(exchange.sessions) == 1


async def test_unknown_events_are_ignored_up_to_a_limit(exchange):
    async with TwilioPhone(exchange) as caller, caller.sideband() as sideband:
        await caller.send({"event": "news", "news": {}})
        await caller.press("1")
        await sideband.until("input_audio_buffer.dtmf_event_received")
        for _ in range(telephony.MAX_UNKNOWN):
            await caller.send({"event": "news"})
        assert await caller.closed() == (1008, "more than 100 messages of unknown kinds")


WRONG_STARTS = {
    "opus": {"event": "start", "streamSid": "MZ", "start": {"mediaFormat": {"encoding": "opus", "sampleRate": 8000}}},
    "wideband µ-law": {
        "event": "start",
        "start": {"mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": 16000}},
    },
    "no format": {"event": "start", "start": {}},
    "audio before the start": {"event": "media", "media": {"payload": "AAAA"}},
}


@pytest.mark.parametrize("message", WRONG_STARTS.values(), ids=WRONG_STARTS)
async def test_a_stream_that_cannot_start_opens_nothing(exchange, message):
    async with TwilioPhone(exchange, start=False) as caller:
        await caller.send(message)
        code, reason = await caller.closed()
        assert code == 1008 and reason
        assert not exchange.host.opened


@pytest.mark.parametrize("phone", [TwilioPhone, AudioSocketPhone])
async def test_a_stream_that_never_starts_is_closed(exchange, phone, monkeypatch):
    monkeypatch.setattr(telephony, "START_SECONDS", 0.1)
    async with phone(exchange, start=False) as caller:
        await caller.closed()
    assert await gauge(exchange, f'calls_ended_total{{provider="{phone.provider}",reason="not_started"}}') == 1


async def test_audiosocket_needs_its_token_and_known_frames(exchange):
    class Stranger(AudioSocketPhone):
        token = type(TOKEN)(int=5)

    async with Stranger(exchange, start=False) as caller:
        for message in caller.opening():
            await caller.send(message)
        await caller.closed()
    for frame in (b"\x11\x00\x02ab", b"\x10\x00\x01a", b"\x12\x00\x02ab", b"\x01\x00\x00", b"\xff\x00\x01\x04"):
        async with AudioSocketPhone(exchange) as caller:
            for _ in range(telephony.MAX_UNKNOWN + 1):
                await caller.send(frame)
            await caller.closed()
    await eventually(lambda: not len(exchange.sessions), "all calls have ended")
    assert len(exchange.host.opened) == 5


async def test_a_full_server_refuses_the_call_with_a_code_to_try_again(running):
    server = await running(host=ScriptedHost(room=0), media_streams=True)
    async with VonagePhone(server, start=False) as caller:
        for message in caller.opening():
            await caller.send(message)
        assert (await caller.closed())[0] == 1013


async def test_a_server_that_stops_hangs_up(exchange):
    async with TwilioPhone(exchange) as caller, AudioSocketPhone(exchange) as second:
        async with asyncio.timeout(DEADLINE):
            await exchange.sessions.close()
        assert (await caller.closed())[0] == 1012
        await second.closed()


async def test_a_sideband_hangs_up(exchange, official):
    async with TwilioPhone(exchange) as caller:
        call_id = caller.session.id.replace("sess_", "rtc_", 1)
        await official(f"{exchange.http}/v1", "any-key-at-all").realtime.calls.hangup(call_id)
        assert (await caller.closed())[0] == 1000


@pytest.mark.parametrize("phone", [TwilioPhone, VonagePhone])
async def test_a_call_through_a_door(running, phone):
    server = await running(media_streams=True, doors=1)
    async with phone(server) as caller, caller.sideband() as sideband:
        await caller.speak(question(caller))
        await sideband.until("output_audio_buffer.stopped")
        await caller.until(lambda: len(caller.sound) >= 0.4 * caller.format.rate)
        await caller.disconnect()
        assert await sideband.closed() == 1000


async def test_a_socket_of_the_realtime_protocol_still_works_beside_it(exchange):
    async with connected(exchange) as client:
        assert (await client.say("hello"))["status"] == "completed"


def test_options_that_leave_audiosocket_open_are_refused():
    for options in ({"api_keys": (KEY,)}, {"audiosocket_tokens": ("secret",)}, {"port": 9000, "audiosocket": 9000}):
        with pytest.raises(InputError, match="audiosocket"):
            ServerOptions(**({"audiosocket": 9000} | options)).check()
    with pytest.raises(InputError, match="--audiosocket-token needs"):
        ServerOptions(audiosocket_tokens=(str(TOKEN),)).check()
