"""The scenes of the duplex lab: the same sounds from every run, where their script says they are."""

import numpy as np
import pytest

from tests.bench.duplex.voices import speak
from vivavoce.audio.io import Sound, write
from vivavoce.bench.duplex import rooms, sounds
from vivavoce.bench.duplex.scenes import CONDITIONS, ECHO_DB, PAUSES, SCENES, gather, script
from vivavoce.bench.duplex.speech import SpokenTexts
from vivavoce.bench.turn_sounds import RATE, SPEECH_DBFS, at_level, talk, voiced_bounds
from vivavoce.errors import InputError
from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES
from vivavoce.evaluation.room_acoustics import impulse_response


def scenes(count=2, names=None, **chosen):
    return script(gather(speak), count, names, **chosen)


def test_every_scene_is_made_twice_alike_in_both_languages():
    first, second = scenes(1), scenes(1)
    assert [(each.name, each.language) for each in first] == [
        (name, part) for name in SCENES for part in HELD_OUT_VOICES
    ]
    for one, two in zip(first, second, strict=True):
        assert np.array_equal(one.exchange.question.sound, two.exchange.question.sound)
        for before, after in ((one.exchange.over, two.exchange.over), (one.exchange.stray, two.exchange.stray)):
            assert (before is None) == (after is None)
            assert before is None or np.array_equal(before.sound, after.sound)


def test_pauses_are_silent_and_as_long_as_planned():
    for each in scenes(len(PAUSES), ["pause"], languages=["en"], conditions=["headset"]):
        ((begin, end),) = each.pauses
        assert (end - begin) / RATE == pytest.approx(PAUSES[each.number])
        sound = each.exchange.question.sound
        assert not sound[begin:end].any() and sound[:begin].any() and sound[end:].any()


def test_sounds_over_the_reply_begin_at_once_and_have_their_levels():
    levels = {"interruption": 0.0, "user backchannel": -6.0, "side talk": -6.0, "background": -10.0}
    for each in scenes(1, list(levels), languages=["en"], conditions=["headset"]):
        sound = each.exchange.over.sound
        assert voiced_bounds(sound)[0] < 0.02 * RATE
        first, last = voiced_bounds(sound)
        heard = 10 * np.log10(np.square(sound[first:last]).mean())
        assert heard == pytest.approx(SPEECH_DBFS + levels[each.name], abs=2.0), each.name


def test_conditions_take_turns_and_change_the_sound():
    made = scenes(len(CONDITIONS), ["smooth"], languages=["en"])
    assert tuple(each.condition for each in made) == CONDITIONS
    by_condition = {each.condition: each.scene.environment for each in made}
    assert by_condition["loss"].line.loss > 0 and by_condition["noise"].snr_db is not None
    alone = scenes(len(CONDITIONS), ["smooth"], languages=["en"], conditions=["headset"])
    changed = [
        not np.array_equal(one.exchange.question.sound, two.exchange.question.sound)
        for one, two in zip(made, alone, strict=True)
    ]
    assert changed == [condition in ("room", "telephone") for condition in CONDITIONS]


def test_no_condition_always_has_the_same_voice():
    """With as many conditions as voices they would go together, call after call."""
    conditions = ("headset", "room", "telephone", "noise")
    made = scenes(16, ["smooth"], conditions=conditions)
    for language, voices in HELD_OUT_VOICES.items():
        for condition in conditions:
            heard = {
                each.exchange.question.voice
                for each in made
                if (each.language, each.condition) == (language, condition)
            }
            assert heard == set(voices), (language, condition)


def test_a_person_who_interrupts_is_known_by_another_recording_of_theirs(tmp_path):
    for person in ("ann", "bob"):
        (tmp_path / person).mkdir()
        for number in range(3):
            sound = talk(1.0, seed=number + (person == "bob"))
            write(tmp_path / person / f"{person}-{number}.wav", Sound(sound[None], RATE))
    found = gather(speak, people=tmp_path)
    for each in script(found, 6, ["interruption"], ["en"], ["headset"]):
        person = each.over_name.split("-")[0]
        if person not in ("ann", "bob"):
            assert each.usual is None
            continue
        known = [sound for sound in found.people if np.array_equal(sound.samples(), each.usual)]
        assert any(sound.name.startswith(person) and sound.name != each.over_name for sound in known)


def test_echo_scenes_cover_all_levels_and_rooms():
    made = scenes(6, ["echo"], languages=["en"])
    assert {each.scene.environment.echo_db for each in made} == set(ECHO_DB)
    assert len({each.condition.split(", ")[1] for each in made}) == len(rooms.ROOMS)
    for each in made:
        assert np.linalg.norm(each.scene.environment.echo_response) == pytest.approx(1.0)


def test_a_room_response_begins_with_the_direct_sound_and_decays():
    for room in rooms.ROOMS:
        response = impulse_response(room, 1.0, seed=3, rate=RATE)
        half = len(response) // 2
        assert response[0] == pytest.approx(1.0, abs=0.05)
        assert np.square(response[half:]).sum() < 0.3 * np.square(response[1:half]).sum()
    dry, live = (impulse_response(room, 1.0, 0, RATE) for room in (rooms.ROOMS[0], rooms.ROOMS[5]))
    assert np.square(live[RATE // 20 :]).sum() > 3 * np.square(dry[RATE // 20 :]).sum()


def test_the_telephone_keeps_its_band():
    source = np.random.default_rng(0).standard_normal(RATE).astype(np.float32)
    spectrum = np.abs(np.fft.rfft(rooms.by_telephone(at_level(source, SPEECH_DBFS))))
    inside = np.square(spectrum[400:3200]).mean()
    assert np.square(spectrum[20:150]).mean() < 0.01 * inside
    assert np.square(spectrum[4200:]).mean() < 0.01 * inside


def test_recorded_sounds_of_esc50_take_turns(tmp_path):
    with pytest.raises(InputError, match=r"no meta/esc50\.csv"):
        sounds.tics(tmp_path)
    (tmp_path / "meta").mkdir()
    (tmp_path / "audio").mkdir()
    lines = ["filename,fold,target,category,esc10,src_file,take"]
    for index, category in enumerate(["coughing", "sneezing", "laughing", "rain"] * 2):
        lines.append(f"{index}.wav,1,0,{category},False,0,A")
        write(tmp_path / "audio" / f"{index}.wav", Sound(np.pad(talk(2.0, index), RATE)[None], RATE))
    (tmp_path / "meta" / "esc50.csv").write_text("\n".join(lines))
    found = sounds.tics(tmp_path)
    assert [each.name.split()[0] for each in found] == ["coughing", "sneezing", "laughing"] * 2
    assert len(found[0].samples()) == 1.5 * RATE
    assert voiced_bounds(found[0].samples())[0] <= RATE // 20
    people = sounds.people(tmp_path / "audio")
    assert len(people) == 8 and len(people[0].samples()) / RATE == pytest.approx(2.1, abs=0.1)


def test_unknown_names_are_refused():
    for given in ({"names": ["nap"]}, {"languages": ["fr"]}, {"conditions": ["moon"]}):
        with pytest.raises(InputError, match="there is no"):
            scenes(1, **given)


@pytest.mark.full
@pytest.mark.published
def test_kokoro_speaks_a_sentence_once(tmp_path):
    text = "I would like a table for | four people."
    first = SpokenTexts(tmp_path)
    spoken = first(text, "af_nova")
    (cut,) = spoken.cuts
    assert first.made == 1 and 0.4 < cut / len(spoken.sound) < 0.8
    frame = np.square(spoken.sound[cut : cut + RATE // 100]).mean()
    assert frame < 0.1 * np.square(spoken.sound).mean()
    second = SpokenTexts(tmp_path)
    assert np.array_equal(second(text, "af_nova").sound, spoken.sound) and second.made == 0
