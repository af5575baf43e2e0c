"""`viva bench turn` against the real server on a real socket; its conversations follow a script."""

import asyncio
import contextlib
import json

import numpy as np
import pytest

from tests.bench.turn_servers import material
from tests.server.harness import RunningServer
from tests.server.scripted import RATE, ScriptedConversation, ScriptedHost, tone, watermark
from vivavoce.audio.io import Sound, read, write
from vivavoce.bench import turn
from vivavoce.bench.turn_client import connect
from vivavoce.bench.turn_scenes import Timing, script
from vivavoce.bench.turn_sounds import Material, SpokenQuestion, talk
from vivavoce.dialogue import events as said
from vivavoce.dialogue.items import AudioPart, Message
from vivavoce.errors import InputError
from vivavoce.server.config import ServerOptions

SHORT = Timing(lead=0.2, between=0.2, after_sound=0.6)
PIECE = RATE // 10


class Slow(ScriptedConversation):
    """Replies of two seconds, begun after `thinking`; its fifth tenth of a second comes `gap` late."""

    thinking, gap, seconds = 0.3, 0.0, 2.0

    def _said(self, reply):
        return Message("assistant", (AudioPart(tone(watermark(reply.text), self.seconds), RATE, reply.text),))

    def _say(self, reply):
        self.emit(said.ReplyText(reply.id, reply.item, reply.text))
        sound = self._said(reply).parts[0].samples
        reply.made_ms, self._last = round(1000 * self.seconds), reply
        for index, begin in enumerate(range(0, len(sound), PIECE)):
            late = self.thinking + (self.gap if index >= 5 else 0.0)
            self._later(late, said.ReplyAudio(reply.id, reply.item, sound[begin : begin + PIECE]))

    def _end(self, reply, reason):
        if reason != "completed":
            super()._end(reply, reason)
            return
        asyncio.get_running_loop().call_later(self.thinking + self.gap + 0.01, self._end_if_under_way, reply)

    def _end_if_under_way(self, reply):
        if self._reply is reply:
            super()._end(reply, "completed")

    def _later(self, seconds, event):
        asyncio.get_running_loop().call_later(seconds, self.emit, event)


class NeverYields(Slow):
    """Ignores input while its reply is playing."""

    def hear(self, samples):
        if self._last is None or self._last.played_ms >= self._last.made_ms:
            super().hear(samples)


class Stuttering(Slow):
    gap = 1.5


class Brief(Slow):
    seconds = 0.5


class Host(ScriptedHost):
    kind = Slow

    def open(self, settings, model):
        self.opened.append(self.kind(settings))
        return self.opened[-1]


async def figures(kind, *scenes, turns=1, sessions=1, asked=None):
    host, asked = Host(), asked or material()
    host.kind = kind
    async with RunningServer(host, ServerOptions(opens_per_minute=1e5)) as server:
        session = turn.session_of("server_vad", 200, None)
        plan = turn.TurnPlan(asked, script(asked, turns, list(scenes)), turns, sessions, session, SHORT)
        result, calls = await turn.measure(lambda: connect(f"{server.ws}/v1/realtime"), plan)
    assert not result["errors"] and not any(call.failure for call in calls)
    return result


async def test_a_server_that_thinks_for_300_ms_answers_no_sooner():
    result = await figures(Slow, "clean", turns=2)
    assert result["totals"]["response_rate"] == 1.0
    for outcome in result["outcomes"]:
        assert 200 + 300 - 60 < outcome["arrival_ms"] <= outcome["response_ms"] + 1
        assert outcome["transcript"].startswith("You said: tone")


async def test_a_server_that_stops_at_any_sound_yields_to_all():
    result = await figures(Slow, "barge-in", "mm-hm")
    totals = result["totals"]
    assert totals["yield_rate"] == 1.0 and totals["backchannel_selectivity"] == 0.0
    assert result["session"]["audio"]["input"]["turn_detection"]["interrupt_response"] is True


async def test_a_server_that_never_stops_yields_to_none():
    totals = (await figures(NeverYields, "barge-in"))["totals"]
    assert totals["interruptions"] == 1 and totals["yield_rate"] == 0.0


async def test_late_audio_is_counted_as_underruns():
    totals = (await figures(Stuttering, "clean"))["totals"]
    assert totals["underruns"] >= 1 and totals["dry_ms"] > 500


async def test_four_concurrent_sessions_get_their_own_answers():
    questions = tuple(SpokenQuestion(f"tone {n}", tone(400.0 + 200 * n, 0.6, 24_000), f"{n}") for n in range(4))
    together = (await figures(Brief, sessions=4, asked=Material(questions, (), "tones")))["together"]
    assert together["sessions"] == 4 and together["response_rate"] == 1.0
    assert (together["answers"], together["own"], together["shared_reply_ids"]) == (4, 4, [])
    assert together["compared_by"] == "words"


@contextlib.contextmanager
def serving(host):
    """A server in its own thread, for what runs its own event loop."""
    import threading

    ready, done = threading.Event(), threading.Event()
    address: list[str] = []

    async def serve():
        async with RunningServer(host, ServerOptions(opens_per_minute=1e5)) as server:
            address.append(server.http)
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(20)
        yield address[0]
    finally:
        done.set()
        thread.join(20)


def test_run_writes_what_it_measured(tmp_path, capsys):
    speech, out = tmp_path / "speech", tmp_path / "out"
    speech.mkdir()
    for number in range(2):
        write(speech / f"question_{number}.wav", Sound(talk(0.7, seed=number), 24_000))
    with serving(ScriptedHost()) as address:
        result = turn.run(address, scenes=["clean"], turns=1, speech=speech, out=out, keep_sound=True)
    assert result["totals"]["response_rate"] == 1.0
    written = json.loads((out / "turn.json").read_text())
    assert written["url"].startswith("ws://127.0.0.1") and written["url"].endswith("/v1/realtime")
    assert written["outcomes"][0]["question"] == "question 0"
    assert written["outcomes"][0]["response_ms"] == result["outcomes"][0]["response_ms"]
    assert (out / "turn.png").stat().st_size > 10_000 and (out / "turn_timeline.png").stat().st_size > 5_000
    call = read(out / "clean_0.wav", mono=False)
    microphone, heard = call.samples
    assert np.abs(microphone).max() > 0.05 and np.abs(heard).max() > 0.2
    assert "V2V" in capsys.readouterr().err


def test_an_unreachable_server_is_one_line():
    with pytest.raises(InputError, match=r"cannot connect to ws://127\.0\.0\.1:9/v1/realtime"):
        turn.run("127.0.0.1:9", scenes=["clean"], turns=1)


async def test_a_missing_key_is_named():
    async with RunningServer(ScriptedHost(), ServerOptions(api_keys=("secret-key-1",))) as server:
        with pytest.raises(InputError, match=r"HTTP 401; give --api-key"):
            async with connect(f"{server.ws}/v1/realtime"):
                pass
        async with connect(f"{server.ws}/v1/realtime", "secret-key-1") as wire:
            assert (await wire.receive())["type"] == "session.created"
