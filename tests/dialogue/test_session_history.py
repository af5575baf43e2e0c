"""What is remembered of a conversation, the user's words, and what is left when it is over."""

import asyncio
import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

from tests.dialogue.stage import Stage, answered, spoken, with_turn
from tests.dialogue.voices import silence, talk
from vivavoce.dialogue.backend import Ended, Wrote
from vivavoce.dialogue.events import InputTranscript, ItemTruncated, ReplyAudio, ReplyDone, ReplyText, TurnCommitted
from vivavoce.dialogue.items import AudioPart, Message, TextPart
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.errors import InputError

pytestmark = pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of sockets that other tests left open


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
    assert [item.id for item in stage.backend.state.past] == [root.id, middle.id, second.id]
    for call in (lambda: talk_of.item(first.id), lambda: talk_of.delete(first.id)):
        with pytest.raises(InputError, match="no item"):
            call()
    with pytest.raises(InputError, match="exists already"):
        talk_of.add(Message("user", (TextPart("c"),)), id=second.id)
    with pytest.raises(InputError, match="no item"):
        talk_of.add(Message("user", (TextPart("c"),)), after=first.id)
    await stage.close()
    stage.check()


async def test_input_transcripts_are_emitted_where_requested():
    class Listener:
        async def transcribe(self, samples, rate, language=None):
            return f"{len(samples) / rate:.1f} seconds"

    stage = Stage.set(
        settings=replace(with_turn(), transcribe_input=True), options=DialogueOptions(transcriber=Listener())
    )
    await stage.hear(np.concatenate([silence(0.5), talk(1.0), silence(0.5)]))
    (transcript,) = stage.all(InputTranscript)
    assert transcript.is_final and transcript.text.endswith("seconds") and transcript.seconds > 1.0
    assert stage.conversation.items[0].content.parts[0].transcript == transcript.text
    sounded = next(index for index, event in enumerate(stage.events) if isinstance(event, ReplyAudio))
    assert stage.events.index(transcript) > sounded  # nobody waits for words as for an answer
    await stage.close()
    stage.check()


async def test_words_do_not_wait_for_the_end_of_a_written_reply():
    class Listener:
        async def transcribe(self, samples, rate, language=None):
            return "words"

    settings = replace(with_turn(), transcribe_input=True, modality="text")
    script = [Wrote("One. "), *[Wrote("More. ")] * 40, Ended("completed")]
    stage = Stage.set(script, settings=settings, options=DialogueOptions(transcriber=Listener()))
    await stage.hear(np.concatenate([silence(0.5), talk(1.0), silence(0.6)]))
    events = [type(event) for event in stage.events]
    assert events.index(ReplyText) < events.index(InputTranscript) < events.index(ReplyDone)
    await stage.close()


@pytest.mark.parametrize("create_response", [True, False])
async def test_words_do_not_wait_for_a_reply_that_is_not_made(create_response):
    class Listener:
        async def transcribe(self, samples, rate, language=None):
            return "words"

    settings = replace(with_turn(create_response=create_response), transcribe_input=True)
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


async def test_the_sound_of_old_turns_is_forgotten_but_not_their_words(monkeypatch):
    monkeypatch.setattr("vivavoce.dialogue.history.MAX_SOUND_SECONDS", 3.0)
    stage = Stage.set()
    for number in range(4):
        stage.conversation.add(Message("user", (AudioPart(np.zeros(16_000, "f"), 16_000, f"word {number}"),)))
    lengths = [len(item.content.parts[0].samples) for item in stage.conversation.items]
    assert lengths == [0, 16_000, 16_000, 16_000]
    assert stage.conversation.items[0].content.parts[0].transcript == "word 0"
    await stage.close()


async def test_conversations_that_are_over_are_forgotten():
    ghosts = []
    for _ in range(10):
        stage = Stage.set(spoken(0.4))
        await stage.hear(np.concatenate([talk(0.5), silence(0.5)]))
        await stage.close()
        ghosts.append(weakref.ref(stage.conversation))
        del stage
    async with asyncio.timeout(20):
        while [ghost for ghost in ghosts if ghost() is not None]:
            await asyncio.sleep(0.01)  # for tasks that end on other threads to let go
            gc.collect()
