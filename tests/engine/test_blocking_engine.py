"""The engine and the batcher for threads without an event loop: the same rows, and faults that stay where they are."""

import threading
from concurrent.futures import CancelledError

import pytest
import torch

from tests.engine.test_engine import MODEL, alone, make_engine, speech
from vivavoce.engine.sampling import GREEDY, Generation, Sampling
from vivavoce.errors import VivaError
from vivavoce.runtime.async_engine import AsyncEngine
from vivavoce.runtime.batcher import DynamicBatcher
from vivavoce.runtime.executor import executor_for

LONG = Generation(GREEDY, max_new_rows=400, min_new_rows=400)
SHORT = Generation(GREEDY, max_new_rows=9)


class PlantedError(Exception):
    """The fault of these tests."""


@pytest.fixture
def engine():
    engine = AsyncEngine(make_engine())
    engine.start()
    yield engine
    engine.shutdown()


def open_sequence(engine, rows):
    return engine.call(lambda: engine.engine.open(rows))


def on_threads(*actions):
    """The results of actions that run on a thread each, or their errors."""
    results = [None] * len(actions)

    def run(index):
        try:
            results[index] = actions[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "it waits for ever"
    return results


def test_replies_read_on_threads_equal_replies_alone(engine):
    prompts = [speech(5 + 3 * number, number) for number in range(4)]
    wanted = [Generation(Sampling(temperature=0.9, top_k=9), max_new_rows=20, seed=number) for number in range(4)]

    def read(prompt, generation):
        reply = engine.stream(open_sequence(engine, prompt), generation, max_unread=3)
        rows = list(reply)
        assert reply.finish in ("stop", "length") and list(reply) == []
        return rows

    pairs = list(zip(prompts, wanted, strict=True))
    assert on_threads(*(lambda pair=pair: read(*pair) for pair in pairs)) == [alone(*pair) for pair in pairs]


async def test_a_coroutine_and_a_thread_share_one_engine():
    async with AsyncEngine(make_engine()) as engine:
        blocking = engine.call(lambda: engine.stream(engine.engine.open(speech(5)), SHORT))
        reply = await engine.generate(await engine.open(speech(6)), SHORT)
        assert [row async for row in reply] == alone(speech(6), SHORT)
        assert list(blocking) == alone(speech(5), SHORT)


def test_closing_a_reply_releases_the_thread_that_waits_for_it(engine):
    sequence = open_sequence(engine, speech(5))
    reply = engine.stream(sequence, LONG, max_unread=1)
    next(reply)
    reply.close()
    (rest,) = on_threads(lambda: list(reply))
    assert len(rest) < 10 and reply.finish == "cancelled"
    engine.discard(sequence)
    engine.call(lambda: None)
    assert not engine.engine.scheduler.sequences


def test_a_prefill_is_done_when_its_rows_are_computed(engine):
    sequence = open_sequence(engine, speech(40))
    first, second = engine.prefill(sequence), engine.prefill(sequence)
    assert first.result(10) is sequence and second.result(10) is sequence
    assert sequence.pending == 0 and engine.prefill(sequence).result(10) is sequence


def test_a_prefill_that_fails_fails_alone_and_is_not_tried_again(monkeypatch):
    engine = AsyncEngine(make_engine())
    poison = speech(40, 7)[20]
    forward, passes = MODEL.forward, []

    def failing(rows, batch):
        passes.append(len(rows))
        if tuple(poison) in [tuple(row) for row in rows.tolist()]:
            raise PlantedError
        return forward(rows, batch)

    monkeypatch.setattr(MODEL, "forward", failing)
    engine.start()
    reply = engine.stream(open_sequence(engine, speech(5)), LONG)
    next(reply)
    bad = open_sequence(engine, speech(40, 7))
    with pytest.raises(PlantedError):
        engine.prefill(bad).result(10)
    reply.close()
    engine.call(lambda: None)
    before = len(passes)
    engine.call(lambda: None)
    assert len(passes) == before and not engine.engine.has_work
    monkeypatch.undo()
    assert engine.prefill(bad).result(10) is bad
    engine.shutdown()


def test_closing_the_engine_releases_everything_that_waits(engine):
    sequence = open_sequence(engine, speech(5))
    reply = engine.stream(sequence, LONG, max_unread=1)
    engine.shutdown()
    engine.shutdown()
    (rows,) = on_threads(lambda: list(reply))
    assert len(rows) <= 1 and reply.finish == "cancelled"
    with pytest.raises(VivaError, match="not running"):
        engine.call(lambda: None)


def test_actions_may_call_and_a_failing_one_fails_its_caller_alone(engine):
    assert engine.call(lambda: engine.call(lambda: 42)) == 42
    with pytest.raises(ZeroDivisionError):
        engine.call(lambda: 1 // 0)

    def fail():
        raise PlantedError

    engine.post(fail)
    assert engine.call(lambda: 1) == 1


def test_jobs_of_threads_are_batched_and_a_failing_one_fails_alone():
    batches, go = [], threading.Event()

    def work(jobs):
        batches.append(list(jobs))
        go.wait(10)
        if "bad" in jobs:
            raise PlantedError
        return [job.upper() for job in jobs]

    batcher = DynamicBatcher("viva-test", work, executor_for(torch.device("cpu")), leaves_jobs=True)
    batcher.start()
    first = batcher.submit("first")
    while not batches:
        threading.Event().wait(0.001)
    good, bad, cancelled = batcher.submit("good"), batcher.submit("bad"), batcher.submit("cancelled")
    assert cancelled.cancel()
    go.set()
    assert first.result(10) == "FIRST" and good.result(10) == "GOOD"
    with pytest.raises(PlantedError):
        bad.result(10)
    with pytest.raises(CancelledError):
        cancelled.result(10)
    assert batches == [["first"], ["good", "bad"], ["good"], ["bad"]]
    go.clear()
    running, waiting = batcher.submit("running"), batcher.submit("waiting")
    while batcher.waiting > 1:
        threading.Event().wait(0.001)
    go.set()
    batcher.shutdown()
    assert {type(each.exception(10)) for each in (running, waiting)} <= {type(None), VivaError}
    with pytest.raises(VivaError, match="not running"):
        batcher.submit("late")


def do_together(batcher, jobs):
    """The futures of jobs that are submitted between two batches, and so run in one."""
    return batcher.call(lambda: [batcher.submit(job) for job in jobs])


def test_a_fault_that_only_batches_have_is_logged_once(caplog):
    def work(jobs):
        if len(jobs) > 1:
            raise PlantedError
        return jobs

    batcher = DynamicBatcher("viva-test", work, executor_for(torch.device("cpu")), leaves_jobs=True)
    batcher.start()
    for _ in range(5):
        assert [done.result(10) for done in do_together(batcher, range(3))] == [0, 1, 2]
    batcher.shutdown()
    (record,) = caplog.records
    assert record.getMessage() == "viva-test: a batch of 3 jobs failed" and record.exc_info is not None


def test_every_job_that_fails_by_itself_is_logged(caplog):
    def work(jobs):
        raise PlantedError

    batcher = DynamicBatcher("viva-test", work, executor_for(torch.device("cpu")), leaves_jobs=True)
    batcher.start()
    assert all(isinstance(done.exception(10), PlantedError) for done in do_together(batcher, range(2)))
    batcher.shutdown()
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["viva-test: a batch of 2 jobs failed", *["viva-test: a job failed"] * 2]


def test_a_running_job_is_not_cancelled_and_its_result_arrives():
    entered, gate = threading.Event(), threading.Event()

    def work(jobs):
        entered.set()
        assert gate.wait(10)
        return jobs

    batcher = DynamicBatcher("viva-test", work, executor_for(torch.device("cpu")), max_batch=1)
    batcher.start()
    running, waiting = batcher.submit(1), batcher.submit(2)
    assert entered.wait(10)
    assert not running.cancel() and waiting.cancel()
    gate.set()
    assert running.result(10) == 1
    batcher.shutdown()
