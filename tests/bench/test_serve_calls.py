"""A caller of `viva bench serve` against a scripted server, in virtual time: every measured time is exact."""

import asyncio
import base64
import math
from dataclasses import dataclass, field

import pytest

from tests.bench.turn_servers import played
from vivavoce.bench.serve_calls import ANSWER_SECONDS, LEAD_IN_SECONDS, YIELD_SECONDS, Call, HeardReply
from vivavoce.bench.serve_plans import CallPlan, EncodedQuestion, EncodedSounds
from vivavoce.bench.serve_transport import (
    CallClosedError,
    CallRefusedError,
    ErrorObject,
    ReceivedEvent,
    ResponseObject,
    base64_bytes,
)

PACKET = 0.04
SPEECH, NOISE = b"speech", b"noise"
QUESTION = EncodedQuestion([SPEECH] * 10 + [NOISE], onset=0.02, last=9)  # 0.4 s of speech
SOUNDS = EncodedSounds(PACKET, [NOISE] * 5, [QUESTION])
REPLY = 2.0
START_BUFFER = 0.08


@dataclass
class Script:
    """What the scripted server does, in seconds from the last message of speech."""

    thinking: float = 0.2
    reply: float = REPLY
    pieces_late: dict[int, float] = field(default_factory=dict)
    """Lateness of pieces of 0.1 s."""
    yields_after: float | None = 0.15
    """Of the first message of speech over a reply; None: it plays on."""
    refuses: bool = False
    answers: bool = True
    closes_at: float | None = None
    stops_by_itself: float | None = None


class ScriptedConnection:
    """A server in memory that takes messages of speech for speech."""

    def __init__(self, listener, script):
        self.listener, self.script = listener, script
        self.now = asyncio.get_running_loop().time
        self.sent, self.closed = [], False
        self._replies = 0
        self._reply = None
        self._speaking = False
        self._tasks = set()

    async def open(self):
        await asyncio.sleep(0.01)

    async def receive(self):
        if self.script.refuses:
            error = ErrorObject("no room", "session_limit_reached")
            self.listener.on_event(self.now(), ReceivedEvent("error", error=error))
            await asyncio.sleep(0.5)
            raise CallRefusedError("1013 no room")
        self.listener.on_event(self.now(), ReceivedEvent("session.created"))
        await asyncio.sleep(self.script.closes_at or 1e6)
        raise CallClosedError("the connection was closed: 1011")

    async def send(self, message):
        self.sent.append((self.now(), message))
        is_speech = message == SPEECH
        if is_speech and not self._speaking and self._reply is not None and self.script.yields_after is not None:
            self._start(self._yield(self._reply))
        if self._speaking and not is_speech and self.script.answers:
            last_speech = self.sent[-2][0]
            if self.script.yields_after is not None or self._reply is None:
                self._reply = self._start(self._answer(last_speech))
        self._speaking = is_speech

    async def close(self):
        self.closed = True
        for task in self._tasks:
            task.cancel()

    def _start(self, coroutine):
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        return task

    async def _yield(self, reply):
        await asyncio.sleep(self.script.yields_after)
        reply.cancel()
        self.listener.on_event(self.now(), ReceivedEvent("input_audio_buffer.speech_started"))

    async def _answer(self, asked):
        self._replies += 1
        id, begins = f"resp_{self._replies}", asked + self.script.thinking
        await asyncio.sleep(begins - self.now())
        self.listener.on_event(self.now(), ReceivedEvent("response.created", response=ResponseObject(id)))
        for number in range(round(self.script.reply / 0.1)):
            late = self.script.pieces_late.get(number, 0.0)
            await asyncio.sleep(max(0.0, begins + number * 0.1 + late - self.now()))
            self.listener.on_audio(self.now(), 0.1, id)
            if self.script.stops_by_itself is not None and number * 0.1 >= self.script.stops_by_itself:
                self.listener.on_event(self.now(), ReceivedEvent("output_audio_buffer.cleared", response_id=id))
                break
        self.listener.on_event(self.now(), ReceivedEvent("response.output_audio.done", response_id=id))
        self.listener.on_event(self.now(), ReceivedEvent("response.done", response=ResponseObject(id)))


def conversation(script, **plan):
    """The result of one call, and its connection."""

    async def run():
        now = asyncio.get_running_loop().time
        call = Call(CallPlan(3, 0.0, **({"questions": [0]} | plan)), SOUNDS, REPLY, now(), [], now=now)
        connections = []

        def connect(listener):
            connections.append(ScriptedConnection(listener, script))
            return connections[0]

        return await call.run(connect), connections[0]

    return played(run())


def test_the_wait_is_from_the_last_speech_sent_to_the_first_sound():
    result, connection = conversation(Script(thinking=0.2))
    (turn,) = result.turns
    assert turn.first_sound == pytest.approx(0.2)
    last_speech = [at for at, message in connection.sent if message == SPEECH][-1]
    assert turn.asked_at == pytest.approx(last_speech)
    assert (turn.underruns, turn.is_over, result.failure) == (0, True, "")
    assert turn.sound_seconds == pytest.approx(REPLY)
    assert result.opened == pytest.approx(0.01)


def test_the_microphone_is_never_silent_and_in_time():
    result, connection = conversation(Script())
    times = [at for at, _ in connection.sent]
    assert times == pytest.approx([times[0] + number * PACKET for number in range(len(times))])
    assert times[-1] > result.turns[0].asked_at + REPLY  # noise while the reply plays
    assert connection.closed
    first_speech = next(at for at, message in connection.sent if message == SPEECH)
    assert first_speech >= LEAD_IN_SECONDS


def test_late_sound_is_an_underrun_and_its_gap_is_dry():
    # Playback begins with the first piece of 0.1 s; pieces arrive just when they are needed, two of them late.
    result, _ = conversation(Script(pieces_late={5: 0.3, 15: 0.5}))
    (turn,) = result.turns
    assert turn.underruns == 2
    assert turn.dry_seconds == pytest.approx(0.3 + 0.2)  # the second starts from a lead of 0.3 s
    assert turn.is_over


def test_a_second_question_is_asked_after_the_first_reply_was_heard():
    result, _ = conversation(Script(), questions=[0, 0])
    first, second = result.turns
    assert second.asked_at > first.asked_at + 0.2 + REPLY
    assert second.first_sound == pytest.approx(0.2)


def test_yielding_is_measured_from_the_onset_of_the_interruption():
    result, _ = conversation(Script(yields_after=0.15), interrupt_after=0.5)
    first, second = result.turns
    assert (first.is_over, first.underruns, second.interrupts) == (True, 0, True)
    # The onset is 0.02 s into the first message, which is sent when its 0.04 s are over.
    assert second.yielded == pytest.approx(0.04 - 0.02 + 0.15)
    assert second.first_sound == pytest.approx(0.2)
    assert second.is_over
    assert result.false_stops == 0


def test_a_reply_that_plays_on_is_not_yielded():
    result, _ = conversation(Script(yields_after=None, reply=YIELD_SECONDS + 4), interrupt_after=0.5)
    first, second = result.turns
    assert second.yielded is None
    assert not first.is_over
    assert result.failure == "a reply was not interrupted"


def test_a_reply_shorter_than_planned_is_not_interrupted():
    result, _ = conversation(Script(reply=0.5), interrupt_after=1.0)
    assert [turn.interrupts for turn in result.turns] == [False, False]
    assert all(turn.is_over for turn in result.turns)


def test_a_stop_without_speech_is_false():
    result, _ = conversation(Script(stops_by_itself=1.0))
    assert result.false_stops == 1


def test_a_refusal_is_timed_until_the_error_and_not_until_the_close():
    result, _ = conversation(Script(refuses=True))
    assert result.refused == pytest.approx(0.01)
    assert (result.refusal, result.opened, result.turns) == ("session_limit_reached", None, [])


def test_silence_is_never_answered():
    result, _ = conversation(Script(answers=False))
    (turn,) = result.turns
    assert turn.first_sound is None
    assert result.ended == pytest.approx(turn.asked_at + ANSWER_SECONDS)


def test_a_lost_connection_is_a_failure():
    result, _ = conversation(Script(closes_at=2.0))
    (turn,) = result.turns
    assert result.failure == "the connection was closed: 1011"
    assert turn.first_sound == pytest.approx(0.2)
    assert not turn.is_over


def packets(*voices: bool):
    """A reply whose packets of 20 ms hold voice or silence."""
    reply = HeardReply("resp_1")
    for number, is_voice in enumerate(voices):
        reply.feed_packet(number * 0.02, 0.02, not is_voice, -math.inf)
    return reply


def test_silence_that_is_sent_inside_a_reply_is_a_gap():
    silence, voice = [False], [True]
    reply = packets(*silence * 5, *voice * 10, *silence * 3, *voice * 5, *silence, *voice * 5, *silence * 9)
    assert reply.first_at == pytest.approx(0.1)
    assert (reply.gaps, reply.gap_seconds) == (1, pytest.approx(0.06))  # not the single packet, nor the end
    assert reply.clock.underruns == 0


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1920])
def test_the_length_of_base64_is_that_of_its_bytes(size):
    assert base64_bytes(base64.b64encode(bytes(size)).decode()) == size
