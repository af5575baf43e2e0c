"""The bundled recogniser writes no text for sounds without speech, and none of the speech around them is lost."""

import numpy as np
import pytest

from vivavoce.asr import SpeechGate, Transcriber, transcribe
from vivavoce.asr.backends import load_backend
from vivavoce.audio.io import read
from vivavoce.bench.asr import BUNDLED, spoken_sentences
from vivavoce.cpu_speed import is_int8_fast
from vivavoce.errors import InputError
from vivavoce.models.whisper.steps import TranscriptionOptions, TranscriptSegment
from vivavoce.train.asr.evaluate import score_texts

RATE = 16_000


@pytest.fixture(scope="module")
def careful():
    return Transcriber.load("mini-asr", "ours", "cpu")


HUMS = ((60, 8), (100, 5), (120, 3), (120, 5), (150, 3))  # Silero takes each of them for a voice


def hum(time: np.ndarray, pitch: float, harmonics: int) -> np.ndarray:
    return sum(np.sin(2 * np.pi * pitch * k * time) / k for k in range(1, harmonics + 1)) / 10


def sounds() -> dict[str, np.ndarray]:
    chance, time = np.random.default_rng(0), np.arange(3 * RATE) / RATE
    beat = np.sin(2 * np.pi * 2 * time) > 0
    chord = sum(np.sin(2 * np.pi * pitch * time) for pitch in (220, 277, 330)) * beat / 15
    made = {
        "silence": np.zeros(3 * RATE),
        "hiss": 1e-3 * chance.standard_normal(3 * RATE),
        "noise": 0.1 * chance.standard_normal(3 * RATE),
        "music": chord,
        "a click": np.eye(1, 3 * RATE, 800)[0],
        "full scale": np.ones(RATE),
        "a moment": 0.1 * chance.standard_normal(200),
        **{f"a hum of {pitch} Hz, {count} partials": hum(time, pitch, count) for pitch, count in HUMS},
    }
    return {name: samples.astype(np.float32) for name, samples in made.items()}


@pytest.mark.parametrize("name", sounds())
def test_no_text_is_written_for_sounds_without_speech(careful, name):
    assert transcribe(sounds()[name], careful).text == ""


def test_the_gate_drops_no_word_of_speech_nor_of_speech_in_noise():
    gate, chance = SpeechGate(), np.random.default_rng(3)
    for spoken in spoken_sentences():
        samples = spoken.samples.numpy()
        noise = chance.standard_normal(len(samples)).astype(np.float32) * np.sqrt(np.square(samples).mean())
        segment = TranscriptSegment(0.0, len(samples) / RATE, spoken.text, (), 0.0, 0.0, 0.0, 0.0)
        for heard in (samples, samples + noise):
            assert gate.passes(segment, gate.activity(heard)), spoken.text


def test_speech_between_silence_and_hiss_is_written(careful):
    question = read(BUNDLED / "09-order.opus", rate=RATE).samples[0]
    hiss = (1e-3 * np.random.default_rng(1).standard_normal(RATE)).astype(np.float32)
    alone = transcribe(question, careful)
    around = transcribe(np.concatenate([hiss, question, hiss]), careful)
    assert alone.text and around.text
    assert all(segment.end > 0.7 and segment.start < 1.3 + len(question) / RATE for segment in around.segments)


@pytest.mark.parametrize("bytes_", [b"", b"RIFF\x00\x00\x00\x00WAVE", b"OggS" + bytes(200), bytes(4000)])
def test_corrupt_files_are_refused_in_a_line(careful, bytes_):
    with pytest.raises(InputError) as caught:
        transcribe(bytes_, careful)
    assert "\n" not in str(caught.value)


def test_an_unknown_language_is_refused_and_the_next_recording_is_transcribed(careful):
    spoken = spoken_sentences(max_recordings=1)[0]
    with pytest.raises(InputError, match="language 'zh'"):
        list(careful.segments(spoken.samples, TranscriptionOptions(language="zh")))
    assert list(careful.segments(spoken.samples))


@pytest.mark.skipif(not is_int8_fast(), reason="no int8 products on this CPU")
def test_int8_writes_nearly_the_same():
    options = TranscriptionOptions(temperatures=(0.0,), padding="trim")
    rounded = load_backend("mini-asr", "ours", "cpu", "int8")
    exact = load_backend("mini-asr", "ours", "cpu", "float32")
    texts = [
        ["".join(s.text for s in backend.segments(one.samples, options)) for one in spoken_sentences(max_recordings=8)]
        for backend in (rounded, exact)
    ]
    assert sum(one == other for one, other in zip(*texts, strict=True)) >= 6


def test_a_packed_model_is_unpacked_for_ctranslate2(tmp_path, monkeypatch):
    pytest.importorskip("ctranslate2")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    theirs = load_backend("mini-asr", "faster-whisper", "cpu", "float32")
    ours = load_backend("mini-asr", "ours", "cpu", "float32")
    for one in spoken_sentences(max_recordings=2):
        options = TranscriptionOptions(temperatures=(0.0,), padding="full")
        assert [s.tokens for s in theirs.segments(one.samples, options)] == [
            s.tokens for s in ours.segments(one.samples, options)
        ]
    short = [one for one in spoken_sentences() if 1.5 <= len(one.samples) / RATE <= 1.65]
    options = TranscriptionOptions(temperatures=(0.0,), padding="trim")
    texts = ["".join(s.text for s in theirs.segments(one.samples, options)) for one in short]
    assert score_texts(texts, [one.text for one in short]).word_error_rate < 0.2
