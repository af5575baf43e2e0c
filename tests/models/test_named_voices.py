"""Voices that lie in a codec's folder: kept, found again, and named when they are not there."""

import pytest
import torch

from tests.models.tiny_codec import tiny_codec
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.checkpoint import published_tensors
from vivavoce.models.flow.state import VoicePrompt
from vivavoce.models.moss_speech.codec import MossSpeechCodec

CODES = torch.arange(20) * 3 % 64
PROMPT = VoicePrompt(CODES[:10], torch.linspace(-8, 1, 40 * 80).view(40, 80), torch.linspace(-1, 1, 192))


@pytest.fixture
def folder(tmp_path):
    codec = tiny_codec()
    codec.save_voice("desk", PROMPT)
    codec.save(tmp_path)
    return tmp_path


def test_a_voice_comes_back_from_the_folder(folder):
    codec = MossSpeechCodec.load(folder)
    assert codec.voices() == ["desk"]
    voice, made = codec.named_voice("desk"), tiny_codec().flow.voice(PROMPT)
    assert codec.named_voice("desk") is voice
    assert torch.equal(codec.speak(CODES, voice), tiny_codec().speak(CODES, made))


def test_the_folder_holds_nothing_that_is_executed(folder):
    assert {file.suffix for file in folder.rglob("*") if file.is_file()} == {".safetensors", ".json"}


def test_a_loaded_codec_keeps_new_voices_in_its_folder(folder):
    codec = MossSpeechCodec.load(folder)
    codec.save_voice("night-desk", VoicePrompt(CODES[:5], PROMPT.mel[:20], -PROMPT.speaker))
    assert MossSpeechCodec.load(folder).voices() == ["desk", "night-desk"]
    codec.save(folder / "copy")
    again = MossSpeechCodec.load(folder / "copy")
    assert again.voices() == ["desk", "night-desk"]
    torch.testing.assert_close(again.named_voice("night-desk").mel, PROMPT.mel[:20])


def test_a_codec_in_memory_keeps_voices_too():
    codec = tiny_codec()
    assert codec.voices() == []
    codec.save_voice("desk", PROMPT)
    assert torch.equal(codec.named_voice("desk").codes, PROMPT.codes)


def test_voices_that_are_not_there_are_named(folder):
    codec = MossSpeechCodec.load(folder)
    with pytest.raises(InputError, match="no voice 'cellar'; it has: desk"):
        codec.named_voice("cellar")
    with pytest.raises(InputError, match=r"cannot be named '\.\./desk'"):
        codec.named_voice("../desk")
    with pytest.raises(InputError, match="cannot be named"):
        codec.save_voice("a b", PROMPT)
    with pytest.raises(InputError, match="codes go from"):
        codec.save_voice("odd", VoicePrompt(CODES + 1000, PROMPT.mel, PROMPT.speaker))
    assert codec.voices() == ["desk"]


def test_a_damaged_voice_is_said_to_be(folder):
    file = folder / "voices" / "desk.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="not a voice"):
        MossSpeechCodec.load(folder).named_voice("desk")


def test_a_folder_with_neither_voices_nor_a_speaker_network_is_refused(folder):
    (folder / "voices" / "desk.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"campplus\.onnx does not exist"):
        MossSpeechCodec.load(folder)


def test_published_pickles_still_load(folder):
    codec = MossSpeechCodec.load(folder)
    for name, module in (("flow-chunk-5", codec.flow), ("hift", codec.vocoder.hift)):
        (folder / "flow" / f"{name}.safetensors").unlink()
        torch.save(published_tensors(module), folder / "flow" / f"{name}.pt")
    again = MossSpeechCodec.load(folder)
    voice = again.named_voice("desk")
    assert torch.equal(again.speak(CODES, voice), codec.speak(CODES, codec.named_voice("desk")))
