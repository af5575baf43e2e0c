"""Sequences together behave as each does alone, whatever is done to them."""

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.models.test_moss_speech import CONVERSATIONS, PROMPT
from tests.models.tiny import CONFIG, tiny_model
from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation, Sampling
from vivavoce.engine.sequence import PlaybackDeadline, Sequence
from vivavoce.errors import CapacityError, InputError

MODEL = tiny_model(seed=5)
CPU = pick("cpu")
SAMPLINGS = [
    GREEDY,
    Sampling(temperature=0.9, top_k=10, top_p=0.9),
    Sampling(temperature=1.1, top_k=0, top_p=0.95, repetition_penalty=1.2),
]


def make_engine(cache_rows: int = 4096, rows_per_step: int = 64, page_size: int = 4, max_rows: int = 16) -> Engine:
    limits = EngineLimits(page_size, cache_rows, rows_per_step=rows_per_step, sequences_per_step=max_rows)
    return Engine(MODEL, CPU, torch.float64, limits)


def alone(rows: list[tuple[int, ...]], generation: Generation) -> list[tuple[int, ...]]:
    """What a sequence with these rows generates in an engine of its own, prefilled whole."""
    engine = make_engine()
    return engine.complete(engine.open(rows), generation)


def speech(count: int, seed: int = 0) -> list[tuple[int, int]]:
    codes = torch.randint(CONFIG.eosp_token_id, (count,), generator=torch.Generator().manual_seed(seed))
    return PROMPT.open_speech() + PROMPT.codes(codes.tolist())


@pytest.mark.parametrize("rows_per_step", [1, 3, 7, 64])
def test_prefill_in_pieces_equals_prefill_at_once(rows_per_step):
    rows = PROMPT.rows(*CONVERSATIONS["many turns"])
    generation = Generation(SAMPLINGS[1], max_new_rows=12, seed=4)
    engine = make_engine(rows_per_step=rows_per_step)
    assert engine.complete(engine.open(rows), generation) == alone(rows, generation)


def test_rows_appended_as_they_come_equal_rows_given_at_once():
    rows = PROMPT.rows(*CONVERSATIONS["many turns"])
    engine = make_engine()
    sequence = engine.open()
    for row in rows:
        engine.append(sequence, [row])
        engine.step()
    assert sequence.pending == 0
    generation = Generation(GREEDY, max_new_rows=12)
    assert engine.complete(sequence, generation) == alone(rows, generation)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("cache_rows", [4096, 300])
def test_sequences_in_a_batch_equal_sequences_alone(sampling, cache_rows):
    """Also where the cache cannot hold them all, so that they evict each other again and again."""
    engine = make_engine(cache_rows, rows_per_step=20)
    prompts = [PROMPT.rows(*conversation) for conversation in CONVERSATIONS.values()]
    generations = [Generation(sampling, max_new_rows=15, seed=seed) for seed in range(len(prompts))]
    sequences = [engine.open(prompt) for prompt in prompts]
    for sequence, generation in zip(sequences, generations, strict=True):
        engine.generate(sequence, generation)
    while engine.has_work:
        engine.step()
    assert (engine.scheduler.evictions > 0) == (cache_rows == 300)
    for sequence, prompt, generation in zip(sequences, prompts, generations, strict=True):
        assert sequence.rows[len(prompt) :] == alone(prompt, generation)


def test_forked_and_rewound_equals_never_forked():
    rows = speech(21)
    engine = make_engine()
    sequence = engine.open(rows)
    engine.step()
    fork = engine.fork(sequence)
    engine.append(fork, speech(9, seed=1))
    generation = Generation(SAMPLINGS[2], max_new_rows=10, seed=8)
    engine.complete(fork, generation)
    engine.rewind(fork, len(rows))
    expected = alone(rows, generation)
    assert engine.complete(fork, generation) == expected
    assert engine.complete(sequence, generation) == expected


def test_a_fork_shares_pages_until_it_writes():
    engine = make_engine(page_size=4)
    sequence = engine.open(speech(9))  # 10 rows: two full pages and a part
    engine.step()
    free = engine.scheduler.pool.free
    fork = engine.fork(sequence)
    assert engine.scheduler.pool.free == free
    engine.append(fork, speech(0))
    engine.step()
    assert engine.scheduler.pool.free == free - 1
    assert fork.pages[:2] == sequence.pages[:2]
    assert fork.pages[2] != sequence.pages[2]


def test_decode_goes_on_while_a_long_prompt_is_prefilled():
    engine = make_engine(rows_per_step=8)
    talking = engine.open(speech(5))
    engine.step()
    engine.generate(talking, Generation(GREEDY, max_new_rows=30, min_new_rows=30))
    engine.open(speech(100))
    made = [len(engine.step()) for _ in range(12)]
    assert made == [1] * 12


def test_a_full_cache_makes_the_younger_wait_and_both_finish():
    engine = make_engine(cache_rows=48, page_size=4)
    first, second = engine.open(speech(30)), engine.open(speech(30, seed=1))
    generation = Generation(GREEDY, max_new_rows=10, min_new_rows=10)
    engine.generate(first, generation)
    engine.generate(second, generation)
    order = []
    while engine.has_work:
        order += [emission.sequence.id for emission in engine.step() if emission.finish]
    assert order == [first.id, second.id]
    assert second.rows[31:] == alone(speech(30, seed=1), generation)


def test_an_evicted_idle_sequence_is_prefilled_again_when_used():
    engine = make_engine(cache_rows=48, page_size=4)
    idle = engine.open(speech(30))
    engine.step()
    busy = engine.open(speech(30, seed=1))
    engine.step()
    assert idle.cached == 0 and not engine.has_work
    assert busy.pending == 0
    generation = Generation(GREEDY, max_new_rows=6)
    assert engine.complete(idle, generation) == alone(speech(30), generation)


def test_a_suspended_reply_gives_its_pages_away_and_goes_on_with_the_same_rows():
    rows = PROMPT.rows(*CONVERSATIONS["many turns"])
    generation = Generation(SAMPLINGS[1], max_new_rows=12, seed=4)
    engine = make_engine(cache_rows=len(rows) + 16)  # room for one of them
    waiting = engine.open(rows)
    engine.generate(waiting, generation, listener=PlaybackDeadline(0.08, 4, since=engine.scheduler.now() - 60.0))
    while waiting.generated < 3:
        engine.step()
    engine.suspend(waiting)
    assert not engine.has_work
    assert engine.complete(engine.open(rows), generation) == alone(rows, generation)
    assert waiting.generated == 3 and engine.scheduler.evictions
    engine.resume(waiting, 0.0)
    assert waiting.listener.playback_end(3) > engine.scheduler.now(), "the time of the suspension is no gap"
    while waiting.is_generating:
        engine.step()
    assert waiting.rows[len(rows) :] == alone(rows, generation)


def test_a_slow_consumer_pauses_its_own_reply_only():
    engine = make_engine()
    slow, quick = engine.open(speech(5)), engine.open(speech(5))
    generation = Generation(GREEDY, max_new_rows=20, min_new_rows=20)
    engine.generate(slow, generation, max_unread=3)
    engine.generate(quick, generation)
    while engine.has_work:
        engine.step()
    assert (slow.generated, quick.generated) == (3, 20)
    engine.take(slow, 2)
    while engine.has_work:
        engine.step()
    assert slow.generated == 5
    assert slow.rows == quick.rows[: len(slow.rows)]


def test_a_reply_ends_with_the_reason():
    engine = make_engine(cache_rows=16, page_size=4)
    sequence = engine.open(speech(11))
    engine.generate(sequence, Generation(GREEDY, max_new_rows=50, min_new_rows=50))
    finishes = []
    while engine.has_work:
        finishes += [emission.finish for emission in engine.step()]
    assert finishes == [None, None, None, "context"]
    with pytest.raises(CapacityError, match="fills all 16 rows"):
        engine.generate(sequence, Generation())
    engine.rewind(sequence, 10)
    engine.generate(sequence, Generation(GREEDY, max_new_rows=2, min_new_rows=2))
    finishes = []
    while engine.has_work:
        finishes += [emission.finish for emission in engine.step()]
    assert finishes == [None, "length"]


@pytest.mark.parametrize(
    ("rows", "error", "says"),
    [
        ([(320, 0)], InputError, "id 320 of channel 0 is not in 0…319"),
        ([(0, 72)], InputError, "id 72 of channel 1"),
        ([(-1, 0)], InputError, "id -1 of channel 0"),
        ([(1, 2, 3)], InputError, "a row has 2 ids"),
        ([(1, 1)] * 65, CapacityError, "65 rows are more than the 64"),
    ],
)
def test_rows_that_cannot_be_are_refused_and_leave_nothing_behind(rows, error, says):
    engine = make_engine(cache_rows=64)
    with pytest.raises(error, match=says):
        engine.open(rows)
    sequence = engine.open(speech(3))
    before = list(sequence.rows)
    with pytest.raises(error, match=says if error is InputError else "more than"):
        engine.append(sequence, rows)
    assert sequence.rows == before
    engine.close(sequence)
    assert not engine.scheduler.sequences


def test_what_cannot_be_done_now_is_said():
    engine = make_engine()
    sequence = engine.open()
    with pytest.raises(InputError, match="no rows to reply to"):
        engine.generate(sequence, Generation())
    engine.append(sequence, speech(3))
    engine.generate(sequence, Generation())
    with pytest.raises(InputError, match="is generating"):
        engine.append(sequence, speech(1))
    with pytest.raises(InputError, match="generating already"):
        engine.generate(sequence, Generation())
    with pytest.raises(InputError, match="cannot be rewound to 99"):
        engine.rewind(sequence, 99)
    engine.close(sequence)
    engine.close(sequence)
    with pytest.raises(InputError, match="is closed"):
        engine.append(sequence, speech(1))


def test_a_step_that_fails_changes_nothing():
    engine = make_engine()
    sequence = engine.open(speech(6))
    generation = Generation(GREEDY, max_new_rows=5, min_new_rows=5)
    engine.generate(sequence, generation)
    engine.step()
    forward, MODEL.forward = MODEL.forward, lambda rows, batch: 1 / 0
    try:
        with pytest.raises(ZeroDivisionError):
            engine.step()
    finally:
        MODEL.forward = forward
    while engine.has_work:
        engine.step()
    assert sequence.rows[7:] == alone(speech(6), generation)


class AnyOrder(RuleBasedStateMachine):
    """Add, append, fork, rewind, stop, close and generate in any order, on a cache too small for all of it."""

    @initialize(cache_rows=st.sampled_from([48, 80, 400]), rows_per_step=st.sampled_from([1, 5, 32]))
    def begin(self, cache_rows, rows_per_step):
        self.engine = make_engine(cache_rows, rows_per_step, page_size=4, max_rows=5)
        self.open: list[Sequence] = []
        self.seed = 0

    def pick(self, index: int) -> Sequence:
        return self.open[index % len(self.open)]

    @rule(count=st.integers(0, 30))
    @precondition(lambda self: len(self.open) < 6)
    def add(self, count):
        self.seed += 1
        self.open.append(self.engine.open(speech(count, self.seed)))

    @rule(index=st.integers(0, 9), count=st.integers(0, 8))
    @precondition(lambda self: self.open)
    def append(self, index, count):
        sequence = self.pick(index)
        rows = speech(count, self.seed)
        if sequence.is_generating:
            with pytest.raises(InputError):
                self.engine.append(sequence, rows)
        elif len(sequence) + len(rows) > self.engine.capacity:
            with pytest.raises(CapacityError):
                self.engine.append(sequence, rows)
        else:
            self.engine.append(sequence, rows)

    @rule(index=st.integers(0, 9))
    @precondition(lambda self: self.open and len(self.open) < 6)
    def fork(self, index):
        self.open.append(self.engine.fork(self.pick(index)))

    @rule(index=st.integers(0, 9), share=st.floats(0, 1))
    @precondition(lambda self: self.open)
    def rewind(self, index, share):
        sequence = self.pick(index)
        self.engine.rewind(sequence, int(len(sequence) * share))

    @rule(index=st.integers(0, 9))
    @precondition(lambda self: self.open)
    def close(self, index):
        sequence = self.pick(index)
        self.engine.close(sequence)
        self.open.remove(sequence)

    @rule(index=st.integers(0, 9))
    @precondition(lambda self: self.open)
    def stop(self, index):
        self.engine.stop(self.pick(index))

    @rule(index=st.integers(0, 9), sampling=st.sampled_from(SAMPLINGS), count=st.integers(1, 12))
    @precondition(lambda self: self.open)
    def generate(self, index, sampling, count):
        sequence = self.pick(index)
        if sequence.is_generating or not 0 < len(sequence) < self.engine.capacity:
            return
        self.seed += 1
        sequence.began = len(sequence), Generation(sampling, max_new_rows=count, min_new_rows=3, seed=self.seed)
        self.engine.generate(sequence, sequence.began[1])

    @rule(steps=st.integers(1, 8))
    def step(self, steps):
        for _ in range(steps):
            for emission in self.engine.step():
                assert emission.sequence in self.open

    @invariant()
    def the_holders_of_a_page_are_the_sequences_that_list_it(self):
        if not hasattr(self, "engine"):
            return
        pool = self.engine.scheduler.pool
        holders = [0] * len(pool.holders)
        for sequence in self.open:
            assert len(sequence.pages) * 4 >= sequence.cached
            for page in sequence.pages:
                holders[page] += 1
        assert holders == pool.holders
        assert pool.free == pool.size - sum(count > 0 for count in holders)

    def teardown(self):
        """Run everything to its end: each reply is what its rows alone would give, and no page is left held."""
        if not hasattr(self, "engine"):
            return
        running = [sequence for sequence in self.open if sequence.is_generating]
        steps = 0
        while self.engine.has_work:
            self.engine.step()
            steps += 1
            assert steps < 3000, "work never ends"
        for sequence in running:
            length, generation = sequence.began
            made = sequence.rows[length:]
            expected = alone(sequence.rows[:length], generation)
            assert made == expected[: len(made)]
            assert len(made) == len(expected) or len(sequence) == self.engine.capacity
        for sequence in self.open:
            self.engine.close(sequence)
        assert self.engine.scheduler.pool.free == self.engine.scheduler.pool.size


AnyOrder.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = AnyOrder.TestCase
