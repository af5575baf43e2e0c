"""The ingress of a fleet before real servers in this process: which replica takes a session or a request."""

import contextlib
import io
import json
from dataclasses import replace

import httpx
import numpy as np
import openai
import pytest
import soundfile
from websockets.exceptions import InvalidStatus

from tests.server.fleets import INNER_KEY, RATE, Fleet, said
from tests.server.harness import RunningServer, connected, eventually
from tests.server.scripted import ScriptedHost, pitch, tone, watermark
from tests.server.test_resume import numbers, resuming, started, vanish
from tests.server.test_webrtc import Peer
from vivavoce.server.app import build_app
from vivavoce.server.cluster.ingress import ingress_app
from vivavoce.server.cluster.options import FleetOptions
from vivavoce.server.cluster.registry import RegistryActor, RegistryClient
from vivavoce.server.config import ServerOptions
from vivavoce.server.realtime.audio_formats import WireFormat, decode
from vivavoce.server.rest.transcripts import WireSegment

pytest.importorskip("aiohttp", reason="an ingress needs what comes with Ray Serve: pip install 'vivavoce[ray]'")


class Typist:
    model, rate = "typist", 16_000

    async def load(self) -> None:
        """It is there."""

    async def transcribe(self, samples, *asked):
        yield WireSegment(f"{len(samples)} samples", 0.0, 1.0)


class Reader:
    model, rate, voices, languages = "reader", 16_000, ("plain",), ()

    async def load(self) -> None:
        """It is there."""

    async def speak(self, words, voice, speed, instructions):
        yield tone(watermark(words), 0.3)
        yield tone(watermark(words), 0.3)


class Keeper(Reader):
    def __init__(self) -> None:
        self.kept: list[str] = []

    def add_voice(self, name, sound, consent, text) -> None:
        self.kept.append(name)

    def remove_voice(self, name) -> None:
        self.kept.remove(name)


def wave(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV")
    return file.getvalue()


async def test_sessions_spread_and_stay_where_they_are(fleet_of):
    fleet = await fleet_of(4, 4)
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(fleet)) for _ in range(6)]
        homes = [fleet.home_of((await client.until("session.created"))["session"]["id"]) for client in clients]
        assert sorted(homes) == ["speech-0"] * 3 + ["speech-1"] * 3
        for number, client in enumerate(clients):
            assert await said(client, f"number {number}") == f"You said: number {number}"
    await eventually(lambda: not any(each.sessions for each in fleet.registry.replicas()), "all have left")


async def test_a_full_fleet_refuses_at_once_and_the_others_go_on(fleet_of):
    fleet = await fleet_of(1, 1)
    async with connected(fleet) as first, connected(fleet) as second:
        for client in (first, second):
            await client.until("session.created")
        async with connected(fleet) as third:
            assert (await third.error())["code"] == "session_limit_reached"
            assert await third.closed() == 1013
        async with httpx.AsyncClient() as http:
            sdp = {"Content-Type": "application/sdp"}
            refused = await http.post(f"{fleet.http}/v1/realtime/calls", content="v=0\r\n", headers=sdp)
            assert refused.status_code == 503 and refused.headers["retry-after"]
        assert await said(first, "hello") == "You said: hello"
    await eventually(lambda: not any(each.sessions for each in fleet.registry.replicas()), "all have left")
    async with connected(fleet) as fourth:
        await fourth.until("session.created")


async def test_too_many_openings_from_one_address(fleet_of):
    fleet = await fleet_of(4, opens_per_minute=2)
    for _ in range(2):
        async with connected(fleet) as client:
            await client.until("session.created")
    async with connected(fleet) as client:
        assert (await client.error())["code"] == "rate_limit_exceeded"
        assert await client.closed() == 1013


async def test_without_replicas_sessions_are_refused(fleet_of):
    fleet = await fleet_of()
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{fleet.http}/healthz")).status_code == 200
        assert (await http.get(f"{fleet.http}/readyz")).status_code == 503
        assert (await http.get(f"{fleet.http}/v1/audio/voices")).status_code == 503
    async with connected(fleet) as client:
        assert (await client.error())["code"] == "server_not_ready"
        assert await client.closed() == 1013


async def test_a_client_that_was_cut_off_comes_back_to_its_session(fleet_of):
    fleet = await fleet_of(4, 4)
    async with connected(fleet) as client:
        session, token = await started(client, "something")
        vanish(client)
    home = fleet.behind[fleet.home_of(session)][1]
    await eventually(lambda: not any(each.connections for each in home.sessions), "the replica noticed")
    async with connected(fleet, resuming(session, "wrong", None)) as thief:
        assert (await thief.error())["code"] == "session_gone"
    async with connected(fleet, resuming(session, token, client.events[-1]["event_id"])) as again:
        assert (await again.next())["session"]["id"] == session
        await again.until("response.done")
        assert set(numbers(client)).isdisjoint(numbers(again))
        sound = decode(client.sound() + again.sound(), WireFormat())
        assert abs(pitch(sound, RATE) - watermark("You said: something")) < 5


async def test_another_ingress_finds_the_session_too(fleet_of):
    fleet = await fleet_of(4, 4)
    other = Fleet({}, {})
    other.registry = fleet.registry
    other.use(ingress_app(FleetOptions(), RegistryClient(RegistryActor(fleet.registry).call)))
    async with connected(fleet) as client:
        session, token = await started(client, "a long one")
        vanish(client)
    home = fleet.behind[fleet.home_of(session)][1]
    await eventually(lambda: not any(each.connections for each in home.sessions), "the replica noticed")
    async with other, connected(other, resuming(session, token, client.events[-1]["event_id"])) as again:
        assert (await again.next())["type"] == "viva.session.resumed"
        await again.until("response.output_audio.delta")


async def test_each_pool_does_what_it_is_for(fleet_of, official):
    fleet = await fleet_of(4, pools={"asr": {"transcriber": Typist()}, "tts": {"speech": Reader()}})
    client = official(f"{fleet.http}/v1", "any")
    names = {model.id async for model in client.models.list()}
    assert {"scripted-1", "typist", "reader"} <= names
    assert (await client.models.retrieve("typist")).id == "typist"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody")
    spoken = await client.audio.speech.create(model="reader", voice="plain", input="hello", response_format="pcm")
    sound = decode(spoken.content, WireFormat())
    assert abs(pitch(sound, RATE) - watermark("hello")) < 5
    wave = await client.audio.speech.create(model="reader", voice="plain", input="hello", response_format="wav")
    heard = await client.audio.transcriptions.create(model="typist", file=("hello.wav", wave.content))
    assert heard.text.endswith("samples")
    async with connected(fleet, "?intent=transcription") as typing, connected(fleet) as talking:
        assert fleet.home_of((await typing.until("session.created"))["session"]["id"]) == "asr"
        assert fleet.home_of((await talking.until("session.created"))["session"]["id"]) == "speech-0"
    async with httpx.AsyncClient() as http:
        assert "<html" in (await http.get(f"{fleet.http}/")).text
        assert (await http.get(f"{fleet.http}/v1/audio/voices")).json()["voices"]
        figures = (await http.get(f"{fleet.http}/metrics")).text
    assert 'viva_fleet_capacity{replica="speech-0",role="speech"} 4.0' in figures


async def test_a_request_that_fails_in_the_ingress_is_an_error_and_is_counted(fleet_of, monkeypatch):
    fleet = await fleet_of(4)

    def fail(role):
        raise RuntimeError("the registry fails")

    async with httpx.AsyncClient(base_url=fleet.http) as http:
        assert "viva_exceptions_total{" not in (await http.get("/metrics")).text
        with monkeypatch.context() as patch:
            patch.setattr(fleet.registry, "pick", fail)
            failed = await http.get("/v1/models")
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "internal_error"
        page = (await http.get("/metrics")).text
        assert 'viva_exceptions_total{where="vivavoce.server.rest.http"} 1.0' in page
        assert (await http.get("/v1/models")).status_code == 200


async def test_a_voice_is_added_at_all_tts_replicas(fleet_of):
    fleet = await fleet_of(4, pools={"tts": {"speech": Keeper()}})
    keeper = Keeper()
    inner = ServerOptions(api_keys=(INNER_KEY,))
    other = RunningServer(ScriptedHost(), inner)
    other.use(build_app(other.host, replace(inner, port=0), speech=keeper))
    async with other, httpx.AsyncClient(base_url=fleet.http) as http:
        fleet.behind["tts-2"] = ("tts", other, 4)
        await eventually(lambda: len(fleet.registry.replicas()) == 3, "it reported")
        asked = {"name": "anna", "consent": "she said yes"}
        silence = {"audio_sample": ("anna.wav", wave(np.zeros(RATE, np.float32)))}
        made = await http.post("/v1/audio/voices", data=asked, files=silence)
        assert made.status_code == 200, made.text
        speakers = [server.app.state.server.speech for role, server, _ in fleet.behind.values() if role == "tts"]
        assert [speaker.kept for speaker in speakers] == [["anna"], ["anna"]]
        assert (await http.delete("/v1/audio/voices/anna")).status_code == 200
        assert [speaker.kept for speaker in speakers] == [[], []]
        assert (await http.post("/v1/audio/voices", data={"name": "x"}, files=silence)).status_code == 400


async def test_keys_are_asked_for_at_the_ingress_alone(fleet_of, official):
    key = "sk-test-1234567890"
    fleet = await fleet_of(4, api_keys=(key,))
    for wrong in (None, INNER_KEY):
        with pytest.raises(InvalidStatus) as refused:
            async with connected(fleet, key=wrong):
                pass
        assert refused.value.response.status_code == 401
        assert json.loads(refused.value.response.body)["error"]["code"] == "invalid_api_key"
    client = official(f"{fleet.http}/v1", key)
    secret = await client.realtime.client_secrets.create(session={"type": "realtime", "instructions": "Only rhyme."})
    async with connected(fleet, key=secret.value) as browser:
        assert (await browser.until("session.created"))["session"]["instructions"] == "Only rhyme."
    other = official(f"{fleet.http}/v1", secret.value)
    with pytest.raises(openai.PermissionDeniedError):
        await other.realtime.client_secrets.create(session={"type": "realtime"})


async def test_a_call_goes_to_a_replica_and_is_found_there(fleet_of, official):
    fleet = await fleet_of(4, 4)
    client = official(f"{fleet.http}/v1", "any")
    peer = Peer()
    try:
        response = await client.realtime.calls.create(sdp=await peer.offer(), session={"type": "realtime"})
        assert response.response.status_code == 201
        await peer.accept(response.text)
        session = (await peer.until("session.created"))["session"]["id"]
        call = response.response.headers["location"].rpartition("/")[2]
        async with connected(fleet, f"?call_id={call}") as sideband:
            assert (await sideband.next())["session"]["id"] == session
            answered = await peer.say("hello")
            assert (await sideband.until("response.done"))["response"]["id"] == answered["id"]
        await client.realtime.calls.hangup(call)
        with pytest.raises(openai.NotFoundError):
            await client.realtime.calls.hangup("rtc_nobody")
        await eventually(lambda: not any(each.sessions for each in fleet.registry.replicas()), "it hung up")
    finally:
        await peer.close()


async def test_binary_sound_passes_through(fleet_of):
    fleet = await fleet_of(4, 4)
    async with connected(fleet, subprotocols=["viva.raw"]) as client:
        session = (await client.until("session.created"))["session"]
        assert session["viva"]["binary"] == "raw"
        await client.say("something")
        assert client.frames and not client.of_type("response.output_audio.delta")
        fleet.kill(fleet.home_of(session["id"]))
        assert (await client.error())["code"] == "replica_lost"
        before = len(client.frames)
        await client.say("more")
        assert len(client.frames) > before
