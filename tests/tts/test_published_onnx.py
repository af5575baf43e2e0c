"""The published ONNX folders, by their stated layout: files, names, types, shapes, voices, and weights beside them."""

from pathlib import Path

import numpy as np
import pytest

from tests.tts.published_onnx import BOOKS, CODES, FRAME, VOICE, write_codec, write_language_model
from vivavoce.audio.level import buzz
from vivavoce.models.moss_tts_nano.prompt import NanoSampling
from vivavoce.tts import SpeakingStyle, StoredVoice
from vivavoce.tts.interface import SpeechSettings
from vivavoce.tts.onnx import LARGEST_UNIFORM, OnnxTTS


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """As the two repositories are fetched: links into a store, side by side in neither."""
    root = tmp_path_factory.mktemp("hub")
    links = []
    for number, write in enumerate((write_language_model, write_codec)):
        store, link = root / f"store-{number}", root / f"snapshot-{number}"
        store.mkdir()
        link.mkdir()
        write(store)
        for index, file in enumerate(sorted(store.iterdir())):
            blob = store / f"{index:02d}"
            file.rename(blob)
            (link / file.name).symlink_to(blob)
        links.append(link)
    return links[0], links[1]


@pytest.fixture(scope="module")
def speaker(folders, tmp_path_factory) -> OnnxTTS:
    return OnnxTTS.load(str(folders[0]), codec=str(folders[1]), voices=tmp_path_factory.mktemp("voices"))


def test_the_weights_of_graphs_lie_beside_them(folders):
    assert (folders[0] / "moss_tts_global_shared.data").exists()


def test_frames_are_drawn_in_the_graph_and_decoded_with_their_state(speaker):
    sound = speaker.say("Hello.", "Ava", SpeakingStyle(seed=3))
    uniform, loud = np.random.default_rng(3), []
    while True:
        numbers = np.minimum(uniform.random((1, 1 + BOOKS)), LARGEST_UNIFORM).astype(np.float32)
        if loud and numbers[0, 0] > 0.9:  # the first frame cannot be the last
            break
        loud.append(int(numbers[0, 1] * np.float32(CODES - 1)) / CODES)
    frames = sound.samples[:, : len(loud) * FRAME].reshape(2, len(loud), FRAME)
    np.testing.assert_allclose(frames[0, :, 0], loud, atol=1e-6)
    assert sound.rate == 48_000 and sound.channels == 2


def test_greedy_frames_go_step_by_step(folders):
    settings = SpeechSettings(NanoSampling(max_new_frames=3), voices={"Ava": StoredVoice("Ava", VOICE)})
    sound = OnnxTTS(*folders, settings=settings).say("Hello.", "Ava", SpeakingStyle(greedy=True))
    assert sound.samples[0, 0] * CODES == 700  # the highest logit of the first codebook


def test_a_recording_is_encoded(speaker):
    codes = speaker._encode_reference(buzz(1.0, 48_000))
    assert len(codes) == 12 and len(codes[0]) == BOOKS


def test_built_in_voices_come_along(speaker):
    assert speaker.voices.get("Ava").codes == VOICE
