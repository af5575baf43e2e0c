"""Beam search and hotwords share the engine's steps with other texts; a language is detected per window."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.asr.idle_engine import assert_idle
from tests.asr.test_transcribe import RATE, SIZES, folder, noise, transcriber  # noqa: F401
from vivavoce.asr import transcribe as gated_transcribe
from vivavoce.asr.batch import TranscribingEngine
from vivavoce.device import pick
from vivavoce.models.whisper.config import WhisperConfig, WhisperSettings, WhisperTokens
from vivavoce.models.whisper.model import Whisper
from vivavoce.models.whisper.steps import TranscriptionOptions
from vivavoce.models.whisper.transcriber import WhisperTranscriber

CPU = pick("cpu")
GREEDY = (0.0,)
transcribe = partial(gated_transcribe, gate=False)  # random weights write text for noise


@pytest.fixture
def bilingual(transcriber):  # noqa: F811
    """A model that must hear which language it is to write, and how often its encoder ran."""
    tokens = WhisperTokens.in_order(transcriber.tokens.endoftext, ["en", "de"])
    config = WhisperConfig(
        **SIZES, max_source_positions=100, max_target_positions=64, vocab_size=tokens.timestamps + 101
    )
    model = Whisper.random(config, seed=5)
    model.decoder.embed_positions.weight.normal_(generator=torch.Generator().manual_seed(0))
    model.decoder.embed_tokens.weight.data *= 3
    runs = []
    model.encoder.register_forward_hook(lambda *_: runs.append(1))
    settings = WhisperSettings(suppressed=tokens.specials, no_speech=None, min_logprob=None, max_compression=None)
    return WhisperTranscriber(model, transcriber.tokenizer, tokens, settings), runs


def test_the_window_of_language_detection_is_encoded_once(bilingual):
    hears, runs = bilingual
    samples = torch.from_numpy(noise(1.5))
    language = hears.own_language(samples)
    runs.clear()
    alone = transcribe(samples.numpy(), hears, timestamps=False, temperatures=GREEDY)
    assert (alone.language, len(runs)) == (language, 1) and alone.segments
    (together,) = TranscribingEngine(hears, CPU, windows=1).transcribe(
        [samples], TranscriptionOptions(timestamps=False, temperatures=GREEDY)
    )
    assert len(runs) == 2 and [s.tokens for s in together] == [s.tokens for s in alone.segments]
    assert {segment.language for segment in together} == {language}
    result = transcribe(samples.numpy(), hears, language, timestamps=False, temperatures=GREEDY)
    other = transcribe(
        samples.numpy(), hears, {"en": "de", "de": "en"}[language], timestamps=False, temperatures=GREEDY
    )
    assert [s.tokens for s in result.segments] == [s.tokens for s in alone.segments] and other.language != language


def test_beams_and_hotwords_share_steps_with_other_texts(transcriber):  # noqa: F811
    sounds = [torch.from_numpy(noise(1.9, seed)) for seed in range(4)]
    pushed = WhisperTranscriber(
        transcriber.model, transcriber.tokenizer, transcriber.tokens, replace(transcriber.settings, hotword_bonus=20.0)
    )
    options_list = [
        TranscriptionOptions(timestamps=False, temperatures=GREEDY),
        TranscriptionOptions(timestamps=False, temperatures=GREEDY, beams=3),
        TranscriptionOptions(timestamps=False, temperatures=GREEDY, hotwords=("breakfast",)),
        TranscriptionOptions(timestamps=True, temperatures=GREEDY, hotwords=("table",), beams=2),
    ]
    engine = TranscribingEngine(pushed, CPU, windows=4)
    together = engine.transcribe(sounds, options_list)
    steps, alone = engine.engine.steps, 0
    for sound, options, segments in zip(sounds, options_list, together, strict=True):
        assert [s.tokens for s in segments] == [s.tokens for s in pushed.segments(sound, options)]
        engine.transcribe([sound], options)
        alone += engine.engine.steps - steps - alone
    assert steps < 0.9 * alone  # how many are shared depends on when their threads begin
    assert_idle(engine)


def test_sampled_texts_with_hotwords_depend_on_the_seed(transcriber):  # noqa: F811
    sound = torch.from_numpy(noise(1.9))
    options_list = [
        TranscriptionOptions(timestamps=False, temperatures=(0.8,), hotwords=("table",), seed=seed)
        for seed in (1, 1, 2)
    ]
    first, again, other = TranscribingEngine(transcriber, CPU, windows=3).transcribe([sound] * 3, options_list)
    assert [s.tokens for s in first] == [s.tokens for s in again] != [s.tokens for s in other]


def test_cancelling_a_beam_search_frees_the_engine(transcriber):  # noqa: F811
    engine = TranscribingEngine(transcriber, CPU, windows=1)
    job = engine.begin(torch.from_numpy(noise(1.9)), TranscriptionOptions(timestamps=False, beams=4))
    step, counts = engine.engine.advance, []

    def advance():
        result = step()
        counts.append(len(engine.engine.scheduler.sequences))
        if len(counts) == 4:
            job.cancel()
        return result

    engine.engine.advance = advance
    assert list(job) == [] and max(counts) > 1
    assert_idle(engine)
    assert len(counts) < 8


def test_three_hours_are_transcribed_window_by_window(transcriber):  # noqa: F811
    """What comes is told as it comes, and no more is held than the sound's own mel and one window."""
    tiny_sizes = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 16)
    few = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "decoder_layers"), 1)
    sizes = {**tiny_sizes, **few, "encoder_layers": 0, "max_source_positions": 1500, "max_target_positions": 12}
    config = replace(transcriber.model.config, **sizes)
    model = Whisper.random(config, seed=3)
    tokens = transcriber.tokens
    word = transcriber.tokenizer.encode(" table")[0]
    settings = WhisperSettings(  # writes one word a window, for the way through the hours is what counts
        suppressed=tuple(set(range(config.vocab_size)) - {word, tokens.endoftext}),
        suppressed_at_start=(tokens.endoftext,),
        no_speech=None,
        min_logprob=None,
        max_compression=None,
    )
    model.decoder.layer_norm.weight.zero_()  # so every state is the same, and says that the text is over
    model.decoder.layer_norm.bias.fill_(1.0)
    model.decoder.embed_tokens.weight[tokens.endoftext] = 1.0
    model.decoder.embed_tokens.weight[word] = -1.0
    hears = WhisperTranscriber(model, transcriber.tokenizer, tokens, settings)
    hours = torch.zeros(3 * 3600 * RATE)
    options = TranscriptionOptions(timestamps=False, temperatures=GREEDY, follow_earlier=False)
    engine = TranscribingEngine(hears, CPU, windows=1)
    ends = []
    for segment in engine.begin(hours, options):
        ends.append(segment.end)
        assert len(engine.engine.scheduler.sequences) <= 1
    assert len(ends) == 360 and ends == sorted(ends) and ends[-1] == 3 * 3600
