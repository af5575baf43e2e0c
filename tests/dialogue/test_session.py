"""A live conversation on a stage: who speaks when, what is held, stopped, cut and told."""

import asyncio
import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

from tests.dialogue.stage import Stage, spoken
from tests.dialogue.voices import cough, hum, silence, talk
from vivavoce.audio.resample import resample
from vivavoce.dialogue.interface import (
    AudioPart,
    ConversationSettings,
    InputTranscript,
    ItemTruncated,
    Message,
    OutputCleared,
    ReplyAudio,
    ReplyDone,
    ReplyItemDone,
    ReplyItemStarted,
    ReplyRequest,
    ReplyStarted,
    ReplyText,
    SpeechStarted,
    SpeechStopped,
    TextPart,
    ToolArguments,
    ToolCall,
    ToolOutput,
    TurnCommitted,
    TurnSettings,
    TurnTimedOut,
    Warned,
)
from vivavoce.dialogue.moderation import Moderation, WordList
from vivavoce.dialogue.pipeline import CallArguments, CallBegan, Ended, Spoke, Wrote
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.dialogue.speaking import SpeakingOptions
from vivavoce.errors import InputError

pytestmark = pytest.mark.filterwarnings("error")


def with_turn(**turn) -> ConversationSettings:
    return ConversationSettings(turn=TurnSettings(**turn))


async def test_one_clean_turn_is_told_in_order():
    stage = Stage.set(spoken(1.0, "Good evening."))
    await stage.hear(np.concatenate([silence(0.5), talk(1.5), silence(2.5)]))
    await stage.close()
    assert stage.names() == [
        *("SpeechStarted", "SpeechStopped", "TurnCommitted", "ReplyStarted"),
        *("ReplyItemStarted", "ReplyText", "ReplyItemDone", "ReplyDone"),
    ]
    (user, reply) = stage.conversation.items
    assert user.id == stage.all(SpeechStarted)[0].item == stage.all(TurnCommitted)[0].item.id
    assert stage.all(ReplyItemStarted)[0].previous == user.id
    assert stage.all(ReplyDone)[0].reason == "completed"
    sound = np.concatenate([event.samples for event in stage.all(ReplyAudio)])
    (part,) = reply.content.parts
    assert np.array_equal(part.samples, sound) and len(sound) == 24_000
    assert part.transcript == "Good evening." and reply.is_complete
    assert stage.pipeline.mind.past == (user, reply)
    stage.check()


async def test_the_turn_starts_with_its_prefix_and_ends_after_its_silence():
    stage = Stage.set(settings=with_turn(prefix_padding_ms=320, silence_duration_ms=320))
    await stage.hear(np.concatenate([silence(1.024), talk(1.024), silence(1.0)]))
    started, stopped = stage.all(SpeechStarted)[0], stage.all(SpeechStopped)[0]
    assert abs(started.audio_start_ms - (1024 - 320)) <= 64
    assert abs(stopped.audio_end_ms - (2048 + 320)) <= 96
    (part,) = stage.all(TurnCommitted)[0].item.content.parts
    assert len(part.samples) / 16 == stopped.audio_end_ms - started.audio_start_ms
    await stage.close()
    stage.check()


async def test_a_reply_is_begun_at_the_likely_end_and_held_until_the_turn_is_over():
    stage = Stage.set()
    await stage.hear(np.concatenate([silence(0.5), talk(1.0), silence(0.16)]))
    (held,) = stage.pipeline.made
    assert not held.is_released and not stage.all(ReplyStarted)
    await stage.hear(silence(0.3))
    assert held.is_released and held.released_for == stage.all(TurnCommitted)[0].item.id
    assert stage.time_of(ReplyAudio) == stage.time_of(SpeechStopped), "the sound was ready when the turn was over"
    await stage.close()
    stage.check()


async def test_a_held_reply_is_dropped_without_a_trace_where_the_user_goes_on():
    stage = Stage.set()
    first, second = talk(1.0, seed=1), talk(1.0, seed=2)
    await stage.hear(np.concatenate([silence(0.5), first, silence(0.128), second]))
    (held,) = stage.pipeline.made
    assert held.is_dropped and not held.is_released
    assert stage.names() == ["SpeechStarted"]
    heard_so_far = stage.pipeline.mind.turn_windows
    await stage.hear(silence(0.5))
    item = stage.all(TurnCommitted)[0].item
    assert stage.pipeline.made[-1].is_released
    assert len(item.content.parts[0].samples) >= (heard_so_far + 3) * 512, "the pause is part of the turn"
    await stage.close()
    stage.check()


async def test_without_holding_the_reply_begins_when_the_turn_is_over():
    stage = Stage.set(options=DialogueOptions(holds_replies=False))
    await stage.hear(np.concatenate([silence(0.5), talk(1.0), silence(0.5)]))
    (item,) = [event.item for event in stage.all(TurnCommitted)]
    assert stage.pipeline.mind.kept == [item.id]
    assert len(stage.pipeline.made) == 1
    await stage.close()
    stage.check()


async def answered(stage: Stage, seconds: float = 1.5) -> str:
    """The user asks, and the reply is under way for some seconds; its id."""
    await stage.hear(np.concatenate([silence(0.5), talk(1.5, seed=5), silence(0.32 + seconds)]))
    return stage.all(ReplyStarted)[-1].reply


async def test_an_interruption_ducks_then_stops_and_keeps_what_was_heard():
    stage = Stage.set(spoken(6.0, "one two three four five six seven eight nine ten eleven twelve"))
    reply = await answered(stage)
    begun, told = stage.clock.now(), len(stage.told)
    await stage.hear(talk(1.0, seed=6))
    after = stage.told[told:]
    assert [type(event) for event in after if not isinstance(event, ReplyAudio)] == [
        *(SpeechStarted, ReplyItemDone, ReplyDone, OutputCleared, ItemTruncated),
    ]
    assert stage.all(ReplyDone)[0].reason == "turn_detected"
    assert stage.time_of(ReplyDone) - begun <= 0.3
    assert any(event.gain < 1 for event in after if isinstance(event, ReplyAudio))
    cut = stage.all(ItemTruncated)[0]
    heard = stage.time_of(ReplyDone) - stage.time_of(ReplyAudio)
    assert cut.audio_end_ms == pytest.approx(heard * 1e3, abs=2)
    (part,) = cut.item.content.parts
    assert len(part.samples) / 24 == pytest.approx(cut.audio_end_ms, abs=1)
    assert part.transcript and "one two three four five six seven eight".startswith(part.transcript)
    assert not cut.item.is_complete
    assert stage.pipeline.mind.past[-1] == stage.conversation.item(cut.item.id)
    await stage.hear(silence(0.6))
    assert len(stage.all(TurnCommitted)) == 2 and len(stage.all(ReplyStarted)) == 2
    assert stage.all(ReplyAudio)[-1].reply != reply
    await stage.close()
    stage.check()


@pytest.mark.parametrize("sound", [hum(0.4, seed=2), hum(0.3, seed=3), cough(1)], ids=["mm-hm", "mm", "cough"])
async def test_a_backchannel_or_a_cough_does_not_stop_the_reply(sound):
    stage = Stage.set(spoken(4.0))
    await answered(stage)
    told = len(stage.told)
    await stage.hear(np.concatenate([sound, silence(1.0)]))
    assert not stage.all(ReplyDone) and len(stage.all(SpeechStarted)) == 1
    assert all(isinstance(event, ReplyAudio) for event in stage.told[told:])
    assert stage.all(ReplyAudio)[-1].gain == 1.0
    await stage.hear(silence(3.0))
    assert stage.all(ReplyDone)[0].reason == "completed"
    await stage.close()
    stage.check()


async def test_what_the_client_reports_as_played_is_what_was_heard():
    stage = Stage.set(spoken(6.0))
    reply = await answered(stage)
    stage.conversation.played(reply, 700)
    stage.conversation.played(reply, 400)
    await stage.hear(talk(1.0, seed=6))
    assert stage.all(ItemTruncated)[0].audio_end_ms == 700
    await stage.close()
    stage.check()


async def test_an_interruption_before_the_first_sound_leaves_no_words():
    stage = Stage.set([Wrote("Hm"), Ended("completed")], options=DialogueOptions(holds_replies=False))
    slow = asyncio.Event()

    async def wait_for_ever(self):
        await slow.wait()
        yield Ended("completed")

    stage.pipeline.scripts = [[Ended("completed")]]
    await stage.hear(np.concatenate([silence(0.5), talk(1.0)]))
    original = type(stage.pipeline.mind).reply

    def stuck(plan):
        reply = original(stage.pipeline.mind, plan)
        reply.pieces = wait_for_ever.__get__(reply)
        return reply

    stage.pipeline.mind.reply = stuck
    await stage.hear(np.concatenate([silence(0.5), talk(0.5, seed=2)]))
    assert stage.all(ReplyDone)[0].reason == "turn_detected"
    assert not stage.all(OutputCleared) and not stage.all(ItemTruncated)
    assert [type(item.content) for item in stage.conversation.items] == [Message]
    await stage.close()
    stage.check()


async def test_speech_after_the_reply_was_sent_but_while_it_is_heard_cuts_it():
    options = DialogueOptions(speaking=SpeakingOptions(most_ahead=None))
    stage = Stage.set(spoken(3.0), options=options)
    await answered(stage, 0.6)
    assert stage.all(ReplyDone)[0].reason == "completed"
    await stage.hear(talk(1.0, seed=6))
    assert [event.reply for event in stage.all(OutputCleared)] == [stage.all(ReplyDone)[0].reply]
    assert 500 < stage.all(ItemTruncated)[0].audio_end_ms < 1200
    await stage.close()
    stage.check()


async def test_sound_is_sent_at_pace():
    stage = Stage.set(spoken(3.0))
    await stage.hear(np.concatenate([silence(0.5), talk(1.0), silence(4.0)]))
    first = stage.time_of(ReplyAudio)
    sent = 0.0
    for event, time in zip(stage.told, stage.times, strict=True):
        if isinstance(event, ReplyAudio):
            assert sent - (time - first) <= 0.4 + 0.04, "never much more than the lead"
            assert sent - (time - first) >= 0.25 or sent < 0.4, "and never near dry"
            sent += len(event.samples) / 24_000
    await stage.close()
    stage.check()


async def test_no_interruptions_where_the_client_wants_none():
    stage = Stage.set(spoken(3.0), spoken(1.0), settings=with_turn(interrupt_response=False))
    await answered(stage, 0.5)
    await stage.hear(np.concatenate([talk(0.8, seed=6), silence(0.4)]))
    assert len(stage.all(TurnCommitted)) == 2 and not stage.all(ReplyDone)
    await stage.hear(silence(3.5))
    assert [event.reason for event in stage.all(ReplyDone)] == ["completed", "completed"]
    await stage.close()
    stage.check()


async def test_turns_are_only_noted_where_no_reply_is_wanted():
    stage = Stage.set(settings=with_turn(create_response=False))
    await stage.hear(np.concatenate([silence(0.5), talk(1.0), silence(1.0)]))
    assert stage.names() == ["SpeechStarted", "SpeechStopped", "TurnCommitted"]
    assert not stage.pipeline.made
    stage.conversation.reply()
    await stage.hear(silence(1.0))
    assert stage.all(ReplyAudio)
    await stage.close()
    stage.check()


async def test_turns_by_hand():
    stage = Stage.set(spoken(0.5), settings=with_turn(detector="none"))
    with pytest.raises(InputError, match="nothing was heard"):
        stage.conversation.commit()
    await stage.hear(silence(0.5))
    stage.conversation.clear_input()
    with pytest.raises(InputError, match="nothing was heard"):
        stage.conversation.commit()
    await stage.hear(talk(1.024))
    item = stage.conversation.commit()
    assert len(item.content.parts[0].samples) == 32 * 512
    assert not stage.all(SpeechStarted) and not stage.pipeline.made
    stage.conversation.reply()
    await stage.hear(talk(1.0))
    assert stage.all(ReplyDone)[0].reason == "completed", "what is heard does not interrupt"
    await stage.close()
    stage.check()


async def test_text_in_and_text_out():
    settings = ConversationSettings(modality="text")
    stage = Stage.set([Wrote("Hel"), Wrote("lo."), Ended("completed")], settings=settings)
    stage.conversation.add(Message("user", (TextPart("Hi"),)), id="item_mine")
    stage.conversation.reply()
    await stage.settle()
    assert [event.delta for event in stage.all(ReplyText)] == ["Hel", "lo."]
    assert stage.conversation.items[-1].content == Message("assistant", (TextPart("Hello."),))
    assert stage.all(ReplyItemStarted)[0].previous == "item_mine"
    await stage.close()
    stage.check()


async def test_a_tool_call_is_an_item_of_its_own():
    call = [CallBegan("call_1", "book"), CallArguments('{"seats":'), CallArguments(" 2}"), Ended("completed")]
    stage = Stage.set([Wrote("One moment."), Spoke(np.full(2400, 0.1, "f")), *call])
    stage.conversation.reply()
    await stage.settle()
    message, tool = stage.conversation.items
    assert tool.content == ToolCall("call_1", "book", '{"seats": 2}')
    started = stage.all(ReplyItemStarted)[1]
    assert (started.kind, started.tool_name, started.call_id, started.previous) == (
        *("tool_call", "book", "call_1"),
        message.id,
    )
    assert "".join(event.delta for event in stage.all(ToolArguments)) == '{"seats": 2}'
    stage.conversation.add(ToolOutput("call_1", "done"))
    assert [type(item.content) for item in stage.pipeline.mind.past] == [Message, ToolCall, ToolOutput]
    await stage.close()
    stage.check()


async def test_only_one_reply_at_a_time_and_cancel_ends_it():
    stage = Stage.set(spoken(5.0), spoken(1.0))
    with pytest.raises(InputError, match="no reply"):
        stage.conversation.cancel()
    first = stage.conversation.reply()
    await stage.hear(silence(0.5))
    with pytest.raises(InputError, match=first):
        stage.conversation.reply()
    stage.conversation.cancel(first)
    with pytest.raises(InputError, match="not under way"):
        stage.conversation.cancel(first)
    await stage.settle()
    assert stage.all(ReplyDone)[0].reason == "client_cancelled"
    stage.conversation.reply()
    await stage.hear(silence(1.5))
    assert stage.all(ReplyDone)[1].reason == "completed"
    await stage.close()
    stage.check()


@pytest.mark.parametrize("stops", ["cancel", "truncate"])
async def test_what_is_said_after_the_client_stopped_a_reply_is_not_said_over_it(stops):
    stage = Stage.set(spoken(5.0), spoken(0.4), options=DialogueOptions(echo=None))
    stage.conversation.reply()
    await stage.hear(silence(0.6))
    item = stage.all(ReplyAudio)[0].item
    stage.conversation.cancel() if stops == "cancel" else stage.conversation.truncate(item, 100)
    await stage.hear(np.concatenate([talk(0.4, 1, level_dbfs=-36.0), silence(0.6)]))  # too soft and short to interrupt
    assert len(stage.all(TurnCommitted)) == 1
    assert [done.reason for done in stage.all(ReplyDone)] == ["client_cancelled", "completed"]
    await stage.close()
    stage.check()


async def test_a_reply_out_of_band_leaves_nothing_in_the_history():
    stage = Stage.set(spoken(0.4), spoken(3.0))
    content = Message("user", (TextPart("classify"),))
    beside = stage.conversation.reply(ReplyRequest(is_out_of_band=True, input=[content]))
    stage.conversation.reply()
    await stage.hear(silence(1.0))
    assert [item.content for item in stage.pipeline.made[0].plan.past] == [content]
    assert stage.pipeline.made[1].plan.past is None
    assert stage.all(ReplyDone)[0].reply == beside
    assert len(stage.conversation.items) == 1
    await stage.close()
    stage.check()


async def test_a_client_can_cut_a_reply_and_knows_better_than_the_clock():
    stage = Stage.set(spoken(6.0, "one two three four five six seven eight nine ten"))
    await answered(stage)
    await stage.hear(talk(0.6, seed=6))
    ours = stage.all(ItemTruncated)[0]
    longer = stage.conversation.truncate(ours.item.id, ours.audio_end_ms + 100)
    assert len(longer.content.parts[0].samples) == (ours.audio_end_ms + 100) * 24
    shorter = stage.conversation.truncate(ours.item.id, 300)
    assert len(shorter.content.parts[0].samples) == 7200
    with pytest.raises(InputError, match="cannot be cut"):
        stage.conversation.truncate(ours.item.id, 60_000)
    with pytest.raises(InputError, match="no item"):
        stage.conversation.truncate("item_nobody", 0)
    with pytest.raises(InputError, match="not a reply"):
        stage.conversation.truncate(stage.conversation.items[0].id, 10)
    await stage.close()
    stage.check()


async def test_history_is_edited_by_id():
    stage = Stage.set()
    talk_of = stage.conversation
    first, _ = talk_of.add(Message("user", (TextPart("a"),)))
    second, previous = talk_of.add(Message("user", (TextPart("b"),)))
    assert previous == first.id
    middle, previous = talk_of.add(Message("user", (TextPart("between"),)), after=first.id)
    root, nothing = talk_of.add(Message("system", (TextPart("first"),)), after="root")
    assert (previous, nothing) == (first.id, None)
    assert [item.id for item in talk_of.items] == [root.id, first.id, middle.id, second.id]
    talk_of.delete(first.id)
    assert [item.id for item in stage.pipeline.mind.past] == [root.id, middle.id, second.id]
    for call in (lambda: talk_of.item(first.id), lambda: talk_of.delete(first.id)):
        with pytest.raises(InputError, match="no item"):
            call()
    with pytest.raises(InputError, match="exists already"):
        talk_of.add(Message("user", (TextPart("c"),)), id=second.id)
    with pytest.raises(InputError, match="no item"):
        talk_of.add(Message("user", (TextPart("c"),)), after=first.id)
    await stage.close()
    stage.check()


async def test_settings_reach_the_mind_and_the_next_turn():
    stage = Stage.set()
    stage.conversation.update(lambda settings: replace(settings, instructions="Be brief."))
    assert stage.pipeline.mind.settings.instructions == "Be brief."
    stage.conversation.update(lambda settings: replace(settings, turn=TurnSettings(silence_duration_ms=640)))
    await stage.hear(np.concatenate([silence(0.5), talk(1.0), silence(0.5)]))
    assert not stage.all(SpeechStopped)
    await stage.hear(silence(0.3))
    assert stage.all(SpeechStopped)
    await stage.close()
    stage.check()


async def test_nobody_speaking_for_long_is_a_turn_too():
    stage = Stage.set(spoken(0.4), settings=with_turn(idle_timeout_ms=1024))
    await stage.hear(silence(1.2))
    (timed_out,) = stage.all(TurnTimedOut)
    assert timed_out.audio_end_ms - timed_out.audio_start_ms == 1024
    assert stage.all(TurnCommitted)[0].item.id == timed_out.item
    assert stage.all(ReplyAudio)
    await stage.close()
    stage.check()


async def test_words_that_may_not_be_said_stop_the_reply_before_their_sound():
    options = DialogueOptions(speaking=SpeakingOptions(moderation=Moderation(WordList(["secret"]))))
    noise = 0.05 * np.random.default_rng(0).standard_normal(12_000).astype("f")
    script = [Wrote("The code is "), Spoke(noise), Wrote("secret"), Spoke(noise), Ended("completed")]
    stage = Stage.set(script, options=options)
    stage.conversation.reply()
    await stage.hear(silence(1.5))
    assert stage.all(ReplyDone)[0].reason == "content_filter"
    assert sum(len(event.samples) for event in stage.all(ReplyAudio)) == 12_000
    assert "".join(event.delta for event in stage.all(ReplyText)) == "The code is "
    assert stage.names()[-3:] == ["ReplyDone", "OutputCleared", "ItemTruncated"]
    assert stage.all(ItemTruncated)[0].audio_end_ms < 500, "what was sent ahead is not heard either"
    assert stage.all(Warned)[0].code == "content_filter"
    await stage.close()
    stage.check()


async def test_sound_is_held_back_for_words_that_come_after_it():
    moderation = Moderation(WordList(["secret"]), window=1.0)
    options = DialogueOptions(speaking=SpeakingOptions(moderation=moderation))
    noise = 0.05 * np.random.default_rng(0).standard_normal(12_000).astype("f")
    script = [Spoke(noise), Spoke(noise), Spoke(noise), Wrote("a secret", at=0.6), Spoke(noise), Ended("completed")]
    stage = Stage.set(script, options=options)
    stage.conversation.reply()
    await stage.hear(silence(2.0))
    assert stage.all(ReplyDone)[0].reason == "content_filter"
    assert sum(len(event.samples) for event in stage.all(ReplyAudio)) == 12_000, "0.5 s went out, not the word at 0.6"
    await stage.close()
    stage.check()


async def test_a_stuck_reply_is_ended():
    tone = (0.1 * np.sin(2 * np.pi * 200 * np.arange(24_000 * 6) / 24_000)).astype("f")
    stage = Stage.set([*(Spoke(part) for part in np.split(tone, 12)), Ended("completed")])
    stage.conversation.reply()
    await stage.hear(silence(7.0))
    assert stage.all(ReplyDone)[0].reason == "max_output_tokens"
    assert stage.all(Warned)[0].code == "reply_guard" and "stuck" in stage.all(Warned)[0].message
    await stage.close()
    stage.check()


async def test_a_pipeline_that_fails_fails_one_reply():
    stage = Stage.set([Wrote("So"), Ended("failed", "the engine is out of pages")], spoken(0.4))
    stage.conversation.reply()
    await stage.settle()
    done = stage.all(ReplyDone)[0]
    assert (done.reason, done.error) == ("failed", "the engine is out of pages")
    stage.conversation.reply()
    await stage.hear(silence(1.0))
    assert stage.all(ReplyDone)[1].reason == "completed"
    await stage.close()
    stage.check()


async def test_the_users_words_are_told_where_they_are_wanted():
    class Listener:
        async def transcribe(self, samples, rate, language=None):
            return f"{len(samples) / rate:.1f} seconds"

    stage = Stage.set(
        settings=ConversationSettings(transcribe_input=True), options=DialogueOptions(transcriber=Listener())
    )
    await stage.hear(np.concatenate([silence(0.5), talk(1.0), silence(0.5)]))
    (transcript,) = stage.all(InputTranscript)
    assert transcript.is_final and transcript.text.endswith("seconds") and transcript.seconds > 1.0
    assert stage.conversation.items[0].content.parts[0].transcript == transcript.text
    sounded = next(place for place, event in enumerate(stage.told) if isinstance(event, ReplyAudio))
    assert stage.told.index(transcript) > sounded  # nobody waits for words as for an answer
    await stage.close()
    stage.check()


async def test_words_do_not_wait_for_the_end_of_a_written_reply():
    class Listener:
        async def transcribe(self, samples, rate, language=None):
            return "words"

    settings = ConversationSettings(transcribe_input=True, modality="text")
    script = [Wrote("One. "), *[Wrote("More. ")] * 40, Ended("completed")]
    stage = Stage.set(script, settings=settings, options=DialogueOptions(transcriber=Listener()))
    await stage.hear(np.concatenate([silence(0.5), talk(1.0), silence(0.6)]))
    told = [type(event) for event in stage.told]
    assert told.index(ReplyText) < told.index(InputTranscript) < told.index(ReplyDone)
    await stage.close()


@pytest.mark.parametrize("create_response", [True, False])
async def test_words_do_not_wait_for_a_reply_that_is_not_made(create_response):
    class Listener:
        async def transcribe(self, samples, rate, language=None):
            return "words"

    settings = ConversationSettings(transcribe_input=True, turn=TurnSettings(create_response=create_response))
    stage = Stage.set([Ended("failed", "no")], settings=settings, options=DialogueOptions(transcriber=Listener()))
    await stage.hear(np.concatenate([silence(0.5), talk(1.0), silence(0.5)]))
    assert [event.text for event in stage.all(InputTranscript)] == ["words"]
    await stage.close()


async def test_sound_that_is_none_is_refused_and_changes_nothing():
    stage = Stage.set()
    for wrong in (np.array([np.nan, 0.0], "f"), np.zeros((2, 4), "f"), np.zeros(4, np.int16)):
        with pytest.raises(InputError, match="sound"):
            stage.conversation.hear(wrong)
    await stage.hear(np.concatenate([silence(0.5), talk(1.0), silence(0.5)]))
    assert stage.all(TurnCommitted)
    await stage.close()
    stage.check()


async def test_a_closed_conversation_says_so():
    stage = Stage.set(spoken(5.0))
    stage.conversation.reply()
    await stage.hear(silence(0.5))
    await stage.close()
    await stage.conversation.close()
    assert stage.all(ReplyDone)[0].reason == "client_cancelled"
    with pytest.raises(InputError, match="closed"):
        stage.conversation.hear(np.zeros(10, "f"))
    stage.check()


async def test_a_turn_that_never_ends_is_ended(monkeypatch):
    monkeypatch.setattr("vivavoce.dialogue.listening.LONGEST_TURN_SECONDS", 2.0)
    stage = Stage.set(settings=with_turn(create_response=False))
    await stage.hear(np.concatenate([silence(0.5), talk(3.0)]))
    assert stage.all(TurnCommitted) and stage.all(Warned)[0].code == "turn_too_long"
    await stage.close()
    stage.check()


async def test_the_sound_of_old_turns_is_forgotten_but_not_their_words(monkeypatch):
    monkeypatch.setattr("vivavoce.dialogue.history.MOST_SOUND_SECONDS", 3.0)
    stage = Stage.set()
    for number in range(4):
        stage.conversation.add(Message("user", (AudioPart(np.zeros(16_000, "f"), 16_000, f"word {number}"),)))
    lengths = [len(item.content.parts[0].samples) for item in stage.conversation.items]
    assert lengths == [0, 16_000, 16_000, 16_000]
    assert stage.conversation.items[0].content.parts[0].transcript == "word 0"
    await stage.close()


class Loudspeaker:
    """Plays what a stage tells after a delay, and says what a microphone beside it hears."""

    def __init__(self, stage: Stage, delay: float, gain: float) -> None:
        self.stage, self.delay, self.gain = stage, delay, gain
        self.sound = np.zeros(0, np.float32)
        self.told = 0

    def microphone(self, now: float) -> np.ndarray:
        for event, time in list(zip(self.stage.told, self.stage.times, strict=True))[self.told :]:
            self.told += 1
            if isinstance(event, ReplyAudio) and len(event.samples):
                start = round((time + self.delay) * 16_000)
                if start > len(self.sound):
                    self.sound = np.concatenate([self.sound, np.zeros(start - len(self.sound), np.float32)])
                self.sound = np.concatenate([self.sound, resample(event.samples[None], 24_000, 16_000)[0]])
        heard = np.zeros(512, np.float32)
        begin = round(now * 16_000)
        piece = self.sound[begin : begin + 512]
        heard[: len(piece)] = piece
        return self.gain * heard


@pytest.mark.parametrize("delay", [0.06, 0.15])
@pytest.mark.parametrize("guarded", [True, False])
async def test_a_loudspeaker_20_db_softer_does_not_interrupt_itself(delay, guarded):
    sound = np.repeat(talk(5.0, seed=9, level_dbfs=-20), 3).reshape(-1, 2)[:, 0].astype("f")  # 24 kHz, an octave higher
    script = [*(Spoke(part) for part in np.array_split(sound, 12)), Ended("completed")]
    options = DialogueOptions() if guarded else DialogueOptions(echo=None)
    stage = Stage.set(script, options=options)
    room = Loudspeaker(stage, delay, gain=0.1)
    stage.conversation.reply()
    noise = silence(7.0)
    for number in range(200):
        await stage.hear(noise[number * 512 : number * 512 + 512] + room.microphone(stage.clock.now()))
    told = stage.names()
    await stage.close()
    if guarded:
        assert "SpeechStarted" not in told and stage.all(ReplyDone)[0].reason == "completed"
    else:
        assert "SpeechStarted" in told, "without the guard it would"


async def test_conversations_that_are_over_are_forgotten():
    ghosts = []
    for _ in range(10):
        stage = Stage.set(spoken(0.4))
        await stage.hear(np.concatenate([talk(0.5), silence(0.5)]))
        await stage.close()
        ghosts.append(weakref.ref(stage.conversation))
        del stage
    gc.collect()
    assert not [ghost for ghost in ghosts if ghost() is not None]


@pytest.mark.parametrize(("finished", "silent"), [(0.9, 0.192), (0.1, 1.0)])
async def test_a_turn_model_decides_how_long_a_pause_may_be(finished, silent):
    asked = []

    def model(samples):
        asked.append(len(samples))
        return finished

    settings = with_turn(detector="semantic", eagerness="high", silence_duration_ms=320)
    stage = Stage.set(settings=settings, options=DialogueOptions(turn_model=model))
    await stage.hear(np.concatenate([silence(0.5), talk(1.0), silence(0.128)]))
    async with asyncio.timeout(10):
        while stage.conversation._tasks:
            await asyncio.sleep(0)
    assert len(asked) == 1 and asked[0] > 16_000
    await stage.hear(silence(silent))
    assert bool(stage.all(SpeechStopped)) == (finished > 0.5)
    await stage.hear(silence(1.2))
    assert stage.all(SpeechStopped), "patience has an end"
    await stage.close()
    stage.check()
