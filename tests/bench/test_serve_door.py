"""`viva bench serve` through real processes and sockets: a scripted server, and the untrained miniature."""

import asyncio
import base64
import json
import threading
from http import HTTPStatus

import numpy as np
import pytest

pytest.importorskip("websockets")

from websockets.asyncio.server import serve as serve_sockets
from websockets.exceptions import ConnectionClosed

from vivavoce.audio.io import pcm16_to_float
from vivavoce.bench import serve_door
from vivavoce.bench.serve_door import DoorOptions, ServerChoice
from vivavoce.bench.serve_profile import Profiler, rows, sample_own_stacks
from vivavoce.bench.serve_server import ServerFailedError, ServerPlan, ServerProcess
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import free_port

PATIENT = 60_000.0  # tests run beside others: how late the callers are is not asserted
PIECE = base64.b64encode(bytes(1920)).decode()  # 40 ms
REPLY_PIECES = 15
LOUD = 0.05
QUIET_PACKETS = 3
METRICS = b"""# TYPE viva_event_loop_lag_seconds histogram
viva_event_loop_lag_seconds_bucket{le="0.001"} %d
viva_event_loop_lag_seconds_bucket{le="+Inf"} %d
# TYPE viva_underruns counter
viva_underruns_total %d
"""


class LoudnessServer:
    """Answers 80 ms of quiet after loud sound; interrupted by loud sound. Counts what it received."""

    def __init__(self, room: int) -> None:
        self.room, self.open, self.most = room, 0, 0
        self.packets: list[int] = []
        self.keys: set[str | None] = set()
        self._scrapes = 0
        self._started = threading.Event()

    def __enter__(self) -> str:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._started.wait()
        return f"http://127.0.0.1:{self.port}"

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        async with serve_sockets(self._session, "127.0.0.1", 0, process_request=self._http) as server:
            self.port = server.sockets[0].getsockname()[1]
            self._started.set()
            await self._stopped.wait()

    def _http(self, connection, request):
        self.keys.add(request.headers.get("Authorization"))
        if request.path != "/metrics":
            return None
        self._scrapes += 1
        page = METRICS % (100 * self._scrapes, 100 * self._scrapes, self._scrapes)
        return connection.respond(HTTPStatus.OK, page.decode())

    async def _session(self, socket) -> None:
        if self.open >= self.room:
            await socket.send(json.dumps({"type": "error", "error": {"code": "full", "message": "full"}}))
            await socket.close(1013, "full")
            return
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await socket.send(json.dumps({"type": "session.created", "session": {"id": "s"}}))
            await self._listen(socket)
        except ConnectionClosed:
            pass
        finally:
            self.open -= 1

    async def _listen(self, socket) -> None:
        quiet, has_spoken, reply, packets = 0, False, None, 0
        try:
            async for message in socket:
                event = json.loads(message)
                assert event["type"] == "input_audio_buffer.append"
                packets += 1
                samples = pcm16_to_float(base64.b64decode(event["audio"]))
                if np.abs(samples).max() > LOUD:
                    quiet, has_spoken = 0, True
                    if reply is not None and not reply.done():
                        reply.cancel()
                        await socket.send(json.dumps({"type": "input_audio_buffer.speech_started"}))
                else:
                    quiet += 1
                if has_spoken and quiet == QUIET_PACKETS:
                    has_spoken = False
                    reply = asyncio.create_task(self._answer(socket, f"resp_{packets}"))
        finally:
            self.packets.append(packets)
            if reply is not None:
                reply.cancel()

    async def _answer(self, socket, id: str) -> None:
        await socket.send(json.dumps({"type": "response.created", "response": {"id": id}}))
        for _ in range(REPLY_PIECES):  # faster than real time: no underruns however slow this machine is
            delta = {"type": "response.output_audio.delta", "response_id": id, "delta": PIECE}
            await socket.send(json.dumps(delta))
            await asyncio.sleep(0.01)
        await asyncio.sleep(REPLY_PIECES * 0.04)
        await socket.send(json.dumps({"type": "response.output_audio.done", "response_id": id}))
        await socket.send(json.dumps({"type": "response.done", "response": {"id": id, "status": "completed"}}))


def options(**changes):
    values = {"seconds": 0.6, "question": 0.5, "spread": 0.2, "max_lateness_ms": PATIENT, "callers": 2}
    return DoorOptions(**({"sessions": [2]} | values | changes))


@pytest.mark.full
def test_callers_of_two_processes_converse_and_the_third_is_refused(tmp_path, capsys):
    scripted = LoudnessServer(room=2)
    with scripted as url:
        result = serve_door.run(ServerChoice(url, key="a-secret-key"), options(sessions=[3]), tmp_path)
    (level,) = result["levels"]
    assert (level["calls"], level["answers"], level["refused"]) == (3, 2, 1)
    assert level["refusals"] == {"full": 1}
    assert level["sound_seconds"] == pytest.approx(2 * REPLY_PIECES * 0.04)
    assert level["first_sound_ms"][50] > 0
    assert (level["never_answered"], level["failed"], level["false_stops"]) == (0, {}, 0)
    assert level["server"]["loop_lag_p99_ms"] == {"server": pytest.approx(1.0)}
    assert level["server"]["counters"]["viva_underruns_total"] >= 1
    assert len(level["callers"]) == 2
    assert (result["most_without_a_gap"], scripted.most) == (0, 2)
    assert scripted.keys == {"Bearer a-secret-key"}
    assert min(sorted(scripted.packets)[-2:]) > (0.6 + 0.5) / 0.04  # the microphones stayed open
    read = json.loads((tmp_path / "serve.json").read_text(encoding="utf8"))
    assert read["levels"][0]["refused"] == 1
    assert "refused 1 within" in capsys.readouterr().err


@pytest.mark.full
def test_a_steady_stream_comes_and_goes_and_its_interruptions_yield():
    with LoudnessServer(room=100) as url:
        result = serve_door.run(
            ServerChoice(url), options(sessions=[2], steady=3.0, interrupt=1.0, seconds=0.5, keep_going=True)
        )
    (level,) = result["levels"]
    assert level["calls"] > 2
    assert level["refused"] == 0
    assert level["failed"] in ({}, {"a reply was not interrupted": level["not_yielded"]})


@pytest.mark.parametrize(
    "change", [{"sessions": []}, {"sessions": [0]}, {"transport": "telegraph"}, {"interrupt": 2.0}]
)
def test_bad_options_are_refused(change):
    with pytest.raises(InputError):
        options(**change).check()


def test_options_of_a_server_that_is_started_here_are_refused_for_another():
    with pytest.raises(InputError, match="not for --url"):
        serve_door.run(ServerChoice("http://127.0.0.1:1"), options(profile=True))


@pytest.mark.full
@pytest.mark.parametrize("transport", ["binary", "webrtc"])
def test_the_miniature_is_called_over_other_transports(transport):
    pytest.importorskip("aiortc" if transport == "webrtc" else "av")
    result = serve_door.run(
        ServerChoice(shape="tiny", device="cpu", max_sessions=1),
        options(sessions=[2], seconds=1.2, spread=0.0, transport=transport),
    )
    (level,) = result["levels"]
    assert (level["answers"], level["refused"], level["never_answered"], level["unfinished"]) == (1, 1, 0, 0)
    assert level["sound_seconds"] == pytest.approx(1.2, abs=0.5)  # silence before the first word is left out


def test_a_server_that_does_not_start_says_why():
    plan = ServerPlan("vast", "cpu", "auto", free_port(), 1, 1, 1, 1.0, 1.0, 8, "/dev/null")
    with ServerProcess(plan) as server, pytest.raises(ServerFailedError, match="shape must be one of"):
        server.wait_until_ready()


@pytest.mark.full
def test_the_miniature_is_served_and_called():
    result = serve_door.run(
        ServerChoice(shape="tiny", device="cpu", max_sessions=2),
        options(sessions=[1, 3], seconds=1.2, keep_going=True, profile=True),
    )
    alone, three = result["levels"]
    assert (alone["calls"], alone["refused"]) == (1, 0)
    assert (three["refused"], three["refusals"]) == (1, {"session_limit_reached": 1})
    assert three["server"]["counters"]["viva_sessions_refused_total"] == 1
    assert result["device"]
    for level in result["levels"]:
        (server, *_) = level["server"]["processes"]
        assert server["name"] == "server"
        assert 0 < server["main_thread_cpu"] <= server["cpu"]
        assert server["rss_bytes"] > 1e8
        assert level["profile"]["rows"]


STACKS = """thread (12): MainThread;run (uvicorn/server.py:75);hear (vivavoce/dialogue/session.py:9);f (numpy/x.py:1) 60
thread (12): MainThread;run (uvicorn/server.py:75);send (websockets/x.py:3) 20
thread (13): viva-engine-0;run (threading.py:9);step (vivavoce/engine/engine.py:7) 15
thread (14): viva-engine-1;run (threading.py:9);step (vivavoce/engine/engine.py:8) 5"""


def test_a_profile_counts_samples_by_thread_and_deepest_module_of_the_package():
    found = [(row.thread, row.module, row.share, row.busy) for row in rows("server", STACKS.splitlines(), 2.0)]
    assert found == [
        ("main", "dialogue.session", 0.6, 0.3),
        ("main", "x.py", 0.2, 0.1),
        ("viva-engine", "engine.engine", 0.2, 0.1),
    ]


def test_a_process_samples_its_own_stacks(tmp_path):
    file, is_over = tmp_path / "own.stacks", threading.Event()

    def work() -> None:
        while not is_over.is_set():
            sum(range(1000))

    threading.Thread(target=work, name="viva-work-0").start()
    try:
        with Profiler({}, tmp_path, file) as profiler:
            sampler = sample_own_stacks(file)
            while not file.is_file() or "viva-work" not in file.read_text(encoding="utf8"):
                is_over.wait(0.05)
    finally:
        is_over.set()
        sampler.set()
    assert "viva-work" in {row.thread for row in profiler.rows}
    assert profiler.threads["server viva-work"] > 0
