"""Stored voices are found again by valid names, replaced and removed."""

import json

import numpy as np
import pytest

from vivavoce.audio.level import buzz
from vivavoce.errors import InputError
from vivavoce.tts.interface import StoredVoice, VoiceStore

CODES = [[1, 2], [3, 4]]


@pytest.fixture
def store(tmp_path) -> VoiceStore:
    return VoiceStore({"rms": StoredVoice("rms", CODES)}, tmp_path / "voices")


def test_a_voice_is_found_by_another_store(store):
    store.add(StoredVoice("Aunt May", CODES, "16000 Hz", "signed 3 May"))
    found = VoiceStore(folder=store.folder).get("Aunt May")
    assert (found.codes, found.consent, found.codec) == (CODES, "signed 3 May", "16000 Hz")
    assert store.names() == ["rms", "Aunt May"] and "Aunt May" in store


def test_a_voice_added_again_is_replaced(store):
    store.add(StoredVoice("guest", CODES))
    store.add(StoredVoice("guest", [[9, 9]]))
    assert store.get("guest").codes == [[9, 9]]


def test_a_removed_voice_is_gone(store):
    store.add(StoredVoice("guest", CODES))
    store.remove("guest")
    assert store.names() == ["rms"]
    with pytest.raises(InputError, match="there is no voice 'guest'; known: rms"):
        store.get("guest")


def test_built_in_voices_cannot_be_replaced_or_removed(store):
    with pytest.raises(InputError, match="choose another name"):
        store.add(StoredVoice("rms", CODES))
    with pytest.raises(InputError, match="cannot be removed"):
        store.remove("rms")


@pytest.mark.parametrize("name", ["", "../evil", "a/b", ".hidden", "x" * 65, "nul\0"])
def test_a_name_is_no_path(store, name):
    with pytest.raises(InputError, match="cannot name a voice"):
        store.add(StoredVoice(name, CODES))
    with pytest.raises(InputError):
        store.get(name)


def test_a_voice_without_codes_is_refused(store):
    with pytest.raises(InputError, match="needs codes or a recording"):
        store.add(StoredVoice("silence", []))


@pytest.mark.parametrize("content", ["", "[]", json.dumps({"name": "x"}), json.dumps({"name": "x", "codes": ["ab"]})])
def test_a_damaged_file_is_an_error_of_one_line(store, content):
    store.folder.mkdir(parents=True)
    (store.folder / "broken.json").write_text(content)
    with pytest.raises(InputError, match="is not a stored voice"):
        store.get("broken")


def test_a_recording_stays_with_its_voice(store):
    recording = buzz(1.0, 16_000)
    store.add(StoredVoice("guest", [], text="good evening"), recording)
    found = VoiceStore(folder=store.folder)
    assert found.names() == ["guest"] and found.get("guest").text == "good evening"
    kept = found.recording("guest")
    assert kept is not None and kept.rate == 16_000
    np.testing.assert_allclose(kept.samples, recording.samples, atol=1e-4)
    store.add(StoredVoice("guest", CODES))
    assert found.recording("guest") is None
    store.remove("guest")
    assert not list(store.folder.iterdir())


def test_a_damaged_voice_can_be_removed(store):
    store.folder.mkdir(parents=True)
    (store.folder / "broken.json").write_text("{")
    store.remove("broken")
    assert "broken" not in store
