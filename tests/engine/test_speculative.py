"""Whatever is drafted, the reply is the one that plain decoding makes; only the number of steps differs."""

from itertools import cycle, islice

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.engine.test_engine import CPU, SAMPLINGS, AnyOrder, alone, make_engine, speech
from tests.models.test_moss_speech import CONVERSATIONS, PROMPT
from tests.models.tiny import CONFIG, tiny_model
from vivavoce.engine.drafts import DraftModel, EarlierHypothesis, NgramLookup
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation, Sampling
from vivavoce.engine.speculative import Acceptance, Draft, Speculation, Typical, accepted_indices
from vivavoce.errors import InputError
from vivavoce.models.llama import Llama
from vivavoce.nn.decoder import TrunkSizes
from vivavoce.nn.modules import allocating, fill_randomly

Rows = list[tuple[int, ...]]
SIZES = TrunkSizes(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
)


class Script:
    """Drafts that were written beforehand, by the place in the reply; every so often a row of them is changed."""

    def __init__(self, reply: Rows, wrong_every: int | None = None, turned: tuple[int, ...] = (1, 7)) -> None:
        self.rows = list(reply)
        if wrong_every:
            for index in range(wrong_every - 1, len(reply), wrong_every):
                self.rows[index] = tuple(value ^ turn for value, turn in zip(reply[index], turned, strict=False))

    def propose(self, sequence, max_rows):
        return self.rows[sequence.generated : sequence.generated + max_rows]


def tiny_llama(seed: int = 0, ends: tuple[int, ...] = (3,)) -> Llama:
    with allocating("cpu", torch.float64):
        model = Llama(SIZES, ends)
    fill_randomly(model, seed, 0.3)
    return model.eval()


def llama_engine(model: Llama, cache_rows: int = 512) -> Engine:
    return Engine(model, CPU, torch.float64, EngineLimits(4, cache_rows, rows_per_step=64, sequences_per_step=8))


def steps_of(engine: Engine) -> int:
    return engine._steps


SPECULATED = [
    GREEDY,
    Sampling(0.9, 10, 0.9),
    Sampling(1.2, 0, 0.95, 1.3),
    (Sampling(0.8, 5, 0.9, 1.1), Sampling(1.4, 30, 1.0, 1.5)),
]


@pytest.mark.parametrize("sampling", SPECULATED)
@pytest.mark.parametrize("penalise_prompt", [True, False])
@pytest.mark.parametrize("wrong_every", [None, 1, 2, 3, 5])
def test_a_draft_right_now_and_then_gives_the_plain_reply_in_the_steps_it_should(
    sampling, penalise_prompt, wrong_every
):
    rows = PROMPT.rows(*CONVERSATIONS["many turns"])
    generation = Generation(sampling, max_new_rows=24, min_new_rows=24, seed=11, penalise_prompt=penalise_prompt)
    plain = alone(rows, generation)
    engine = make_engine(rows_per_step=256)
    speculation = Speculation(Script(plain, wrong_every), max_rows=3)
    assert engine.complete(engine.open(rows), generation, speculation) == plain
    assert steps_of(engine) == expected_steps(len(plain), 3, wrong_every)


def expected_steps(length: int, max_rows: int, wrong_every: int | None) -> int:
    """Each step keeps what is right of its draft and makes one row more."""
    steps = made = 0
    while made < length:
        room = min(max_rows, length - made - 1)
        first_wrong = room if wrong_every is None else (wrong_every - 1 - made) % wrong_every
        made += min(room, first_wrong) + 1
        steps += 1
    return steps


def test_a_draft_that_is_always_right_makes_one_row_more_than_it_has_every_step():
    rows, generation = speech(9), Generation(SAMPLINGS[1], max_new_rows=20, min_new_rows=20, seed=2)
    plain = alone(rows, generation)
    engine = make_engine()
    sequence = engine.open(rows)
    engine.generate(sequence, generation, speculation=Speculation(Script(plain), max_rows=4))
    assert [len(engine.step()) for _ in range(4)] == [5, 5, 5, 5]
    assert not engine.has_work and sequence.rows[len(rows) :] == plain
    assert engine.acceptance.histogram == [0, 0, 0, 0, 4] and engine.acceptance.mean_kept == 4


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_mix_of_sequences_settings_and_drafts_gives_the_plain_replies(data):
    """Sequences with right, wrong, mixed and no drafts, of different lengths, share the steps of a small cache."""
    engine = make_engine(data.draw(st.sampled_from([120, 4096])), data.draw(st.sampled_from([6, 30, 64])))
    replies = []
    for number in range(data.draw(st.integers(1, 4))):
        sampling = st.builds(
            Sampling,
            temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
            top_k=st.sampled_from([0, 3, 20]),
            top_p=st.sampled_from([0.7, 1.0]),
            repetition_penalty=st.sampled_from([1.0, 1.2, 2.0]),
        )
        generation = Generation(
            (data.draw(sampling), data.draw(sampling)),
            max_new_rows=data.draw(st.integers(1, 16)),
            min_new_rows=data.draw(st.integers(0, 16)),
            seed=data.draw(st.integers(0, 2**63 - 1)),
            penalise_prompt=data.draw(st.booleans()),
        )
        rows = speech(data.draw(st.integers(0, 20)), seed=number)
        plain = alone(rows, generation)
        wrong = data.draw(st.sampled_from([None, 1, 2, 3, 7]))
        source = data.draw(st.sampled_from([Script(plain, wrong), NgramLookup(2, 1), EarlierHypothesis(plain[1:])]))
        speculation = data.draw(st.sampled_from([None, Speculation(source, data.draw(st.integers(1, 6)))]))
        replies.append((engine.open(rows), rows, generation, speculation, plain))
    for sequence, _, generation, speculation, _ in replies:
        engine.generate(sequence, generation, speculation=speculation)
        engine.step()
    while engine.has_work:
        engine.step()
    for sequence, rows, _, _, plain in replies:
        assert sequence.rows[len(rows) :] == plain
        engine.close(sequence)
    assert engine.scheduler.pool.free == engine.scheduler.pool.size


@given(
    seed=st.integers(0, 2**63 - 1), temperature=st.sampled_from([0.0, 0.7, 1.5]), penalty=st.sampled_from([1.0, 1.4])
)
@settings(max_examples=40, deadline=None)
def test_a_draft_model_that_nearly_agrees_gives_the_plain_reply(seed, temperature, penalty):
    target, draft = tiny_llama(1), tiny_llama(1)
    noise = torch.Generator().manual_seed(seed % 1000)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(torch.randn(weight.shape, generator=noise, dtype=weight.dtype), alpha=0.02)
    generation = Generation(Sampling(temperature, 0, 1.0, penalty), max_new_rows=30, seed=seed)
    prompt = [(5,), (9,), (11,)]
    plain = llama_engine(target)
    expected = plain.complete(plain.open(prompt), generation)
    engine, small = llama_engine(target), llama_engine(draft)
    source = DraftModel.of(small, engine)
    assert engine.complete(engine.open(prompt), generation, Speculation(source, max_rows=5)) == expected
    source.close()
    assert small.scheduler.pool.free == small.scheduler.pool.size


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 0, 1.0), Sampling(1.3, 0, 0.9, 1.3)])
def test_the_model_as_its_own_draft_is_always_right_through_modes_and_minimums(sampling):
    """The draft sequence draws with the seed, positions, penalties, mode and counters of the sequence it follows."""
    rows = PROMPT.rows(*CONVERSATIONS["many turns"])
    generation = Generation(sampling, max_new_rows=40, min_new_rows=30, seed=5)
    plain = alone(rows, generation)
    engine = make_engine(rows_per_step=256)
    source = DraftModel.of(make_engine(rows_per_step=256), engine)
    sequence = engine.open(rows)
    assert engine.complete(sequence, generation, Speculation(source, max_rows=4)) == plain
    assert engine.acceptance.kept == engine.acceptance.drafted > 0
    engine.close(sequence)
    source.propose_together([])
    assert source.engine.scheduler.pool.free == source.engine.scheduler.pool.size


def test_sequences_share_a_draft_models_steps():
    engine, small = make_engine(), make_engine()
    source = DraftModel.of(small, engine)
    generation = Generation(GREEDY, max_new_rows=10, min_new_rows=10)
    sequences = [engine.open(speech(5, seed)) for seed in range(3)]
    engine.step()
    for sequence in sequences:
        engine.generate(sequence, generation, speculation=Speculation(source, max_rows=4))
    while engine.has_work:
        engine.step()
    assert steps_of(small) == 4 + 4  # ten rows are two checks of four drafted rows each, for all three at once
    assert [sequence.rows[6:] for sequence in sequences] == [alone(speech(5, seed), generation) for seed in range(3)]


def test_an_end_inside_a_draft_ends_the_reply_there():
    """With the end among the likely ids, replies end by themselves at many places of a draft."""
    ended = 0
    for seed in range(40):
        model = tiny_llama(seed % 4, ends=tuple(range(0, 40, 5)))
        generation = Generation(Sampling(1.5, 0, 1.0), max_new_rows=30, seed=seed)
        plain, engine = llama_engine(model), llama_engine(model)
        expected = plain.complete(plain.open([(7,)]), generation)
        ended += 1 < len(expected) < 30
        following = [*expected, *[(1,)] * 5]
        sequence = engine.open([(7,)])
        assert engine.complete(sequence, generation, Speculation(Script(following), max_rows=6)) == expected
        assert sequence.cached < len(sequence)
    assert ended > 20


@pytest.mark.parametrize("max_rows", [1, 2, 3, 4, 5, 6])
def test_a_reply_is_never_longer_than_asked(max_rows):
    rows = speech(7)
    plain = alone(rows, Generation(GREEDY, max_new_rows=30, min_new_rows=30))
    engine = make_engine()
    sequence = engine.open(rows)
    generation = Generation(GREEDY, max_new_rows=max_rows, min_new_rows=30)
    engine.generate(sequence, generation, speculation=Speculation(Script(plain), max_rows=4))
    emissions = []
    while engine.has_work:
        emissions += engine.step()
    assert [emission.row for emission in emissions] == plain[:max_rows]
    assert [emission.finish for emission in emissions] == [None] * (max_rows - 1) + ["length"]


def test_a_draft_fills_the_context_and_not_more():
    generation = Generation(GREEDY, max_new_rows=50, min_new_rows=50)
    plain = alone(speech(11), generation)
    engine = make_engine(cache_rows=16, page_size=4)
    sequence = engine.open(speech(11))
    engine.generate(sequence, generation, speculation=Speculation(Script(plain), max_rows=9))
    emissions = []
    while engine.has_work:
        emissions += engine.step()
    assert [emission.row for emission in emissions] == plain[:4]
    assert [emission.finish for emission in emissions] == [None, None, None, "context"]


def test_a_slow_consumer_gets_no_more_than_it_can_take():
    generation = Generation(GREEDY, max_new_rows=20, min_new_rows=20)
    plain = alone(speech(5), generation)
    engine = make_engine()
    sequence = engine.open(speech(5))
    engine.generate(sequence, generation, max_unread=3, speculation=Speculation(Script(plain), max_rows=8))
    while engine.has_work:
        engine.step()
    assert sequence.generated == 3
    engine.take(sequence, 2)
    assert [emission.row for emission in engine.step()] == plain[3:5]


def test_wrong_drafts_hold_no_page_after_the_step():
    engine = make_engine(page_size=4)
    generation = Generation(GREEDY, max_new_rows=30, min_new_rows=30)
    plain = alone(speech(6), generation)
    sequence = engine.open(speech(6))
    engine.generate(sequence, generation, speculation=Speculation(Script(plain, wrong_every=1), max_rows=12))
    while engine.has_work:
        engine.step()
        held = engine.scheduler.pool.size - engine.scheduler.pool.free
        assert held == len(sequence.pages) == -(-sequence.cached // 4)
    assert engine.acceptance.histogram == [engine.acceptance.checks]


def test_a_draft_takes_no_page_from_anybody():
    engine = make_engine(cache_rows=32, page_size=4)
    idle = engine.open(speech(14))
    engine.step()
    generation = Generation(GREEDY, max_new_rows=5, min_new_rows=5)
    plain = alone(speech(6), generation)
    busy = engine.open(speech(6))
    assert engine.complete(busy, generation, Speculation(Script(plain, wrong_every=1), max_rows=30)) == plain
    assert engine.scheduler.evictions == 0 and idle.pending == 0


def test_a_prompt_and_its_draft_are_computed_in_one_step():
    generation = Generation(GREEDY, max_new_rows=12, min_new_rows=12)
    plain = alone(speech(20), generation)
    engine = make_engine()
    sequence = engine.open(speech(20))
    assert engine.complete(sequence, generation, Speculation(EarlierHypothesis(plain), max_rows=20)) == plain
    assert steps_of(engine) == 1


def test_decoding_and_prefill_come_before_drafts():
    """Where a step is full, there is no room to guess; the reply goes on a row at a time."""
    engine = make_engine(rows_per_step=8)
    generation = Generation(GREEDY, max_new_rows=30, min_new_rows=30)
    plain = alone(speech(5), generation)
    talking = engine.open(speech(5))
    engine.step()
    engine.generate(talking, generation, speculation=Speculation(Script(plain), max_rows=4))
    engine.open(speech(41))
    made = [len(engine.step()) for _ in range(8)]
    assert made == [1, 1, 1, 1, 1, 1, 5, 5]


@pytest.mark.parametrize(
    "draft",
    [[(0, 0, 0)], [(320, 0)], [(1, 72)], [(-1, 3)], [(CONFIG.eos_token_id, 3)], []],
    ids=["too wide", "no such text id", "no such code", "negative", "an end", "nothing"],
)
def test_rows_that_cannot_be_read_end_a_draft(draft):
    class Garbage:
        def propose(self, sequence, max_rows):
            return draft

    generation = Generation(SAMPLINGS[2], max_new_rows=8, min_new_rows=8)
    engine = make_engine()
    assert engine.complete(engine.open(speech(5)), generation, Speculation(Garbage())) == alone(speech(5), generation)
    assert engine.acceptance.checks == 0


def test_a_source_that_fails_changes_no_row_and_is_not_asked_again():
    asked = []

    class Broken:
        def propose(self, sequence, max_rows):
            asked.append(sequence)
            raise ZeroDivisionError

    generation = Generation(GREEDY, max_new_rows=8, min_new_rows=8)
    engine = make_engine()
    origin = engine.open(speech(5))
    engine.step()
    sequence = engine.fork(origin)
    assert engine.complete(sequence, generation, Speculation(Broken())) == alone(speech(5), generation)
    assert asked == [sequence]


def test_penalties_know_kept_drafts_in_the_next_reply_too():
    """The first reply is drawn without penalties, so that nobody asked what it had drafted until the second."""
    first = Generation(Sampling(1.0, 0, 1.0), max_new_rows=12, min_new_rows=12, seed=3)
    second = Generation(Sampling(1.0, 0, 1.0, 3.0), max_new_rows=12, min_new_rows=12, seed=4)
    rows = speech(4)
    one = alone(rows, first)
    two = alone(rows + one, second)
    engine = make_engine()
    sequence = engine.open(rows)
    assert engine.complete(sequence, first, Speculation(Script(one), max_rows=3)) == one
    assert engine.complete(sequence, second, Speculation(Script(two, wrong_every=4), max_rows=3)) == two


def test_a_fork_in_the_middle_of_a_drafted_reply_goes_on_alone():
    generation = Generation(SAMPLINGS[2], max_new_rows=16, min_new_rows=16, seed=6)
    rows = speech(10)
    plain = alone(rows, generation)
    engine = make_engine()
    sequence = engine.open(rows)
    engine.generate(sequence, generation, speculation=Speculation(Script(plain, wrong_every=3), max_rows=4))
    engine.step()
    fork = engine.fork(sequence)
    rows_before = list(fork.rows)
    after = Generation(SAMPLINGS[1], max_new_rows=6, min_new_rows=6, seed=9)
    made = engine.complete(fork, after, Speculation(NgramLookup(2, 1), max_rows=4))
    assert made == alone(rows_before, after)
    while engine.has_work:
        engine.step()
    assert sequence.rows[len(rows) :] == plain


class TestLookup:
    """The rows after the longest match, and of equally long ones after the newest."""

    @staticmethod
    def proposed(rows: Rows, max_rows: int = 4, **given) -> Rows:
        engine = llama_engine(tiny_llama())
        return list(NgramLookup(**given).propose(engine.open(rows), max_rows))

    def test_a_longer_match_wins_over_a_newer_one(self):
        rows = [(1,), (2,), (3,), (9,), (8,), (3,), (7,), (1,), (2,), (3,)]
        assert self.proposed(rows, max_match=3, min_match=1) == [(9,), (8,), (3,), (7,)]
        assert self.proposed(rows, max_match=1, min_match=1) == [(7,), (1,), (2,), (3,)]

    def test_a_round_goes_round(self):
        assert self.proposed([(1,), (2,), (1,)], max_rows=5, min_match=1) == [(2,), (1,), (2,), (1,), (2,)]

    def test_nothing_is_proposed_without_a_match(self):
        assert self.proposed([(1,), (2,), (3,)], min_match=1) == []
        assert self.proposed([(1,), (2,), (1,)], min_match=2) == []

    def test_texts_are_looked_up_within_each(self):
        texts = [[(4,), (5,), (6,)], [(7,), (8,)]]
        assert self.proposed([(4,), (5,)], texts=texts) == [(6,)]
        assert self.proposed([(6,), (7,)], texts=texts) == []
        assert self.proposed([(6,), (7,)], min_match=1, texts=texts) == [(8,)]

    def test_rewound_rows_are_forgotten(self):
        engine, lookup = llama_engine(tiny_llama()), NgramLookup(2, 1)
        sequence = engine.open([(1,), (2,), (1,)])
        assert lookup.propose(sequence, 1) == [(2,)]
        engine.rewind(sequence, 1)
        assert lookup.propose(sequence, 1) == []

    def test_a_reply_that_repeats_itself_takes_fewer_steps(self):
        """A model whose weights are zero says the same id for ever."""
        model = tiny_llama()
        with torch.no_grad():
            for weight in model.parameters():
                weight.zero_()
        engine = llama_engine(model)
        generation = Generation(GREEDY, max_new_rows=40)
        made = engine.complete(engine.open([(9,)]), generation, Speculation(NgramLookup(2, 1), max_rows=4))
        assert (
            made == [(0,)] * 40 and steps_of(engine) == 2 + 8
        )  # the first two make a round of one, the others five rows each


class TestEarlierHypothesis:
    """An old reply is followed, left, and found again."""

    @staticmethod
    def proposed(old: list[int], reply: list[int], max_rows: int = 3, **given) -> list[int]:
        engine = llama_engine(tiny_llama())
        sequence = engine.open([(30,), *[(value,) for value in reply]])
        sequence.generated = len(reply)
        return [row[0] for row in EarlierHypothesis([(v,) for v in old], **given).propose(sequence, max_rows)]

    def test_it_is_followed_from_its_beginning(self):
        assert self.proposed([1, 2, 3, 4], []) == [1, 2, 3]
        assert self.proposed([1, 2, 3, 4], [1, 2]) == [3, 4]
        assert self.proposed([1, 2, 3, 4], [1, 2, 3, 4]) == []

    def test_it_is_found_again_where_a_row_was_changed_left_out_or_put_in(self):
        old = [1, 2, 3, 4, 5, 6, 7]
        assert self.proposed(old, [1, 9]) == []
        assert self.proposed(old, [1, 9, 3, 4]) == [5, 6, 7]
        assert self.proposed(old, [1, 3, 4]) == [5, 6, 7]
        assert self.proposed(old, [1, 9, 8, 2, 3]) == [4, 5, 6]

    def test_the_nearest_of_several_places_counts(self):
        assert self.proposed([1, 2, 5, 1, 2, 6, 1, 2, 7], [9, 9, 9, 1, 2], max_rows=1) == [6]

    def test_where_it_departed_it_may_stand_in_several_places(self):
        old = [1, 2, 3, 4, 5, 6, 7]
        assert self.proposed(old, [1, 9], presumes=True) == [3, 4, 5]
        branching = self.proposed(old, [1, 9], max_rows=6, presumes=True, branches=3)
        assert branching == [3, 4, 2, 3, 4, 5]  # a row was changed, put in, or left out
        assert self.proposed(old, [1, 2], max_rows=4, presumes=True, branches=3) == [3, 4, 5, 6]

    def test_its_uncertain_end_is_left_out(self):
        assert self.proposed([1, 2, 3, 4], [1], uncertain=2) == [2]
        assert self.proposed([1, 2], [], uncertain=5) == []


def test_relaxed_acceptance_keeps_what_is_likely_and_never_what_is_forbidden():
    generation = Generation(Sampling(1.0, 0, 1.0), max_new_rows=24, min_new_rows=24, seed=2)
    rows = speech(6)
    plain = alone(rows, generation)
    other = alone(rows, Generation(generation.sampling, max_new_rows=24, min_new_rows=24, seed=3))
    assert plain != other

    def speculated(draft: Rows, relaxed: Typical | None) -> tuple[Rows, Acceptance]:
        engine = make_engine()
        return engine.complete(engine.open(rows), generation, Speculation(Script(draft), 4, relaxed)), engine.acceptance

    lenient, kept = speculated(other, Typical(1e-9, 1e-9))
    assert lenient == [*other[:4], *lenient[4:]] and kept.mean_kept > 3
    strict, _ = speculated(other, None)
    assert strict == plain
    forbidden = [(CONFIG.modality_pad_token_id, CONFIG.eosp_token_id + 1)] * 24
    made, kept = speculated(forbidden, Typical(1e-9, 1e-9))
    assert made == plain and kept.kept == 0


def test_relaxed_replies_leave_strict_ones_beside_them_alone():
    generation = Generation(Sampling(1.0, 0, 1.0), max_new_rows=16, min_new_rows=16, seed=2)
    plain = alone(speech(6), generation)
    draft = Script(alone(speech(6), Generation(generation.sampling, max_new_rows=16, min_new_rows=16, seed=8)))
    engine = make_engine()
    strict, relaxed = engine.open(speech(6)), engine.open(speech(6))
    engine.generate(strict, generation, speculation=Speculation(draft))
    engine.generate(relaxed, generation, speculation=Speculation(draft, relaxed=Typical(1e-9, 1e-9)))
    while engine.has_work:
        engine.step()
    assert strict.rows[7:] == plain != relaxed.rows[7:]


def test_statistics_count_what_happened():
    acceptance = Acceptance()
    assert acceptance.mean_kept == 0 and acceptance.histogram == [] and acceptance.rate(0) == 0
    for drafted, kept in [(3, 0), (3, 3), (2, 2), (3, 1)]:
        acceptance.note(drafted, kept)
    assert (acceptance.checks, acceptance.drafted, acceptance.kept, acceptance.mean_kept) == (4, 11, 6, 1.5)
    assert acceptance.histogram == [1, 1, 1, 1]
    assert acceptance.rate(0) == 3 / 4 and acceptance.rate(1) == 2 / 3 and acceptance.rate(2) == 1 / 1
    assert accepted_indices(Draft([(1,), (2,), (3,)]), [(1,), (2,), (4,), (5,)]) == [0, 1]
    assert accepted_indices(Draft(), [(1,)]) == []


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Speculation(NgramLookup(), max_rows=0), "at least 1 row"),
        (lambda: NgramLookup(max_match=1, min_match=2), "are impossible"),
        (lambda: EarlierHypothesis([], resume=0), "not 0 and"),
        (lambda: Typical(max_probability=1.5), "bounds in"),
        (lambda: DraftModel.of(llama_engine(tiny_llama()), make_engine()), "and the model"),
    ],
)
def test_what_makes_no_sense_is_refused(make, says):
    with pytest.raises(InputError, match=says):
        make()


ODD_ROUND = [*speech(3, 99)[1:], *speech(2, 98)]


class Guesser:
    """Drafts that know nothing of the model: the last rows again, or the same few rows always."""

    def propose(self, sequence, max_rows):
        own = list(islice(cycle(sequence.rows[-5:]), max_rows))
        return own if sequence.generated % 2 else ODD_ROUND[:max_rows]


class AnyOrderSpeculated(AnyOrder):
    """The engine's any-order test with drafts from all sides: looked up, guessed, and by models good and bad."""

    @initialize(cache_rows=st.sampled_from([48, 80, 400]), rows_per_step=st.sampled_from([1, 5, 32]))
    def begin(self, cache_rows, rows_per_step):
        super().begin(cache_rows, rows_per_step)
        speculate, kinds = self.engine.generate, cycle(range(5))
        same = DraftModel(make_engine())
        other = DraftModel(Engine(tiny_model(seed=8), CPU, torch.float64, EngineLimits(4, 200)))

        def generate(sequence, generation):
            sources = [None, NgramLookup(2, 1), Guesser(), same, other]
            source = sources[next(kinds)]
            speculate(sequence, generation, speculation=source and Speculation(source, max_rows=3))

        self.engine.generate = generate


AnyOrderSpeculated.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrderSpeculated = AnyOrderSpeculated.TestCase
