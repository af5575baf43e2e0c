"""Kokoro as a speech model: streaming, word times, voices, languages; a tiny model with random weights."""

import math
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.models.tiny_kokoro import tiny_kokoro, write_folder
from vivavoce.audio.io import Sound
from vivavoce.cascade.local_synthesiser import TTSSynthesiser
from vivavoce.errors import InputError, MissingDependencyError, NothingToSayError
from vivavoce.models.kokoro.windows import WHOLE_SENTENCES, WindowLengths
from vivavoce.tts import phonemes as phonemes_module
from vivavoce.tts.interface import SpeakingStyle, open_speech_model
from vivavoce.tts.kokoro import PAUSE, SAMPLED_LENGTHS, WARM_UP_TEXTS, breaks, word_times
from vivavoce.tts.kokoro_batch import BatchedWorker
from vivavoce.tts.phonemes import Phonemes, Word, phonemes, sentences, split_long

TEXT = "The library is open, except on Sundays, when it closes. Good evening to you all."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tiny_kokoro(), tmp_path_factory.mktemp("kokoro"))


@pytest.fixture
def tts(folder, letters):
    opened = open_speech_model(str(folder), "cpu", "float32")
    opened.windows = WindowLengths(0.2, 0.3, 0.6)
    return opened


@pytest.fixture
def letters(monkeypatch):
    """Phonemes by the letters themselves: no package is needed for what is tested here."""
    monkeypatch.setattr(phonemes_module, "english", lambda is_british: str.lower)


def test_a_stream_is_what_is_said_at_once(tts):
    pieces = list(tts.stream(TEXT))
    assert len(pieces) > 4  # two sentences in windows, and the pauses behind them
    assert np.array_equal(np.concatenate(pieces, axis=1), tts.say(TEXT).samples)


def test_the_first_window_comes_before_the_others_are_computed(tts):
    computed = []
    generate = tts.worker.generate
    for length in SAMPLED_LENGTHS:
        tts.voice_statistics("af_heart", length)
    tts.worker.generate = lambda prepared, lead: computed.append(1) or generate(prepared, lead)
    stream = tts.stream(TEXT)
    next(stream)
    first = len(computed)
    list(stream)
    assert first == 1 < len(computed)


def test_the_statistics_of_a_voice_are_those_of_the_style_for_the_length_of_the_text(tts):
    short, long = (tts.voice_statistics("af_heart", length) for length in SAMPLED_LENGTHS)
    assert not torch.allclose(short.means, long.means)
    between = tts.voice_statistics("af_heart", 32)
    torch.testing.assert_close(between.means, torch.lerp(short.means, long.means, math.log(32 / 16, 64 / 16)))
    assert len(tts._voice_statistics) == 2, "those between are interpolated"
    assert tts.voice_statistics("af_heart", 1) is tts.voice_statistics("af_heart", SAMPLED_LENGTHS[0])
    assert tts.voice_statistics("af_heart", 400) is tts.voice_statistics("af_heart", SAMPLED_LENGTHS[-1])


async def test_a_warm_voice_computes_nothing_but_its_text(tts):
    """Dictionaries and statistics of a voice are there before the first text."""
    phonemise, asked, texts = tts._phonemise, [], []
    tts._phonemise = lambda text, *given: asked.append(text) or phonemise("library", *given)
    await TTSSynthesiser(tts).warm_up("af_bella")
    assert set(asked) >= set(WARM_UP_TEXTS), "in both languages"
    assert list(tts._voice_statistics) == [("af_bella", length) for length in SAMPLED_LENGTHS]
    tts._phonemise = phonemise
    prepare = tts.worker.prepare
    tts.worker.prepare = lambda text: texts.append(text) or prepare(text)
    sound = np.concatenate(list(tts.stream("The library is open, except on Sundays.", "af_bella")), axis=1)
    assert len(texts) == 1 and sound.shape[1] > tts.rate / 2


def test_several_texts_at_once_sound_as_they_do_alone(tts):
    tts.windows = WHOLE_SENTENCES
    texts = ["Good evening.", "The library is open. Come in."]
    for together, text in zip(tts.say_all(texts), texts, strict=True):
        alone = tts.say(text).samples
        assert together.samples.shape == alone.shape
        assert np.corrcoef(together.samples[0], alone[0])[0, 1] > 0.9999


def test_words_have_times_in_order_within_the_sound(tts):
    pieces = list(tts.speak(TEXT))
    words = [word for piece in pieces for word in piece.words]
    assert [word.word for word in words] == TEXT.split()
    times = [time for word in words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert times[-1] <= sum(piece.samples.shape[1] for piece in pieces) / tts.rate


def test_word_times_follow_the_durations():
    spoken = Phonemes("ab c", (Word("ab", 0, 2), Word("see", 3, 4)))
    times = list(word_times(spoken, [10, 1, 2, 4, 3, 10], begin=1.0))
    assert [(word.word, round(word.start, 3), round(word.end, 3)) for word in times] == [
        ("ab", 1.25, 1.325),
        ("see", 1.425, 1.5),
    ]
    assert [each.feature for each in breaks("ab c", [10, 1, 2, 4, 3, 10])] == [30]


def test_a_faster_text_is_shorter_and_pauses_scale(tts):
    plain, fast = tts.say("Good evening."), tts.say("Good evening.", style=SpeakingStyle(2.0, pause=0.0))
    assert fast.samples.shape[1] <= plain.samples.shape[1] - PAUSE * tts.rate
    with pytest.raises(InputError, match="speed"):
        tts.say("Good evening.", style=SpeakingStyle(9.0))


def test_voices_and_mixtures(tts):
    heart, bella = tts.say("Hello.", "af_heart").samples, tts.say("Hello.", "af_bella").samples
    mixed = tts.say("Hello.", "af_heart:0.7+af_bella:0.3").samples
    assert not np.array_equal(heart, mixed)
    assert not np.array_equal(bella, mixed)
    assert tts.voices.names()[0] == "af_heart"
    assert "af_heart:0.7+af_bella:0.3" in tts.voices
    assert "ann" not in tts.voices
    for wrong in ("ann", Sound(np.zeros(100, np.float32), 16_000)):
        with pytest.raises(InputError):
            tts.say("Hello.", wrong)
    with pytest.raises(InputError, match="imitate"):
        tts.add_voice("ann", Sound(np.zeros(100, np.float32), 16_000))


async def test_a_mixture_reaches_the_model_through_the_cascade(tts):
    spoken = [piece async for piece in TTSSynthesiser(tts).speak("Hello.", "af_heart:0.7+af_bella:0.3", 1.0)]
    assert np.array_equal(np.concatenate(spoken), tts.say("Hello.", "af_heart:0.7+af_bella:0.3").samples[0])


def test_what_cannot_be_said_is_refused_before_the_first_sound(tts):
    with pytest.raises(NothingToSayError):
        tts.stream("***").__next__()
    with pytest.raises(InputError, match="speaks Spanish"):
        tts.stream("Hola.", "ef_dora").__next__()


def test_a_missing_phonemiser_is_named(monkeypatch):
    for name in ("hibari", "hibari.g2p", "misaki", "misaki.en", "misaki.zh"):
        monkeypatch.setitem(sys.modules, name, None)
    phonemes_module.english.cache_clear()
    phonemes_module.mandarin.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"vivavoce\[kokoro\]"):
        phonemes("Hello.", "a", str.isprintable)
    with pytest.raises(MissingDependencyError, match=r"vivavoce\[kokoro\]"):
        phonemes("你好。", "z", str.isprintable)


def test_sentences_do_not_end_at_titles():
    assert sentences('Mr. Smith came. "Did he?" Yes! J. S. Bach.') == [
        "Mr. Smith came.",
        '"Did he?"',
        "Yes!",
        "J. S. Bach.",
    ]
    assert sentences("你好。今天天气很好！") == ["你好。", "今天天气很好！"]


def test_long_texts_are_split_at_punctuation_and_then_at_words():
    spoken = Phonemes("aa bb, cc dd ee", tuple(Word(str(at), at, at + 2) for at in (0, 3, 7, 10, 13)))
    assert [part.text for part in split_long(spoken, 8)] == ["aa bb,", "cc dd ee"]
    parts = list(split_long(spoken, 6))
    assert [part.text for part in parts] == ["aa bb,", "cc dd", "ee"]
    assert [[(word.text, word.start) for word in part.words] for part in parts] == [
        [("0", 0), ("3", 3)],
        [("7", 0), ("10", 3)],
        [("13", 0)],
    ]
    assert [part.text for part in split_long(Phonemes("a" * 10, ()), 4)] == ["aaaa", "aaaa", "aa"]


@pytest.mark.full
def test_mandarin_has_tones_and_numbers():
    pytest.importorskip("misaki.zh")
    spoken = phonemes("我有3本书。", "z", str.isprintable)
    assert "3" not in spoken.text
    assert {"↓", "→"} <= set(spoken.text)
    assert "".join(word.text for word in spoken.words) == "我有3本书"


def test_wifi_is_said_as_two_words():
    pytest.importorskip("hibari", reason="English phonemes")
    assert (
        phonemes("The wifi is free.", "a", str.isprintable).text
        == phonemes("The Wi-Fi is free.", "a", str.isprintable).text
    )


@pytest.mark.full
def test_english_by_hibaris_phonemiser():
    pytest.importorskip("hibari")
    phonemes_module.english.cache_clear()
    spoken = phonemes("It costs $12.50 today.", "a", str.isprintable)
    assert not any(map(str.isdigit, spoken.text))
    assert [word.text for word in spoken.words] == ["It", "costs", "$12.50", "today."]


@pytest.mark.full
def test_hibari_speaks_by_sentence():
    pytest.importorskip("hibari")
    tts = open_speech_model("hibari")
    pieces = list(tts.stream("Good evening. How are you?"))
    assert len(pieces) == 4
    assert np.array_equal(np.concatenate(pieces, axis=1), tts.say("Good evening. How are you?").samples)
    with pytest.raises(InputError, match="English only"):
        tts.stream("你好。")
    with pytest.raises(InputError, match="no voice"):
        tts.say("Hello.", "nobody")


def test_hibari_without_its_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "hibari", None)
    with pytest.raises(MissingDependencyError, match=r"vivavoce\[hibari\]"):
        open_speech_model("hibari")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.full
def test_concurrent_texts_share_passes_and_sound_as_they_do_alone(folder, letters, device):
    alone, together = (open_speech_model(str(folder), device, "float32") for _ in range(2))
    if device == "cpu":
        together.worker = BatchedWorker(together.model, together.model.generate, together.device)
    texts = [f"{TEXT} This is text {word}, read by one of many." for word in ("one", "fifteen", "a hundred and two")]
    expected = [alone.say(text).samples for text in texts]
    try:
        with ThreadPoolExecutor(len(texts)) as callers:
            sounds = list(callers.map(together.say, texts))
        batcher = together.worker.sounds
        assert batcher.batches < batcher.jobs
    finally:
        together.close()
    for sound, single in zip(sounds, expected, strict=True):
        assert sound.samples.shape == single.shape
        assert np.corrcoef(sound.samples[0], single[0])[0, 1] > (0.9999 if device == "cpu" else 0.99)
