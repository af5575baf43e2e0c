"""NanoTTS: the streamed audio is the whole audio, in any voice and at any speed, and concurrent texts do not mix."""

import dataclasses
import json
import threading

import numpy as np
import pytest
import torch

from tests.models.tiny_nano import LetterTokenizer, tiny_nano, tiny_nano_codec
from vivavoce import tts as speech
from vivavoce.audio.io import Sound
from vivavoce.audio.level import buzz
from vivavoce.cpu_speed import is_int8_fast
from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano.model import MossTTSNano
from vivavoce.models.moss_tts_nano.prompt import NanoSampling
from vivavoce.train.tts.codec import TINY_CODEC
from vivavoce.train.tts.train import TINY_LM
from vivavoce.tts import NanoTTS, SpeakingStyle, StoredVoice
from vivavoce.tts.interface import SpeechSettings
from vivavoce.tts.nano import EngineFrameGenerator

SHORT = NanoSampling(max_new_frames=9)
TEXT = "Good evening. A table for two, please. At seven o'clock it is. And a bottle of water."
EIGHT = SpeakingStyle(greedy=True)


def tiny_speaker(folder, sampling: NanoSampling = SHORT, **settings) -> NanoTTS:
    voices = {"bell": StoredVoice("bell", [[1, 2, 3, 4, 5]] * 6), "own": StoredVoice("own", [[5, 4, 3, 2, 1]] * 6)}
    chosen = SpeechSettings(sampling, chunk_tokens=24, own_voice="own", voices=voices, **settings)
    model, codec = tiny_nano(dtype=torch.float32), tiny_nano_codec()
    return NanoTTS(model, codec, LetterTokenizer(), pick("cpu"), chosen, folder)


@pytest.fixture(scope="module", params=["alone", "engine"])
def speaker(request, tmp_path_factory) -> NanoTTS:
    speaks = tiny_speaker(tmp_path_factory.mktemp("voices"))
    if request.param == "engine":
        speaks.generator = EngineFrameGenerator(speaks.model, speaks.prompt, pick("cpu"))
    return speaks


def joined(pieces) -> np.ndarray:
    return np.concatenate(list(pieces), axis=1)


def test_a_text_is_said_part_by_part_with_pauses_between(speaker):
    sound = speaker.say(TEXT)
    assert sound.rate == 1000 and sound.channels == 2
    parts = 4
    assert sound.samples.shape[1] >= parts * 2 * 80 + (parts - 1) * 240


def test_what_is_said_is_what_the_engine_makes_of_the_whole_prompt(tmp_path):
    speaker = tiny_speaker(tmp_path)
    text = "Good evening."
    rows = speaker.prompt.clone(text, speaker.voices.get("bell").codes)
    engine = Engine(speaker.model, pick("cpu"), torch.float32, EngineLimits(cache_rows=512))
    generation = speaker.settings.generation(speaker.model.config.n_vq, len(text), 0, greedy=True)
    made = engine.complete(engine.open(rows), generation)
    codes = torch.tensor(speaker.model.spoken_frames(made)).T[None]
    expected = speaker.codec.decode(codes)[0].numpy()
    said = speaker.say(text, "bell", EIGHT).samples
    np.testing.assert_allclose(said, expected, atol=1e-5)


def test_the_size_of_chunks_changes_nothing(speaker):
    ticks = iter(range(10_000))
    hurried = joined(speaker.stream(TEXT, "bell", EIGHT, clock=lambda: 100.0 * next(ticks)))  # the player is always dry
    leisurely = joined(speaker.stream(TEXT, "bell", EIGHT, clock=lambda: 0.0))
    np.testing.assert_allclose(hurried, leisurely, atol=1e-5)


def test_the_first_piece_is_one_frame_and_later_ones_grow(speaker):
    sizes = [piece.shape[1] for piece in speaker.stream(TEXT, "bell", EIGHT, clock=lambda: 0.0)]
    assert sizes[0] == 80
    assert max(sizes) > 160


def test_the_same_seed_says_the_same_and_another_something_else(speaker):
    first, again, other = (speaker.say(TEXT, style=SpeakingStyle(seed=seed)).samples for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert first.shape != other.shape or not np.allclose(first, other)


def test_the_own_voice_is_the_one_without_a_reference(speaker):
    np.testing.assert_array_equal(speaker.say(TEXT, None, EIGHT).samples, speaker.say(TEXT, "own", EIGHT).samples)


def test_a_recording_speaks_like_the_voice_kept_of_it(tmp_path):
    speaker = tiny_speaker(tmp_path)
    recording = buzz(1.0, 1000)
    for book in speaker.codec.quantizer.quantizers:
        book.codebook.weight[24:] = 0.0  # the tiny model has fewer codes than its codec
    kept = speaker.add_voice("guest", recording, consent="agreed on tape")
    assert kept.consent == "agreed on tape"
    by_name, by_sound = speaker.say(TEXT, "guest", EIGHT), speaker.say(TEXT, recording, EIGHT)
    np.testing.assert_array_equal(by_name.samples, by_sound.samples)
    assert tiny_speaker(tmp_path).voices.get("guest").codes == kept.codes


def test_speech_continues_a_recording_with_a_transcript(speaker):
    codes, text = speaker.voices.get("bell").codes, "And two more."
    speaker.voices.built_in["ann"] = StoredVoice("ann", codes, text="A table for one.")
    rows = speaker.prompt.continuation(text, "A table for one. ", codes)
    engine = Engine(speaker.model, pick("cpu"), torch.float32, EngineLimits(cache_rows=512))
    generation = speaker.settings.generation(speaker.model.config.n_vq, len(text), 0, greedy=True)
    made = engine.complete(engine.open(rows), generation)
    expected = speaker.codec.decode(torch.tensor(speaker.model.spoken_frames(made)).T[None])[0].numpy()
    said = speaker.say(text, "ann", SpeakingStyle(greedy=True, continues=True)).samples
    np.testing.assert_allclose(said, expected, atol=1e-5)
    for wordless in ("bell", None, buzz(1.0, 1000)):
        with pytest.raises(InputError, match="needs its transcript"):
            speaker.stream(text, wordless, SpeakingStyle(continues=True))
    del speaker.voices.built_in["ann"]


def test_speed_changes_the_length_of_speech_and_not_of_pauses(tmp_path):
    speaker = tiny_speaker(tmp_path)
    usual = speaker.say(TEXT, "bell", EIGHT).samples.shape[1]
    without = speaker.say(TEXT, "bell", SpeakingStyle(greedy=True, pause=0.0)).samples.shape[1]
    fast = speaker.say(TEXT, "bell", SpeakingStyle(greedy=True, speed=2.0)).samples.shape[1]
    assert fast == pytest.approx(without / 2 + (usual - without), abs=4)


def test_pauses_are_scaled(speaker):
    styles = [SpeakingStyle(greedy=True, pause=pause) for pause in (0, 1, 3)]
    lengths = [speaker.say(TEXT, "bell", style).samples.shape[1] for style in styles]
    assert lengths[2] - lengths[0] == pytest.approx(3 * (lengths[1] - lengths[0]), abs=4)
    assert lengths[1] > lengths[0]


def test_voices_do_not_mix(speaker):
    texts = {"bell": "Good evening. Two, please.", "own": "The bill. And a taxi."}
    alone = {voice: speaker.say(text, voice, EIGHT).samples for voice, text in texts.items()}
    streams = {voice: speaker.stream(text, voice, EIGHT) for voice, text in texts.items()}
    pieces = {voice: [] for voice in texts}
    waiting = list(texts)
    while waiting:
        voice = waiting.pop(0)
        piece = next(streams[voice], None)
        if piece is not None:
            pieces[voice].append(piece)
            waiting.append(voice)
    for voice, expected in alone.items():
        np.testing.assert_allclose(joined(pieces[voice]), expected, atol=1e-5)


def test_threads_may_speak_at_once(speaker):
    expected = speaker.say(TEXT, "bell", EIGHT).samples
    found: list[np.ndarray] = []
    threads = [
        threading.Thread(target=lambda: found.append(speaker.say(TEXT, "bell", EIGHT).samples)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for sound in found:
        np.testing.assert_allclose(sound, expected, atol=1e-5)


def test_speech_that_loses_its_way_is_ended(tmp_path):
    endless = tiny_speaker(tmp_path, NanoSampling(max_new_frames=200), frames_a_token=0.5)
    endless.model.transformer.wte.weight[7] = -endless.model.transformer.wte.weight[9]  # it never wants to stop
    sound = endless.say("Yes.", "bell", EIGHT)
    assert sound.samples.shape[1] <= (25 + 2 + 1) * 80


@pytest.mark.parametrize("text", ["", "   ", "🎉", "—", "\x00\x01"])
def test_nothing_to_say_is_an_error(speaker, text):
    with pytest.raises(InputError, match="nothing to say"):
        speaker.say(text)


@pytest.mark.parametrize(
    "text", ["Yes 🎉 no", "mixed 中文 and кириллица", "a\x07b", "**bold**", "“quoted” — and so on…", "x" * 300]
)
def test_odd_texts_are_said(speaker, text):
    assert speaker.say(text, "bell", EIGHT).seconds > 0


@pytest.mark.parametrize("text", ["𒀀𒁀𒂀", "ᚠᛇᚻ ᛒᛦᚦ", "עברית", "हिन्दी भाषा", "ꦧꦱꦗꦮ"])
def test_texts_in_other_languages_are_spoken(speaker, text):
    assert speaker.say(text, "bell", EIGHT).seconds > 0


def test_a_text_of_a_hundred_kilobytes_begins_at_once(speaker):
    text = "Good evening, madam. " * 4760
    pieces = speaker.stream(text[:100_000], "bell", EIGHT)
    assert next(pieces).shape == (2, 80)
    pieces.close()


@pytest.mark.parametrize("seconds", [0.0, 0.1, 600.0])
def test_references_of_useless_length_say_what_is_useful(speaker, seconds):
    with pytest.raises(InputError, match=r"0\.4 to 60 s of speech, three to eight are best"):
        speaker.stream(TEXT, Sound(np.zeros((1, round(seconds * 1000)), np.float32), 1000))


def test_too_long_a_text_is_an_error(speaker):
    with pytest.raises(InputError, match="give at most"):
        speaker.stream("word " * 30_000)


def test_unknown_voices_and_impossible_styles_are_refused_immediately(speaker):
    with pytest.raises(InputError, match="known: bell, own"):
        speaker.stream(TEXT, "nobody")
    with pytest.raises(InputError, match="speed must be"):
        speaker.stream(TEXT, style=SpeakingStyle(speed=3.0))
    with pytest.raises(InputError, match="pause must be"):
        SpeakingStyle(pause=-1.0)


@pytest.mark.parametrize("seconds", [0.1, 61.0])
def test_a_reference_of_the_wrong_length_is_refused(speaker, seconds):
    with pytest.raises(InputError, match="the reference voice has"):
        speaker.stream(TEXT, Sound(np.zeros((1, int(seconds * 1000)), np.float32), 1000))


def test_a_codec_of_too_few_codebooks_is_refused():
    few = dataclasses.replace(TINY_CODEC, quantizer=dataclasses.replace(TINY_CODEC.quantizer, num_quantizers=4))
    with pytest.raises(CheckpointError, match="8 codebooks, the codec has 4"):
        NanoTTS(MossTTSNano(TINY_LM), MossAudioTokenizerNano(few), LetterTokenizer(), pick("cpu"))


def test_say_loads_a_folder_and_streams_the_same_at_any_rate(folder):
    whole = speech.say("A table for 2.", model=str(folder), device="cpu")
    assert whole.rate == 16_000
    streamed = joined(speech.speak_stream("A table for 2.", model=str(folder), device="cpu"))
    np.testing.assert_allclose(streamed, whole.samples, atol=1e-5)
    up = joined(speech.speak_stream("A table for 2.", model=str(folder), device="cpu", rate=24_000))
    assert up.shape[1] == pytest.approx(1.5 * whole.samples.shape[1], abs=2)
    assert speech.say("A table for 2.", model=str(folder), device="cpu", rate=8000).rate == 8000


def test_an_int8_speaker_speaks(folder):
    speaks = NanoTTS.load(str(folder), "cpu", "int8") if is_int8_fast() else None
    assert speaks is None or speaks.say("Two, please.").seconds > 0
    with pytest.raises(InputError, match="dtype 'int4' is not known"):
        NanoTTS.load(str(folder), "cpu", "int4")


def test_numbers_are_spelled_for_a_model_that_cannot_count(folder):
    speaks = speech.speech_model(str(folder), "cpu")
    assert speaks.prepare_text("A table for 2 at 7:30!") == "A table for two at seven thirty!"


def test_settings_travel_with_the_model(folder):
    read = SpeechSettings.read(folder)
    assert read.sampling == SHORT and read.chunk_tokens == 60 and read.own_voice == "rms"
    assert SpeechSettings.read(folder / "codec") == SpeechSettings()


def test_damaged_settings_are_an_error_of_one_line(tmp_path):
    (tmp_path / "speech.json").write_text(json.dumps({"chunk_tokens": 3, "no_such": 1}))
    with pytest.raises(CheckpointError, match=r"speech.json cannot be read"):
        SpeechSettings.read(tmp_path)


def test_a_published_folder_is_drawn_as_published():
    generation: Generation = SpeechSettings().generation(16, tokens=10, seed=3)
    assert generation.max_new_rows == 376 and not generation.penalise_prompt
    assert [(s.temperature, s.top_k, s.top_p, s.repetition_penalty) for s in generation.per_channel(17)[:2]] == [
        (1.0, 50, 1.0, 1.0),
        (0.8, 25, 0.95, 1.2),
    ]
