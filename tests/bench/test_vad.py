"""`viva bench vad`: labels, windows and the area under the curve."""

import json

import numpy as np
import pytest

from vivavoce.audio import vad as activity
from vivavoce.audio.io import Sound, write
from vivavoce.bench import vad
from vivavoce.bench.turn_sounds import talk
from vivavoce.errors import InputError


def labelled(folder, name="one", speech=(1.0, 2.0), seconds=3.0):
    samples = np.zeros(round(seconds * 24_000), np.float32)
    samples[round(speech[0] * 24_000) : round(speech[1] * 24_000)] = talk(speech[1] - speech[0], seed=4)
    write(folder / f"{name}.wav", Sound(samples[None], 24_000).resampled(16_000))
    start, end = speech
    (folder / f"{name}.scv").write_text(f"{name},0.000,{start},0,{start},{end},1,{end},{seconds},0\n")


def test_average_precision_is_the_mean_precision_at_the_positives():
    scores, labels = np.array([0.9, 0.8, 0.7, 0.6], np.float32), np.array([True, False, True, False])
    assert vad.average_precision(scores, labels) == pytest.approx((1 + 2 / 3) / 2)
    assert vad.average_precision(np.ones(4, np.float32), labels) == 0.5  # equal scores say nothing
    assert vad.average_precision(labels.astype(np.float32), labels) == 1.0


def test_labels_are_those_of_the_middle_of_each_window(tmp_path):
    labelled(tmp_path)
    (sound,) = vad.read_labelled(tmp_path)
    flags = sound.labels(512, 93)
    assert np.flatnonzero(flags)[[0, -1]].tolist() == [31, 61]  # 1.008 and 1.968 s
    perfect = vad.Detector("perfect", 512, lambda sounds: [flags.astype(np.float32)])
    scored = vad.score(perfect, [sound])
    assert scored["average_precision"] == scored["best_f1"] == 1.0
    assert scored["speech"] == pytest.approx(1 / 3, abs=0.01)


def test_silero_in_a_batch_is_silero_alone(tmp_path):
    for number, speech in enumerate(((0.5, 1.5), (1.0, 1.8))):
        labelled(tmp_path, f"sound-{number}", speech, 2.0 + number)
    sounds = [each.samples for each in vad.read_labelled(tmp_path)]
    detector = activity.voice_activity()
    for batched, samples in zip(vad.silero().probabilities(sounds), sounds, strict=True):
        assert batched == pytest.approx(activity.speech_probabilities(detector, samples), abs=1e-4)


def test_the_result_is_written(tmp_path, capsys):
    labelled(tmp_path)
    (tmp_path / "out").mkdir()
    result = vad.run(tmp_path, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "vad.json").read_text())
    assert written["detectors"][0] == result["detectors"][0] and "Silero" in capsys.readouterr().err
    curve = result["detectors"][0]["curve"]
    assert curve[0]["recall"] == 1.0 and len(curve) == 100


def test_noise_is_added_and_suppressed(tmp_path):
    labelled(tmp_path)
    detectors = {each["name"]: each for each in vad.run(tmp_path, snr=0.0, denoise=True)["detectors"]}
    plain = vad.silero().name
    assert {plain, f"{plain}, noise suppressed"} <= detectors.keys()
    assert detectors[plain] != vad.run(tmp_path)["detectors"][0], "there was noise"
    assert detectors[f"{plain}, noise suppressed"]["windows"] == detectors[plain]["windows"]


def test_a_folder_without_labels_is_refused(tmp_path):
    with pytest.raises(InputError, match="no labelled recordings"):
        vad.read_labelled(tmp_path)
    labelled(tmp_path)
    (tmp_path / "one.scv").write_text("one,0.0,x,1")
    with pytest.raises(InputError, match="in one line"):
        vad.read_labelled(tmp_path)
