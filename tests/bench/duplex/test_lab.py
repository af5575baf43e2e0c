"""The duplex lab against servers whose right result is known: in virtual time, and on a real socket."""

import json

import pytest
from typer.testing import CliRunner

from tests.bench.duplex.voices import keep, speak
from tests.bench.test_turn_server import Host, Slow, serving
from tests.bench.turn_servers import Behaviour, Servers, played
from vivavoce.bench.duplex import page, report, requirements, texts
from vivavoce.bench.duplex.lab import LabOptions, run
from vivavoce.bench.duplex.runner import play_scenes
from vivavoce.bench.duplex.scenes import gather, script
from vivavoce.bench.turn import session_of
from vivavoce.cli import app
from vivavoce.errors import InputError
from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES

LONG = 4.0


def lab(behaviour: Behaviour, *names: str, count: int = 2, parallel: int = 1, conditions=("headset",)):
    """The played scenes of a server that behaves so."""
    scenes = script(gather(speak), count, names, ["en"], conditions)
    session = session_of("default", 0, None)
    return played(play_scenes(Servers(behaviour), scenes, session, parallel))


def test_a_server_that_yields_at_200_ms_is_measured_so():
    found = report.figures(lab(Behaviour(stops_after=0.2, reply=LONG), "interruption", count=2))
    assert found["R_Y"] == 1.0 and found["interruption.measured"] == 2
    assert found["L_Y"] == pytest.approx(0.2, abs=0.06)
    assert found["interruption.stop_p50"] == pytest.approx(0.2, abs=0.06)
    assert found["interruption.over_latency_p50"] == pytest.approx(0.2 + 0.15 + 0.08, abs=0.08)


def test_a_server_that_yields_to_all_keeps_nothing():
    names = ("user backchannel", "vocal tic", "side talk", "background", "noise")
    found = report.figures(lab(Behaviour(stops_after=0.04, reply=LONG), *names, count=1))
    assert (found["S_BC"], found["S_VT"], found["S_ND"]) == (0.0, 0.0, 0.0)
    assert found["background.stopped"] == 1.0 and found["vocal tic.stray_answered"] == 1.0


def test_a_sound_in_silence_waits_for_the_reply_to_the_one_before():
    (found,) = lab(Behaviour(stops_after=0.04, reply=1.5), "vocal tic", count=1).outcomes
    stray = found.caller[-1]
    assert stray.part == "stray" and len(found.agent) == 3  # to the question, the tic over it, and the one in silence
    assert found.agent[1][1] + 1.0 < stray.start < stray.end < found.agent[2][0]


def test_a_server_that_never_yields_keeps_everything():
    names = ("interruption", "user backchannel", "vocal tic", "side talk", "background")
    found = report.figures(lab(Behaviour(stops_after=None, reply=LONG), *names, count=1))
    assert found["R_Y"] == 0.0 and found["L_Y"] is None
    assert found["S_BC"] == 1.0 and found["background.stopped"] == 0.0 and found["vocal tic.stopped"] == 0.0


def test_pauses_are_answered_by_a_hasty_server_and_not_by_a_patient_one():
    hasty = report.figures(lab(Behaviour(silence=0.2, thinking=0.05, reply=1.5), "pause", "smooth", count=1))
    patient = report.figures(lab(Behaviour(silence=1.5, thinking=0.05, reply=1.5), "pause", "smooth", count=1))
    assert hasty["pause.early"] == 1.0 and patient["pause.early"] == 0.0
    assert hasty["I_A"] == 0.5 and patient["I_A"] == 0.0
    assert hasty["smooth.latency_p50"] == pytest.approx(0.33, abs=0.08)
    assert patient["smooth.latency_p50"] == pytest.approx(1.63, abs=0.08)
    assert patient["R_R"] == hasty["R_R"] == 1.0


def test_a_silent_server_answers_nothing():
    found = report.figures(lab(Behaviour(silence=60.0), "smooth", "interruption", count=1))
    assert found["R_R"] == 0.0 and found["smooth.answered"] == 0.0
    assert found["R_Y"] is None and found["interruption.measured"] == 0


def test_a_reply_that_ends_by_itself_proves_nothing():
    done = lab(Behaviour(stops_after=None, reply=0.9), "user backchannel", "interruption", count=1)
    assert [each.stopped for each in done.outcomes] == [None, None]
    assert [each.over for each in done.outcomes] == ["interruption", "backchannel"]
    found = report.figures(done)
    assert found["S_BC"] is None and found["R_Y"] is None and found["R_R"] == 1.0


def test_a_server_that_stops_by_itself_is_cut_short():
    found = report.figures(lab(Behaviour(stops_by_itself=1.0, reply=LONG), "smooth", count=1))
    assert found["smooth.cut_short"] == 1.0


def test_echo_in_a_room_stops_a_server_that_hears_itself():
    hears_itself = lab(Behaviour(stops_after=0.1, reply=LONG), "echo", count=1)  # -6 dB
    assert hears_itself.outcomes[0].cut_short
    microphone, heard = hears_itself.recordings[0]
    first = round(hears_itself.outcomes[0].agent[0][0] * 24_000)
    assert heard[:first].max() < 0.01 and microphone[first + 2000 : first + 6000].max() > 0.01


@pytest.mark.full
def test_scenes_played_at_once_have_the_same_result():
    names = ("interruption", "user backchannel", "pause", "smooth")
    one, three = (lab(Behaviour(reply=LONG), *names, parallel=parallel) for parallel in (1, 3))
    assert report.figures(one) == pytest.approx(report.figures(three), abs=0.05)


def test_both_sides_are_recorded_on_one_clock():
    done = lab(Behaviour(reply=LONG), "interruption", count=1)
    (found,), (sound,) = done.outcomes, done.recordings
    asked, over = found.caller
    for spoken in (asked, over):
        begin, end = round(spoken.start * 24_000), round(spoken.end * 24_000)
        assert abs(sound[0, begin:end]).max() > 0.05 > abs(sound[0, begin - 2400 : begin - 240]).max()
    begin, end = (round(moment * 24_000) for moment in found.agent[0])
    assert abs(sound[1, begin:end]).max() > 0.05 and not sound[1, begin - 2400 : begin - 240].any()
    assert asked.end < found.agent[0][0] < over.start


def test_the_report_is_written(tmp_path, capsys):
    done = lab(Behaviour(reply=LONG), "interruption", "pause", count=1)
    required = requirements.parse("R_Y>=.95, pause.early<=.05", report.figure_names())
    about = {"url": "ws://here", "how": "made up <b>", "sounds": "syllables"}
    result = report.result_of(done, about, required)
    report.print_result(result)
    report.save(result, tmp_path)
    written = json.loads((tmp_path / "duplex.json").read_text())
    assert [each["met"] for each in written["requirements"]] == [True, False]
    assert written["figures"]["R_Y"] == 1.0 and written["events"]["R_Y"] == 1
    assert any(each["name"] == "gpt-realtime-1.5" for each in written["published"])
    text = page.write_page(result, done.outcomes, done.recordings, tmp_path).read_text()
    assert text.count("<audio") == text.count("<svg") == 2 and "made up &lt;b&gt;" in text
    assert all((tmp_path / "calls" / f"{index:03d}.ogg").stat().st_size > 1000 for index in range(2))
    shown = capsys.readouterr().err
    assert "not met" in shown and "gpt-realtime-1.5" in shown and "interruption, en" in shown


def test_requirements_are_read_and_checked():
    bounds = requirements.parse("R_Y>=.95,L_Y_p50<0.35, user backchannel.stopped <= 0.1")
    assert [str(each) for each in bounds] == ["R_Y>=0.95", "L_Y_p50<0.35", "user backchannel.stopped<=0.1"]
    assert [each.is_met({"R_Y": 0.95, "L_Y_p50": 0.4}) for each in bounds] == [True, False, False]
    for wrong in ("R_Y=1", "R_Y>=x", ">=1"):
        with pytest.raises(InputError, match="is not a requirement"):
            requirements.parse(wrong)
    with pytest.raises(InputError, match="there is no figure 'R_X'"):
        requirements.parse("R_X>1", report.figure_names())


class Patient(Slow):
    seconds = 3.0


@pytest.mark.full
def test_the_command_calls_a_real_server_and_fails_on_a_bound(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "vivavoce" / "duplex" / "kokoro-82m"
    for bank in (texts.QUESTIONS, texts.INTERRUPTIONS):
        keep(folder, bank["en"][0], HELD_OUT_VOICES["en"][0])
    host = Host()
    host.kind = Patient
    chosen = ["--scene", "smooth", "--scene", "interruption", "--language", "en", "--count", "1", "--json"]
    with serving(host) as address:
        bound = ["--require", "R_R>=1,smooth.latency_p50<=0.1", "--out", str(tmp_path / "out")]
        done = CliRunner().invoke(app, ["bench", "duplex", address, *chosen, *bound])
    assert done.exit_code == 1, done.output
    result = json.loads(done.stdout)
    assert [each["met"] for each in result["requirements"]] == [True, False]
    assert result["figures"]["R_R"] == 1.0 and result["figures"]["smooth.latency_p50"] > 0.3
    assert result["figures"]["interruption.stopped"] in (1.0, None)  # None: a busy machine was too late for the reply
    assert not result["errors"] and (tmp_path / "out" / "index.html").is_file()


@pytest.mark.parametrize(("option", "value"), [("speaker", "enrol"), ("smart_turn", "folder")])
def test_options_of_a_simulated_server_are_refused_for_others(option, value):
    with pytest.raises(InputError, match="--" + option.replace("_", "-")):
        run("ws://127.0.0.1:1/v1/realtime", options=LabOptions(**{option: value}))
