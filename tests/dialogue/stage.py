"""A live conversation on a backend with scripted replies, and a clock that advances with the sound."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from tests.dialogue.voices import silence, talk
from vivavoce.audio.player import SimulatedClock
from vivavoce.dialogue.backend import Ended, Spoke, Wrote
from vivavoce.dialogue.barge_in import OverlapClassifier, OverlapJudge
from vivavoce.dialogue.events import ReplyAudio, ReplyDone, ReplyStarted, Usage
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.dialogue.settings import ConversationSettings, TurnSettings

WINDOW = 512
RATE = 16_000


class InlineExecutor(ThreadPoolExecutor):
    """Runs work when it is submitted, so that a test does not depend on threads."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def spoken(seconds: float, text: str = "", seed: int = 0, rate: int = 24_000) -> list:
    """The pieces of a spoken reply, 0.4 s each: a tone with noise, so that it is neither silent nor stuck."""
    noise = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    sound = (0.1 * np.sin(2 * np.pi * 300 * time * (1 + time)) + 0.02 * noise.standard_normal(len(time))).astype("f")
    pieces = [Wrote(text)] if text else []
    return [*pieces, *(Spoke(part) for part in np.split(sound, range(9600, len(sound), 9600))), Ended("completed")]


class ScriptedReply:
    """A reply whose pieces are given beforehand; an `asyncio.Event` among them holds up those after it."""

    def __init__(self, state, plan, pieces):
        self.state, self.plan = state, plan
        self._pieces = pieces
        self.turn_windows = state.turn_windows if plan.includes_turn else 0
        self.released_for, self.is_released, self.is_dropped = None, False, False

    async def pieces(self):
        generated, backend = 0.0, self.state.backend
        for piece in self._pieces:
            await asyncio.sleep(0)
            if isinstance(piece, asyncio.Event):
                await piece.wait()
                continue
            while backend.ahead is not None and (excess := generated - self.plan.played() - backend.ahead) > 1e-6:
                await backend.clock.until(backend.clock.now() + excess)
            if isinstance(piece, Spoke):
                generated += len(piece.samples) / backend.output_rate
            yield piece

    def release(self, turn):
        self.is_released, self.released_for = True, turn
        if self.plan.includes_turn:
            self.state.turn_windows = 0
        self.state.log.append(("release", turn))

    def drop(self):
        assert not self.is_dropped
        self.is_dropped = True
        self.state.log.append("drop" if not self.is_released else "end")
        self.state.backend.open_replies.discard(self)

    @property
    def usage(self):
        return Usage(input_audio=self.turn_windows, output_audio=len(self._pieces))


class ScriptedConversation:
    """A conversation state that records its calls."""

    def __init__(self, backend):
        self.backend = backend
        self.past, self.settings = (), None
        self.turn_windows = 0
        self.committed: list[str] = []
        self.log: list = []

    def set_history(self, past, settings):
        self.past, self.settings = tuple(past), settings

    def listen(self, samples):
        assert len(samples) % WINDOW == 0
        self.turn_windows += len(samples) // WINDOW

    def discard_turn(self):
        self.turn_windows = 0

    def commit_turn(self, item):
        self.committed.append(item)
        self.turn_windows = 0

    def reply(self, plan):
        script = self.backend.scripts.pop(0) if self.backend.scripts else spoken(2.0, "Well, I think so. ")
        reply = ScriptedReply(self, plan, script)
        self.backend.open_replies.add(reply)
        self.backend.replies.append(reply)
        return reply

    def pause(self):
        self.log.append("pause")

    def resume(self):
        self.log.append("resume")

    async def close(self):
        self.backend.open_conversations -= 1


class ScriptedBackend:
    """Replies with the scripts in order, then with a default one, at most `ahead` seconds before playback."""

    input_rate, output_rate, transcribes = RATE, 24_000, False

    def __init__(self, *scripts: Sequence, clock: SimulatedClock | None = None, ahead: float | None = None):
        self.scripts = list(scripts)
        self.clock, self.ahead = clock, ahead
        self.open_replies: set[ScriptedReply] = set()
        self.replies: list[ScriptedReply] = []
        self.open_conversations = 0

    def open(self, on_transcript):
        self.open_conversations += 1
        self.on_transcript = on_transcript
        self.state = ScriptedConversation(self)
        return self.state


@dataclass
class Stage:
    """A conversation, its clock, and its events with the time of each."""

    backend: ScriptedBackend
    conversation: LiveConversation
    clock: SimulatedClock
    events: list = field(default_factory=list)
    times: list = field(default_factory=list)

    @classmethod
    def set(
        cls,
        *scripts,
        settings=None,
        options: DialogueOptions | None = None,
        ahead: float | None = 0.4,
        classifier: OverlapJudge | None = None,
    ) -> "Stage":
        clock = SimulatedClock()
        backend = ScriptedBackend(*scripts, clock=clock, ahead=ahead)
        # The voices of these tests are arithmetic: the rules take them for speech, the trained network may not.
        options = replace(options or DialogueOptions(), classifier=classifier or OverlapClassifier())
        conversation = LiveConversation(backend, settings or with_turn(), options, input_rate=RATE, clock=clock)
        stage = cls(backend, conversation, clock)
        stage._reader = asyncio.get_running_loop().create_task(stage._read())
        return stage

    async def _read(self):
        async for event in self.conversation.events():
            self.events.append(event)
            self.times.append(self.clock.now())

    async def settle(self):
        """Let every task run until it waits for the clock."""
        for _ in range(12):
            await asyncio.sleep(0)

    async def hear(self, samples: np.ndarray):
        """Feed the user's audio in real time by the conversation's clock."""
        samples = samples[: len(samples) // WINDOW * WINDOW].astype(np.float32)
        for start in range(0, len(samples), WINDOW):
            self.clock.advance(WINDOW / RATE)
            self.conversation.hear(samples[start : start + WINDOW])
            await self.conversation.drain_input()
            await self.settle()

    async def close(self):
        await self.conversation.close()
        await self._reader

    def all(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def time_of(self, kind, which: int = 0) -> float:
        return [time for event, time in zip(self.events, self.times, strict=True) if isinstance(event, kind)][which]

    def names(self, leave_out=(ReplyAudio,)) -> list[str]:
        return [type(event).__name__ for event in self.events if not isinstance(event, leave_out)]

    def check(self):
        """Check the invariants of a closed conversation."""
        started = Counter(event.reply for event in self.all(ReplyStarted))
        done = Counter(event.reply for event in self.all(ReplyDone))
        assert started == done and all(count == 1 for count in done.values())
        assert not self.backend.open_replies, "a reply was never dropped"
        assert self.backend.open_conversations == 0
        over = set()
        for event in self.events:
            if isinstance(event, ReplyDone):
                over.add(event.reply)
            elif isinstance(event, ReplyAudio) and len(event.samples):
                assert event.reply not in over, "sound after the end of its reply"
        ids = [item.id for item in self.conversation.items]
        assert len(ids) == len(set(ids))


def with_turn(**turn) -> ConversationSettings:
    return ConversationSettings(turn=TurnSettings(**({"silence_duration_ms": 240} | turn)))


async def answered(stage: Stage, seconds: float = 1.5) -> str:
    """The user asks, and the reply plays for some seconds; its id."""
    await stage.hear(np.concatenate([silence(0.5), talk(1.5, seed=5), silence(0.32 + seconds)]))
    return stage.all(ReplyStarted)[-1].reply
