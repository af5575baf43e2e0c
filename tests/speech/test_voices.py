"""Voices stay where they were put, under names that are names."""

import json

import pytest

from vivavoce.errors import InputError
from vivavoce.speech.voices import KeptVoice, VoiceShelf

CODES = [[1, 2], [3, 4]]


@pytest.fixture
def shelf(tmp_path) -> VoiceShelf:
    return VoiceShelf({"rms": KeptVoice("rms", CODES)}, tmp_path / "voices")


def test_a_voice_is_found_again_by_another_shelf(shelf):
    shelf.add(KeptVoice("Aunt May", CODES, "16000 Hz", "signed 3 May"))
    found = VoiceShelf(folder=shelf.folder).get("Aunt May")
    assert (found.codes, found.consent, found.codec) == (CODES, "signed 3 May", "16000 Hz")
    assert shelf.names() == ["rms", "Aunt May"] and "Aunt May" in shelf


def test_a_voice_added_again_is_replaced(shelf):
    shelf.add(KeptVoice("guest", CODES))
    shelf.add(KeptVoice("guest", [[9, 9]]))
    assert shelf.get("guest").codes == [[9, 9]]


def test_a_removed_voice_is_gone(shelf):
    shelf.add(KeptVoice("guest", CODES))
    shelf.remove("guest")
    assert shelf.names() == ["rms"]
    with pytest.raises(InputError, match="there is no voice 'guest'; known: rms"):
        shelf.get("guest")


def test_built_in_voices_cannot_be_replaced_or_removed(shelf):
    with pytest.raises(InputError, match="choose another name"):
        shelf.add(KeptVoice("rms", CODES))
    with pytest.raises(InputError, match="cannot be removed"):
        shelf.remove("rms")


@pytest.mark.parametrize("name", ["", "../evil", "a/b", ".hidden", "x" * 65, "nul\0"])
def test_a_name_is_no_path(shelf, name):
    with pytest.raises(InputError, match="a voice's name"):
        shelf.add(KeptVoice(name, CODES))
    with pytest.raises(InputError):
        shelf.get(name)


def test_a_voice_without_codes_is_refused(shelf):
    with pytest.raises(InputError, match="needs codes"):
        shelf.add(KeptVoice("silence", []))


@pytest.mark.parametrize("content", ["", "[]", json.dumps({"name": "x"}), json.dumps({"name": "x", "codes": ["ab"]})])
def test_a_damaged_file_is_an_error_of_one_line(shelf, content):
    shelf.folder.mkdir(parents=True)
    (shelf.folder / "broken.json").write_text(content)
    with pytest.raises(InputError, match="is not a voice as it was kept"):
        shelf.get("broken")
