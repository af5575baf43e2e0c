"""MOSS-Speech that reads what a recogniser writes down of the user's turns, on the untrained miniature."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from tests.s2s.small_parts import SpeechParts, small_speech
from tests.s2s.test_moss_speech import SHORT, Caller, asked, pages_held
from vivavoce.dialogue.conversation import ReplyRequest
from vivavoce.dialogue.events import InputTranscript, InputTranscriptFailed, ReplyDone
from vivavoce.dialogue.items import AudioPart, Message
from vivavoce.dialogue.settings import TurnSettings
from vivavoce.errors import VivaError
from vivavoce.models.moss_speech.prompt import DEFAULT_SYSTEM, Turn
from vivavoce.tts.text import numbers_as_words

LISTENING = replace(SHORT, transcribe_input=True)


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> SpeechParts:
    return small_speech(tmp_path_factory.mktemp("untrained"))


@dataclass
class Transcripts:
    """A recogniser whose transcripts, in order, are given; an exception is raised."""

    texts: list[str | Exception]
    seconds: list[float] = field(default_factory=list)

    async def transcribe(self, samples, rate, language=None):
        self.seconds.append(len(samples) / rate)
        text = self.texts[min(len(self.seconds), len(self.texts)) - 1]
        if isinstance(text, Exception):
            raise text
        return text


async def rows_of(caller: Caller) -> list[int]:
    """The text channel of the conversation's sequence."""
    caller.clock.advance(3.0)  # until the reply has been played
    await caller.settled()
    return [row[0] for row in caller.conversation._state._sequence.rows]


def text_rows(parts: SpeechParts, words: str) -> list[int]:
    turns = [Turn("system", DEFAULT_SYSTEM["speech"]), Turn("user", words)]
    return [row[0] for turn in turns for row in parts.prompt.turn(turn)]


async def test_the_model_reads_the_words_and_the_caption_has_them(parts):
    recogniser = Transcripts(["Wake us at 8:30."])
    async with parts.pipeline(recogniser=recogniser, normalise=numbers_as_words) as pipeline:
        caller = Caller.on(pipeline, settings=LISTENING)
        await caller.hear(asked())
        await caller.until(ReplyDone)
        await caller.until(InputTranscript)
        (heard,) = caller.all(InputTranscript)
        assert (heard.text, heard.is_final) == ("Wake us at 8:30.", True), "as it was written down"
        expected = text_rows(parts, numbers_as_words("Wake us at 8:30."))
        assert (await rows_of(caller))[: len(expected)] == expected, "as the model was trained"
        usage = caller.all(ReplyDone)[0].usage
        assert usage.input_audio == 0 and usage.output_audio == 12
        assert len(caller.sound()) == 12 * parts.codec.samples_per_code
        await caller.close()
        assert pages_held(pipeline) == 0


async def test_a_turn_without_words_gets_no_reply_and_the_next_one_does(parts):
    async with parts.pipeline(recogniser=Transcripts(["", "What time is it?"])) as pipeline:
        caller = Caller.on(pipeline, settings=LISTENING)
        await caller.hear(asked())
        await caller.until(ReplyDone)
        assert not caller.all(ReplyDone)[0].usage.output_audio and caller.all(ReplyDone)[0].reason == "completed"
        await caller.hear(asked(1))
        await caller.until(ReplyDone, 2)
        assert len(caller.sound()) == 12 * parts.codec.samples_per_code
        assert [event.text for event in caller.all(InputTranscript)] == ["", "What time is it?"]
        await caller.close()


async def test_a_recogniser_that_fails_costs_its_turn_alone(parts):
    recogniser = Transcripts([VivaError("the recogniser is broken"), "What time is it?"])
    async with parts.pipeline(recogniser=recogniser) as pipeline:
        caller = Caller.on(pipeline, settings=LISTENING)
        await caller.hear(asked())
        await caller.until(ReplyDone)
        await caller.until(InputTranscriptFailed)
        assert caller.all(ReplyDone)[0].error == "the recogniser is broken"
        await caller.hear(asked(1))
        await caller.until(ReplyDone, 2)
        assert caller.all(ReplyDone)[1].reason == "max_output_tokens" and len(recogniser.seconds) == 2
        expected = text_rows(parts, "What time is it?")
        assert (await rows_of(caller))[: len(expected)] == expected
        await caller.close()


async def test_a_turn_that_the_client_ends_is_written_down_when_it_is_committed(parts):
    async with parts.pipeline(recogniser=Transcripts(["What time is it?"])) as pipeline:
        caller = Caller.on(pipeline, settings=replace(LISTENING, turn=TurnSettings(detector="none")))
        await caller.hear(asked())
        caller.conversation.commit()
        await caller.until(InputTranscript)
        caller.conversation.reply()
        await caller.until(ReplyDone)
        expected = text_rows(parts, "What time is it?")
        assert (await rows_of(caller))[: len(expected)] == expected
        await caller.close()


async def test_sound_that_a_client_adds_is_written_down_too(parts):
    recogniser = Transcripts(["What time is it?"])
    async with parts.pipeline(recogniser=recogniser) as pipeline:
        caller = Caller.on(pipeline, settings=LISTENING)
        caller.conversation.add(Message("user", (AudioPart(np.ones(24_000, np.float32), 24_000),)))
        caller.conversation.reply(ReplyRequest())
        await caller.until(ReplyDone)
        assert recogniser.seconds == [1.0]
        expected = text_rows(parts, "What time is it?")
        assert (await rows_of(caller))[: len(expected)] == expected
        await caller.close()
