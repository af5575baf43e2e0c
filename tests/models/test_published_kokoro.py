"""Kokoro's published weights: our samples are onnxruntime's."""

import numpy as np
import onnx
import pytest
import torch

from vivavoce.device import pick
from vivavoce.models.kokoro.config import RATE, read_vocabulary
from vivavoce.models.kokoro.cpu import CpuGenerator
from vivavoce.models.kokoro.model import Kokoro, PhonemeText
from vivavoce.models.kokoro.voices import VoiceTables
from vivavoce.models.kokoro.weights import onnx_tensors
from vivavoce.models.kokoro.windows import WHOLE_SENTENCES
from vivavoce.tts.kokoro import CPU_WINDOWS, KokoroTTS
from vivavoce.tts.phonemes import Phonemes

pytestmark = [pytest.mark.published, pytest.mark.full]
ENGLISH = "hˈWdO ˌIm kˌOkəɹˈO, ænd ðɪs ɪz ɐ tˈɛst."
MANDARIN = "ni↓xau↓, tɕin→tʰjɛn→ tʰjɛn→tɕʰi↘ xən↓ xau↓."
SPECTRUM = "/decoder/decoder/generator/Concat_3_output_0"
SCALE = 1.5  # the exported graph leaves out the division by the windows' sum


@pytest.fixture(scope="module")
def folder(published_model):
    return published_model("kokoro-82m")


@pytest.fixture(scope="module")
def model(folder):
    return Kokoro.load(folder)


def spoken(folder, phonemes: str, voice: str, seed: int | None) -> PhonemeText:
    vocabulary = read_vocabulary(folder)
    ids = [vocabulary[phoneme] for phoneme in phonemes]
    return PhonemeText(ids, VoiceTables(folder, 256).style(voice, len(ids)), 1.0, seed)


def inputs(text: PhonemeText) -> dict[str, np.ndarray]:
    return {"input_ids": np.array([[0, *text.ids, 0]]), "style": text.style[None].numpy(), "speed": np.ones(1, "f4")}


@pytest.fixture(scope="module")
def with_given_noise(folder, tmp_path_factory):
    """The published graph, the spectrum of its noise-free excitation replaced by an input."""
    onnxruntime = pytest.importorskip("onnxruntime")
    published = onnx.load(str(folder / "model.onnx"))
    for node in published.graph.node:
        for place, name in enumerate(node.input):
            if name == SPECTRUM:
                node.input[place] = "spectrum"
    shape = onnx.helper.make_tensor_value_info("spectrum", onnx.TensorProto.FLOAT, [1, 22, "frames"])
    published.graph.input.append(shape)
    file = tmp_path_factory.mktemp("graph") / "given.onnx"
    onnx.save(published, str(file))
    return onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(("phonemes", "voice"), [(ENGLISH, "af_heart"), (MANDARIN, "zm_yunxi")])
def test_samples_are_those_of_onnxruntime_with_the_same_noise(folder, model, with_given_noise, phonemes, voice):
    text = spoken(folder, phonemes, voice, seed=3)
    prepared = model.prepare([text])
    given = {**inputs(text), "spectrum": prepared.spectrum.numpy()}
    theirs = with_given_noise.run(["waveform"], given)[0].ravel() / SCALE
    for ours, _ in (model.generate(prepared), CpuGenerator(model.decoder.generator)(prepared)):
        assert ours.shape[1] == len(theirs)
        assert np.corrcoef(ours[0].numpy(), theirs)[0, 1] > 0.99999
        assert np.abs(ours[0].numpy() - theirs)[20:].max() < 1e-3  # its first half window is scaled differently


def test_the_unchanged_graph_sounds_the_same_without_noise(folder, model):
    """Where the noise-free excitation is zero, the angles of its spectrum are rounding errors, and differ."""
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    text = spoken(folder, ENGLISH, "af_heart", seed=None)
    theirs = session.run(None, inputs(text))[0].ravel()
    assert np.corrcoef(model([text])[0].numpy(), theirs)[0, 1] > 0.99


def test_every_tensor_of_the_model_is_in_the_file(folder, model):
    found = onnx_tensors(folder / "model.onnx")
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_windows_of_a_short_sentence_sound_as_the_whole(folder, model):
    """The statistics of a voice for longer texts, whose style is another one, would halve the loudness."""
    text = Phonemes("fa↓kwo↗ tɤ ʂou↓tu→ ʂɨ↘ pa→li↗.", ())
    whole, joined = (
        KokoroTTS(model, folder, pick("cpu"), "float32", windows, lambda *_: text).say("法国", "zf_xiaoxiao").samples[0]
        for windows in (WHOLE_SENTENCES, CPU_WINDOWS)
    )
    whole = whole[len(whole) - len(joined) :]  # windows begin with the first word
    assert len(joined) < 3 * RATE
    assert np.corrcoef(whole, joined)[0, 1] > 0.95
    assert abs(20 * np.log10(np.std(joined) / np.std(whole))) < 1
