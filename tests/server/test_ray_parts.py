"""The parts of a fleet that need no Ray: its options, the registry, the policy, and what a mirror keeps."""

import base64
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.errors import CapacityError, InputError, MissingDependencyError
from vivavoce.server.cluster.options import FleetOptions, SessionPolicy
from vivavoce.server.cluster.registry import PENDING_SECONDS, STALE_SECONDS, Placement, ReplicaRegistry, ReplicaReport
from vivavoce.server.cluster.replica_server import ReplicaMetrics, import_object
from vivavoce.server.cluster.session_mirror import SessionMirror
from vivavoce.server.hosting import ServingOptions, serve_fleet
from vivavoce.server.realtime.session_changes import default_session

CONFIG = Path(__file__).parents[2] / "docs" / "ray.yaml"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def report(name: str, sessions: int = 0, opened: int = 0, **more) -> ReplicaReport:
    return ReplicaReport(name, "speech", f"http://{name}", "key", 4, sessions, opened, **more)


def test_reservations_count_until_the_replica_reports_them():
    registry = ReplicaRegistry(Clock())
    registry.report(report("a"))
    assert [registry.admit("speech") is None for _ in range(5)] == [False] * 4 + [True]
    registry.report(report("a", sessions=4, opened=4))
    assert registry.admit("speech") is None
    registry.report(report("a", sessions=3, opened=4))  # one left
    assert registry.admit("speech") is not None and registry.admit("speech") is None


def test_unused_reservations_expire():
    clock = Clock()
    registry = ReplicaRegistry(clock)
    registry.report(report("a"))
    assert all(registry.admit("speech") for _ in range(4))
    clock.now += PENDING_SECONDS + 1
    registry.report(report("a"))
    assert all(registry.admit("speech") for _ in range(4))


def test_sessions_go_to_the_emptiest_live_replica():
    clock = Clock()
    registry = ReplicaRegistry(clock)
    registry.report(report("full", 3))
    registry.report(report("empty", 1))
    registry.report(report("leaving", is_draining=True))
    assert registry.admit("speech").replica == "empty"
    assert registry.admit("speech", ["empty"]).replica == "full"
    assert registry.admit("tts") is None
    clock.now += STALE_SECONDS + 1
    registry.report(report("full", 2))
    assert registry.admit("speech").replica == "full"  # nothing was heard of the other
    registry.mark_lost("full")
    assert registry.admit("speech") is None and registry.pick("speech") is None


def test_a_session_is_found_while_its_replica_lives():
    registry = ReplicaRegistry(Clock())
    registry.report(report("a"))
    registry.place(Placement("sess_1", "token", "a", "sess_1", "token"))
    assert registry.locate("sess_1")[1].url == "http://a"
    assert registry.locate("sess_2") is None
    registry.mark_lost("a")
    assert registry.locate("sess_1") is None


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

    metrics = {"sessions": {"a": sessions / 2, "b": sessions / 2}, "late_share": {"a": 0.0, "b": late}}
    metrics |= {} if slack is None else {"slack": {"a": 0.3, "b": slack}}
    policy = SessionPolicy(target=12, late_share=0.02, min_slack=0.06)
    assert policy(Context(running, metrics)) == (wanted, {})


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
    metrics = ReplicaMetrics.read(page)
    assert metrics == ReplicaMetrics(3, 7, 4.0, 20.0, None)
    assert ReplicaMetrics.read(page + "\nviva_engine_slack_seconds 0.4").slack == 0.4
    spoken = page.replace("NaN", "0.25") + "\nviva_audio_requests 2.0\nviva_audio_requests_begun 9.0"
    assert ReplicaMetrics.read(spoken) == ReplicaMetrics(5, 16, 4.0, 20.0, 0.25)
    assert metrics.late_share(ReplicaMetrics(0, 0, 2.0, 10.0), 0.1) == pytest.approx(2 / 100)
    assert metrics.late_share(metrics, 0.1) == 0.0


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ({"speech": {"colour": "blue"}}, "colour"),
        ({"spech": {}}, "spech"),
        ({"speech": {"least": 3, "most": 2}}, "min_replicas 3"),
        ({"speech": {"sessions": 0}}, "sessions"),
        ({"speech": {"load": "nowhere"}}, "module:function"),
        ({"codec": {}}, "speech, asr or tts"),
        ({"speech": {"model": {"chat": "smollm2", "asr": "pool"}}}, "no pool called asr"),
        ({"server": {"host": "0.0.0.0"}}, "key"),
        ({"server": 8000}, "mapping"),
        ({"ingresses": 0}, "ingresses"),
    ],
)
def test_invalid_options_are_reported_in_one_line(args, word):
    with pytest.raises(InputError, match=word) as error:
        FleetOptions.read(args)
    assert "\n" not in str(error.value)


def test_a_missing_loader_is_named():
    with pytest.raises(InputError, match="no_such_room"):
        import_object("vivavoce.no_such_room:load")


def test_a_cluster_without_gpus_is_refused():
    fleet = FleetOptions.read({"speech": {"gpus": 1, "least": 2, "most": 4}})
    with pytest.raises(CapacityError, match="needs 2 GPUs and the cluster has no GPUs"):
        fleet.check_capacity({"CPU": 64.0})
    fleet.check_capacity({"CPU": 64.0, "GPU": 2.0})


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "vivavoce.server.cluster.app", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"vivavoce\[ray\]"):
        serve_fleet(ServingOptions(device="cpu"), replicas=1)


def test_the_config_of_the_docs_is_a_fleet():
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with Ray")
    application = yaml.safe_load(CONFIG.read_text(encoding="utf8"))["applications"][0]
    fleet = FleetOptions.read(application["args"])
    module, _, name = application["import_path"].partition(":")
    assert (module, name) == ("vivavoce.server.cluster.app", "build")
    assert fleet.pools["speech"].max_replicas >= fleet.pools["speech"].min_replicas


SESSION = msgspec.to_builtins(default_session(ConversationSettings(), "mini-speech")) | {
    "id": "sess_" + "a" * 24,
    "viva": {"resume_token": "token"},
}


def send_event(mirror: SessionMirror, kind: str, **fields):
    return mirror.replica_sent(json.dumps({"type": kind, **fields}, separators=(",", ":")))


def spoken(id: str, seconds: float | None, words: str | None) -> dict:
    part = {"type": "input_audio", "transcript": words}
    if seconds is not None:
        part["audio"] = base64.b64encode(bytes(round(seconds * 48_000))).decode()
    return {"id": id, "object": "realtime.item", "type": "message", "role": "user", "content": [part]}


@pytest.fixture
def mirror() -> SessionMirror:
    mirror = SessionMirror(kept_sound_seconds=10)
    send_event(mirror, "session.created", session=SESSION)
    return mirror


def keep(mirror: SessionMirror, id: str, previous: str | None, seconds: float, words: str | None) -> None:
    done = send_event(mirror, "conversation.item.done", item=spoken(id, None, words), previous_item_id=previous)
    assert json.loads(done.to_replica[0])["item_id"] == id
    assert send_event(mirror, "conversation.item.retrieved", item=spoken(id, seconds, words)).to_client is None


def test_a_mirror_keeps_the_newest_audio_and_the_text_of_the_rest(mirror):
    for number in range(5):
        words = None if number == 0 else f"words {number}"
        keep(mirror, f"item_{number}", f"item_{number - 1}" if number else None, 4.0, words)
    parts = [json.loads(event)["item"]["content"][0] for event in mirror.history()]
    assert [part.get("text") or "sound" for part in parts] == ["words 1", "words 2", "sound", "sound"]


def test_items_are_restored_in_their_order_without_those_that_were_deleted(mirror):
    def text(id: str, role: str, words: str) -> dict:
        return {"id": id, "type": "message", "role": role, "content": [{"type": "input_text", "text": words}]}

    send_event(mirror, "conversation.item.added", item=text("b", "user", "second"), previous_item_id=None)
    send_event(mirror, "conversation.item.added", item=text("c", "user", "third"), previous_item_id="b")
    send_event(mirror, "conversation.item.added", item=text("a", "system", "first"), previous_item_id=None)
    send_event(mirror, "conversation.item.deleted", item_id="b")
    assert [json.loads(event)["item"]["id"] for event in mirror.history()] == ["a", "c"]


def test_an_item_retrieved_by_the_client_is_forwarded(mirror):
    keep(mirror, "item_0", None, 1.0, "words")
    mirror.client_sent('{"type":"conversation.item.retrieve","item_id":"item_0"}')
    assert send_event(mirror, "conversation.item.retrieved", item=spoken("item_0", 1.0, "words")).to_client is not None


def test_a_deleted_item_is_no_longer_awaited(mirror):
    done = send_event(mirror, "conversation.item.done", item=spoken("item_0", None, None), previous_item_id=None)
    assert not mirror.is_quiet
    error = {"type": "invalid_request_error", "message": "gone", "event_id": json.loads(done.to_replica[0])["event_id"]}
    assert send_event(mirror, "error", error=error).to_client is None
    assert mirror.is_quiet
    other = {"type": "server_error", "message": "late", "event_id": None}
    assert send_event(mirror, "error", error=other).to_client is not None


def test_only_audio_since_the_last_turn_is_sent_again(mirror):
    def append(seconds: float) -> str:
        sound = base64.b64encode(bytes(round(seconds * 48_000))).decode()
        return json.dumps({"type": "input_audio_buffer.append", "audio": sound})

    mirror.client_sent(append(1.0))
    send_event(mirror, "input_audio_buffer.committed", item_id="item_0", previous_item_id=None)
    mirror.client_sent(append(0.5))
    assert mirror.tail == [append(0.5)]
    mirror.reset_after_move()
    stopped = send_event(mirror, "input_audio_buffer.speech_stopped", audio_end_ms=400, item_id="item_1")
    assert json.loads(stopped.to_client)["audio_end_ms"] == 1400
    for _ in range(50):
        mirror.client_sent(append(1.0))
    assert len(mirror.tail) <= 20
