"""The parts of a fleet that need no Ray: its options, the roll, the policy, and what a ledger keeps."""

import base64
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from vivavoce.errors import CapacityError, InputError, MissingDependencyError
from vivavoce.server.cluster.app import check_room, run
from vivavoce.server.cluster.options import FleetOptions, SessionPolicy
from vivavoce.server.cluster.registry import PENDING_SECONDS, SILENT_SECONDS, Placement, ReplicaRegistry, ReplicaReport
from vivavoce.server.cluster.replica import Figures, named
from vivavoce.server.cluster.session_mirror import SessionMirror

CONFIG = Path(__file__).parents[2] / "docs" / "ray.yaml"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def report(name: str, sessions: int = 0, opened: int = 0, **more) -> ReplicaReport:
    return ReplicaReport(name, "speech", f"http://{name}", "key", 4, sessions, opened, **more)


def test_places_that_were_given_count_until_they_are_taken():
    roll = ReplicaRegistry(Clock())
    roll.report(report("a"))
    assert [roll.admit("speech") is None for _ in range(5)] == [False] * 4 + [True]
    roll.report(report("a", sessions=4, opened=4))
    assert roll.admit("speech") is None
    roll.report(report("a", sessions=3, opened=4))  # one left
    assert roll.admit("speech") is not None and roll.admit("speech") is None


def test_places_that_nobody_took_are_free_again():
    clock = Clock()
    roll = ReplicaRegistry(clock)
    roll.report(report("a"))
    assert all(roll.admit("speech") for _ in range(4))
    clock.now += PENDING_SECONDS + 1
    roll.report(report("a"))
    assert all(roll.admit("speech") for _ in range(4))


def test_sessions_go_to_the_least_full_who_is_alive_and_stays():
    clock = Clock()
    roll = ReplicaRegistry(clock)
    roll.report(report("full", 3))
    roll.report(report("empty", 1))
    roll.report(report("leaving", is_draining=True))
    assert roll.admit("speech").replica == "empty"
    assert roll.admit("speech", ["empty"]).replica == "full"
    assert roll.admit("tts") is None
    clock.now += SILENT_SECONDS + 1
    roll.report(report("full", 2))
    assert roll.admit("speech").replica == "full"  # nothing was heard of the other
    roll.lost("full")
    assert roll.admit("speech") is None and roll.somebody("speech") is None


def test_a_session_is_found_while_its_replica_lives():
    roll = ReplicaRegistry(Clock())
    roll.report(report("a"))
    roll.seat(Placement("sess_1", "token", "a", "sess_1", "token"))
    assert roll.where("sess_1")[1].url == "http://a"
    assert roll.where("sess_2") is None
    roll.lost("a")
    assert roll.where("sess_1") is None


@pytest.mark.parametrize(
    ("sessions", "late", "slack", "running", "wanted"),
    [
        (0, 0.0, None, 3, 1),
        (12, 0.0, 0.3, 1, 1),
        (13, 0.0, 0.3, 1, 2),
        (120, 0.0, 0.3, 4, 10),
        (12, 0.5, 0.3, 1, 2),
        (60, 0.5, 0.3, 2, 5),
        (12, 0.0, 0.05, 1, 2),
        (12, 0.0, -0.2, 3, 4),
    ],
)
def test_a_pool_has_enough_replicas_for_its_sessions_and_one_more_while_sound_is_late_or_nearly_is(
    sessions, late, slack, running, wanted
):
    @dataclass
    class Context:
        current_num_replicas: int
        aggregated_metrics: dict

    told = {"sessions": {"a": sessions / 2, "b": sessions / 2}, "late_share": {"a": 0.0, "b": late}}
    told |= {} if slack is None else {"slack": {"a": 0.3, "b": slack}}
    policy = SessionPolicy(target=12, late_share=0.02, least_slack=0.06)
    assert policy(Context(running, told)) == (wanted, {})


def test_figures_are_read_from_a_servers_metrics():
    page = "\n".join(
        [
            "# HELP viva_sessions Sessions that are open.",
            "viva_sessions 3.0",
            'viva_sessions_opened_total{transport="websocket"} 5.0',
            'viva_sessions_opened_total{transport="webrtc"} 2.0',
            "viva_deadlines_missed_total 4.0",
            "viva_sound_sent_seconds_total 20.0",
            "viva_slack_seconds NaN",
        ]
    )
    figures = Figures.read(page)
    assert figures == Figures(3, 7, 4.0, 20.0, None)
    assert Figures.read(page + "\nviva_engine_slack_seconds 0.4").slack == 0.4
    spoken = page.replace("NaN", "0.25") + "\nviva_audio_requests 2.0\nviva_audio_requests_begun 9.0"
    assert Figures.read(spoken) == Figures(5, 16, 4.0, 20.0, 0.25)
    assert figures.late_share(Figures(0, 0, 2.0, 10.0), 0.1) == pytest.approx(2 / 100)
    assert figures.late_share(figures, 0.1) == 0.0


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ({"speech": {"colour": "blue"}}, "colour"),
        ({"spech": {}}, "spech"),
        ({"speech": {"least": 3, "most": 2}}, "least 3"),
        ({"speech": {"sessions": 0}}, "sessions"),
        ({"speech": {"load": "nowhere"}}, "module:function"),
        ({"codec": {}}, "speech, asr or tts"),
        ({"speech": {"model": {"chat": "smollm2", "asr": "pool"}}}, "no pool called asr"),
        ({"server": {"host": "0.0.0.0"}}, "key"),
        ({"server": 8000}, "mapping"),
        ({"ingresses": 0}, "ingresses"),
    ],
)
def test_options_that_cannot_be_are_one_clear_line(args, word):
    with pytest.raises(InputError, match=word) as error:
        FleetOptions.read(args)
    assert "\n" not in str(error.value)


def test_a_loader_that_is_not_there_is_named():
    with pytest.raises(InputError, match="no_such_room"):
        named("vivavoce.no_such_room:load")


def test_a_cluster_without_gpus_is_told_at_once():
    fleet = FleetOptions.read({"speech": {"gpus": 1, "least": 2, "most": 4}})
    with pytest.raises(CapacityError, match="needs 2 GPUs and the cluster has no GPUs"):
        check_room(fleet, {"CPU": 64.0})
    check_room(fleet, {"CPU": 64.0, "GPU": 2.0})


def test_without_ray_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"vivavoce\[ray\]"):
        run(FleetOptions())


def test_the_config_of_the_docs_is_a_fleet():
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with Ray")
    application = yaml.safe_load(CONFIG.read_text(encoding="utf8"))["applications"][0]
    fleet = FleetOptions.read(application["args"])
    module, _, name = application["import_path"].partition(":")
    assert (module, name) == ("vivavoce.server.cluster.app", "build")
    assert fleet.pools["speech"].most >= fleet.pools["speech"].least


FORMAT = {"type": "audio/pcm", "rate": 24000}
SESSION = {
    "id": "sess_" + "a" * 24,
    "viva": {"resume_token": "token"},
    "audio": {"input": {"format": FORMAT}, "output": {"format": FORMAT}},
}


def tell(ledger: SessionMirror, kind: str, **fields):
    return ledger.told(json.dumps({"type": kind, **fields}, separators=(",", ":")))


def spoken(id: str, seconds: float | None, words: str | None) -> dict:
    part = {"type": "input_audio", "transcript": words}
    if seconds is not None:
        part["audio"] = base64.b64encode(bytes(round(seconds * 48_000))).decode()
    return {"id": id, "object": "realtime.item", "type": "message", "role": "user", "content": [part]}


@pytest.fixture
def ledger() -> SessionMirror:
    ledger = SessionMirror(kept_sound_seconds=10)
    tell(ledger, "session.created", session=SESSION)
    return ledger


def keep(ledger: SessionMirror, id: str, previous: str | None, seconds: float, words: str | None) -> None:
    done = tell(ledger, "conversation.item.done", item=spoken(id, None, words), previous_item_id=previous)
    assert json.loads(done.ask[0])["item_id"] == id
    assert tell(ledger, "conversation.item.retrieved", item=spoken(id, seconds, words)).forward is None


def test_a_ledger_keeps_the_newest_sound_and_the_words_of_the_rest(ledger):
    for number in range(5):
        words = None if number == 0 else f"words {number}"
        keep(ledger, f"item_{number}", f"item_{number - 1}" if number else None, 4.0, words)
    parts = [json.loads(event)["item"]["content"][0] for event in ledger.history()]
    assert [part.get("text") or "sound" for part in parts] == ["words 1", "words 2", "sound", "sound"]


def test_items_are_restored_in_their_order_without_those_that_were_deleted(ledger):
    def text(id: str, role: str, words: str) -> dict:
        return {"id": id, "type": "message", "role": role, "content": [{"type": "input_text", "text": words}]}

    tell(ledger, "conversation.item.added", item=text("b", "user", "second"), previous_item_id=None)
    tell(ledger, "conversation.item.added", item=text("c", "user", "third"), previous_item_id="b")
    tell(ledger, "conversation.item.added", item=text("a", "system", "first"), previous_item_id=None)
    tell(ledger, "conversation.item.deleted", item_id="b")
    assert [json.loads(event)["item"]["id"] for event in ledger.history()] == ["a", "c"]


def test_what_a_client_asked_for_is_not_swallowed(ledger):
    keep(ledger, "item_0", None, 1.0, "words")
    ledger.said('{"type":"conversation.item.retrieve","item_id":"item_0"}')
    assert tell(ledger, "conversation.item.retrieved", item=spoken("item_0", 1.0, "words")).forward is not None


def test_an_item_that_went_before_its_sound_came_is_not_waited_for(ledger):
    done = tell(ledger, "conversation.item.done", item=spoken("item_0", None, None), previous_item_id=None)
    assert not ledger.is_quiet
    error = {"type": "invalid_request_error", "event_id": json.loads(done.ask[0])["event_id"]}
    assert tell(ledger, "error", error=error).forward is None
    assert ledger.is_quiet
    assert tell(ledger, "error", error={"event_id": None}).forward is not None


def test_only_sound_since_the_last_turn_is_said_again(ledger):
    def append(seconds: float) -> str:
        sound = base64.b64encode(bytes(round(seconds * 48_000))).decode()
        return json.dumps({"type": "input_audio_buffer.append", "audio": sound})

    ledger.said(append(1.0))
    tell(ledger, "input_audio_buffer.committed", item_id="item_0", previous_item_id=None)
    ledger.said(append(0.5))
    assert ledger.tail == [append(0.5)]
    ledger.moved()
    stopped = tell(ledger, "input_audio_buffer.speech_stopped", audio_end_ms=400, item_id="item_1")
    assert json.loads(stopped.forward)["audio_end_ms"] == 1400
    for _ in range(50):
        ledger.said(append(1.0))
    assert len(ledger.tail) <= 20
