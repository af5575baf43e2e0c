"""A scripted server and a virtual clock: a call of a minute takes a second, and every time is exact."""

import asyncio
import base64
import itertools
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from vivavoce.audio.io import float_to_pcm16, pcm16_to_float
from vivavoce.bench.turn_sounds import RATE, Material, SpokenQuestion, mm_hm, talk

LOUD = 0.04


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock skips idle time."""

    def __init__(self) -> None:
        super().__init__()
        self._skipped = 0.0
        real = self._selector.select

        def select(timeout=None):
            assert timeout is not None, "nothing will ever happen again"
            events = real(0)
            if not events:
                self._skipped += timeout
            return events

        self._selector.select = select

    def time(self) -> float:
        return self._skipped


def played(coroutine):
    """The result of a coroutine, run in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(coroutine)


def material(count: int = 4) -> Material:
    """Questions in made-up voices, each with its own length."""
    questions = tuple(
        SpokenQuestion(f"question {n}", talk(1.0 + 0.1 * n, seed=n), f"voice {n % 2}") for n in range(count)
    )
    return Material(questions, tuple(mm_hm(seed) for seed in range(3)), "made-up")


@dataclass
class Behaviour:
    """Behaviour of the scripted server, in seconds."""

    silence: float = 0.2
    thinking: float = 0.15
    reply: float = 3.0
    stops_after: float | None = 0.06
    """Of loud sound over a reply; None: it never yields."""
    piece: float = 0.1
    ahead: float = 0.3
    gap: float = 0.0
    """By which every tenth piece is late."""
    lead_in: float = 0.0
    """Silence at the beginning of a reply."""
    stops_by_itself: float | None = None
    transcripts: bool = True
    mixes_up: bool = False
    """Answers the question that another session has just asked."""


class ScriptedServer:
    """One session, as a wire in memory: turns by loudness, replies of syllables."""

    ids = itertools.count(1)

    def __init__(self, behaviour: Behaviour, others: "list[ScriptedServer]") -> None:
        self.behaviour, self.others = behaviour, others
        self.asked: tuple[float, int] = (-9.0, 0)
        """When a turn ended, and how many tenths of a second it was loud."""
        self._spoken = 0.0
        self.received: list[dict] = []
        self._out: asyncio.Queue[dict] = asyncio.Queue()
        self._loud = self._quiet = 0.0
        self._speaking = False
        self._reply: asyncio.Task | None = None
        self._id: str | None = None
        self._sounds_until = 0.0
        self._now = asyncio.get_running_loop().time
        self._emit("session.created", session={})

    async def receive(self) -> dict:
        return await self._out.get()

    async def send(self, event: dict) -> None:
        self.received.append(event)
        if event["type"] == "session.update":
            self._emit("session.updated", session=event["session"])
        elif event["type"] == "input_audio_buffer.append":
            self._receive_audio(pcm16_to_float(base64.b64decode(event["audio"])))
        elif event["type"] == "response.cancel":
            self._stop("client_cancelled")

    def _receive_audio(self, samples: np.ndarray) -> None:
        seconds = len(samples) / RATE
        is_loud = np.abs(samples).max() > LOUD
        self._loud = self._loud + seconds if is_loud else 0.0
        self._spoken += seconds if is_loud else 0.0
        self._quiet = 0.0 if is_loud else self._quiet + seconds
        is_heard = self._now() < self._sounds_until
        needed = self.behaviour.stops_after if is_heard else 0.0
        if is_loud and not self._speaking and needed is not None and self._loud >= needed:
            self._speaking = True
            self._emit("input_audio_buffer.speech_started", audio_start_ms=0, item_id="item")
            self._stop("turn_detected")
        elif self._speaking and self._quiet >= self.behaviour.silence - 1e-6:
            self._speaking = False
            self.asked, self._spoken = (self._now(), round(10 * self._spoken)), 0.0
            self._emit("input_audio_buffer.committed", item_id="item")
            self._reply = asyncio.create_task(self._say())

    def _stop(self, reason: str) -> None:
        self._sounds_until = 0.0
        if self._reply is not None and not self._reply.done():
            self._reply.cancel()
            if self._id is None:
                return
            details = {"type": "cancelled", "reason": reason}
            self._emit("response.done", response={"id": self._id, "status": "cancelled", "status_details": details})

    async def _say(self) -> None:
        does, self._id = self.behaviour, None
        await asyncio.sleep(does.thinking)
        self._id = f"resp_{next(self.ids)}"
        self._emit("response.created", response={"id": self._id})
        seed = self._answer()
        if does.transcripts:
            self._emit("response.output_audio_transcript.delta", response_id=self._id, delta=f"{seed} it is, {seed}.")
        sound = np.concatenate([np.zeros(round(does.lead_in * RATE), np.float32), talk(does.reply, seed)])
        step, began = round(does.piece * RATE), self._now()
        self._sounds_until = began + len(sound) / RATE
        for index, begin in enumerate(range(0, len(sound), step)):
            late = does.gap if index % 10 == 9 else 0.0
            await asyncio.sleep(max(0.0, began + begin / RATE - does.ahead + late - self._now()))
            if does.stops_by_itself is not None and begin / RATE >= does.stops_by_itself:
                self._emit("input_audio_buffer.speech_started", audio_start_ms=0, item_id="item")
                self._stop("turn_detected")
            pcm = base64.b64encode(float_to_pcm16(sound[begin : begin + step]).tobytes()).decode()
            self._emit("response.output_audio.delta", response_id=self._id, item_id=f"i{self._id}", delta=pcm)
        self._emit("response.output_audio.done", response_id=self._id)
        self._emit("response.done", response={"id": self._id, "status": "completed"})

    def _answer(self) -> int:
        """The seed of the answer, by the length of the question."""
        now, asked = self._now(), self.asked[1]
        heard = [other.asked[1] for other in self.others if other is not self and now - other.asked[0] < 1.0]
        return heard[0] if self.behaviour.mixes_up and heard else asked

    def _emit(self, type: str, **fields) -> None:
        self._out.put_nowait({"type": type, **fields})


@dataclass
class Servers:
    """Opens a scripted server for every call, and stores them."""

    behaviour: Behaviour = field(default_factory=Behaviour)
    opened: list[ScriptedServer] = field(default_factory=list)

    @asynccontextmanager
    async def __call__(self):
        self.opened.append(ScriptedServer(self.behaviour, self.opened))
        yield self.opened[-1]
