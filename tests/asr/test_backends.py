"""All recognition backends have one interface, and write the same text for the same model."""

from pathlib import Path

import pytest
import torch

from tests.asr.idle_engine import assert_idle
from tests.asr.test_batch import SOUNDS
from tests.asr.test_transcribe import folder, noise, transcriber  # noqa: F401 - fixtures
from vivavoce.asr import transcribe
from vivavoce.asr.backends import OwnBackend, fitting, load_backend
from vivavoce.asr.backends.ctranslate2 import ConvertedWindows, FasterWhisper, converted, load_converted
from vivavoce.asr.drafts import DraftChoice
from vivavoce.device import pick
from vivavoce.errors import CheckpointError, InputError, MissingDependencyError
from vivavoce.models.whisper.config import SIZES
from vivavoce.models.whisper.model import Whisper
from vivavoce.models.whisper.steps import TranscriptionOptions


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_engine_and_the_plain_transcriber_write_the_same_segments(transcriber):  # noqa: F811
    backend = OwnBackend(transcriber, pick("cpu"))
    options = TranscriptionOptions(word_times=True)
    for samples in SOUNDS[:3]:
        alone = list(transcriber.segments(samples, options))
        assert [s.tokens for s in backend.segments(samples, options)] == [s.tokens for s in alone]
    assert transcribe(noise(1.5), backend, gate=False).text == transcribe(noise(1.5), transcriber, gate=False).text


def test_an_interrupted_request_keeps_its_segments_and_frees_the_engine(transcriber):  # noqa: F811
    backend = OwnBackend(transcriber, pick("cpu"))
    whole = list(backend.segments(torch.from_numpy(noise(8.0))))
    going = backend.segments(torch.from_numpy(noise(8.0)))
    kept = [next(going) for _ in range(2)]
    going.close()
    assert [s.tokens for s in kept] == [s.tokens for s in whole[:2]]
    assert_idle(backend.engine)
    assert not backend.engine.engine.scheduler.sequences
    assert [s.tokens for s in backend.segments(torch.from_numpy(noise(8.0)))] == [s.tokens for s in whole]


def test_ctranslate2_writes_the_same_text_for_windows_of_any_length(folder, cache):  # noqa: F811
    pytest.importorskip("ctranslate2")
    theirs = load_backend(folder, "faster-whisper", "cpu", "float32")
    assert isinstance(theirs, ConvertedWindows)
    ours = load_backend(folder, "ours", "cpu")
    options = TranscriptionOptions(timestamps=False, temperatures=(0.0,))
    for samples in (SOUNDS[0], SOUNDS[2]):
        expected = [(s.tokens, s.start, s.end) for s in ours.segments(samples, options)]
        assert [(s.tokens, s.start, s.end) for s in theirs.segments(samples, options)] == expected
    with pytest.raises(InputError, match="backend ours"):
        list(theirs.segments(SOUNDS[0], TranscriptionOptions(word_times=True)))
    again = load_converted(folder, "cpu", "float32")
    assert isinstance(again, ConvertedWindows)


@pytest.mark.parametrize(
    ("compute", "tolerance"), [("float32", 0.0), ("float16", 1e-3), ("bfloat16", 8e-3), ("int8", 0.02)]
)
def test_the_engine_reads_ctranslate2_folders(folder, cache, compute, tolerance):  # noqa: F811
    pytest.importorskip("ctranslate2")
    original, theirs = Whisper.load(folder), converted(folder, compute)
    ours = Whisper.load(theirs)
    assert ours.config == original.config
    assert fitting(theirs, pick("cpu")) == "ours"
    for (name, expected), (_, found) in zip(original.named_parameters(), ours.named_parameters(), strict=True):
        assert torch.allclose(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())), name
    if compute == "float32":
        assert transcribe(noise(1.5), theirs, gate=False).text == transcribe(noise(1.5), folder, gate=False).text


def test_a_ctranslate2_file_that_was_cut_short_is_named(folder, cache):  # noqa: F811
    pytest.importorskip("ctranslate2")
    file = converted(folder, "float16") / "model.bin"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match="not a whole CTranslate2 Whisper"):
        load_backend(file.parent, "ours", "cpu")


def test_options_are_translated_for_faster_whisper():
    class Theirs:
        """As faster-whisper gives segments."""

        supported_languages = ("en",)

        def transcribe(self, samples, **asked):
            self.asked = asked
            made = type(
                "S",
                (),
                {
                    "start": 0.0,
                    "end": 1.0,
                    "text": " hi",
                    "tokens": [1],
                    "temperature": 0.0,
                    "avg_logprob": -0.1,
                    "compression_ratio": 1.0,
                    "no_speech_prob": 0.0,
                    "words": None,
                },
            )
            return iter([made]), type("About", (), {"language": "en"})

    model = Theirs()
    (segment,) = FasterWhisper(model).segments(
        SOUNDS[0], TranscriptionOptions("en", hotwords=("a", "b"), beams=3, timestamps=False)
    )
    assert segment.text == " hi" and segment.tokens == (1,) and segment.language == "en"
    assert (model.asked["beam_size"], model.asked["hotwords"], model.asked["without_timestamps"]) == (3, "a b", True)


def test_the_default_backend_depends_on_files_size_and_device(folder, tmp_path):  # noqa: F811
    cpu = pick("cpu")
    assert fitting(folder, cpu) == "ours"
    SIZES["small"].write(tmp_path / "small")
    assert fitting(tmp_path / "small", cpu) == "faster-whisper"
    assert fitting(tmp_path / "small", cpu, DraftChoice(lookup=True)) == "ours"
    (tmp_path / "encoder_model.onnx").touch()
    assert fitting(tmp_path, cpu) == "moonshine"
    with pytest.raises(InputError, match="backend must be one of auto, ours"):
        load_backend(folder, "theirs")


@pytest.mark.parametrize("gone", ["faster_whisper", "onnxruntime"])
def test_a_missing_package_is_named(folder, tmp_path, cache, monkeypatch, gone):  # noqa: F811
    monkeypatch.setitem(__import__("sys").modules, gone, None)
    for name in ("encoder_model.onnx", "decoder_model_merged.onnx"):
        (tmp_path / name).touch()
    asked: tuple[Path, str] = (folder, "faster-whisper") if gone == "faster_whisper" else (tmp_path, "moonshine")
    with pytest.raises(MissingDependencyError, match="pip install"):
        load_backend(asked[0], asked[1], "cpu")
