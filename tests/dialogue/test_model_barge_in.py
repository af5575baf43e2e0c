"""Barge-in by the trained network: a function of the sound, with the rules where there is no network."""

from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from tests.dialogue.overlap_networks import network_in_doubt, network_that_always_says
from tests.dialogue.voices import cough, hum, silence, talk
from vivavoce.audio.io import Sound
from vivavoce.audio.vad import RATE, WINDOW
from vivavoce.bench.turn_sounds import gather, voiced_bounds
from vivavoce.dialogue import model_barge_in
from vivavoce.dialogue.barge_in import OverlapClassifier, OverlapVerdict, UserLevel
from vivavoce.dialogue.front_end import AudioFrontEnd, AudioWindow, InlineFrontEnd, window_features
from vivavoce.dialogue.joined_turns import AnsweredTurn
from vivavoce.dialogue.model_barge_in import ModelClassifier, ModelLimits, log_odds, overlap_judge
from vivavoce.dialogue.overlap_model import (
    BUNDLED,
    EARLIER_INPUTS,
    INPUTS,
    MELS,
    MIN_USUAL_WINDOWS,
    OverlapInputs,
    SoundKind,
    read_overlap_network,
    usual_spectrum,
)
from vivavoce.dialogue.reply import ActiveReply
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.errors import CheckpointError
from vivavoce.evaluation.overlaps import Stop, heard_each, judge
from vivavoce.train.barge_in.train import write_overlap_network

USER = UserLevel(user=-24.0)


def over_a_reply(sound: np.ndarray) -> list[AudioWindow]:
    microphone = np.concatenate([silence(1.2), sound, silence(0.6)]).astype(np.float32)
    noise = np.random.default_rng(0).normal(0, 1e-4, len(microphone)).astype(np.float32)
    return heard_each([(microphone + noise, np.zeros(0, np.float32))], echo_guard=False)[0]


def judged(sound: np.ndarray, levels: UserLevel = USER) -> Stop:
    return judge(over_a_reply(sound), overlap_judge("model"), levels, 1.2)


def questions() -> list[np.ndarray]:
    found = []
    for question in gather().questions:
        voice = question.sound[voiced_bounds(question.sound)[0] :][:36_000]
        found.append(Sound(voice[None], 24_000).resampled(RATE).samples[0])
    return found


def test_the_bundled_model_is_small_and_decides_unless_rules_are_asked_for():
    assert isinstance(DialogueOptions().classifier, ModelClassifier)
    assert isinstance(overlap_judge("model"), ModelClassifier)
    assert BUNDLED.stat().st_size < 500_000


def test_bundled_questions_stop_a_reply_and_what_is_no_turn_does_not():
    """Voices that no training has, and sounds made by other arithmetic than the training's."""
    stops = [judged(sound, UserLevel(user=-22.5)) for sound in questions()]
    times = [stop.seconds for stop in stops if stop.seconds is not None]
    assert len(times) >= 0.95 * len(stops) and np.median(times) <= 0.35
    harmless = [judged(cough(seed, -24.0 + seed % 6)) for seed in range(12)]
    harmless += [judged(hum(0.25 + 0.02 * seed, seed, -32.0 + seed % 6)) for seed in range(12)]
    assert sum(stop.seconds is not None for stop in harmless) <= 1


def test_a_batch_of_windows_gives_what_each_gives_alone():
    network = read_overlap_network()
    inputs = np.random.default_rng(1).standard_normal((20, 5, INPUTS)).astype(np.float32)
    together, states = network.initial_state(5), [network.initial_state() for _ in range(5)]
    for window in inputs:
        outputs, together = network.step(together, window)
        for row, each in enumerate(window):
            alone, states[row] = network.step(states[row], each[None])
            np.testing.assert_allclose(outputs[row], alone[0], atol=1e-4)
    np.testing.assert_allclose(np.exp(outputs).sum(axis=1), 1, atol=1e-5)


def test_late_and_bursty_audio_is_decided_the_same():
    sound = questions()[3]
    microphone = np.concatenate([silence(1.2), sound, silence(0.6)]).astype(np.float32)
    stops = []
    for sizes in ([len(microphone)], [320], [1000, 7000, 64]):
        windows: list[AudioWindow] = []
        front_end = AudioFrontEnd(RATE, model_activity(), None, lambda moment, size: np.zeros(size, np.float32))
        inline = InlineFrontEnd(front_end, lambda new, quiet, found=windows: found.extend(new))
        begin = number = 0
        while begin < len(microphone):
            size = sizes[number % len(sizes)]
            late = 0.5 if number % 3 == 2 else 0.0
            inline.hear(microphone[begin : begin + size], min(begin + size, len(microphone)) / RATE + late)
            begin, number = begin + size, number + 1
        stop = judge([replace_moment(w, i) for i, w in enumerate(windows)], overlap_judge("model"), USER, 1.2)
        stops.append(stop)
    assert stops[0].seconds is not None and stops == [stops[0]] * 3


def model_activity():
    from vivavoce.audio.vad import voice_activity

    return voice_activity()


def replace_moment(window: AudioWindow, index: int) -> AudioWindow:
    """The capture clock estimates moments from arrivals; here they are those of the sound."""
    return window._replace(ended_at=(index + 1) * WINDOW / RATE)


@pytest.mark.parametrize(
    ("kind", "verdict", "may_be_turn"),
    [
        (SoundKind.TURN, OverlapVerdict.INTERRUPTION, True),
        (SoundKind.BACKCHANNEL, OverlapVerdict.BACKCHANNEL, True),
        (SoundKind.NOISE, OverlapVerdict.NOISE, False),
        (SoundKind.BYSTANDER, OverlapVerdict.BYSTANDER, False),
        (SoundKind.ECHO, OverlapVerdict.ECHO, False),
    ],
)
def test_the_odds_of_the_kinds_decide(kind, verdict, may_be_turn):
    watch = ModelClassifier(network_that_always_says(kind)).watch()
    sound, verdicts = talk(0.9, 1), []
    for start in range(0, len(sound) - WINDOW + 1, WINDOW):
        watch.step(sound[start : start + WINDOW], 0.9, 0.0, True, USER)
        verdicts.append(watch.verdict)
    limits = ModelLimits()
    first = limits.earliest_ms if kind is SoundKind.TURN else limits.harmless_ms
    assert verdicts.index(verdict) == first // 32 - 1 and set(verdicts[: first // 32 - 1]) <= {None}
    assert watch.may_be_turn is may_be_turn and watch.lasted_ms == 32 * len(verdicts)


@pytest.mark.parametrize(("level_db", "echo", "stops"), [(-24.0, 0.0, True), (-34.0, 0.0, False), (-24.0, 0.4, False)])
def test_a_voice_as_loud_as_the_user_interrupts_after_a_second_whatever_it_is_taken_for(level_db, echo, stops):
    watch = ModelClassifier(network_that_always_says(SoundKind.NOISE)).watch()
    sound, verdicts = talk(2.0, 1, level_dbfs=level_db), []
    for start in range(0, len(sound) - WINDOW + 1, WINDOW):
        watch.step(sound[start : start + WINDOW], 0.9, echo, True, USER)
        verdicts.append(watch.verdict)
    assert (verdicts[-1] is OverlapVerdict.INTERRUPTION) is stops
    assert OverlapVerdict.INTERRUPTION not in verdicts[: ModelLimits().max_loud_ms // 32 - 1]


@pytest.mark.parametrize(
    ("level_db", "levels", "stops"),
    [(-24.0, USER, True), (-36.0, USER, True), (-46.0, USER, False), (-46.0, UserLevel(), True)],
    ids=["as loud", "softer", "far softer", "no level is known"],
)
def test_the_users_voice_interrupts_after_a_while_unless_it_is_far_softer_than_usual(level_db, levels, stops):
    watch = ModelClassifier(network_that_always_says(SoundKind.BACKCHANNEL)).watch()
    sound = talk(1.6, 1, level_dbfs=level_db)
    for start in range(0, len(sound) - WINDOW + 1, WINDOW):
        watch.step(sound[start : start + WINDOW], 0.9, 0.0, True, levels)
    assert (watch.verdict is OverlapVerdict.INTERRUPTION) is stops


@pytest.mark.parametrize(
    ("odds", "finished", "goes_on"),
    [(0.0, 0.02, True), (0.0, 0.5, False), (0.0, None, False), (-3.0, 0.02, False)],
    ids=["unfinished", "finished", "not known", "a backchannel"],
)
def test_less_evidence_is_enough_for_a_user_who_goes_on_with_an_unfinished_turn(odds, finished, goes_on):
    watch = ModelClassifier(network_in_doubt(odds)).watch()
    before = AnsweredTurn("item", (), 0, cast(ActiveReply, None), finished=finished)
    sound, heard, asked = talk(0.6, 1), [], []
    for start in range(0, len(sound) - WINDOW + 1, WINDOW):
        watch.step(sound[start : start + WINDOW], 0.9, 0.0, True, USER)
        heard.append(watch.goes_on(before, asked.append))
    assert watch.verdict is not OverlapVerdict.INTERRUPTION
    assert (before in asked) is (finished is None) and not watch.goes_on(None, asked.append)
    assert heard[-1] is goes_on and not any(heard[: ModelLimits().earliest_ms // 32 - 1])


def test_words_decide_where_there_are_some():
    sound = talk(0.5, 1)
    for kind, words, verdict in (
        (SoundKind.TURN, "mm-hm", OverlapVerdict.BACKCHANNEL),
        (SoundKind.NOISE, "stop", OverlapVerdict.INTERRUPTION),
    ):
        watch = ModelClassifier(network_that_always_says(kind)).watch()
        watch.words = words
        for start in range(0, len(sound) - WINDOW + 1, WINDOW):
            watch.step(sound[start : start + WINDOW], 0.9, 0.0, True, USER)
        assert watch.verdict is verdict


def test_inputs_do_not_depend_on_the_gain_of_microphone_and_user():
    samples = talk(0.2, 2)[: 2 * WINDOW]

    def inputs(gain: float) -> np.ndarray:
        level = float(-24.0 + 20 * np.log10(gain))
        made, windows = OverlapInputs(), gain * samples.reshape(2, WINDOW)
        given = [made.add(AudioWindow(each, 0.9, level), window_features(each), True, level) for each in windows]
        return given[-1]

    np.testing.assert_allclose(inputs(1.0), inputs(0.25), atol=2e-2)
    assert inputs(1.0).shape == (INPUTS,)


def test_the_usual_spectrum_is_that_of_the_voice_whatever_the_gain():
    def windows(seed: int, gain: float = 1.0) -> list[np.ndarray]:
        sound = gain * talk(1.0, seed)
        return list(sound[: len(sound) // WINDOW * WINDOW].reshape(-1, WINDOW))

    usual = usual_spectrum(windows(2), -24.0)
    assert usual is not None and usual.shape == (MELS,)
    np.testing.assert_allclose(usual, usual_spectrum(windows(2, 0.5), -24.0 - 6.0206), atol=2e-2)
    assert usual_spectrum(windows(2), None) is None
    assert usual_spectrum(windows(2)[: MIN_USUAL_WINDOWS - 1], -24.0) is None


def test_the_model_knows_how_the_user_usually_sounds():
    """The same sound after two different users has different odds; for a network of before it has the same."""
    sound, watched = talk(0.5, 1), {}
    network = read_overlap_network()
    narrow = replace(network, input_weight=network.input_weight[:, : min(EARLIER_INPUTS)])
    for name, weights in (("with", network), ("without", narrow)):
        for seed in (1, 2):
            levels = UserLevel(user=-24.0)
            for window in talk(1.5, seed)[: 40 * WINDOW].reshape(-1, WINDOW):
                levels.loud.append(window)
            watch = ModelClassifier(weights).watch(levels=levels)
            for start in range(0, len(sound) - WINDOW + 1, WINDOW):
                watch.step(sound[start : start + WINDOW], 0.9, 0.0, True, levels)
            watched[name, seed] = watch.log_probabilities
    assert not np.allclose(watched["with", 1], watched["with", 2], atol=1e-3)
    np.testing.assert_array_equal(watched["without", 1], watched["without", 2])


@pytest.mark.parametrize("size", EARLIER_INPUTS)
def test_files_of_earlier_networks_are_read_and_do_not_see_what_they_do_not_know(size, tmp_path):
    source = np.random.default_rng(2)
    bundled = read_overlap_network()
    weight = source.standard_normal((len(bundled.input_bias), INPUTS)).astype(np.float32)
    networks = []
    for known in (size, INPUTS):
        path = tmp_path / f"{known}.safetensors"
        write_overlap_network(replace(bundled, input_weight=weight[:, :known]), path)
        networks.append(read_overlap_network(path))
    inputs = source.standard_normal((1, INPUTS)).astype(np.float32)
    changed = inputs.copy()
    changed[:, size:] += 1.0
    for network, is_earlier in zip(networks, (True, False), strict=True):
        outputs, others = (network.step(network.initial_state(), each)[0] for each in (inputs, changed))
        assert np.array_equal(outputs, others) is is_earlier


def test_log_odds():
    log_probabilities = np.log(np.array([0.5, 0.25, 0.25, 1e-9, 1e-9], np.float32))
    assert log_odds(log_probabilities, SoundKind.TURN) == pytest.approx(0.0, abs=1e-4)
    assert log_odds(log_probabilities, SoundKind.TURN, SoundKind.NOISE) == pytest.approx(np.log(3), abs=1e-4)


def test_a_missing_or_damaged_file_is_refused(tmp_path):
    damaged = tmp_path / "model.safetensors"
    damaged.write_bytes(b"\x08" + b"\0" * 40)
    for path in (tmp_path / "none.safetensors", damaged):
        with pytest.raises(CheckpointError, match="is not a barge-in model"):
            overlap_judge(str(path))


def test_rules_decide_by_choice_and_where_there_is_no_model(tmp_path, monkeypatch, caplog):
    assert isinstance(overlap_judge("rules"), OverlapClassifier)
    monkeypatch.setattr(model_barge_in, "BUNDLED", tmp_path / "none.safetensors")
    assert isinstance(overlap_judge.__wrapped__("model"), OverlapClassifier)
    assert "rules decide on barge-in" in caplog.text
