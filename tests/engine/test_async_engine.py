"""The engine behind an event loop: replies as alone, and consumers that are slow, cancelled or gone."""

import asyncio
import gc

import pytest

from tests.engine.test_engine import MODEL, alone, make_engine, speech
from tests.models.tiny import CONFIG
from vivavoce.engine.sampling import GREEDY, Generation, Sampling
from vivavoce.errors import InputError, VivaError
from vivavoce.runtime.async_engine import AsyncEngine

LONG = Generation(GREEDY, max_new_rows=400, min_new_rows=400)


async def settle(engine: AsyncEngine) -> None:
    """Wait until every command given so far has been carried out."""
    await engine._call(lambda: None)


async def test_replies_read_together_equal_replies_alone():
    prompts = [speech(5 + 3 * number, number) for number in range(6)]
    wanted = [Generation(Sampling(temperature=0.9, top_k=9), max_new_rows=20, seed=number) for number in range(6)]

    async def read(engine, prompt, generation):
        sequence = await engine.open(prompt[:3])
        await engine.append(sequence, prompt[3:])
        reply = await engine.generate(sequence, generation)
        rows = [row async for row in reply]
        assert reply.finish in ("stop", "length")
        assert [row async for row in reply] == []
        return rows

    async with AsyncEngine(make_engine()) as engine:
        replies = await asyncio.gather(*(read(engine, *pair) for pair in zip(prompts, wanted, strict=True)))
    assert replies == [alone(*pair) for pair in zip(prompts, wanted, strict=True)]


async def test_a_consumer_that_is_cancelled_stops_its_reply_and_no_other():
    core = make_engine()
    async with AsyncEngine(core) as engine:
        gone, stays = await engine.open(speech(5)), await engine.open(speech(6))
        reading = asyncio.Event()

        async def read_for_ever():
            async with await engine.generate(gone, LONG) as reply:
                async for _ in reply:
                    reading.set()

        task = asyncio.create_task(read_for_ever())
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not gone.is_generating
        generation = Generation(GREEDY, max_new_rows=9)
        assert [row async for row in await engine.generate(stays, generation)] == alone(speech(6), generation)


async def test_a_garbage_collected_reply_is_stopped():
    core = make_engine()
    async with AsyncEngine(core) as engine:
        sequence = await engine.open(speech(5))
        reply = await engine.generate(sequence, LONG)
        await anext(reply)
        del reply
        while sequence.is_generating:  # rows on their way to the reply keep it for a moment
            gc.collect()
            await settle(engine)
        assert sequence.generated < LONG.max_new_rows, "it was not stopped, it finished"
        assert not core.has_work


async def test_a_slow_consumer_makes_its_reply_wait_for_it():
    core = make_engine()
    async with AsyncEngine(core) as engine:
        sequence = await engine.open(speech(5))
        generation = Generation(GREEDY, max_new_rows=40, min_new_rows=40)
        reply = await engine.generate(sequence, generation, max_unread=4)
        rows = [await anext(reply)]
        while core.has_work:
            await settle(engine)
        assert sequence.unread == 4, "it went on past what was read"
        rows += [row async for row in reply]
        assert rows == alone(speech(5), generation)


async def test_stopping_keeps_the_rows_and_rewinding_cuts_them():
    lively = Sampling(temperature=1.0, top_k=40)
    long = Generation(lively, max_new_rows=400, min_new_rows=400, seed=2)
    async with AsyncEngine(make_engine()) as engine:
        sequence = await engine.open(speech(8))
        reply = await engine.generate(sequence, long)
        heard = [await anext(reply) for _ in range(3)]
        await reply.aclose()
        await reply.aclose()
        assert reply.finish == "cancelled"
        await engine.rewind(sequence, 9 + 3)
        assert sequence.rows == speech(8) + heard
        assert heard[-1][1] != CONFIG.audio_pad_token_id, "a prompt that ends so begins a reply in text, as published"
        reply = await engine.generate(sequence, Generation(lively, max_new_rows=5, min_new_rows=5, seed=2))
        assert [row async for row in reply] == alone(speech(8), long)[3:8]


async def test_rewinding_or_closing_ends_a_reply_under_way():
    core = make_engine()
    async with AsyncEngine(core) as engine:
        for act in (lambda s: engine.rewind(s, 2), engine.close):
            sequence = await engine.open(speech(5))
            reply = await engine.generate(sequence, LONG)
            await anext(reply)
            await act(sequence)
            async for _ in reply:
                pass
            assert reply.finish == "cancelled"


async def test_a_fork_speaks_while_its_origin_listens():
    async with AsyncEngine(make_engine()) as engine:
        origin = await engine.open(speech(9))
        fork = await engine.fork(origin)
        generation = Generation(GREEDY, max_new_rows=8, min_new_rows=8)
        reply = await engine.generate(fork, generation)
        await engine.append(origin, speech(4, seed=2))
        assert [row async for row in reply] == alone(speech(9), generation)
        reply = await engine.generate(origin, generation)
        assert [row async for row in reply] == alone(speech(9) + speech(4, seed=2), generation)


async def test_a_refused_call_raises_where_it_was_made():
    async with AsyncEngine(make_engine()) as engine:
        with pytest.raises(InputError, match="not in 0"):
            await engine.open([(9999, 0)])
        sequence = await engine.open()
        with pytest.raises(InputError, match="no rows"):
            await engine.generate(sequence, LONG)


async def test_a_step_that_fails_ends_the_replies_with_its_error_and_the_engine_goes_on():
    core = make_engine()
    async with AsyncEngine(core) as engine:
        sequence = await engine.open(speech(5))
        forward = MODEL.forward
        reply = await engine.generate(sequence, LONG)
        await anext(reply)
        MODEL.forward = lambda rows, batch: 1 / 0
        try:
            with pytest.raises(ZeroDivisionError):
                async for _ in reply:
                    pass
        finally:
            MODEL.forward = forward
        assert reply.finish == "error"
        generation = Generation(GREEDY, max_new_rows=5)
        fresh = await engine.open(speech(7))
        assert [row async for row in await engine.generate(fresh, generation)] == alone(speech(7), generation)


async def test_closing_the_engine_cancels_what_runs():
    engine = AsyncEngine(make_engine())
    async with engine:
        sequence = await engine.open(speech(5))
        reply = await engine.generate(sequence, LONG)
        await anext(reply)
    async for _ in reply:
        pass
    assert reply.finish == "cancelled"
    with pytest.raises(VivaError, match="not running"):
        await engine.open()


async def test_rows_that_are_there_come_together_and_a_reply_is_begun_in_one_go():
    core, prompt, short = make_engine(), speech(12, 3), Generation(GREEDY, max_new_rows=7, min_new_rows=7)
    expected = alone(prompt, short)
    async with AsyncEngine(core) as engine:
        past = await engine.open(prompt[:9])
        reply = await engine.answer(past, prompt, 9, short, max_unread=24)
        first = await reply.several(3)
        rest = await reply.several(10)
        assert len(first) >= 3 and first + rest == expected
        assert await reply.several(1) == [] and len(past.rows) == 9
        with pytest.raises(InputError):
            await engine.answer(past, [(10**9, 0)], 0, short)
        assert len(core.scheduler.sequences) == 2, "what could not begin leaves nothing"


@pytest.mark.parametrize("ask", ["open", "fork", "answer"])
async def test_a_caller_cancelled_while_opening_a_sequence_leaves_none_open(ask):
    core = make_engine()
    async with AsyncEngine(core) as engine:
        past = await engine.open(speech(5))
        wants = {
            "open": lambda: engine.open(speech(6)),
            "fork": lambda: engine.fork(past),
            "answer": lambda: engine.answer(past, speech(5), 5, LONG),
        }
        task = asyncio.create_task(wants[ask]())
        await asyncio.sleep(0)
        while len(core.scheduler.sequences) < 2:  # the engine has made it while the event loop is busy
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle(engine)
        assert list(core.scheduler.sequences) == [past.id] and not core.has_work
