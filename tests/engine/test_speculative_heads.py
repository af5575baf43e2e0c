"""Heads on the model's own state: any heads leave the reply alone, trained ones make it in fewer steps."""

import pytest
import torch
from torch.nn import functional

from tests.engine.test_engine import SAMPLINGS, alone, make_engine, speech
from tests.engine.test_speculative import llama_engine, steps_of, tiny_llama
from tests.models.tiny import CONFIG
from vivavoce.engine.drafts import HeadDrafts, MedusaHeads
from vivavoce.engine.engine import Engine
from vivavoce.engine.sampling import GREEDY, Generation, Sampling
from vivavoce.engine.speculative import Speculation
from vivavoce.errors import InputError
from vivavoce.models.llama import Llama


def random_heads(hidden: int, channels: int, seed: int = 0) -> MedusaHeads:
    heads = MedusaHeads(hidden, 3, channels).double()
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_(torch.randn(weight.shape, generator=source, dtype=weight.dtype) * 0.2)
    return heads


def test_untrained_heads_guess_that_the_state_stays():
    hidden = torch.randn(2, 3, 8)
    assert torch.equal(MedusaHeads(8, 4, 3)(hidden), hidden[:, None].expand(-1, 4, -1, -1))
    assert torch.equal(MedusaHeads(8, 4)(hidden[:, 0]), hidden[:, None, 0].expand(-1, 4, -1))


def test_heads_of_a_channel_are_residual_blocks_of_its_state():
    heads, hidden = random_heads(8, 2), torch.randn(5, 2, 8, dtype=torch.float64)
    out = heads(hidden)
    for place in range(3):
        for channel in range(2):
            x = hidden[:, channel]
            block = functional.silu(functional.linear(x, heads.weight[place, channel], heads.bias[place, channel]))
            assert torch.allclose(out[:, place, channel], x + block)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_heads_of_any_weights_leave_the_replies_of_a_batch_as_they_are(sampling):
    engine = make_engine()
    source = HeadDrafts(random_heads(CONFIG.hidden_size, 2), engine)
    generations = [Generation(sampling, max_new_rows=9 + seed, min_new_rows=9, seed=seed) for seed in range(3)]
    sequences = [engine.open(speech(4 + seed, seed)) for seed in range(3)]
    for sequence, generation in zip(sequences, generations, strict=True):
        engine.generate(sequence, generation, speculation=Speculation(source, 3, reads_hidden=True))
        engine.step()
    while engine.has_work:
        engine.step()
    assert engine.acceptance.checks > 0
    for seed, (sequence, generation) in enumerate(zip(sequences, generations, strict=True)):
        rows = speech(4 + seed, seed)
        assert sequence.rows[len(rows) :] == alone(rows, generation)
        assert sequence.hidden is not None, "where its last row led stays at hand until it goes on"


class Listening:
    """Guesses nothing, and keeps the states it is shown with the rows they are followed by."""

    def __init__(self) -> None:
        self.states: list[tuple[int, torch.Tensor]] = []

    def propose(self, sequence, max_rows):
        if sequence.hidden is not None:
            self.states.append((len(sequence), sequence.hidden))
        return []


def trained_heads(model: Llama, prompt: list[tuple[int, ...]], generation: Generation) -> MedusaHeads:
    """Heads that have learned one reply by heart."""
    engine, listening = llama_engine(model), Listening()
    sequence = engine.open(prompt)
    engine.complete(sequence, generation, Speculation(listening, reads_hidden=True))
    heads = MedusaHeads(model.sizes.hidden_size, 3).double()
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.03)
    usable = [(place, state) for place, state in listening.states if place + 3 <= len(sequence)]
    states = torch.stack([state for _, state in usable]).clone()
    wanted = torch.tensor([[sequence.rows[place + ahead][0] for ahead in range(3)] for place, _ in usable])
    for _ in range(150):
        loss = functional.cross_entropy(model.logits(heads(states)).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return heads


def steps_with(heads: MedusaHeads, engine: Engine, prompt: list[tuple[int, ...]], generation: Generation) -> int:
    engine.complete(engine.open(prompt), generation, Speculation(HeadDrafts(heads, engine), 3, reads_hidden=True))
    return steps_of(engine)


def test_trained_heads_save_steps():
    model, prompt = tiny_llama(2, ends=()), [(5,), (9,), (11,)]
    generation = Generation(GREEDY, max_new_rows=41)
    heads = trained_heads(model, prompt, generation)
    assert steps_with(heads, llama_engine(model), prompt, generation) <= 16
    assert steps_with(MedusaHeads(32, 3).double(), llama_engine(model), prompt, generation) > 20


def test_the_state_is_the_one_the_newest_row_was_drawn_from():
    """A head that guesses the place after the newest row from it, untrained, draws by the same logits."""
    model = tiny_llama(2, ends=())
    engine, listening = llama_engine(model), Listening()
    sequence = engine.open([(5,), (9,)])
    generation = Generation(Sampling(0.0), max_new_rows=10)
    engine.complete(sequence, generation, Speculation(listening, reads_hidden=True))
    assert [length for length, _ in listening.states] == list(range(3, 11))
    for length, state in listening.states:
        assert int(model.logits(state).argmax()) == sequence.rows[length - 1][0]


def test_heads_that_see_nothing_ahead_are_refused():
    with pytest.raises(InputError, match="at least 1 row ahead"):
        MedusaHeads(8, 0)
