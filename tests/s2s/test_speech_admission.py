"""Admission on a CPU: what replies cost is measured, and a session that the cores cannot speak for is refused."""

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from tests.s2s.small_parts import SpeechParts, small_speech
from tests.server.harness import RunningServer, connected
from vivavoce.audio.level import buzz
from vivavoce.dialogue.backend import ReplyPlan, Spoke
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.engine.sequence import Admission
from vivavoce.errors import CapacityError
from vivavoce.models.moss_speech.codec import DECODER_RATE
from vivavoce.s2s import conversation
from vivavoce.s2s.speech_cost import AVERAGED_SECONDS, MIN_SOUND_SECONDS, START_SECONDS, BusySeconds, SpeechCost
from vivavoce.server.config import ServerOptions
from vivavoce.server.hosting.config import ServingOptions
from vivavoce.server.hosting.hosts import SpeechHost, load_models

TEN_SECONDS = BusySeconds(engine=1.04, vocoder=3.01)  # for ten seconds of mini-speech, on two cores of a Neoverse N1
SLOW = BusySeconds(engine=4.0, vocoder=6.0)  # for ten seconds, slower than real time where one pass is run at a time


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> SpeechParts:
    return small_speech(tmp_path_factory.mktemp("untrained"))


def after(cost: SpeechCost, sound: float, busy: BusySeconds) -> SpeechCost:
    """The cost after one more reply of this length that took this long."""
    cost.note(sound, BusySeconds(cost.total.engine + busy.engine, cost.total.vocoder + busy.vocoder), is_start=True)
    return cost


def test_two_cores_speak_for_four_and_not_for_five():
    cost, limit = after(SpeechCost(threads=2, vocoder_workers=2), 10.0, TEN_SECONDS), Admission().max_speech_load
    assert cost.load(4) == pytest.approx(0.81) and cost.load(4) < limit < cost.load(5)


def test_the_busiest_of_several_threads_decides():
    assert after(SpeechCost(threads=3), 10.0, TEN_SECONDS).load(2) == pytest.approx(2 * 0.301)
    assert after(SpeechCost(threads=3), 10.0, BusySeconds(5.0, 3.0)).load(2) == pytest.approx(1.0)
    assert after(SpeechCost(threads=1, vocoder_workers=2), 10.0, TEN_SECONDS).load(1) == pytest.approx(0.405)


def test_the_cost_is_unknown_until_some_seconds_were_measured_and_after_a_restart():
    cost = after(SpeechCost(threads=1), MIN_SOUND_SECONDS - START_SECONDS - 0.1, SLOW)
    assert cost.load(1) is None
    assert after(cost, 1.0, SLOW).load(1) > 1
    cost.restart(cost.total)
    assert cost.load(1) is None
    assert after(cost, 10.0, TEN_SECONDS).load(1) == pytest.approx(0.405)


def test_decisions_that_make_no_sound_do_not_make_the_sound_dearer():
    """A caller whose turns all call functions was refused by an idle server: two such sessions seemed too many."""
    cost, decision = SpeechCost(threads=2, vocoder_workers=2), BusySeconds(engine=0.35, vocoder=0.0)
    for _ in range(20):
        cost.note_decision(BusySeconds(cost.total.engine + decision.engine, cost.total.vocoder))
    assert cost.load(1) is None, "nothing is known of the vocoder"
    spoken = after(cost, 10.0, TEN_SECONDS).load(1)
    assert spoken == pytest.approx(0.2025, abs=1e-3)
    for _ in range(20):
        cost.note_decision(BusySeconds(cost.total.engine + decision.engine, cost.total.vocoder))
    assert spoken * 0.8 < cost.load(1) < spoken * 1.2


def test_a_slow_time_is_forgotten_after_more_sound():
    cost = after(SpeechCost(threads=1), 30.0, BusySeconds(30.0, 30.0))
    assert cost.load(1) == pytest.approx(60 / 31 * 1.1)
    for _ in range(round(2 * AVERAGED_SECONDS / 10.0)):
        after(cost, 10.0, TEN_SECONDS)
    assert 0.405 < cost.load(1) < 0.6


async def test_the_only_conversation_is_admitted_and_one_beside_it_refused_while_the_cores_are_too_slow(parts):
    async with parts.pipeline(admission=Admission()) as pipeline:
        after(pipeline.speech_cost, 10.0, BusySeconds(50.0, 50.0))
        pipeline.core.slack.note(pipeline.core.scheduler.now(), left=-2.0)  # of a session that has ended
        only = pipeline.open(lambda item, text: None)
        pipeline.core.slack.reset()
        with pytest.raises(CapacityError, match=r"would take \d+% of the cores with one more, and the limit is 97%"):
            pipeline.open(lambda item, text: None)
        await only.close()
        await pipeline.open(lambda item, text: None).close()


async def test_a_small_cache_has_room_for_the_only_conversation(parts):
    async with parts.pipeline(cache_rows=512, admission=Admission()) as pipeline:
        await pipeline.open(lambda item, text: None).close()


async def test_conversations_are_admitted_while_nothing_is_known_and_without_a_limit(parts):
    async with AsyncExitStack() as stack:
        unmeasured = await stack.enter_async_context(parts.pipeline(admission=Admission()))
        unlimited = await stack.enter_async_context(parts.pipeline(admission=Admission(max_speech_load=1000.0)))
        after(unlimited.speech_cost, 10.0, BusySeconds(50.0, 50.0))
        for pipeline in (unmeasured, unlimited):
            for _ in range(12):
                stack.push_async_callback(pipeline.open(lambda item, text: None).close)


async def test_conversations_in_which_nobody_speaks_take_no_time(parts, monkeypatch):
    async with parts.pipeline(admission=Admission()) as pipeline:
        after(pipeline.speech_cost, 10.0, BusySeconds(50.0, 50.0))
        idle = pipeline.open(lambda item, text: None)
        assert idle.is_active, "its first turn is expected"
        monkeypatch.setattr(conversation, "ACTIVE_SECONDS", 0.0)
        assert not idle.is_active
        beside = pipeline.open(lambda item, text: None)
        beside.set_history((), ConversationSettings())
        beside.listen(buzz(1.0, 16_000).samples[0])
        reply = beside.reply(ReplyPlan("item", ConversationSettings(max_output_tokens=30), lambda: 0.0))
        assert beside.is_active
        with pytest.raises(CapacityError):
            pipeline.open(lambda item, text: None)
        beside.pause()
        assert not beside.is_active, "it waits for its client"
        await pipeline.open(lambda item, text: None).close()
        reply.drop()
        await beside.close()
        await idle.close()


async def test_replies_are_measured_from_the_end_of_the_warm_up(parts):
    async with parts.pipeline(admission=Admission(), max_loop=None) as pipeline:
        await pipeline.warm_up()
        warm = pipeline.speech_cost.total
        assert pipeline.speech_cost.sound == 0 < warm.engine
        state, settings = pipeline.open(lambda item, text: None), ConversationSettings(max_output_tokens=30)
        state.set_history((), settings)
        state.listen(buzz(1.0, 16_000).samples[0])
        reply = state.reply(ReplyPlan("item", settings, lambda: 0.0))
        pieces = [piece async for piece in reply.pieces()]
        reply.drop()
        await state.close()
        sound = sum(len(piece.samples) for piece in pieces if isinstance(piece, Spoke)) / DECODER_RATE
        cost = pipeline.speech_cost
        counted = sound + START_SECONDS
        assert 0.95 * counted < cost.sound <= counted, "older sound has a little less weight"
        assert cost.total.engine > warm.engine and cost.total.vocoder > warm.vocoder


async def test_a_library_user_is_never_refused_and_nothing_is_measured(parts):
    async with parts.pipeline() as pipeline:
        assert pipeline.speech_cost is None
        await asyncio.gather(*(pipeline.open(lambda item, text: None).close() for _ in range(12)))


def test_the_limit_of_a_server_is_an_option():
    assert ServerOptions().max_speech_load == Admission().max_speech_load
    options = ServingOptions(model="mini-speech", device="cpu", server=ServerOptions(max_speech_load=100.0))
    assert load_models(options).pipeline.options.admission == Admission(max_speech_load=100.0)


async def test_a_session_for_which_the_cores_are_too_slow_is_refused_at_once(parts):
    async with parts.pipeline(admission=Admission()) as pipeline:
        host = SpeechHost("untrained", pipeline, DialogueOptions())
        host.is_ready = True
        after(pipeline.speech_cost, 10.0, BusySeconds(3.0 * pipeline.speech_cost.threads, 0.0))
        async with RunningServer(host, ServerOptions()) as server, AsyncExitStack() as stack:
            refused, seconds = [], []
            for _ in range(12):
                client = await stack.enter_async_context(connected(server))
                began = time.monotonic()
                event = await client.next()
                seconds.append(time.monotonic() - began)
                if event["type"] == "error":
                    refused.append(event["error"]["code"])
                    assert await client.closed() == 1013
            assert 0 < len(server.sessions) < 12 and refused == ["capacity"] * (12 - len(server.sessions))
            assert sorted(seconds)[len(seconds) // 2] < 0.1
