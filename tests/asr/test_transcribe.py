"""Transcription of any recording, by Whispers with random weights: tests of the procedure, not of the words."""

import io
import json
import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from vivavoce.asr import transcribe as gated_transcribe
from vivavoce.audio.io import Sound
from vivavoce.audio.mel import WhisperMel
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.whisper.alignment import TimedWord
from vivavoce.models.whisper.config import WhisperConfig, WhisperSettings, WhisperTokens
from vivavoce.models.whisper.decoding import cut_segments
from vivavoce.models.whisper.model import Whisper
from vivavoce.models.whisper.steps import TranscriptionOptions, TranscriptSegment
from vivavoce.models.whisper.transcriber import WhisperTranscriber, is_hallucination
from vivavoce.train.asr import Vocabulary, save_whisper

RATE = 16_000
transcribe = partial(gated_transcribe, gate=False)  # random weights write text for noise
SIZES = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Whisper of 2 s windows that writes nonsense, in the layout of a published one."""
    folder = tmp_path_factory.mktemp("whisper")
    vocabulary = Vocabulary.learn(["when is breakfast", "a table for three please"] * 2, 30, window_seconds=2.0)
    config = WhisperConfig(**SIZES, max_source_positions=100, max_target_positions=64, vocab_size=vocabulary.size)
    model = Whisper.random(config, seed=3)
    model.decoder.embed_positions.weight.normal_(generator=torch.Generator().manual_seed(0))
    save_whisper(model, vocabulary, folder)
    return folder


@pytest.fixture(scope="module")
def transcriber(folder):
    made = WhisperTranscriber.load(folder)
    open_minded = replace(
        made.settings, likely_text_is_speech=True, min_logprob=None, max_compression=None, no_speech=None
    )
    return WhisperTranscriber(made.model, made.tokenizer, made.tokens, open_minded)


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).standard_normal(int(seconds * RATE))).astype(np.float32)


def test_files_bytes_sounds_and_samples_give_the_same_transcript(transcriber, folder, tmp_path):
    samples = noise(1.5)
    soundfile = pytest.importorskip("soundfile")
    soundfile.write(tmp_path / "noise.wav", samples, RATE, subtype="FLOAT")
    expected = transcribe(samples, transcriber)
    assert expected.text and expected.language == "en" and expected.seconds == 1.5
    buffer = io.BytesIO((tmp_path / "noise.wav").read_bytes())
    for sound in (tmp_path / "noise.wav", buffer.getvalue(), buffer, Sound(samples, RATE), np.stack([samples] * 2)):
        assert transcribe(sound, transcriber) == expected
    by_folder = transcribe(samples, folder, device="cpu")
    assert by_folder.language == "en"


def test_segments_follow_one_another_through_a_long_sound(transcriber):
    seen = []
    transcript = transcribe(noise(21.3), transcriber, on_segment=seen.append)
    assert tuple(seen) == transcript.segments and len(seen) > 8
    assert transcript.text == "".join(segment.text for segment in seen).strip()
    starts = [segment.start for segment in seen]
    assert starts == sorted(starts)
    assert all(0 <= segment.start < segment.end <= 23.3 for segment in seen)


def test_segments_before_an_interruption_are_kept(transcriber):
    whole = list(transcriber.segments(torch.from_numpy(noise(8.0))))
    going = transcriber.segments(torch.from_numpy(noise(8.0)))
    assert [next(going) for _ in range(2)] == whole[:2]
    going.close()


def test_the_log_mel_of_a_long_sound_is_made_in_blocks_without_seams(transcriber):
    samples = torch.from_numpy(noise(130.0))
    whole = WhisperMel(80)(torch.cat([samples, torch.zeros(2 * RATE)])[None])[0]
    assert (transcriber.log_mel(samples) - whole).abs().max() < 1e-5


def test_words_have_times_inside_their_segments_window(transcriber):
    transcript = transcribe(noise(5.0), transcriber, word_times=True)
    assert any(segment.words for segment in transcript.segments)
    for segment in transcript.segments:
        assert segment.text == "".join(word.text for word in segment.words)
        times = [time for word in segment.words for time in (word.start, word.end)]
        assert times == sorted(times) and (not times or (times[0] >= 0 and times[-1] <= 5.0))


def test_a_doubtful_text_is_tried_again_at_every_temperature(transcriber):
    strict = replace(transcriber.settings, min_logprob=0.0, temperatures=(0.0, 0.5, 1.0))
    strict_listener = WhisperTranscriber(transcriber.model, transcriber.tokenizer, transcriber.tokens, strict)
    first = transcribe(noise(2.0), strict_listener, seed=1)
    assert {segment.temperature for segment in first.segments} == {1.0}
    assert transcribe(noise(2.0), strict_listener, seed=1) == first
    assert {segment.temperature for segment in transcribe(noise(2.0), transcriber).segments} == {0.0}


def test_silence_is_not_written_down(transcriber):
    settings = replace(transcriber.settings, no_speech=-1.0, min_logprob=0.0)  # the model always hears nobody
    deaf = WhisperTranscriber(transcriber.model, transcriber.tokenizer, transcriber.tokens, settings)
    assert transcribe(noise(5.0), deaf).segments == ()
    sure = replace(settings, min_logprob=-100.0, likely_text_is_speech=True)  # but it is sure of what it wrote
    assert transcribe(noise(5.0), WhisperTranscriber(deaf.model, deaf.tokenizer, deaf.tokens, sure)).segments
    humble = replace(sure, likely_text_is_speech=False)
    assert not transcribe(noise(5.0), WhisperTranscriber(deaf.model, deaf.tokenizer, deaf.tokens, humble)).segments


def test_improbable_words_after_silence_are_dropped_as_hallucinations():
    def segment(probability: float, length: float) -> TranscriptSegment:
        words = tuple(TimedWord(f" w{n}", 5.0 + n * length, 5.0 + (n + 1) * length, probability) for n in range(4))
        return TranscriptSegment(5.0, 7.0, "", (), 0.0, 0.0, 0.0, 0.0, words)

    assert is_hallucination(segment(0.05, 0.4), spoken_until=2.0, max_silence=2.0)
    assert is_hallucination(segment(0.9, 0.01), spoken_until=2.0, max_silence=2.0)
    assert not is_hallucination(segment(0.9, 0.4), spoken_until=2.0, max_silence=2.0)
    assert not is_hallucination(segment(0.05, 0.4), spoken_until=4.5, max_silence=2.0)
    assert not is_hallucination(segment(0.05, 0.4), spoken_until=2.0, max_silence=None)


def test_prompts_prefixes_and_hotwords_change_what_is_written(transcriber):
    plain = transcribe(noise(1.9), transcriber).text
    assert transcribe(noise(1.9), transcriber, prompt="breakfast at seven").text != plain
    assert transcribe(noise(1.9), transcriber, prefix="a table").text.startswith("a table")
    pushed = WhisperTranscriber(
        transcriber.model, transcriber.tokenizer, transcriber.tokens, replace(transcriber.settings, hotword_bonus=50.0)
    )
    assert "breakfast" in transcribe(noise(1.9), pushed, hotwords=["breakfast"], timestamps=False).text


def test_without_timestamps_a_window_is_a_segment(transcriber):
    transcript = transcribe(noise(5.0), transcriber, timestamps=False)
    assert [(segment.start, segment.end) for segment in transcript.segments] == [(0, 2), (2, 4), (4, 5)]


def test_trimmed_windows_differ_only_where_there_is_silence_to_trim(transcriber):
    full = transcribe(noise(2.0), transcriber)
    assert transcribe(noise(2.0), transcriber, padding="trim") == full
    mel = transcriber.log_mel(torch.from_numpy(noise(1.2)))
    assert transcriber.window(mel, 0, "trim", 60).shape[-1] == 120  # it hears 1.2 s and more
    free = WhisperTranscriber(
        transcriber.model,
        transcriber.tokenizer,
        transcriber.tokens,
        replace(transcriber.settings, min_window_seconds=0.5),
    )
    assert free.window(mel, 0, "trim", 60).shape[-1] == 64


@pytest.mark.parametrize("right", [0, 3, 99])
def test_a_guess_saves_steps_and_changes_nothing(transcriber, monkeypatch, right):
    options = TranscriptionOptions(timestamps=False, temperatures=(0.0,))
    samples, widths = torch.from_numpy(noise(1.9)), []
    step = type(transcriber.model.decoder).step

    def counted(decoder, state, tokens):
        widths.append(tokens.shape[1])
        return step(decoder, state, tokens)

    monkeypatch.setattr(type(transcriber.model.decoder), "step", counted)
    (plain,) = transcriber.segments(samples, options)
    plain_steps, wrong = len(widths), (plain.tokens[0] + 1) % 20
    monkeypatch.setattr(type(transcriber.tokenizer), "encode", lambda tokenizer, text: [*plain.tokens[:right], wrong])
    widths.clear()
    (guessed,) = transcriber.segments(samples, replace(options, guess="a guess"))
    assert replace(guessed, average_logprob=0.0) == replace(plain, average_logprob=0.0)
    assert guessed.average_logprob == pytest.approx(plain.average_logprob, abs=1e-4)
    assert len(widths) == plain_steps - min(right, len(plain.tokens) - 1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"language": "zh"}, "language 'zh'"), ({"prefix": "very long " * 60}, "prefix")],
)
def test_options_that_cannot_be_met_are_refused(transcriber, options, complaint):
    with pytest.raises(InputError, match=complaint):
        transcribe(noise(1.0), transcriber, **options)


@pytest.mark.parametrize("sound", [np.zeros(0, np.float32), b"not a sound at all", "/no/such/file.wav"])
def test_a_file_without_audio_is_refused(transcriber, sound):
    with pytest.raises(InputError) as caught:
        transcribe(sound, transcriber)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("samples", [np.zeros(RATE, np.float32), np.ones(100, np.float32), noise(0.011)])
def test_silence_and_very_short_recordings_are_transcribed(transcriber, samples):
    assert all(segment.end <= len(samples) / RATE + 0.02 for segment in transcribe(samples, transcriber).segments)


def test_a_folder_without_tokenizer_says_so(folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        os.link(folder / name, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        WhisperTranscriber.load(tmp_path)


def test_settings_come_from_the_model(folder, tmp_path):
    config, tokens = WhisperConfig(), WhisperTokens.of_vocabulary(51865)
    published = WhisperSettings.read(tmp_path, config, tokens)
    assert len(published.alignment_heads) == 23 and (27, 15) in published.alignment_heads
    assert len(published.suppressed) == 88
    assert published.suppressed_at_start == (220, 50257)
    own = {"no_speech_threshold": None, "logprob_threshold": -2.0, "writes_timestamps": False, "default_language": "zh"}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    tuned = WhisperSettings.read(tmp_path, config, tokens)
    assert (tuned.no_speech, tuned.min_logprob, tuned.writes_times, tuned.language) == (None, -2.0, False, "zh")
    mini = WhisperTranscriber.load(folder)
    assert mini.settings.min_window_seconds == 1.2 and mini.settings.latest_start == 2.0


@pytest.mark.parametrize(("seconds", "asked", "is_timed"), [(1.5, None, False), (2.5, None, True), (1.5, True, True)])
def test_short_sounds_are_timed_only_where_that_is_asked(transcriber, seconds, asked, is_timed):
    assert transcriber.settings.untimed_up_to == 2.0
    segments = transcriber.segments(torch.from_numpy(noise(seconds)), TranscriptionOptions(timestamps=asked))
    tokens = [token for segment in segments for token in segment.tokens]
    assert any(transcriber.tokens.is_timestamp(token) for token in tokens) == is_timed


def test_a_window_is_cut_at_pairs_of_times():
    ids = WhisperTokens.of_vocabulary(51865)
    t = ids.timestamp
    pair = cut_segments([t(0.0), 5, t(1.0), t(1.2), 6, t(2.0), t(2.0), 7], ids, 3000, True)
    assert [(part.start, part.end) for part in pair.segments] == [(0.0, 1.0), (1.2, 2.0)] and pair.frames == 200
    ended = cut_segments([t(0.0), 5, t(1.0), t(1.2), 6, t(2.0)], ids, 3000, True)
    assert [part.tokens[1] for part in ended.segments] == [5, 6] and ended.frames == 3000
    single = cut_segments([t(0.4), 5, 6, t(3.0)], ids, 3000, True)
    assert [(part.start, part.end) for part in single.segments] == [(0.0, 3.0)] and single.frames == 3000
    none = cut_segments([5, 6], ids, 1000, False)
    assert [(part.start, part.end) for part in none.segments] == [(0.0, 10.0)] and none.frames == 1000


def test_options_that_are_not_given_come_from_the_model(transcriber):
    settled = transcriber._with_defaults(TranscriptionOptions(), 3.0)
    assert (settled.language, settled.timestamps) == ("en", True)
