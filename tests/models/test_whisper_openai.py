"""Decoding, windows and segments are openai-whisper's: its figures for a tiny model, and its ranking rule apart."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.models.openai_whisper_case import GOLDEN, SOUNDS, sound, write_model
from vivavoce.asr.batch import TranscribingEngine
from vivavoce.device import pick
from vivavoce.models.whisper.decoding import Text, decode, follow
from vivavoce.models.whisper.model import WindowMemory
from vivavoce.models.whisper.steps import EncodeWindow, TranscriptionOptions, WriteText
from vivavoce.models.whisper.transcriber import WhisperTranscriber

CASES = json.loads(GOLDEN.read_text(encoding="utf8"))["cases"]
DRAWS = 5


@pytest.fixture(scope="module")
def listener(tmp_path_factory):
    return WhisperTranscriber.load(write_model(tmp_path_factory.mktemp("openai")))


def samples_of(case) -> torch.Tensor:
    return torch.from_numpy(sound(SOUNDS[case["sound"]], case["seed"]))


def options_of(case) -> TranscriptionOptions:
    return TranscriptionOptions(
        "en", timestamps=case["timestamps"], beams=case["beams"], temperatures=(0.0,), follow_earlier=False
    )


def assert_equal(segments, case) -> None:
    assert [list(segment.tokens) for segment in segments] == [expected["tokens"] for expected in case["segments"]]
    for segment, expected in zip(segments, case["segments"], strict=True):
        assert (segment.start, segment.end) == pytest.approx((expected["start"], expected["end"]), abs=1e-6)
        assert segment.average_logprob == pytest.approx(expected["avg_logprob"], abs=1e-3)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['sound']}-{c['seed']}-{c['beams']}-{c['timestamps']}")
def test_segments_are_those_of_openai_whisper(listener, case):
    assert_equal(list(listener.segments(samples_of(case), options_of(case))), case)


def test_the_engine_follows_beams_to_the_same_segments(listener):
    chosen = [case for case in CASES if case["sound"] == "short"]
    engine = TranscribingEngine(listener, pick("cpu"), windows=len(chosen))
    made = engine.transcribe([samples_of(case) for case in chosen], [options_of(case) for case in chosen])
    for segments, case in zip(made, chosen, strict=True):
        assert_equal(segments, case)


def per_token(text: Text) -> float:
    """openai-whisper's rank without a length penalty: `<|endoftext|>` adds to the sum, not to the length."""
    return text.logprob / len(text.tokens)


def encoded(listener, seed: int) -> WindowMemory:
    mel = listener.log_mel(torch.from_numpy(sound(3.7, seed)))
    return listener.encode(listener.window(mel, 0, "full", 370))


def test_the_best_of_some_drawn_texts_is_that_of_the_highest_rank(listener):
    prompt, rules = (
        listener.tokens.prompt("en", "transcribe", True),
        listener.rules(TranscriptionOptions("en", timestamps=True)),
    )
    memory, differ = encoded(listener, 0), 0
    repeated = WindowMemory(memory.keys.repeat_interleave(DRAWS, 1), memory.values.repeat_interleave(DRAWS, 1))
    for seed in range(40):
        given = {"rules": rules, "temperature": 0.9, "max_tokens": 8, "seed": seed}
        drawn = decode(listener.model, listener.tokens, repeated, [prompt] * DRAWS, **given)
        (chosen,) = decode(listener.model, listener.tokens, memory, [prompt], best_of=DRAWS, **given)
        assert chosen.tokens == max(drawn, key=per_token).tokens
        differ += max(drawn, key=lambda text: text.average_logprob).tokens != chosen.tokens
    assert differ  # else dividing by one token more would pass, too


def test_the_engine_ranks_drawn_texts_alike(listener):
    """The draws of `best_of=k` are the first k of those of a larger one, so the rank can only rise."""
    engine = TranscribingEngine(listener, pick("cpu"), windows=1)
    prompt = tuple(listener.tokens.prompt("en", "transcribe", True))

    def drawn(best_of: int, seed: int):
        options = TranscriptionOptions("en", timestamps=True, seed=seed)

        def asking():
            mel = listener.log_mel(torch.from_numpy(sound(3.7, 0)))
            memory = yield EncodeWindow(listener.window(mel, 0, "full", 370))
            return (yield WriteText(memory, prompt, options, 0.9, best_of, 8))

        job = engine.run(asking())
        assert list(job) == []
        return job.result

    for seed in range(3):
        ranks = [per_token(drawn(best_of, seed)) for best_of in range(1, DRAWS + 1)]
        assert all(later >= rank - 1e-5 for rank, later in pairwise(ranks))  # batches differ in the last bits


def test_no_more_texts_are_finished_than_there_are_beams():
    finished = [Text([1], -0.1, True, 0.0)]
    logprobs = torch.tensor([[-0.1, -0.2, -0.3], [-0.15, -0.25, -0.35]])  # token 0 ends a text
    follow(torch.zeros(2), logprobs, torch.zeros(2, 1, dtype=torch.long), 2, 0, 0.0, finished)
    assert [text.logprob for text in finished] == pytest.approx([-0.1, -0.1])


def test_what_follows_the_sound_in_a_window_is_zero_unless_the_model_was_trained_on_silence(listener):
    mel = listener.log_mel(torch.from_numpy(sound(3.7, 0)))
    for padding, frames in (("full", 3000), ("trim", 976)):  # trimmed windows end with six seconds of padding
        window = listener.window(mel, 0, padding, 370)
        assert window.shape[-1] == frames and not window[..., 370:].any()
        assert torch.equal(window[0, :, :370], mel[:, :370])
    quiet = replace(listener.settings, window_fill="silence")
    trained = WhisperTranscriber(listener.model, listener.tokenizer, listener.tokens, quiet)
    assert torch.equal(trained.window(mel, 0, "full", 370)[0], mel[:, :3000])
