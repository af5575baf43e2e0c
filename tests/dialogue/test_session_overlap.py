"""Speaking over a reply: who yields, what is then history, and our own echo."""

import asyncio

import numpy as np
import pytest

from tests.dialogue.stage import Stage, answered, spoken, with_turn
from tests.dialogue.voices import cough, hum, silence, talk
from vivavoce.audio.resample import resample
from vivavoce.dialogue.backend import Ended, Spoke, Wrote
from vivavoce.dialogue.events import (
    ItemTruncated,
    OutputCleared,
    OverlapJudged,
    ReplyAudio,
    ReplyDone,
    ReplyItemDone,
    ReplyStarted,
    SpeechStarted,
    TurnCommitted,
)
from vivavoce.dialogue.items import Message
from vivavoce.dialogue.session import DialogueOptions

pytestmark = pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of sockets that other tests left open


async def test_an_interruption_ducks_then_stops_and_keeps_what_was_heard():
    stage = Stage.set(spoken(6.0, "one two three four five six seven eight nine ten eleven twelve"))
    reply = await answered(stage)
    started, count = stage.clock.now(), len(stage.events)
    await stage.hear(talk(1.0, seed=6))
    after = stage.events[count:]
    assert [type(event) for event in after if not isinstance(event, ReplyAudio)] == [
        *(OverlapJudged, SpeechStarted, ReplyItemDone, ReplyDone, OutputCleared, ItemTruncated),
    ]
    assert stage.all(ReplyDone)[0].reason == "turn_detected"
    assert stage.time_of(ReplyDone) - started <= 0.3
    assert any(event.gain < 1 for event in after if isinstance(event, ReplyAudio))
    cut = stage.all(ItemTruncated)[0]
    heard = stage.time_of(ReplyDone) - stage.time_of(ReplyAudio)
    assert cut.audio_end_ms == pytest.approx(heard * 1e3, abs=2)
    (part,) = cut.item.content.parts
    assert len(part.samples) / 24 == pytest.approx(cut.audio_end_ms, abs=1)
    assert part.transcript and "one two three four five six seven eight".startswith(part.transcript)
    assert not cut.item.is_complete
    assert stage.backend.state.past[-1] == stage.conversation.item(cut.item.id)
    await stage.hear(silence(0.6))
    assert len(stage.all(TurnCommitted)) == 2 and len(stage.all(ReplyStarted)) == 2
    assert stage.all(ReplyAudio)[-1].reply != reply
    await stage.close()
    stage.check()


@pytest.mark.parametrize("ahead", [0.4, None], ids=["being made", "complete"])
@pytest.mark.parametrize(
    ("sound", "verdicts"),
    [(hum(0.4, seed=2), ["backchannel"]), (hum(0.3, seed=3), ["backchannel"]), (cough(1), [])],
    ids=["mm-hm", "mm", "cough"],
)
async def test_a_backchannel_or_a_cough_does_not_stop_the_reply(sound, verdicts, ahead):
    stage = Stage.set(spoken(4.0), ahead=ahead)
    await answered(stage)
    count = len(stage.events)
    await stage.hear(np.concatenate([sound, silence(1.0)]))
    assert bool(stage.all(ReplyDone)) == (ahead is None) and len(stage.all(SpeechStarted)) == 1
    assert all(isinstance(event, ReplyAudio | OverlapJudged) for event in stage.events[count:])
    assert [event.verdict for event in stage.all(OverlapJudged)] == verdicts
    assert stage.all(ReplyAudio)[-1].gain == 1.0
    await stage.hear(silence(3.0))
    assert stage.all(ReplyDone)[0].reason == "completed"
    await stage.close()
    stage.check()


async def test_what_the_client_reports_as_played_is_what_was_heard():
    stage = Stage.set(spoken(6.0))
    reply = await answered(stage)
    stage.conversation.played(reply, 1300)
    stage.conversation.played(reply, 400)
    await stage.hear(talk(1.0, seed=6))
    assert stage.all(ItemTruncated)[0].audio_end_ms == 1300
    await stage.close()
    stage.check()


async def test_an_interruption_before_the_first_sound_leaves_no_words():
    options = DialogueOptions(holds_replies=False, join_within_ms=0)
    stage = Stage.set([Wrote("Hm"), Ended("completed")], options=options)
    slow = asyncio.Event()

    async def wait_for_ever(self):
        await slow.wait()
        yield Ended("completed")

    stage.backend.scripts = [[Ended("completed")]]
    await stage.hear(np.concatenate([silence(0.5), talk(1.0)]))
    original = type(stage.backend.state).reply

    def stuck(plan):
        reply = original(stage.backend.state, plan)
        reply.pieces = wait_for_ever.__get__(reply)
        return reply

    stage.backend.state.reply = stuck
    await stage.hear(np.concatenate([silence(0.5), talk(0.5, seed=2)]))
    assert stage.all(ReplyDone)[0].reason == "turn_detected"
    assert not stage.all(OutputCleared) and not stage.all(ItemTruncated)
    assert [type(item.content) for item in stage.conversation.items] == [Message]
    await stage.close()
    stage.check()


async def test_speech_after_the_reply_was_sent_but_while_it_is_heard_cuts_it():
    stage = Stage.set(spoken(3.0), ahead=None)
    await answered(stage, 1.4)
    assert stage.all(ReplyDone)[0].reason == "completed"
    await stage.hear(talk(1.0, seed=6))
    assert any(event.gain < 1 for event in stage.all(ReplyAudio)), "what was handed out is ducked too"
    assert [event.reply for event in stage.all(OutputCleared)] == [stage.all(ReplyDone)[0].reply]
    assert 1300 < stage.all(ItemTruncated)[0].audio_end_ms < 2000
    await stage.close()
    stage.check()


@pytest.mark.parametrize("ahead", [0.4, None], ids=["being made", "complete"])
async def test_no_interruptions_where_the_client_wants_none(ahead):
    stage = Stage.set(spoken(3.0), spoken(1.0), settings=with_turn(interrupt_response=False), ahead=ahead)
    await answered(stage, 0.5)
    await stage.hear(np.concatenate([talk(0.8, seed=6), silence(0.4)]))
    assert len(stage.all(TurnCommitted)) == 2 and not stage.all(OutputCleared)
    await stage.hear(silence(3.5))
    assert [event.reason for event in stage.all(ReplyDone)] == ["completed", "completed"]
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


class Loudspeaker:
    """Plays what a stage tells after a delay, and says what a microphone beside it hears."""

    def __init__(self, stage: Stage, delay: float, gain: float) -> None:
        self.stage, self.delay, self.gain = stage, delay, gain
        self.sound = np.zeros(0, np.float32)
        self.seen = 0

    def microphone(self, now: float) -> np.ndarray:
        for event, time in list(zip(self.stage.events, self.stage.times, strict=True))[self.seen :]:
            self.seen += 1
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
    names = stage.names()
    await stage.close()
    if guarded:
        assert "SpeechStarted" not in names and stage.all(ReplyDone)[0].reason == "completed"
    else:
        assert "SpeechStarted" in names, "without the guard it would"


class KnownEcho:
    """An echo remover that lets everything through, and takes a fixed share of it for echo."""

    def __init__(self, share: float) -> None:
        self.share = share

    def initial_state(self) -> None:
        """None."""

    def step(self, state: None, microphone: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, float, None]:
        return microphone, self.share, None


@pytest.mark.parametrize(("share", "is_turn"), [(0.8, False), (0.2, True)])
@pytest.mark.parametrize("lead", [0.0, 0.1], ids=["after the reply", "from its end on"])
async def test_an_echo_that_outlasts_its_reply_is_no_turn(share, is_turn, lead):
    stage = Stage.set(spoken(1.0), spoken(1.0), options=DialogueOptions(echo=KnownEcho(share)))
    stage.conversation.reply()
    await stage.hear(silence(1.0 - lead))
    await stage.hear(talk(0.25, seed=9))
    await stage.hear(silence(1.0))
    names = stage.names()
    await stage.close()
    assert ("SpeechStarted" in names) == is_turn
