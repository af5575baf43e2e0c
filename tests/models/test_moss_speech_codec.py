"""Sound in, codes, sound out: the codec's parts together, on small random weights in the published folder layout."""

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests.models.tiny_codec import tiny_codec
from vivavoce.audio.io import Sound
from vivavoce.audio.mel import KaldiFbank
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.cosyvoice.folder import SpeakerEmbedder
from vivavoce.models.moss_speech.codec import MossSpeechCodec

CODEC = tiny_codec()
EXACT = MossSpeechCodec(CODEC.speech_encoder.encoder, CODEC.flow, CODEC.vocoder.hift, look_right=None)
SPEAKER = torch.linspace(-1, 1, 192)


def some_sound(seconds: float, rate: int = 24_000, channels: int = 1) -> Sound:
    """A tone that glides, with a little noise."""
    time = np.arange(int(seconds * rate)) / rate
    tone = 0.3 * np.sin(2 * np.pi * (120 + 60 * time) * time) + 0.02 * np.random.default_rng(0).standard_normal(
        len(time)
    )
    return Sound(np.tile(tone.astype(np.float32), (channels, 1)), rate)


def some_codes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(64, (count,), generator=torch.Generator().manual_seed(seed))


VOICE = CODEC.voice(some_sound(1.7), SPEAKER)


@pytest.fixture(scope="module")
def campplus(tmp_path_factory):
    """A stand-in for the speaker network with its interface: the mean of the features, projected to 192."""
    matrix = np.random.default_rng(1).standard_normal((80, 192)).astype(np.float32)
    nodes = [
        helper.make_node("ReduceMean", ["features"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("Add", ["mean", "one"], ["shifted"]),
        helper.make_node("MatMul", ["shifted", "matrix"], ["vector"]),
    ]
    graph = helper.make_graph(
        nodes,
        "speaker",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, [1, "frames", 80])],
        [helper.make_tensor_value_info("vector", TensorProto.FLOAT, [1, 192])],
        [numpy_helper.from_array(matrix, "matrix"), numpy_helper.from_array(np.ones(80, np.float32), "one")],
    )
    file = tmp_path_factory.mktemp("speaker") / "campplus.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), file)
    return file, matrix


def streamed(codec, voice, codes, cuts, left, seed=3):
    """The pieces of sound a reply comes in when its codes come so."""
    state = codec.start(voice, left, seed)
    pieces = []
    for number, piece in enumerate(codes.split(cuts), start=1):
        sound, state = codec.step(state, piece, final=number == len(cuts))
        pieces.append(sound)
    return pieces


@given(cuts=st.lists(st.integers(1, 12), min_size=1, max_size=8), left=st.sampled_from([None, 0, 2]))
@settings(max_examples=12, deadline=None)
def test_a_stream_in_any_pieces_is_the_whole_reply(cuts, left):
    codes = some_codes(sum(cuts))
    whole = EXACT.speak(codes, VOICE, left, seed=3)
    pieces = streamed(EXACT, VOICE, codes, cuts, left)
    assert whole.shape == (len(codes) * 1920,)
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-4, rtol=1e-3)


def test_the_quick_stream_has_no_clicks_where_its_pieces_meet():
    """The vocoder guesses frames it does not have yet; what it guessed wrong must not be heard as an edge."""
    codes = some_codes(60)
    pieces = [piece for piece in streamed(CODEC, VOICE, codes, [4] * 15, 2) if len(piece)]
    assert len(pieces) > 8
    sound = torch.cat(pieces)
    assert sound.shape == (60 * 1920,)
    jumps = sound.diff().abs()
    edges = torch.tensor([len(piece) for piece in pieces]).cumsum(0)[:-1] - 1
    assert jumps[edges].max() <= jumps.quantile(0.999)


def test_replies_spoken_together_equal_replies_alone():
    other = CODEC.voice(some_sound(0.9), -SPEAKER)
    lengths, voices = [5, 13, 8, 21], [VOICE, other, VOICE, other]
    states = [CODEC.start(each, 2, seed) for seed, each in enumerate(voices)]
    codes = [some_codes(length, length) for length in lengths]
    spoken = [[] for _ in states]
    for begin in range(0, 24, 4):
        pieces = [each[begin : begin + 4] for each in codes]
        live = [index for index, piece in enumerate(pieces) if len(piece)]
        final = [begin + 4 >= lengths[index] for index in live]
        sounds, after = CODEC.step_batch([states[i] for i in live], [pieces[i] for i in live], final)
        for index, sound, state in zip(live, sounds, after, strict=True):
            spoken[index].append(sound)
            states[index] = state
    for index, (each, length) in enumerate(zip(voices, lengths, strict=True)):
        state = CODEC.start(each, 2, index)
        alone = []
        for begin in range(0, length, 4):
            sound, state = CODEC.step(state, codes[index][begin : begin + 4], final=begin + 4 >= length)
            alone.append(sound)
        torch.testing.assert_close(torch.cat(spoken[index]), torch.cat(alone), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("rate", "channels"), [(8_000, 1), (16_000, 2), (44_100, 1), (48_000, 2)])
def test_sound_of_any_rate_is_heard(rate, channels):
    codes = CODEC.encode(some_sound(1.0, rate, channels))
    assert len(codes) == 13
    assert (codes >= 0).all() and (codes < 64).all()


def test_the_published_folder_round_trips(tmp_path, campplus):
    CODEC.save(tmp_path)
    (tmp_path / "flow" / "campplus.onnx").write_bytes(campplus[0].read_bytes())
    again = MossSpeechCodec.load(tmp_path)
    codes = some_codes(9)
    torch.testing.assert_close(again.speak(codes, VOICE), CODEC.speak(codes, VOICE), rtol=0, atol=0)
    sound = some_sound(2.0)
    assert torch.equal(again.encode(sound), CODEC.encode(sound))
    assert again.voice(sound).codes.shape == (25,)
    with pytest.raises(InputError, match="chunks of 5 or 25"):
        MossSpeechCodec.load(tmp_path, chunk=7)
    with pytest.raises(CheckpointError, match="flow-chunk-25"):
        MossSpeechCodec.load(tmp_path, chunk=25)
    (tmp_path / "flow" / "sizes.json").write_text('{"flow": {}}')
    with pytest.raises(CheckpointError, match="sizes"):
        MossSpeechCodec.load(tmp_path)


def test_the_speaker_vector_is_what_the_network_gives(campplus):
    file, matrix = campplus
    samples = torch.from_numpy(some_sound(1.0, 16_000).samples[0])
    features = KaldiFbank(subtract_mean=True)(samples[None])[0].numpy()
    expected = (features.mean(axis=0) + 1) @ matrix
    np.testing.assert_allclose(SpeakerEmbedder(file).embed(samples).numpy(), expected, rtol=1e-4, atol=1e-4)


def test_speaker_files_that_cannot_be_are_named(tmp_path, campplus):
    with pytest.raises(CheckpointError, match="does not exist"):
        SpeakerEmbedder(tmp_path / "campplus.onnx")
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(campplus[0].read_bytes()[:50])
    with pytest.raises(CheckpointError, match="cannot be read as ONNX"):
        SpeakerEmbedder(broken)
    with pytest.raises(InputError, match="finite samples"):
        SpeakerEmbedder(campplus[0]).embed(torch.full((16000,), float("nan")))


def test_recordings_that_make_no_voice_are_refused():
    with pytest.raises(InputError, match="at most 30"):
        CODEC.voice(some_sound(31.0), SPEAKER)
    with pytest.raises(InputError, match="at least a second"):
        CODEC.voice(some_sound(0.05), SPEAKER)
    with pytest.raises(InputError, match="speaker"):
        CODEC.voice(some_sound(2.0))


ODD_SOUNDS = {
    "ten milliseconds": (some_sound(0.01, 48_000), 1),
    "one sample": (Sound(np.zeros(1, np.float32) + 0.5, 16_000), 1),
    "silence": (Sound(np.zeros(16_000, np.float32), 16_000), 13),
    "clipped": (Sound(np.clip(some_sound(1.0, 16_000).samples * 50, -1, 1), 16_000), 13),
    "far over full scale": (Sound(some_sound(1.0, 16_000).samples * 1000, 16_000), 13),
    "seven channels": (some_sound(1.0, 16_000, channels=7), 13),
    "three minutes": (some_sound(180.0, 8_000), 2250),
}


@pytest.mark.parametrize("name", ODD_SOUNDS)
def test_odd_sounds_are_heard_and_spoken(name):
    sound, expected = ODD_SOUNDS[name]
    codes = CODEC.encode(sound)
    assert len(codes) == expected
    spoken = CODEC.speak(codes[:20], VOICE, left_chunks=2)
    assert torch.isfinite(spoken).all()
    assert spoken.abs().max() <= 0.99


def test_what_is_no_sound_is_refused_in_one_line():
    with pytest.raises(InputError, match="no samples"):
        CODEC.encode(Sound(np.zeros(0, np.float32), 16_000))
    with pytest.raises(InputError, match=r"NaN|finite"):
        Sound(np.full(16_000, np.nan, np.float32), 16_000)
    with pytest.raises(InputError, match="rate"):
        Sound(np.zeros(16_000, np.float32), 7)
