"""Replies on their way out: paced, checked, one at a time, ended once."""

import numpy as np
import pytest

from tests.dialogue.stage import Stage, spoken
from tests.dialogue.voices import silence, talk
from vivavoce.dialogue.backend import CallArguments, CallBegan, Ended, Spoke, Wrote
from vivavoce.dialogue.conversation import ReplyRequest
from vivavoce.dialogue.events import (
    ItemTruncated,
    ReplyAudio,
    ReplyDone,
    ReplyItemStarted,
    ReplyText,
    ToolArguments,
    Warned,
)
from vivavoce.dialogue.items import Message, TextPart, ToolCall, ToolOutput
from vivavoce.dialogue.moderation import Moderation, WordList
from vivavoce.dialogue.replies import MAX_OUT_OF_BAND
from vivavoce.dialogue.reply import SpeakingOptions
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.errors import InputError

pytestmark = pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of sockets that other tests left open


async def test_sound_is_handed_out_as_soon_as_it_is_made():
    stage = Stage.set(spoken(3.0), ahead=None)
    stage.conversation.reply()
    await stage.settle()
    assert sum(len(event.samples) for event in stage.all(ReplyAudio)) == 3 * 24_000
    assert stage.all(ReplyDone)[0].reason == "completed" and stage.clock.now() == 0.0
    assert stage.backend.replies[0].plan.played() == 0.0
    stage.clock.advance(1.0)
    assert stage.backend.replies[0].plan.played() == 1.0, "when it is played is for the output to decide"
    await stage.close()
    stage.check()


@pytest.mark.parametrize("ahead", [0.4, None], ids=["being made", "complete"])
async def test_of_a_cancelled_reply_the_history_keeps_what_was_played(ahead):
    stage = Stage.set(spoken(5.0, "one two three four five six seven eight nine ten"), ahead=ahead)
    reply = stage.conversation.reply()
    await stage.hear(silence(2.0))
    stage.conversation.cancel(reply)
    (part,) = stage.conversation.items[-1].content.parts
    assert len(part.samples) / 24_000 == pytest.approx(2.0, abs=0.06)
    assert part.transcript and "one two three four five six".startswith(part.transcript)
    assert stage.backend.state.past[-1] == stage.conversation.items[-1]
    with pytest.raises(InputError, match="not in progress"):
        stage.conversation.cancel(reply)
    stage.conversation.truncate(stage.conversation.items[-1].id, 2300)
    (part,) = stage.conversation.items[-1].content.parts
    assert len(part.samples) == round(2.3 * 24_000), "the client knows better"
    await stage.close()
    stage.check()


async def test_a_reply_behind_another_is_played_when_that_is_over():
    stage = Stage.set(spoken(2.0), spoken(2.0, "later words"), ahead=None)
    stage.conversation.reply()
    await stage.hear(silence(0.5))
    stage.conversation.reply()
    await stage.hear(silence(1.0))
    assert stage.backend.replies[1].plan.played() == 0.0
    await stage.hear(silence(1.0))
    assert stage.backend.replies[1].plan.played() == pytest.approx(0.5, abs=0.1)
    stage.conversation.cancel()
    (part,) = stage.conversation.items[-1].content.parts
    assert len(part.samples) / 24_000 == pytest.approx(0.5, abs=0.1)
    assert len(stage.conversation.items[0].content.parts[0].samples) == 48_000
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
    assert [type(item.content) for item in stage.backend.state.past] == [Message, ToolCall, ToolOutput]
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
    with pytest.raises(InputError, match="not in progress"):
        stage.conversation.cancel(first)
    await stage.settle()
    assert stage.all(ReplyDone)[0].reason == "client_cancelled"
    stage.conversation.reply()
    await stage.hear(silence(1.5))
    assert stage.all(ReplyDone)[1].reason == "completed"
    await stage.close()
    stage.check()


async def test_a_reply_out_of_band_leaves_nothing_in_the_history():
    stage = Stage.set(spoken(0.4), spoken(3.0))
    content = Message("user", (TextPart("classify"),))
    beside = stage.conversation.reply(ReplyRequest(is_out_of_band=True, input=[content]))
    stage.conversation.reply()
    await stage.hear(silence(1.0))
    assert [item.content for item in stage.backend.replies[0].plan.past] == [content]
    assert stage.backend.replies[1].plan.past is None
    assert stage.all(ReplyDone)[0].reply == beside
    assert len(stage.conversation.items) == 1
    await stage.close()
    stage.check()


async def test_replies_out_of_band_are_bounded_and_do_not_hide_the_one_being_said():
    stage = Stage.set(spoken(3.0), *[spoken(3.0)] * MAX_OUT_OF_BAND)
    said = stage.conversation.reply()
    await stage.hear(silence(1.5))
    beside = [stage.conversation.reply(ReplyRequest(is_out_of_band=True)) for _ in range(MAX_OUT_OF_BAND)]
    with pytest.raises(InputError, match="out-of-band"):
        stage.conversation.reply(ReplyRequest(is_out_of_band=True))
    for reply in beside:
        stage.conversation.cancel(reply)
    stage.conversation.played(said, 100)
    await stage.hear(talk(1.0))
    assert stage.all(ReplyDone)[-1].reason == "turn_detected"
    assert stage.all(ItemTruncated)[-1].audio_end_ms < 1000, "cut to what the client says that it played"
    await stage.close()
    stage.check()


async def test_moderation_stops_the_reply_before_the_sound_of_forbidden_words():
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
    stage = Stage.set(script, options=options, ahead=None)
    stage.conversation.reply()
    await stage.hear(silence(2.0))
    assert stage.backend.replies[0].plan.max_ahead == 7.0, "what is held back does not count as made ahead"
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


async def test_a_failing_backend_fails_one_reply():
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
