"""The language model's way through a step on a CPU gives the rows of the plain one, whatever the step is made of."""

import pytest
import torch

from tests.models.test_moss_speech import CONVERSATIONS, PROMPT
from tests.models.tiny import tiny_model
from vivavoce.device import pick
from vivavoce.engine.drafts import NgramLookup
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation, Sampling
from vivavoce.engine.speculative import Draft, Speculation
from vivavoce.models.moss_speech.cpu import LONG_PIECE, CpuMossSpeech
from vivavoce.models.moss_speech.model import TEXT

PLAIN = tiny_model(seed=3)
PROMPTS = [PROMPT.rows(*conversation) for conversation in CONVERSATIONS.values()]
SAMPLINGS = [
    GREEDY,
    Sampling(temperature=0.9, top_k=10, top_p=0.9),
    Sampling(temperature=0.0, repetition_penalty=1.3),
    Sampling(temperature=1.1, top_k=0, top_p=0.95, repetition_penalty=1.2),
]


def engines(rows_per_step: int = 24, cache_rows: int = 2048) -> list[Engine]:
    limits = EngineLimits(4, cache_rows, rows_per_step=rows_per_step, sequences_per_step=16)
    return [Engine(model, pick("cpu"), torch.float64, limits) for model in (PLAIN, CpuMossSpeech(PLAIN))]


def replies(engine: Engine, generations: list[Generation], speculation: Speculation | None = None) -> list[list]:
    """Each prompt's reply, all made at once; prompts come in while others are answered already."""
    made = []
    for prompt, generation in zip(PROMPTS, generations, strict=False):
        sequence = engine.open(prompt)
        engine.generate(sequence, generation, speculation=speculation)
        engine.step()
        made.append((sequence, len(prompt)))
    while engine.has_work:
        engine.step()
    return [sequence.rows[length:] for sequence, length in made]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("cache_rows", [2048, 300])
def test_rows_are_those_of_the_plain_model(sampling, cache_rows):
    """Prompts in pieces beside single rows; with few pages they evict each other too."""
    generations = [Generation(sampling, max_new_rows=14, seed=seed) for seed in range(len(PROMPTS))]
    plain, flat = (replies(engine, generations) for engine in engines(cache_rows=cache_rows))
    assert flat == plain and all(plain)


def test_greedy_and_drawn_replies_with_and_without_penalties_in_one_batch():
    generations = [Generation(SAMPLINGS[n % 4], max_new_rows=12, seed=n) for n in range(len(PROMPTS))]
    plain, flat = (replies(engine, generations) for engine in engines())
    assert flat == plain


def test_a_penalty_counts_rows_that_were_made_before_anybody_asked():
    """Histories are not kept while nobody is penalised, and are caught up with then."""
    found = []
    for engine in engines():
        sequence = engine.open(PROMPTS[0])
        engine.complete(sequence, Generation(GREEDY, max_new_rows=8))
        fork = engine.fork(sequence)
        found.append(engine.complete(sequence, Generation(SAMPLINGS[2], max_new_rows=8)))
        assert engine.complete(fork, Generation(SAMPLINGS[2], max_new_rows=8)) == found[-1]
        fresh = engine.open(fork.rows[: len(fork.rows) - len(found[-1])])
        assert engine.complete(fresh, Generation(SAMPLINGS[2], max_new_rows=8)) == found[-1]
    assert found[0] == found[1]


def test_forked_rewound_and_held_replies_are_the_plain_ones():
    found = []
    for engine in engines():
        sequence = engine.open(PROMPTS[1][:-3])
        engine.step()
        held = engine.fork(sequence)
        engine.append(held, PROMPTS[1][-3:])
        engine.generate(held, Generation(GREEDY, max_new_rows=9))
        engine.append(sequence, PROMPTS[2])  # the user goes on while the reply is held
        while engine.has_work:
            engine.step()
        engine.rewind(held, len(PROMPTS[1]) + 4)
        engine.append(held, PROMPTS[0])
        found.append((held.rows, engine.complete(held, Generation(GREEDY, max_new_rows=9)), sequence.rows))
    assert found[0] == found[1]


def test_drafts_that_branch_are_checked_alike():
    class Twigs:
        """Two guesses for each of the next places, of which one may be right."""

        def propose(self, sequence, max_rows):
            first, second = sequence.rows[-1], sequence.rows[-2]
            return Draft([first, second, first, second], [-1, -1, 0, 1])

    generations = [Generation(GREEDY, max_new_rows=12)] * len(PROMPTS)
    expected = replies(engines()[0], generations)
    for source in (Twigs(), NgramLookup()):
        assert replies(engines()[1], generations, Speculation(source, max_rows=4)) == expected


@pytest.mark.parametrize("rows_per_step", [24, 200])
@pytest.mark.parametrize("cache_rows", [2048, 300])
def test_a_sequence_that_is_only_written_has_the_text_of_one_that_may_speak(rows_per_step, cache_rows):
    """Alone and beside replies of both modes, prefilled at once, in pieces, and again after an eviction."""
    assert any(len(prompt) > LONG_PIECE for prompt in PROMPTS[::2])
    written = [index % 2 == 0 for index in range(len(PROMPTS))]
    found = []
    for engine, lone_mode in zip(engines(rows_per_step, cache_rows), (None, TEXT), strict=True):
        generations = [Generation(GREEDY, max_new_rows=14, lone_mode=lone_mode if each else None) for each in written]
        prompts = [
            [*prompt, *PROMPT.open_reply("text")] if each else prompt
            for prompt, each in zip(PROMPTS, written, strict=True)
        ]
        sequences = [engine.open(prompt) for prompt in prompts]
        for sequence, generation in zip(sequences, generations, strict=True):
            engine.generate(sequence, generation)
        while engine.has_work:
            engine.step()
        assert (engine.scheduler.evictions > 0) == (cache_rows == 300)
        made = [sequence.rows[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]
        found.append([[row[TEXT] for row in rows] if each else rows for rows, each in zip(made, written, strict=True)])
    assert found[0] == found[1] and all(found[0])


def test_bfloat16_products_change_the_states_of_a_text_prompt_by_little_and_no_others():
    """By less than two percent of their length: bfloat16 has eight bits."""
    plain = tiny_model(seed=3, dtype=torch.float32)
    prompt = [*max(PROMPTS, key=len), *PROMPT.open_reply("text")]
    states: list[dict[int | None, torch.Tensor]] = []
    for model in (CpuMossSpeech(plain), CpuMossSpeech(plain, torch.bfloat16)):
        engine = Engine(model, pick("cpu"), torch.float32, EngineLimits(cache_rows=2048))
        drawn = {}
        for lone_mode in (None, TEXT):
            sequence = engine.open(prompt)
            sequence.states = []
            engine.complete(sequence, Generation(GREEDY, max_new_rows=1, lone_mode=lone_mode))
            drawn[lone_mode] = sequence.states[0][TEXT]
        states.append(drawn)
    exact, rounded = states
    assert torch.equal(rounded[None], exact[None])
    error = (rounded[TEXT] - exact[TEXT]).norm() / exact[TEXT].norm()
    assert 0 < error < 0.02


def test_other_weights_than_plain_ones_are_left_to_the_plain_model():
    assert CpuMossSpeech.suits(PLAIN)
    assert not CpuMossSpeech.suits(tiny_model(dtype=torch.bfloat16))
