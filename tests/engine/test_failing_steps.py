"""A step that fails fails the sequences that cannot be computed; all others make the rows they would have made."""

import pytest
import torch

from tests.engine.test_async_decode import Device
from tests.engine.test_engine import CPU, SAMPLINGS, alone, speech
from tests.models.test_whisper_engine import SETTINGS, TOKENS, model, windows_of  # noqa: F401 - a fixture
from tests.models.tiny import tiny_model
from vivavoce.engine.drafts import DraftModel
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.engine.speculative import Speculation
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.whisper.engine import WhisperWriter
from vivavoce.runtime.async_engine import AsyncEngine


class PlantedError(Exception):
    """The fault of these tests."""


class Faulty(MossSpeech):
    """Cannot compute one row."""

    poison: tuple[int, ...] | None = None
    fails_in_batches = False
    passes = 0

    def forward(self, rows, batch):
        self.passes += 1
        if self.fails_in_batches and len(batch.pieces) > 1:
            raise PlantedError
        hidden = super().forward(rows, batch)  # writes keys and values of all rows before it fails
        if self.poison is not None and self.poison in [tuple(row) for row in rows.tolist()]:
            raise PlantedError
        return hidden


def faulty_engine(rows_per_step: int = 64, cache_rows: int = 4096) -> Engine:
    broken = tiny_model(seed=5)
    broken.__class__ = Faulty
    return Engine(
        broken, CPU, torch.float64, EngineLimits(4, cache_rows, rows_per_step=rows_per_step, sequences_per_step=16)
    )


def generations(sampling) -> list[Generation]:
    return [Generation(sampling, max_new_rows=14, min_new_rows=14, seed=number) for number in range(6)]


def prompts() -> list[list[tuple[int, int]]]:
    return [speech(5 + 3 * number, number) for number in range(6)]


def planted(wanted: list[list[tuple[int, ...]]], asked: list[list[tuple[int, ...]]]) -> tuple[int, tuple[int, ...]]:
    """A row that one reply reaches after some others, and no other reply or prompt has; whose it is."""
    return next(
        (index, row)
        for index, rows in enumerate(wanted)
        for row in rows[3:-2]
        if row not in rows[:3] and all(row not in rest for rest in [*asked, *wanted[:index], *wanted[index + 1 :]])
    )


def without(rows: list, index: int) -> list:
    return rows[:index] + rows[index + 1 :]


def rows_of(engine: Engine, sequences) -> tuple[dict[int, list], dict[int, Exception]]:
    """What each sequence makes until nothing has work, and who failed."""
    made, failed = {sequence.id: [] for sequence in sequences}, {}
    while engine.has_work:
        result = engine.advance()
        for emission in result.emissions:
            made[emission.sequence.id].append(emission.row)
        for failure in result.failures:
            assert failure.sequence.id not in failed
            failed[failure.sequence.id] = failure.error
    return made, failed


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("rows_per_step", [7, 64])
def test_only_the_sequence_that_cannot_be_computed_fails(sampling, rows_per_step):
    wanted = [alone(*pair) for pair in zip(prompts(), generations(sampling), strict=True)]
    engine = faulty_engine(rows_per_step)
    free = engine.scheduler.pool.free
    place, engine.model.poison = planted(wanted, prompts())
    sequences = [engine.open(rows) for rows in prompts()]
    for sequence, generation in zip(sequences, generations(sampling), strict=True):
        engine.generate(sequence, generation)
    made, failed = rows_of(engine, sequences)
    victim = sequences[place]
    assert list(failed) == [victim.id] and isinstance(failed[victim.id], PlantedError)
    assert [made[sequence.id] for sequence in without(sequences, place)] == without(wanted, place)
    reached = wanted[place].index(engine.model.poison) + 1
    assert made[victim.id] == wanted[place][:reached] and victim.rows == prompts()[place] + made[victim.id]
    assert victim.is_open and not victim.has_work and not victim.pages

    engine.model.poison = None  # and it can be gone on with
    engine.rewind(victim, len(prompts()[place]))
    assert engine.complete(victim, generations(sampling)[place]) == wanted[place]
    for sequence in sequences:
        engine.close(sequence)
    assert engine.scheduler.pool.free == free


def test_a_fault_that_only_batches_have_fails_no_sequence_and_is_logged_once(caplog):
    engine = faulty_engine()
    engine.model.fails_in_batches = True
    sequences = [engine.open(speech(4, number)) for number in range(2)]
    for sequence in sequences:
        engine.generate(sequence, Generation(GREEDY, max_new_rows=4, min_new_rows=4))
    generated, failed = rows_of(engine, sequences)
    assert not failed and [len(rows) for rows in generated.values()] == [4, 4]
    assert [record.getMessage() for record in caplog.records] == ["a step of 2 sequences failed; running its halves"]


def test_a_culprit_is_found_without_a_pass_for_each():
    engine = faulty_engine()
    sequences = [engine.open(speech(4, number)) for number in range(16)]
    while engine.has_work:
        engine.advance()
    engine.model.poison, before = (3, 4), engine.model.passes
    for sequence in sequences:
        engine.append(sequence, [engine.model.poison if sequence is sequences[9] else (3, 5)])
    assert [failure.sequence for failure in engine.advance().failures] == [sequences[9]]
    assert engine.model.passes - before == 1 + 2 * 4
    assert all(sequence.pending == 0 for sequence in sequences if sequence is not sequences[9])


def test_a_prompt_that_cannot_be_computed_is_not_tried_for_ever():
    engine = faulty_engine()
    engine.model.poison = speech(5)[-1]
    sequence = engine.open(speech(5))
    (failure,) = engine.advance().failures
    assert failure.sequence is sequence and not engine.has_work and not sequence.pages


def test_a_fork_fails_alone_if_its_pages_cannot_be_copied():
    engine = faulty_engine()
    origin, other = engine.open(speech(5)), engine.open(speech(6, seed=3))
    while engine.has_work:
        engine.advance()
    generation = Generation(GREEDY, max_new_rows=8, min_new_rows=8)
    fork = engine.fork(origin)
    engine.generate(fork, generation)
    copy_pages = engine.runner.cache.copy_pages

    def fail(pairs):
        raise PlantedError

    object.__setattr__(engine.runner.cache, "copy_pages", fail)
    assert [failure.sequence for failure in engine.advance().failures] == [fork]
    object.__setattr__(engine.runner.cache, "copy_pages", copy_pages)
    assert engine.complete(fork, generation) == alone(speech(5), generation)
    assert engine.complete(origin, generation) == alone(speech(5), generation)
    assert engine.complete(other, generation) == alone(speech(6, seed=3), generation)


def test_a_row_that_cannot_be_accepted_fails_its_sequence_alone():
    engine = faulty_engine()
    wanted = [alone(*pair) for pair in zip(prompts(), generations(GREEDY), strict=True)]
    sequences = [engine.open(rows) for rows in prompts()]
    for sequence, generation in zip(sequences, generations(GREEDY), strict=True):
        engine.generate(sequence, generation)
    (place, bad), ends = planted(wanted, []), engine.model.ends

    def refuse(row):
        if row == bad:
            raise PlantedError
        return ends(row)

    engine.model.ends = refuse
    made, failed = rows_of(engine, sequences)
    victim = sequences[place]
    assert list(failed) == [victim.id]
    assert victim.rows == prompts()[place] + made[victim.id] and bad not in victim.rows
    assert [made[sequence.id] for sequence in without(sequences, place)] == without(wanted, place)


def test_steps_prelaunched_fail_their_sequence_alone(model):  # noqa: F811
    class FaultyWriter(WhisperWriter):
        poison: int | None = None

        def forward(self, rows, batch):
            hidden = super().forward(rows, batch)
            if self.poison is not None and self.poison in rows[:, 0].tolist():
                raise PlantedError
            return hidden

    memory, prompt = windows_of(model, 5), TOKENS.prompt("en")

    def begun(poison):
        writer = FaultyWriter(model, TOKENS, SETTINGS, 6)
        limits = EngineLimits(page_size=4, cache_rows=512, sequences_per_step=8)
        engine = Engine(writer, CPU, torch.float64, limits)
        device = Device(engine)
        sequences = [engine.open(writer.prompt(window, prompt, False)) for window in writer.store.hold(memory)]
        for index, sequence in enumerate(sequences):
            engine.generate(sequence, Generation(SAMPLINGS[1], max_new_rows=12, min_new_rows=12, seed=index))
        writer.poison = poison
        made, failed = rows_of(engine, sequences)
        assert device.prelaunched > 0
        return [made[sequence.id] for sequence in sequences], list(failed.values()), engine

    wanted, failed, _ = begun(None)
    assert not failed
    tokens = [[token for token, _ in rows] for rows in wanted]
    victim, poison = planted(tokens, [prompt])
    made, failed, engine = begun(poison)
    assert len(failed) == 1 and isinstance(failed[0], PlantedError)
    assert without(made, victim) == without(wanted, victim)
    assert made[victim] == wanted[victim][: len(made[victim])]
    for sequence in list(engine.scheduler.sequences.values()):
        engine.close(sequence)
    assert engine.scheduler.pool.free == engine.scheduler.pool.size


def test_a_draft_that_fails_costs_no_row():
    draft = faulty_engine()
    engine, wanted = faulty_engine(), [alone(*pair) for pair in zip(prompts(), generations(GREEDY), strict=True)]
    _, draft.model.poison = planted(wanted, prompts())
    speculation = Speculation(DraftModel.of(draft, engine), max_rows=3)
    sequences = [engine.open(rows) for rows in prompts()]
    for sequence, generation in zip(sequences, generations(GREEDY), strict=True):
        engine.generate(sequence, generation, speculation=speculation)
    made, failed = rows_of(engine, sequences)
    assert not failed and [made[sequence.id] for sequence in sequences] == wanted
    assert engine.acceptance.kept > 0


async def test_behind_an_event_loop_only_the_failing_reply_ends():
    wanted = [alone(*pair) for pair in zip(prompts(), generations(SAMPLINGS[1]), strict=True)]
    core = faulty_engine()
    place, core.model.poison = planted(wanted, prompts())
    async with AsyncEngine(core) as engine:
        sequences = [await engine.open(rows) for rows in prompts()]
        replies = [
            await engine.generate(sequence, generation)
            for sequence, generation in zip(sequences, generations(SAMPLINGS[1]), strict=True)
        ]
        made = {number: [row async for row in reply] for number, reply in enumerate(replies) if number != place}
        with pytest.raises(PlantedError):
            async for _ in replies[place]:
                pass
        assert replies[place].finish == "error"
        assert list(made.values()) == without(wanted, place)
        for sequence in sequences:
            await engine.close(sequence)
    assert core.scheduler.pool.free == core.scheduler.pool.size


async def test_a_prompt_that_fails_in_the_background_leaves_replies_alone():
    core = faulty_engine()
    generation = Generation(SAMPLINGS[1], max_new_rows=40, min_new_rows=40, seed=1)
    wanted = alone(speech(9), generation)
    core.model.poison = (3, 4)
    assert core.model.poison not in [*wanted, *speech(9)]
    async with AsyncEngine(core) as engine:
        reply = await engine.generate(await engine.open(speech(9)), generation)
        rows = [await anext(reply)]
        await engine.open([*speech(4), core.model.poison])
        assert rows + [row async for row in reply] == wanted
    assert not core.has_work
