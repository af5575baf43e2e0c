"""Transcripts of turns by speaker: letters that last over turns, and turns in which two speak."""

import numpy as np
import pytest

from tests.dialogue.marked_voices import by_mark, voice
from tests.dialogue.stage import Stage, with_turn
from tests.dialogue.test_speaker import InlineExecutor
from tests.dialogue.voices import silence
from vivavoce.dialogue.events import InputTranscript
from vivavoce.dialogue.session import DialogueOptions
from vivavoce.dialogue.settings import RecognitionSettings
from vivavoce.dialogue.turn_speakers import TurnSpeakers


class LengthRecogniser:
    """Writes down how long a sound is, in tenths of a second."""

    async def transcribe(self, samples, rate, language=None):
        return f"{round(10 * len(samples) / rate)}"


async def transcribe(sound):
    return await LengthRecogniser().transcribe(sound, 16_000)


async def test_a_turn_of_one_speaker_is_one_segment_of_all_its_text():
    speakers = TurnSpeakers()
    sound = voice(1.5).astype(np.float32)
    (segment,) = await speakers.segments("Good morning.", sound, by_mark, transcribe)
    assert (segment.speaker, segment.text, segment.start, segment.end) == ("A", "Good morning.", 0.0, 1.5)
    (other,) = await speakers.segments("Hello.", voice(1.5, is_user=False), by_mark, transcribe)
    (again,) = await speakers.segments("Yes.", sound, by_mark, transcribe)
    assert (other.speaker, again.speaker) == ("B", "A")


async def test_a_turn_of_two_speakers_is_transcribed_in_parts():
    sound = np.concatenate([voice(2.0), silence(0.3), voice(2.0, is_user=False)]).astype(np.float32)
    segments = await TurnSpeakers().segments("all of it", sound, by_mark, transcribe)
    assert [segment.speaker for segment in segments] == ["A", "B"]
    assert all(15 <= int(segment.text) <= 27 for segment in segments)
    assert segments[0].end == pytest.approx(2.0, abs=0.5) and segments[1].end == pytest.approx(4.3, abs=0.3)


async def test_silence_has_no_segments():
    assert await TurnSpeakers().segments("", silence(1.0), by_mark, transcribe) == ()


@pytest.mark.parametrize("with_speakers", [True, False])
async def test_a_conversation_says_who_spoke_where_it_is_asked_to(with_speakers):
    settings = with_turn()
    recognition = RecognitionSettings(with_speakers=with_speakers)
    stage = Stage.set(
        settings=type(settings)(turn=settings.turn, transcribe_input=True, recognition=recognition),
        options=DialogueOptions(voices=by_mark, transcriber=LengthRecogniser()),
    )
    stage._reader.get_loop().set_default_executor(InlineExecutor())
    for is_user in (True, False):
        await stage.hear(np.concatenate([silence(0.5), voice(1.6, is_user), silence(3.0)]))
    transcripts = [event for event in stage.all(InputTranscript) if event.is_final]
    assert len(transcripts) == 2
    speakers = [[segment.speaker for segment in each.segments] for each in transcripts]
    assert speakers == ([["A"], ["B"]] if with_speakers else [[], []])
    await stage.close()


async def test_an_embedding_that_fails_costs_the_speakers_alone():
    def fails(sound):
        raise RuntimeError("no memory")

    settings = with_turn()
    stage = Stage.set(
        settings=type(settings)(
            turn=settings.turn, transcribe_input=True, recognition=RecognitionSettings(with_speakers=True)
        ),
        options=DialogueOptions(voices=fails, transcriber=LengthRecogniser()),
    )
    stage._reader.get_loop().set_default_executor(InlineExecutor())
    await stage.hear(np.concatenate([silence(0.5), voice(1.6), silence(3.0)]))
    (transcript,) = [event for event in stage.all(InputTranscript) if event.is_final]
    assert transcript.text and transcript.segments == ()
    await stage.close()
