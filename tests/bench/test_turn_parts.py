"""Parts of `viva bench turn`: player, microphone, sounds, questions, script, and comparison of answers."""

import json

import numpy as np
import pytest

from tests.bench.turn_servers import material
from vivavoce.audio.io import Sound, write
from vivavoce.audio.level import rms_dbfs
from vivavoce.audio.vad import speech_probabilities, voice_activity
from vivavoce.bench.turn import session_of
from vivavoce.bench.turn_caller import PACKET, CallEnvironment, Microphone
from vivavoce.bench.turn_client import RESEND_SECONDS, Line, LineDirection, Loudspeaker, PlayedReply, realtime_url
from vivavoce.bench.turn_measure import SessionAnswer, classify_answer, cut_at, sound_similarity
from vivavoce.bench.turn_scenes import SCENES, script
from vivavoce.bench.turn_sounds import (
    RATE,
    SPEECH_DBFS,
    cough,
    distant_talker,
    gather,
    knock,
    mm_hm,
    recorded,
    room_noise,
    talk,
    voiced_bounds,
    with_pause,
)
from vivavoce.errors import InputError


def sound(seconds: float, value: float = 0.1) -> np.ndarray:
    return np.full(round(seconds * RATE), value, np.float32)


# The player


def test_sound_is_heard_when_the_start_buffer_is_full():
    reply = PlayedReply("r", 0.0)
    reply.feed(1.0, sound(0.05))
    assert reply.heard_at(0) is None
    reply.feed(1.04, sound(0.05))
    assert reply.heard_at(0) == 1.04
    assert reply.heard_at(RATE // 20) == pytest.approx(1.09)
    assert reply.arrived_at(0) == 1.0 and reply.arrived_at(RATE // 20) == 1.04


def test_a_reply_shorter_than_the_buffer_is_heard_when_it_is_whole():
    reply = PlayedReply("r", 0.0)
    reply.feed(1.0, sound(0.05))
    reply.finish(1.2)
    assert reply.heard_at(0) == 1.2 and reply.ends_at() == pytest.approx(1.25) and reply.gaps == []


def test_running_dry_is_a_gap_only_if_sound_follows():
    reply = PlayedReply("r", 0.0)
    reply.feed(1.0, sound(0.1))
    reply.feed(1.3, sound(0.1))
    assert reply.gaps == [pytest.approx(0.2)]
    assert reply.heard_at(RATE // 10) == 1.3
    reply.finish(9.0)
    assert len(reply.gaps) == 1 and not reply.is_audible(9.0)


def test_dropped_audio_is_not_played_and_later_audio_is():
    reply = PlayedReply("r", 0.0)
    reply.feed(1.0, sound(1.0))
    assert reply.drop(1.4, "speech_started")
    assert reply.position(1.4) == RATE  # the rest is gone
    assert reply.heard_at(round(0.39 * RATE)) == pytest.approx(1.39)
    assert reply.heard_at(round(0.41 * RATE)) is None
    assert cut_at(reply) == 1.4
    reply.feed(1.5, sound(0.2))
    assert reply.heard_at(RATE) == 1.5 and cut_at(reply) is None and reply.gaps == []


def test_a_second_reply_waits_for_the_first():
    player = Loudspeaker()
    player.feed(1.0, "a", sound(1.0, 0.1))
    player.reply("a", 1.0).finish(1.0)
    player.feed(1.2, "b", sound(0.5, 0.2))
    assert player.replies["b"].heard_at(0) == pytest.approx(2.0)
    heard = player.read(1.9, RATE // 5)
    assert np.allclose(heard[: RATE // 10], 0.1) and np.allclose(heard[RATE // 10 :], 0.2)
    assert player.read(0.5, RATE // 4).max() == 0.0


def test_a_reply_the_caller_stopped_was_not_stopped_by_the_server():
    reply = PlayedReply("r", 0.0)
    reply.feed(1.0, sound(1.0))
    reply.drop(1.4, "bench")
    reply.status = "cancelled"
    assert cut_at(reply) is None


# The microphone


def test_the_microphone_gives_every_sample_once_and_hears_the_loudspeaker():
    player = Loudspeaker()
    player.feed(0.0, "a", sound(2.0, 0.5))
    microphone = Microphone(CallEnvironment(echo_db=-20.0, echo_delay=0.1), player)
    said = talk(0.5, seed=1)
    utterance = microphone.say(said, "question")
    taken = np.concatenate([microphone.packet() for _ in range(50)])
    echo = np.where(np.arange(len(taken)) >= 0.1 * RATE, 0.05, 0.0)
    rest = taken - echo
    rest[: len(said)] -= said
    assert np.abs(rest).max() < 0.003  # a quiet room
    first, last = voiced_bounds(said)
    assert (utterance.first, utterance.last) == (first / RATE, last / RATE)


def test_noise_has_the_given_snr():
    microphone = Microphone(CallEnvironment(snr_db=10.0), Loudspeaker())
    taken = np.concatenate([microphone.packet() for _ in range(500)])
    assert rms_dbfs(taken) == pytest.approx(SPEECH_DBFS - 10, abs=0.2)


def test_lost_packets_are_silent():
    microphone = Microphone(CallEnvironment(line=Line(loss=0.1)), Loudspeaker())
    silent = sum(not microphone.packet().any() for _ in range(2000))
    assert 140 < silent < 260
    assert len(microphone.record) == 2000 and all(len(packet) == PACKET for packet in microphone.record)


def test_a_line_keeps_the_order_and_sends_again():
    way = LineDirection(Line(jitter=0.03, delay=0.02, loss=0.1), seed=1)
    sent = np.arange(500) * 0.02
    arrived = np.array([way.arrival(moment, resent=True) for moment in sent])
    assert (np.diff(arrived) >= 0).all() and (arrived >= sent + 0.02).all()
    assert (arrived - sent).max() > RESEND_SECONDS


# The sounds


def test_a_hum_is_taken_for_a_voice_and_a_knock_is_not():
    detector = voice_activity()

    def voice(samples):
        heard = np.concatenate([room_noise(0.5, -70), samples, room_noise(0.5, -70)])
        return float((speech_probabilities(detector, Sound(heard, RATE).resampled(16_000).samples[0]) > 0.5).mean())

    assert all(voice(mm_hm(seed)) > 0.1 for seed in range(4))
    assert all(voice(talk(1.0, seed)) > 0.3 for seed in range(3))
    assert all(voice(knock(seed)) == 0.0 for seed in range(4))


def test_levels_are_those_of_a_call():
    question = talk(1.0, seed=2)
    first, last = voiced_bounds(question)
    assert rms_dbfs(question[first:last]) == pytest.approx(SPEECH_DBFS, abs=1.5)
    assert rms_dbfs(distant_talker(question)) < SPEECH_DBFS - 15
    for made in (mm_hm(1), cough(1), cough(2), knock(1), question):
        assert made.dtype == np.float32 and np.abs(made).max() < 1.0


def test_a_hesitation_is_silence_in_the_middle():
    question = talk(1.2, seed=3)
    paused, cut = with_pause(question, 0.6)
    assert len(paused) == len(question) + round(0.6 * RATE)
    assert not paused[cut : cut + round(0.6 * RATE)].any()
    assert len(question) // 4 < cut < 3 * len(question) // 4


# The questions


def test_questions_are_read_by_their_index(tmp_path):
    write(tmp_path / "a.flac", Sound(0.3 * talk(0.8, seed=1), RATE))
    write(tmp_path / "b.opus", Sound(talk(0.8, seed=2), RATE))
    entries = [
        {"file": "b.opus", "text": "B?", "reply": "Yes.", "voice": "v", "intent": "x"},
        {"file": "a.flac", "text": "A?"},
    ]
    (tmp_path / "questions.json").write_text(json.dumps(entries))
    (tmp_path / "backchannels").mkdir()
    write(tmp_path / "backchannels" / "yes.wav", Sound(talk(0.3, seed=3), 16_000))
    found = gather(tmp_path)
    assert [(each.text, each.reply, each.voice) for each in found.questions] == [("B?", "Yes.", "v"), ("A?", None, "")]
    assert len(found.backchannels) == 1
    for question in found.questions:
        first, last = voiced_bounds(question.sound)
        assert rms_dbfs(question.sound[first:last]) == pytest.approx(SPEECH_DBFS, abs=2)
        assert first <= RATE // 10 and len(question.sound) - last <= RATE // 10


def test_a_folder_without_questions_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no recorded questions"):
        recorded(tmp_path)
    (tmp_path / "questions.json").write_text("{}")
    with pytest.raises(InputError, match="must be a list"):
        recorded(tmp_path)
    with pytest.raises(InputError, match="not a folder"):
        gather(tmp_path / "nowhere")


@pytest.mark.debian("flite")
def test_without_recordings_a_synthesizer_asks(monkeypatch, tmp_path):
    monkeypatch.setattr("vivavoce.bench.turn_sounds.BUNDLED", tmp_path)
    found = gather()
    assert found.source == "synthesised by flite" and len(found.questions) == 12
    assert len({question.voice for question in found.questions}) > 2


def test_without_anything_syllables_ask(monkeypatch, tmp_path):
    monkeypatch.setattr("vivavoce.bench.turn_sounds.BUNDLED", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = gather()
    assert found.source == "made-up syllables" and all(voiced_bounds(each.sound)[1] for each in found.questions)


# The script


def test_every_scene_has_the_given_number_of_questions():
    scenes = script(material(), 3)
    assert [scene.name for scene in scenes] == list(SCENES)
    assert all(len(scene.exchanges) == 3 for scene in scenes)
    interruptions = next(scene for scene in scenes if scene.name == "barge-in").exchanges
    assert all(each.over.sound is not each.question.sound for each in interruptions)


def test_an_unknown_scene_is_named():
    assert script(material(), 1, ["none"]) == []
    with pytest.raises(InputError, match="there is no scene sneeze; there are clean, pauses"):
        script(material(), 1, ["sneeze"])


# Addresses and sessions


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("127.0.0.1:8000", "ws://127.0.0.1:8000/v1/realtime"),
        ("http://host:8000/", "ws://host:8000/v1/realtime"),
        ("https://api.example.com/v1", "wss://api.example.com/v1/realtime"),
        ("wss://host/openai/v1/realtime?model=x", "wss://host/openai/v1/realtime?model=x"),
        ("ws://host/own/path", "ws://host/own/path"),
    ],
)
def test_addresses(given, meant):
    assert realtime_url(given) == meant


def test_a_model_is_part_of_the_address():
    assert realtime_url("ws://h/v1/realtime?model=x&a=b", "y") == "ws://h/v1/realtime?model=y&a=b"
    with pytest.raises(InputError, match="not the address of a server"):
        realtime_url("ftp://host")


def test_the_session_asked_for():
    vad = session_of("server_vad", 250, None)["audio"]["input"]["turn_detection"]
    assert vad["silence_duration_ms"] == 250 and vad["interrupt_response"] is True
    assert "silence_duration_ms" not in session_of("semantic_vad", 250, "x")["audio"]["input"]["turn_detection"]
    assert "turn_detection" not in session_of("default", 250, None)["audio"]["input"]
    assert session_of("default", 250, "Be brief.")["instructions"] == "Be brief."
    with pytest.raises(InputError, match="detection must be one of"):
        session_of("push", 250, None)


# Whose answer it is


def test_answers_are_classified_by_their_words():
    known = {"a": SessionAnswer("a", "We open at nine."), "b": SessionAnswer("b", "Dogs are welcome, of course.")}
    assert classify_answer(SessionAnswer("a", "we open at nine"), known) == "own"
    assert classify_answer(SessionAnswer("a", "Dogs are welcome of course."), known) == "other"
    assert classify_answer(SessionAnswer("b", "Something else entirely"), known) == "unclear"


def test_answers_are_classified_by_their_sound():
    first, second = talk(2.0, seed=1), talk(2.0, seed=2)
    known = {"a": SessionAnswer("a", sound=first), "b": SessionAnswer("b", sound=second)}
    shifted = np.concatenate([np.zeros(RATE // 10, np.float32), 0.5 * first])
    assert sound_similarity(first, shifted) > 0.8
    assert sound_similarity(first, second) < 0.6
    assert classify_answer(SessionAnswer("a", sound=shifted), known) == "own"
    assert classify_answer(SessionAnswer("b", sound=shifted), known) == "other"
