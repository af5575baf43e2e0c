"""Synthetic voices: they speak, whole voices stay unheard, and they can be carried to a bare machine."""

import random
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.train.synthesizers import Programs, bundle, varied_prosody
from vivavoce.train.voices import (
    HELD_OUT,
    OPTIONAL,
    RATE,
    TEACHER,
    TRAINING,
    VOICES,
    SyntheticVoice,
    draw,
    programs,
    speak,
    speak_many,
    training_voices,
    trimmed,
)

SENTENCE = "Could I book a table for four, please?"
PROGRAMS = ("flite", "espeak-ng", "festival")


def named(name: str) -> SyntheticVoice:
    return next(voice for voice in VOICES if voice.name == name)


def test_there_are_many_voices_and_some_are_never_heard():
    assert len({voice.name for voice in VOICES}) == len(VOICES) >= 70
    assert not set(TRAINING) & set(HELD_OUT)
    speakers = {argument for voice in TRAINING for argument in voice.arguments}
    assert "awb" not in speakers and "ked_diphone" not in speakers
    assert not any("x-rp" in argument for argument in speakers)
    assert TEACHER in VOICES and not TEACHER.held_out


def test_optional_voices_are_guests_where_their_data_is():
    bare = Programs({program: (program,) for program in PROGRAMS})
    assert training_voices(bare) == TRAINING
    richer = Programs({**bare.commands, "mbrola": ("mbrola",)}, parts=frozenset({"us1", "it3"}))
    assert {voice.part for voice in set(training_voices(richer)) - set(TRAINING)} == {"us1"}
    all_voices = (*TRAINING, *OPTIONAL)
    drawn = Counter(draw(random.Random(7), 1, all_voices)[0].program for _ in range(2_000))
    assert drawn["espeak-ng"] < 0.4 * 2_000 < drawn["flite"] + drawn["mbrola"] + drawn["pico2wave"]
    assert not {"awb", "ked_diphone", "mb-en-gb-x-rp"} & {word for voice in OPTIONAL for word in voice.arguments}


def test_loose_speech_says_the_same_sounds_in_another_way():
    phonemes = "h 60\n@U 120 0 110 100 130\nt 70\nE 90 0 120 100 100\nl 80\n_ 300\n"
    ways = [varied_prosody(phonemes, "us1", random.Random(turn)) for turn in range(40)]
    assert ways[0] == varied_prosody(phonemes, "us1", random.Random(0)) and len(set(ways)) == 40
    sounds = [[line.split()[0] for line in way.splitlines()] for way in ways]
    assert {tuple(said[::2]) for said in sounds} == {("h", "t", "l")}
    assert {said[1] for said in sounds} >= {"@U", "O"} and {said[-1] for said in sounds} == {"_"}
    assert {line.split()[1] for way in ways for line in way.splitlines() if line.startswith("_")} == {"300"}
    abroad = [varied_prosody(phonemes, "sw2", random.Random(turn)).splitlines()[1].split()[0] for turn in range(40)]
    assert set(abroad) == {"@U"}


@pytest.mark.debian(*PROGRAMS)
@pytest.mark.parametrize("voice", [*VOICES[::9], *HELD_OUT], ids=lambda voice: voice.name)
def test_voices_speak(voice):
    samples = speak(voice, SENTENCE, programs())
    assert samples.dtype == np.float32
    assert 1.2 < len(samples) / RATE < 5.0
    assert 0.005 < np.sqrt(np.mean(samples**2)) < 0.4
    assert np.abs(samples).max() <= 1.0


@pytest.mark.debian(*PROGRAMS)
def test_a_little_silence_is_left_around_speech():
    for voice in (TEACHER, named("festival-slt"), named("espeak-en-us-m1")):
        samples = np.abs(speak(voice, SENTENCE, programs()))
        quiet = samples < 0.03 * samples.max()
        lead, trail = np.argmin(quiet), np.argmin(quiet[::-1])
        assert 0.01 < lead / RATE < 0.11 and 0.03 < trail / RATE < 0.25


def test_a_click_long_before_speech_is_cut_off():
    speech = np.sin(np.arange(RATE) * 0.2).astype(np.float32)
    click = np.zeros(RATE // 4, np.float32)
    click[:100] = 0.01
    assert len(trimmed(np.concatenate([click, speech]))) <= len(speech) + RATE // 10


@pytest.mark.debian(*PROGRAMS)
def test_many_sentences_are_the_same_as_one_by_one():
    texts = ["Good evening.", 'He said "no" to me.', "Where is the pool?"]
    for voice in (TEACHER, named("festival-ked-1.1")):
        together = speak_many(voice, texts, programs())
        assert all(
            np.array_equal(samples, speak(voice, text, programs()))
            for samples, text in zip(together, texts, strict=True)
        )


@pytest.mark.debian("espeak-ng")
def test_variants_of_one_accent_differ():
    spoken = [speak(voice, SENTENCE, programs()) for voice in VOICES if voice.name.startswith("espeak-en-us-")][::9]
    assert len({samples.tobytes() for samples in spoken}) == len(spoken) > 2


@pytest.mark.debian("espeak-ng")
def test_a_sentence_without_sound_is_named():
    with pytest.raises(InputError, match=r"espeak-en-us-m1.*' \.'"):
        speak(named("espeak-en-us-m1"), " .", programs())


def test_a_missing_program_names_its_package():
    with pytest.raises(MissingDependencyError, match="apt install flite"):
        speak(TEACHER, SENTENCE, Programs({}))


def test_an_empty_folder_holds_no_programs(tmp_path):
    with pytest.raises(InputError, match=r"voices\.bundle"):
        programs(tmp_path)


@pytest.mark.debian(*PROGRAMS, "ldd")
def test_a_bundle_speaks_as_the_machine_it_comes_from(tmp_path, monkeypatch):
    bundle(tmp_path / "carried")
    moved = (tmp_path / "carried").rename(tmp_path / "elsewhere")
    monkeypatch.setenv("PATH", "/nowhere")
    carried = programs(moved)
    monkeypatch.undo()
    more = {voice.part: voice for voice in OPTIONAL if voice.part in programs().parts}
    assert set(training_voices(programs())) == set(training_voices(carried))
    for voice in (
        *(TEACHER, named("festival-slt"), named("festival-ked-1.1"), named("espeak-en-us-m1")),
        *more.values(),
    ):
        assert np.array_equal(speak(voice, SENTENCE, carried), speak(voice, SENTENCE, programs()))
    paths = "(begin (print libdir) (print datadir) (print lexdir))"  # the machine's own data may not be there
    said = subprocess.run([*carried.command("festival"), "-b", paths], capture_output=True, text=True, check=True)
    assert [Path(line.strip('"')).is_relative_to(moved) for line in said.stdout.split()] == [True, True, True]
