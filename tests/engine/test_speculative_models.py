"""Drafts under the rules of real models: Whisper's times, CosyVoice's repetitions; and the distribution, counted."""

import pytest
import torch
from scipy import stats

from tests.engine.test_speculative import CPU, Script, llama_engine, steps_of, tiny_llama
from tests.models.test_cosyvoice_lm import CODES, PUBLISHED, TINY, WRITTEN
from tests.models.test_whisper_engine import CONFIG as WHISPER
from tests.models.test_whisper_engine import SETTINGS, TOKENS, windows_of
from vivavoce.engine.drafts import DraftModel, EarlierHypothesis, NgramLookup
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation, Sampling
from vivavoce.engine.speculative import Speculation
from vivavoce.models.cosyvoice.lm import CosyVoiceLM
from vivavoce.models.whisper.engine import WhisperWriter
from vivavoce.models.whisper.model import Whisper

LIMITS = EngineLimits(page_size=4, cache_rows=512, rows_per_step=64, sequences_per_step=8)


@pytest.fixture(scope="module")
def whisper():
    made = Whisper.random(WHISPER, dtype=torch.float64, seed=1)
    made.decoder.embed_positions.weight.normal_(generator=torch.Generator().manual_seed(0))
    return made


def writing(whisper: Whisper) -> tuple[Engine, list[list[tuple[int, int]]]]:
    """An engine that has heard three windows, and the prompts of their texts."""
    writer = WhisperWriter(whisper, TOKENS, SETTINGS, 3)
    held = writer.store.hold(windows_of(whisper, 3))
    prompts = [writer.prompt(window, TOKENS.prompt("en", timestamps=True), True) for window in held]
    return Engine(writer, CPU, torch.float64, LIMITS), prompts


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 0, 1.0), Sampling(0.7, 0, 1.0, 1.3)])
@pytest.mark.parametrize("wrong_every", [None, 2, 5])
def test_whisper_writes_the_same_times_and_words(whisper, sampling, wrong_every):
    generations = [Generation(sampling, max_new_rows=20 + seed, seed=seed) for seed in range(3)]
    engine, prompts = writing(whisper)
    plain = [engine.complete(engine.open(prompt), each) for prompt, each in zip(prompts, generations, strict=True)]
    assert any(TOKENS.is_timestamp(row[0]) for row in plain[0])
    engine, prompts = writing(whisper)
    sequences = [engine.open(prompt) for prompt in prompts]
    for sequence, generation, text in zip(sequences, generations, plain, strict=True):
        source = Script(text, wrong_every, turned=(1, 0))
        engine.generate(sequence, generation, speculation=Speculation(source, max_rows=4))
    while engine.has_work:
        engine.step()
    assert [sequence.rows[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)] == plain
    assert engine.acceptance.kept > 0


def test_whisper_drafts_for_itself_without_a_miss(whisper):
    """The draft obeys the rules of where the text is, not of a text that begins."""
    generation = Generation(GREEDY, max_new_rows=24)
    (engine, prompts), (small, _) = writing(whisper), writing(whisper)
    plain = writing(whisper)[0]
    expected = plain.complete(plain.open(prompts[1]), generation)
    speculation = Speculation(DraftModel.of(small, engine), max_rows=4)
    assert engine.complete(engine.open(prompts[1]), generation, speculation) == expected
    assert engine.acceptance.kept == engine.acceptance.drafted > 0


def test_an_earlier_text_of_the_same_window_is_checked_in_one_pass(whisper):
    generation = Generation(GREEDY, max_new_rows=24)
    engine, prompts = writing(whisper)
    sequence = engine.open(prompts[2])
    expected = engine.complete(sequence, generation)
    before = steps_of(engine)
    again = engine.open(prompts[2])
    assert engine.complete(again, generation, Speculation(EarlierHypothesis(expected), max_rows=40)) == expected
    assert steps_of(engine) - before == 1


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("wrong_every", [None, 2, 3])
def test_the_repetition_rule_looks_back_over_drafted_rows(version, wrong_every):
    model = CosyVoiceLM.random(TINY[version], dtype=torch.float64, seed=3)
    prompt = model.prompt([77, *WRITTEN], codes=CODES)
    repeated = 0
    for seed in range(4):
        generation = Generation(PUBLISHED, max_new_rows=40, min_new_rows=40, seed=seed)
        plain, engine = (Engine(model, CPU, torch.float64, LIMITS) for _ in range(2))
        expected = plain.complete(plain.open(prompt), generation)
        repeated += any(expected.count(row) > 3 for row in expected)
        source = NgramLookup(2, 1) if wrong_every == 3 else Script(expected, wrong_every, turned=(0, 1))
        assert engine.complete(engine.open(prompt), generation, Speculation(source, max_rows=5)) == expected
        assert engine.acceptance.checks > 0
    assert repeated


def test_a_reply_may_end_behind_a_draft_as_soon_as_it_is_long_enough():
    """Ends are likely, and forbidden for nine rows: a reply that ends right after them has counted drafted rows."""
    model = CosyVoiceLM.random(TINY[3], dtype=torch.float64, seed=3)
    prompt = model.prompt([77, *WRITTEN])
    plain, engine = (Engine(model, CPU, torch.float64, LIMITS) for _ in range(2))
    lengths = []
    for seed in range(30):
        generation = Generation(Sampling(1.5, 0, 1.0), max_new_rows=40, min_new_rows=9, seed=seed)
        expected = plain.complete(plain.open(prompt), generation)
        assert engine.complete(engine.open(prompt), generation, Speculation(Script(expected), max_rows=5)) == expected
        lengths.append(len(expected))
    assert min(lengths) == 10 and lengths.count(10) >= 3


def test_ids_come_as_often_as_their_chances_say_behind_a_draft():
    """The second row, whether it stood behind a kept draft or a rejected one, counted over seeds."""
    model, prompt, guess = tiny_llama(1, ends=()), [(5,), (9,), (11,)], (4,)
    sampling, count = Sampling(1.5, 6, 1.0), 1600
    source = Script([guess, guess])
    engine = llama_engine(model)
    pairs: dict[tuple[int, ...], int] = {}
    for first in range(0, count, 8):
        sequences = [engine.open(prompt) for _ in range(8)]
        for number, sequence in enumerate(sequences):
            generation = Generation(sampling, max_new_rows=2, seed=first + number)
            engine.generate(sequence, generation, speculation=Speculation(source, max_rows=1))
        while engine.has_work:
            engine.step()
        for sequence in sequences:
            pair = tuple(row[0] for row in sequence.rows[3:])
            pairs[pair] = pairs.get(pair, 0) + 1
            engine.close(sequence)
    chances = {pair: chance for pair, chance in _pair_chances(model, prompt, sampling) if chance * count >= 5}
    assert set(pairs) <= {pair for pair, _ in _pair_chances(model, prompt, sampling)}
    observed = [pairs.get(pair, 0) for pair in chances]
    expected = [chance * count for chance in chances.values()]
    rest = [count - sum(observed)], [count - sum(expected)]
    assert stats.chisquare(observed + rest[0], expected + rest[1]).pvalue > 0.001


def _pair_chances(model, prompt, sampling):
    for first, chance in _chances(model, prompt, sampling):
        for second, then in _chances(model, [*prompt, (first,)], sampling):
            yield (first, second), chance * then


def _chances(model, rows, sampling):
    """Each likely next id with its chance, by a pass of its own."""
    states = []
    engine = llama_engine(model)
    forward, model.forward = model.forward, lambda *given: states.append(forward(*given)) or states[-1]
    try:
        engine.complete(engine.open(rows), Generation(GREEDY, max_new_rows=1))
    finally:
        model.forward = forward
    best, ids = (model.logits(states[-1][-1:])[0] / sampling.temperature).topk(sampling.top_k)
    return list(zip(ids.tolist(), best.softmax(0).tolist(), strict=True))
