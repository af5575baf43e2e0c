"""The ingress of a fleet before real servers in this process: who goes where, and what becomes of them."""

import asyncio
import base64
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
from websockets.utils import accept_key

from tests.server.harness import RunningServer, connected, eventually
from tests.server.scripted import ScriptedHost, pitch, tone, watermark
from tests.server.test_resume import numbers, resuming, started, vanish
from tests.server.test_webrtc import Peer
from vivavoce.server.app import build_app
from vivavoce.server.cluster import router
from vivavoce.server.cluster.ingress import ingress_app
from vivavoce.server.cluster.options import FleetOptions, PoolOptions
from vivavoce.server.cluster.registry import RegistryActor, RegistryClient, ReplicaRegistry, ReplicaReport
from vivavoce.server.config import ServerOptions
from vivavoce.server.host import ModelCard
from vivavoce.server.realtime.audio_formats import WireFormat, decode
from vivavoce.server.rest.transcripts import WireSegment

pytest.importorskip("aiohttp", reason="an ingress needs what comes with Ray Serve: pip install 'vivavoce[ray]'")

RATE = 24_000
INNER_KEY = "key-of-a-replica"


class Fleet(RunningServer):
    """An ingress on a port, and servers behind it that report to its registry."""

    def __init__(self, server: dict, pools: dict) -> None:
        self.registry, self.behind = ReplicaRegistry(), {}
        self.options = ServerOptions(port=0, **server)
        self.port = 0
        fleet = FleetOptions(pools={role: PoolOptions() for role in {"speech", *pools}}, server=self.options)
        self.use(ingress_app(fleet, RegistryClient(RegistryActor(self.registry).call)))
        self.draining: set[str] = set()

    async def report(self) -> None:
        """Reports of all who are alive, for ever."""
        while True:
            for name, (role, server, places) in self.behind.items():
                opened = len(server.host.opened)
                load = (len(server.sessions), opened, 0.0, name in self.draining)
                self.registry.report(ReplicaReport(name, role, server.http, INNER_KEY, places, *load))
            await asyncio.sleep(0.02)

    def kill(self, name: str) -> None:
        """End a server as a power cut does."""
        _, server, _ = self.behind.pop(name)
        for listening in server._server.servers:
            listening.close()
        for connection in list(server._server.server_state.connections):
            connection.transport.abort()

    def home_of(self, session: str) -> str:
        return self.registry.locate(session)[0].replica


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


@pytest.fixture
async def fleet_of():
    """Starts fleets: places of each speech server, other pools, and options of the ingress."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*places: int, pools: dict | None = None, **server) -> Fleet:
            fleet = await stack.enter_async_context(Fleet(server, pools or {}))
            wanted = {f"speech-{number}": ("speech", many, {}) for number, many in enumerate(places)}
            wanted |= {role: (role, 4, makers) for role, makers in (pools or {}).items()}
            for name, (role, many, makers) in wanted.items():
                inner = ServerOptions(api_keys=(INNER_KEY,), max_sessions=many, opens_per_minute=1e9)
                host = ScriptedHost(models=(ModelCard(name),)) if makers else ScriptedHost()
                behind = RunningServer(host, inner)
                behind.use(build_app(host, replace(inner, port=0), **makers))
                fleet.behind[name] = (role, await stack.enter_async_context(behind), many)
            reporting = asyncio.create_task(fleet.report())
            stack.callback(reporting.cancel)
            await asyncio.sleep(0)
            return fleet

        yield start


async def said(client, text: str) -> str:
    """The words of the answer to a text."""
    response = await client.say(text, output_modalities=["text"])
    assert response["status"] == "completed"
    return response["output"][0]["content"][0]["text"]


async def texts(client) -> list[tuple[str, str]]:
    """The history as its replica has it: who, and the words."""
    items = {}
    for event in client.of_type("conversation.item.added", "conversation.item.done"):
        items[event["item"]["id"]] = None
    for id in items:
        await client.send("conversation.item.retrieve", item_id=id)
        item = (await client.until("conversation.item.retrieved"))["item"]
        part = item["content"][0]
        items[id] = (item["role"], part.get("text") or part.get("transcript") or "sound")
    return list(items.values())


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


async def test_a_lost_replica_is_reported_and_the_session_continues(fleet_of):
    fleet = await fleet_of(4, 4)
    async with connected(fleet) as client, connected(fleet) as other:
        await other.until("session.created")
        await client.send("session.update", session={"instructions": "Be brief."})
        await client.until("session.updated")
        session = client.events[0]["session"]["id"]
        assert await said(client, "a table for three") == "You said: a table for three"
        await started_again(client, "a long one")
        dead = fleet.home_of(session)
        fleet.kill(dead)
        assert (await client.error())["code"] == "replica_lost"
        done = (await client.until("response.done"))["response"]
        assert done["status"] == "failed" and done["status_details"]["error"]["code"] == "replica_lost"
        assert await said(client, "still here") == "You said: still here"
        assert fleet.home_of(session) != dead
        items = await texts(client)
        assert items[:2] == [("user", "a table for three"), ("assistant", "You said: a table for three")]
        assert items[2] == ("user", "a long one") and items[3][0] == "assistant"
        assert items[4:] == [("user", "still here"), ("assistant", "You said: still here")]
        alive = fleet.behind[fleet.home_of(session)][1]
        assert alive.host.opened[-1].settings.instructions == "Be brief."
        assert await said(other, "me too") == "You said: me too"
        assert not other.of_type("error")
        assert {event["response"]["conversation_id"] for event in client.of_type("response.done")} == {
            f"conv_{session[5:]}"
        }


def first_socket_without_answers(app):
    """The application, which hears nothing from the first socket that it accepts from now on."""
    sockets = []

    async def serve(scope, receive, send):
        is_first = scope["type"] == "websocket" and not sockets
        if is_first:
            sockets.append(scope)

        async def without_messages():
            message = await receive()
            while message["type"] == "websocket.receive":
                message = await receive()
            return message

        await app(scope, without_messages if is_first else receive, send)

    return serve


async def test_a_session_that_could_not_be_restored_at_once_holds_no_second_place(fleet_of, monkeypatch):
    monkeypatch.setattr(router, "ANSWER_SECONDS", 0.5)
    fleet = await fleet_of(1, 1)
    async with connected(fleet) as client:
        session = (await client.until("session.created"))["session"]["id"]
        assert await said(client, "a table for three") == "You said: a table for three"
        dead = fleet.home_of(session)
        (other,) = set(fleet.behind) - {dead}
        replica = fleet.behind[other][1]
        config = replica._server.config
        config.loaded_app = first_socket_without_answers(config.loaded_app)
        fleet.kill(dead)
        assert (await client.error())["code"] == "replica_lost"
        assert await said(client, "still here") == "You said: still here"
        assert len(replica.host.opened) == 2 and len(replica.sessions) == 1


async def hang(reader, writer) -> None:
    """A server that accepts a socket and says nothing on it, not even when it is closed."""
    request = (await reader.readuntil(b"\r\n\r\n")).decode()
    key = next(line.split(": ")[1] for line in request.split("\r\n") if line.lower().startswith("sec-websocket-key"))
    accept = f"Sec-WebSocket-Accept: {accept_key(key)}\r\n\r\n"
    writer.write(f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{accept}".encode())
    await reader.read()
    writer.close()


async def test_a_replica_that_hangs_delays_a_new_session_by_its_own_time_only(fleet_of, monkeypatch, caplog):
    monkeypatch.setattr(router, "ANSWER_SECONDS", 0.5)
    fleet = await fleet_of(2)
    async with await asyncio.start_server(hang, "127.0.0.1", 0) as hanging:
        url = "http://{}:{}".format(*hanging.sockets[0].getsockname())
        fleet.registry.report(ReplicaReport("hanging", "speech", url, INNER_KEY, 100, 0, 0))
        await eventually(lambda: len(fleet.registry.replicas()) == 2, "both are known")
        busy = fleet.registry.admit("speech", {"hanging"})
        assert busy.replica == "speech-0"  # so that the other is less occupied
        async with asyncio.timeout(5), connected(fleet) as client:
            await client.until("session.created")
    assert "replica hanging did not take a session" in caplog.text


async def started_again(client, text: str) -> None:
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
    await client.send("conversation.item.create", item=item)
    await client.send("response.create")
    for _ in range(3):
        await client.until("response.output_audio.delta")


async def test_what_was_spoken_and_heard_comes_along(fleet_of):
    fleet = await fleet_of(4, 4)
    async with connected(fleet) as client:
        session = (await client.until("session.created"))["session"]["id"]
        await client.speak(np.concatenate([tone(500, 0.4, RATE), tone(500, 0.4, RATE) * 0]))
        await client.until("response.done")
        spoken = client.of_type("input_audio_buffer.committed")[0]["item_id"]
        await client.speak(tone(900, 0.4, RATE))
        began = await client.until("input_audio_buffer.speech_started")
        fleet.kill(fleet.home_of(session))
        assert (await client.error())["code"] == "replica_lost"
        await client.speak(tone(900, 0.4, RATE) * 0)
        ended = await client.until("input_audio_buffer.speech_stopped")
        assert ended["audio_end_ms"] > began["audio_start_ms"] > 300
        await client.until("response.done")
        second = client.of_type("input_audio_buffer.committed")[-1]["item_id"]
        assert second != spoken
        for item, frequency in ((spoken, 500), (second, 900)):
            await client.send("conversation.item.retrieve", item_id=item)
            part = (await client.until("conversation.item.retrieved"))["item"]["content"][0]
            sound = decode(base64.b64decode(part["audio"]), WireFormat())
            assert abs(pitch(sound, RATE) - frequency) < 10


async def test_what_a_replica_took_and_did_not_answer_is_asked_of_the_next(fleet_of):
    fleet = await fleet_of(4, 4)
    async with connected(fleet) as client:
        session = (await client.until("session.created"))["session"]["id"]
        home = fleet.behind[fleet.home_of(session)][1]
        for held in home.sessions:
            held.log._append = lambda payload, size, numbers: None  # what it tells reaches nobody any more
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a table for three"}]}
        await client.send("conversation.item.create", item=item)
        await client.send("response.create", response={"output_modalities": ["text"]})
        await eventually(lambda: len(home.host.opened[-1].items) >= 1, "it was taken")
        fleet.kill(fleet.home_of(session))
        assert (await client.error())["code"] == "replica_lost"
        done = (await client.until("response.done"))["response"]
        assert done["output"][0]["content"][0]["text"] == "You said: a table for three"


async def test_a_client_that_comes_back_finds_its_session_opened_again(fleet_of):
    fleet = await fleet_of(4, 4)
    async with connected(fleet) as client:
        session = (await client.until("session.created"))["session"]
        await said(client, "a table for three")
        vanish(client)
    home = fleet.home_of(session["id"])
    await eventually(lambda: not any(each.connections for each in fleet.behind[home][1].sessions), "it noticed")
    fleet.kill(home)
    query = resuming(session["id"], session["viva"]["resume_token"], client.events[-1]["event_id"])
    async with connected(fleet, query) as again:
        assert (await again.next())["session"]["id"] == session["id"]
        assert await said(again, "and on") == "You said: and on"
        host = fleet.behind[fleet.home_of(session["id"])][1].host
        assert len(host.opened[-1].items) == 4


async def test_sessions_leave_a_replica_that_is_to_go_when_they_are_quiet(fleet_of):
    fleet = await fleet_of(4, 4)
    async with connected(fleet) as quiet, connected(fleet) as other:
        await said(quiet, "a table for three")
        await other.until("session.created")
        id = quiet.events[0]["session"]["id"]
        leaving = fleet.home_of(id)
        await started_again(quiet, "a long one")
        fleet.draining.add(leaving)
        while quiet.sound() and len(quiet.of_type("response.output_audio.delta")) < 12:
            await quiet.next()
        assert fleet.home_of(id) == leaving  # it speaks
        await quiet.send("response.cancel")
        await quiet.until("response.done")
        await eventually(lambda: fleet.home_of(id) != leaving, "it left")
        await eventually(lambda: not fleet.behind[leaving][1].sessions, "nobody is left")
        assert await said(quiet, "still here") == "You said: still here"
        assert not quiet.of_type("error")
        items = fleet.behind[fleet.home_of(id)][1].host.opened[-1].items
        assert len(items) == 6


async def test_a_session_without_another_place_stays(fleet_of):
    fleet = await fleet_of(1)
    async with connected(fleet) as client:
        await said(client, "a table for three")
        fleet.draining.add("speech-0")
        await asyncio.sleep(0.6)
        assert await said(client, "still here") == "You said: still here"
        assert not client.of_type("error")


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
