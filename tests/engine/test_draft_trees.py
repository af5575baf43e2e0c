"""Drafts that branch: whatever the tree, the reply is the plain one, and the branch that is right is kept."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.test_engine import SAMPLINGS, alone, make_engine, speech
from tests.engine.test_speculative import Rows, llama_engine, steps_of, tiny_llama
from tests.engine.test_speculative_heads import random_heads, trained_heads
from tests.models.tiny import CONFIG
from vivavoce.engine.drafts import HeadDrafts, likeliest_tree
from vivavoce.engine.sampling import GREEDY, Generation, Sampling
from vivavoce.engine.speculative import Draft, Speculation, Typical, accepted_indices, usable
from vivavoce.errors import InputError


class Branching:
    """Trees of wrong rows in which the right reply is one branch, of a given length, or none."""

    def __init__(self, reply: Rows, right: int, shapes: list[list[int]], turned: tuple[int, ...] = (1, 7)) -> None:
        self.reply, self.right, self.shapes, self.turned = list(reply), right, shapes, turned
        self.asked = 0

    def propose(self, sequence, max_rows):
        shape = self.shapes[self.asked % len(self.shapes)]
        self.asked += 1
        coming = self.reply[sequence.generated : sequence.generated + self.right]
        rows, parents, current = [], [], -1
        for place, choice in enumerate(shape):
            up = choice % (place + 1) - 1
            depth = len(Draft(rows, parents).branch(up)) if up >= 0 else 0
            is_right = up == current and depth < len(coming)
            row = coming[depth] if is_right else self._wrong(sequence, depth)
            current = place if is_right else current
            rows.append(row)
            parents.append(up)
        return Draft(rows, parents)

    def _wrong(self, sequence, depth):
        place = min(sequence.generated + depth, len(self.reply) - 1)
        return tuple(value ^ turn for value, turn in zip(self.reply[place], self.turned, strict=False))


SHAPES = st.lists(st.lists(st.integers(0, 8), max_size=9), min_size=1, max_size=4)


@given(shapes=SHAPES, right=st.integers(0, 5), sampling=st.sampled_from([GREEDY, *SAMPLINGS]), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_tree_gives_the_plain_reply(shapes, right, sampling, seed):
    rows, generation = speech(5), Generation(sampling, max_new_rows=14, min_new_rows=14, seed=seed)
    plain = alone(rows, generation)
    engine = make_engine(rows_per_step=64)
    beside = engine.open(speech(3))
    engine.generate(beside, Generation(GREEDY, max_new_rows=20, min_new_rows=20))
    speculation = Speculation(Branching(plain, right, shapes), max_rows=9)
    assert engine.complete(engine.open(rows), generation, speculation) == plain


def test_the_drawn_branch_is_accepted_wherever_it_is_in_the_tree():
    model, prompt = tiny_llama(2, ends=()), [(5,), (9,), (11,)]
    generation = Generation(GREEDY, max_new_rows=40)
    engine = llama_engine(model)
    plain = engine.complete(engine.open(prompt), generation)

    def source(sequence, max_rows):
        one, two, three = (plain[min(sequence.generated + n, 39)][0] for n in range(3))
        rows = [(one ^ 1,), (one,), (two ^ 1,), (two ^ 2,), (two,), (three ^ 1,), (three,)]
        return Draft(rows, [-1, -1, 0, 1, 1, 4, 4])

    class Source:
        propose = staticmethod(source)

    engine = llama_engine(model)
    assert engine.complete(engine.open(prompt), generation, Speculation(Source(), max_rows=7)) == plain
    assert steps_of(engine) <= 13 and engine.acceptance.histogram[3] >= 8  # four rows a step, until trees are cut
    sequence = engine.open(prompt)
    engine.generate(sequence, generation, speculation=Speculation(Source(), max_rows=7))
    engine.step()
    forked = engine.fork(sequence)
    assert forked.rows[3:] == plain[:4]
    assert engine.complete(forked, Generation(GREEDY, max_new_rows=6)) == plain[4:10]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, 10, 0.9, 1.2)])
def test_untrained_heads_with_branches_leave_replies_alone(sampling):
    generation = Generation(sampling, max_new_rows=16, min_new_rows=16, seed=4)
    engine = make_engine(rows_per_step=128)
    source = HeadDrafts(random_heads(CONFIG.hidden_size, 2), engine, width=3)
    speculation = Speculation(source, max_rows=8, reads_hidden=True)
    prompts = [speech(4), speech(9)]
    sequences = [engine.open(rows) for rows in prompts]
    for sequence in sequences:
        engine.generate(sequence, generation, speculation=speculation)
    while engine.has_work:
        engine.step()
    for rows, sequence in zip(prompts, sequences, strict=True):
        assert sequence.rows[len(rows) :] == alone(rows, generation)


def test_second_guesses_save_steps():
    """Heads that are often nearly right: their second guess is the row more often than never."""
    model, prompt = tiny_llama(2, ends=()), [(5,), (9,), (11,)]
    generation = Generation(GREEDY, max_new_rows=41)
    heads = trained_heads(model, prompt, generation)
    with torch.no_grad():
        noise = torch.Generator().manual_seed(0)
        heads.weight.add_(torch.randn(heads.weight.shape, generator=noise, dtype=torch.float64) * 0.3)
    steps = {}
    for width, max_rows in ((1, 3), (4, 16)):
        engine = llama_engine(model)
        source = HeadDrafts(heads, engine, width)
        engine.complete(engine.open(prompt), generation, Speculation(source, max_rows, reads_hidden=True))
        steps[width] = steps_of(engine)
    assert steps[4] < steps[1]


def test_a_branch_that_ends_or_cannot_be_read_is_left_out_with_all_behind_it():
    model = tiny_llama(0, ends=(3,))
    draft = Draft([(3,), (1,), (5,), (99,), (6,), (7,)], [-1, -1, 0, 1, 1, 3])
    assert usable(draft, model, 9) == Draft([(1,), (6,)], [-1, 0])
    assert usable(draft, model, 9).parents == (-1, 0)
    assert usable(draft, model, 1) == Draft([(1,)])


def test_drafts_know_their_branches():
    draft = Draft([(1,), (2,), (3,), (4,), (5,)], [-1, -1, 1, 0, 3])
    assert draft.depth == 3 and not draft.is_chain and Draft([(1,), (2,)]).is_chain
    assert draft.branch(4) == [0, 3, 4] and draft.branch(-1) == []
    assert draft.likeliest() == Draft([(1,), (4,), (5,)]) and draft.first(2).parents == (-1, -1)
    assert accepted_indices(draft, [(2,), (9,), (3,), (8,), (9,), (9,)]) == [1, 2]
    with pytest.raises(InputError, match="parents"):
        Draft([(1,)], [0])


def test_the_likeliest_combinations_come_first():
    guesses = [[((1,), 0.6), ((2,), 0.4)], [((3,), 0.9), ((4,), 0.1)]]
    tree = likeliest_tree(guesses, 4)
    assert (tree, tree.parents) == (((1,), (3,), (2,), (3,)), (-1, 0, -1, 2))
    assert likeliest_tree([], 4) == () and likeliest_tree([[((1,), 1.0)], [((2,), 1.0)]], 1) == ((1,),)


def test_relaxed_acceptance_requests_the_likeliest_rows():
    model, prompt = tiny_llama(1, ends=()), [(5,), (9,)]
    drafted = Draft([(7,), (8,), (9,)], [-1, -1, 0])

    class Source:
        def propose(self, sequence, max_rows):
            return drafted

    engine = llama_engine(model)
    speculation = Speculation(Source(), max_rows=3, relaxed=Typical(1e-9, 1e-9))
    made = engine.complete(engine.open(prompt), Generation(Sampling(1.0, 0, 1.0), max_new_rows=8), speculation)
    assert made[:2] == [(7,), (9,)]
