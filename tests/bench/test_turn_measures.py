"""The figures of `viva bench turn` on scripted servers, in virtual time."""

import pytest

from tests.bench.turn_servers import Behaviour, Servers, material, played
from vivavoce.bench.turn import TurnPlan, measure
from vivavoce.bench.turn_caller import CallEnvironment
from vivavoce.bench.turn_scenes import Scene, ScriptedExchange, script


def figures(behaviour, *scenes, turns=3, sessions=1, count=4):
    """What is measured in these scenes, by name or made up, of a server that behaves like this."""
    said, servers = material(count), Servers(behaviour)
    made_up = [scene for scene in scenes if isinstance(scene, Scene)]
    named = script(said, turns, [scene for scene in scenes if isinstance(scene, str)])
    result, calls = played(measure(servers, TurnPlan(said, [*named, *made_up], turns, sessions)))
    return result, calls, servers


def test_latency_is_what_the_server_takes():
    for silence, thinking, lead_in in ((0.2, 0.15, 0.0), (0.5, 0.4, 0.0), (0.2, 0.0, 0.25)):
        behaviour = Behaviour(silence=silence, thinking=thinking, lead_in=lead_in)
        totals = figures(behaviour, "clean")[0]["totals"]
        assert totals["response_rate"] == 1.0
        # the last voiced sample lies inside a packet of 20 ms, and the last 10 ms of a syllable may not be loud
        for quantile in ("p50", "p95"):
            assert 1e3 * (silence + thinking + lead_in) - 15 < totals["response_ms"][quantile]
            assert totals["response_ms"][quantile] < 1e3 * (silence + thinking + lead_in) + 45


def test_a_server_that_says_nothing_has_answered_nothing():
    totals = figures(Behaviour(thinking=1e4), "clean", turns=2)[0]["totals"]
    assert totals["response_rate"] == 0.0 and totals["response_ms"] is None


def test_a_server_that_stops_at_every_sound_yields_and_is_not_selective():
    totals = figures(Behaviour(stops_after=0.06), "barge-in", "mm-hm", "cough", "knock")[0]["totals"]
    assert totals["yield_rate"] == 1.0
    assert 59 < totals["yield_ms"]["p50"] <= 120
    assert totals["backchannel_selectivity"] == totals["cough_selectivity"] == 0.0
    assert totals["self_interruptions"] == 0
    assert totals["after_interruption_ms"]["p50"] == pytest.approx(350, abs=45)


def test_truncate_events_carry_the_played_duration():
    _, calls, servers = figures(Behaviour(stops_after=0.06), "barge-in")
    received = [event for server in servers.opened for event in server.received]
    truncations = [event for event in received if event["type"] == "conversation.item.truncate"]
    played = [each for call in calls for each in call.played]
    heard = [1e3 * (each.over.first + 0.06 - each.reply.spans[0].start) for each in played]
    assert [event["item_id"] for event in truncations] == [each.reply.item for each in played]
    assert [event["audio_end_ms"] for event in truncations] == pytest.approx(heard, abs=41)


def test_a_caller_keeps_their_voice_and_a_scene_is_all_its_calls():
    result, calls, servers = figures(Behaviour(), "clean", "barge-in", turns=3)
    voices = [[each.exchange.question.voice for each in call.played] for call in calls]
    assert voices == 2 * [["voice 0", "voice 0"], ["voice 1"]] and len(servers.opened) == 4
    assert [(scene["name"], scene["questions"]) for scene in result["scenes"]] == [("clean", 3), ("barge-in", 3)]


def test_a_server_that_never_yields_keeps_every_reply():
    totals = figures(Behaviour(stops_after=None), "barge-in", "mm-hm", "cough", "side talk")[0]["totals"]
    assert totals["yield_rate"] == 0.0 and totals["yield_ms"] is None
    assert totals["backchannel_selectivity"] == totals["cough_selectivity"] == totals["side_talk_selectivity"] == 1.0


def test_a_slow_detector_stops_for_interruptions_and_not_for_backchannels():
    totals = figures(Behaviour(stops_after=0.3), "barge-in", "mm-hm")[0]["totals"]
    assert totals["yield_rate"] == 1.0 and totals["backchannel_selectivity"] == 1.0
    assert 299 < totals["yield_ms"]["p50"] <= 700  # syllables end and begin again


def test_a_reply_too_short_to_be_disturbed_is_not_counted():
    totals = figures(Behaviour(reply=0.5), "barge-in")[0]["totals"]
    assert totals["interruptions"] == 0 and totals["yield_rate"] is None and totals["not_measured"] == 3


def test_hesitations_shorter_than_the_silence_are_no_end():
    assert figures(Behaviour(silence=1.0), "pauses")[0]["totals"]["false_end_rate"] == 0.0


def test_hesitations_longer_than_the_silence_are_false_ends():
    totals = figures(Behaviour(silence=0.2), "pauses")[0]["totals"]
    assert totals["false_end_rate"] == 1.0 and totals["cut_in_rate"] > 0.5
    assert totals["response_rate"] == 1.0  # the rest of the question is answered all the same


def test_late_sound_is_underruns():
    smooth = figures(Behaviour(), "clean")[0]["totals"]
    assert smooth["underruns"] == 0 and smooth["dry_ms"] == 0
    late = figures(Behaviour(gap=0.5), "clean")[0]["totals"]
    # the tenth piece comes 200 ms after the player ran dry; the others come as late, but by then it is that far behind
    assert late["underruns"] == 3
    assert late["dry_ms"] == pytest.approx(3 * 200, abs=1)


def test_a_server_that_hears_its_own_echo_interrupts_itself():
    exchanges = tuple(ScriptedExchange(question) for question in material(2).questions)
    loud = Scene("loud echo", exchanges, CallEnvironment(echo_db=-3.0))
    assert figures(Behaviour(), loud)[0]["totals"]["self_interruptions"] > 0
    assert figures(Behaviour(), "echo")[0]["totals"]["self_interruptions"] == 0  # too soft for what this server hears
    assert figures(Behaviour(stops_after=None), loud)[0]["totals"]["self_interruptions"] == 0


def test_a_server_that_stops_without_caller_speech_is_counted():
    totals = figures(Behaviour(stops_by_itself=1.0), "clean")[0]["totals"]
    assert totals["self_interruptions"] == 3 and totals["response_rate"] == 1.0


def test_sounds_in_silence_that_are_answered_are_counted():
    assert figures(Behaviour(), "cough")[0]["totals"]["stray_selectivity"] == 0.0


def test_a_long_reply_is_stopped_by_the_caller_and_that_is_no_interruption():
    result, _, servers = figures(Behaviour(reply=30.0), "clean", turns=2)
    assert result["totals"]["self_interruptions"] == 0 and result["totals"]["response_rate"] == 1.0
    received = [event for server in servers.opened for event in server.received]
    assert sum(event["type"] == "response.cancel" for event in received) == 2


def test_a_bad_line_makes_answers_late_and_some_gaps():
    good = figures(Behaviour(ahead=0.1), "clean")[0]["totals"]
    bad = figures(Behaviour(ahead=0.1), "loss", "jitter", turns=4)[0]["totals"]
    assert bad["response_ms"]["p50"] > good["response_ms"]["p50"] + 30
    assert bad["underruns"] > 0 and bad["response_rate"] > 0.7


def test_noise_above_what_a_server_takes_for_speech_is_seen():
    totals = figures(Behaviour(), "noise 5 dB", turns=2)[0]["totals"]
    assert totals["response_rate"] < 1.0


def test_sessions_at_once_get_their_own_answers():
    together = figures(Behaviour(reply=1.0), sessions=3, turns=2)[0]["together"]
    assert together["response_rate"] == 1.0 and together["underruns"] == 0
    assert (together["answers"], together["own"], together["compared_by"]) == (6, 6, "words")
    assert together["shared_reply_ids"] == []


@pytest.mark.parametrize("transcripts", [True, False])
def test_answers_that_reach_the_wrong_session_are_found(transcripts):
    behaviour = Behaviour(reply=1.0, mixes_up=True, transcripts=transcripts)
    together = figures(behaviour, sessions=3, turns=1)[0]["together"]
    assert together["compared_by"] == ("words" if transcripts else "sound")
    assert together["other"] >= 2 and together["own"] + together["other"] == 3


def test_the_same_call_twice_gives_the_same_figures():
    first, second = (figures(Behaviour(), "clean", "mm-hm", "loss")[0] for _ in range(2))
    assert first["outcomes"] == second["outcomes"]
