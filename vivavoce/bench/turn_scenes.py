"""Scenes of `viva bench turn`: their scripts, and how a simulated caller plays them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from vivavoce.bench.turn_caller import BenchCaller, CallEnvironment, CallerUtterance
from vivavoce.bench.turn_client import Line, PlayedReply
from vivavoce.bench.turn_sounds import (
    RATE,
    Material,
    Samples,
    SpokenQuestion,
    cough,
    distant_talker,
    knock,
    voiced_bounds,
    with_pause,
)
from vivavoce.errors import InputError

PAUSES = (0.4, 0.6, 0.5, 0.8, 0.7)
DISTURB_AT_SECONDS = (0.6, 0.9, 0.75, 1.1)
"""Seconds into a reply at which the caller disturbs it."""
MAX_REPLIES = 4
"""Replies to one sound that a caller waits for."""


@dataclass(frozen=True)
class Timing:
    """Waiting times of a caller, in seconds."""

    lead: float = 0.7
    """Silence before the first word."""
    patience: float = 8.0
    """Timeout for a reply."""
    max_reply_seconds: float = 8.0
    """The caller cancels a reply after this long."""
    between: float = 0.4
    """Silence before the next sound."""
    after_sound: float = 2.0
    """Wait after a stray sound."""


@dataclass(frozen=True)
class Disturbance:
    """A sound over a reply or in silence."""

    kind: str
    sound: Samples = field(repr=False)
    at: float = 0.0
    """Seconds into the reply."""


@dataclass(frozen=True)
class ScriptedExchange:
    """One question, an optional sound over its reply, and one after it."""

    question: SpokenQuestion
    pause: float = 0.0
    over: Disturbance | None = None
    stray: Disturbance | None = None


@dataclass(frozen=True)
class Scene:
    """A named sequence of exchanges in one environment."""

    name: str
    exchanges: tuple[ScriptedExchange, ...]
    environment: CallEnvironment = field(default_factory=CallEnvironment)

    def calls(self) -> list["Scene"]:
        """The scene split by voice, one call each, because servers adapt to a speaker's level within a call."""
        voices = dict.fromkeys(each.question.voice for each in self.exchanges)
        return [
            replace(self, exchanges=tuple(each for each in self.exchanges if each.question.voice == voice))
            for voice in voices
        ]


@dataclass
class PlayedExchange:
    """Times and reply of a played exchange."""

    exchange: ScriptedExchange
    asked: CallerUtterance
    reply: PlayedReply | None = None
    """First reply audible after the question."""
    over: CallerUtterance | None = None
    stray: CallerUtterance | None = None


@dataclass
class ScriptedCall:
    """A played scene (or one voice's part of it); all times are of one clock."""

    scene: Scene
    caller: BenchCaller
    number: int = 0
    played: list[PlayedExchange] = field(default_factory=list)
    failure: str | None = None


async def play(call: ScriptedCall, timing: Timing) -> None:
    """Play a scene; results are stored in the call and its caller."""
    caller = call.caller
    await caller.wait(caller.now() + timing.lead)
    for exchange in call.scene.exchanges:
        await _play_exchange(call, exchange, timing)


async def _play_exchange(call: ScriptedCall, exchange: ScriptedExchange, timing: Timing) -> None:
    caller = call.caller
    played = PlayedExchange(exchange, _ask(caller, exchange))
    call.played.append(played)
    await caller.wait(played.asked.last)
    await caller.until(lambda: caller.heard_since(played.asked.last) is not None, timing.patience)
    played.reply = caller.heard_since(played.asked.last)
    if exchange.over is not None and played.reply is not None:
        played.over = await _disturb_reply(caller, played.reply, exchange.over)
    await _wait_for_silence(caller, timing)
    if exchange.stray is not None:
        played.stray = caller.say(exchange.stray.sound, exchange.stray.kind)
        await caller.wait(played.stray.last + timing.after_sound)
        await _wait_for_silence(caller, timing)


def _ask(caller: BenchCaller, exchange: ScriptedExchange) -> CallerUtterance:
    sound = exchange.question.sound
    if not exchange.pause:
        return caller.say(sound, "question")
    sound, cut = with_pause(sound, exchange.pause)
    return caller.say(sound, "question", (cut, cut + round(exchange.pause * RATE)))


async def _disturb_reply(caller: BenchCaller, reply: PlayedReply, sound: Disturbance) -> CallerUtterance | None:
    """Play the sound at its time in the reply; None if the reply has ended before."""
    began = reply.heard_at(reply.voice_at or 0) or caller.now()
    await caller.wait(began + sound.at)
    if not reply.is_audible(caller.now()):
        return None
    utterance = caller.say(sound.sound, sound.kind)
    await caller.wait(utterance.end)
    if sound.kind == "interruption":  # an interruption expects an answer
        await caller.until(lambda: caller.heard_since(utterance.last) is not None, 2.0)
    return utterance


async def _wait_for_silence(caller: BenchCaller, timing: Timing) -> None:
    """Wait until replies have ended and none has begun for a while; cancel those that take too long."""
    for _ in range(MAX_REPLIES):
        if not await caller.until(lambda: caller.is_quiet, timing.max_reply_seconds):
            await caller.stop_replies()
            await caller.until(lambda: caller.is_quiet, timing.patience)
        await caller.wait(caller.now() + timing.between)
        if caller.is_quiet:
            return


def script(material: Material, turns: int, names: list[str] | None = None) -> list[Scene]:
    """The scenes, each of `turns` questions. `names` selects among `SCENES`, or is ["none"]."""
    if names == ["none"]:
        return []
    unknown = set(names or ()) - SCENES.keys()
    if unknown:
        raise InputError(f"there is no scene {', '.join(sorted(unknown))}; there are {', '.join(SCENES)}")
    chosen = {name: make for name, make in SCENES.items() if names is None or name in names}
    return [make(name, _Script(material, turns)) for name, make in chosen.items()]


@dataclass(frozen=True)
class _Script:
    material: Material
    turns: int

    def question(self, number: int) -> SpokenQuestion:
        return self.material.questions[number % len(self.material.questions)]

    def clean(self) -> tuple[ScriptedExchange, ...]:
        return tuple(ScriptedExchange(self.question(number)) for number in range(self.turns))

    def over(
        self, kind: str, sound: Callable[[int], Samples], with_stray: bool = False
    ) -> tuple[ScriptedExchange, ...]:
        """Every reply is disturbed at varying times; `with_stray` adds sounds in the silence after it."""
        exchanges = []
        for number in range(self.turns):
            disturbance = Disturbance(kind, sound(number), DISTURB_AT_SECONDS[number % len(DISTURB_AT_SECONDS)])
            stray = Disturbance(kind, sound(number + self.turns)) if with_stray and number % 2 == 0 else None
            exchanges.append(ScriptedExchange(self.question(number), over=disturbance, stray=stray))
        return tuple(exchanges)

    def backchannel(self, number: int) -> Samples:
        return self.material.backchannels[number % len(self.material.backchannels)]

    def interruption(self, number: int) -> Samples:
        """Another question of the same voice if there is one, without leading silence."""
        asked, others = self.question(number), self.material.questions
        same = [each for each in others if each.voice == asked.voice and each is not asked] or others
        sound = same[number % len(same)].sound
        return sound[voiced_bounds(sound)[0] :]

    def side_talk(self, number: int) -> Samples:
        """A distant utterance of another voice."""
        asked, others = self.question(number), self.material.questions
        different = [each for each in others if each.voice != asked.voice] or others
        return distant_talker(different[(number + 1) % len(different)].sound)


def _noisy(snr_db: float) -> Callable[[str, _Script], Scene]:
    return lambda name, script: Scene(name, script.clean(), CallEnvironment(snr_db=snr_db))


def _pauses(name: str, script: _Script) -> Scene:
    return Scene(
        name,
        tuple(
            ScriptedExchange(script.question(number), PAUSES[number % len(PAUSES)]) for number in range(script.turns)
        ),
    )


ECHO = CallEnvironment(echo_db=-20.0)
LATE = CallEnvironment(line=Line(jitter=0.03, delay=0.02))
LOSSY = CallEnvironment(line=Line(loss=0.03, jitter=0.01, delay=0.02))
SCENES: dict[str, Callable[[str, _Script], Scene]] = {
    "clean": lambda name, script: Scene(name, script.clean()),
    "pauses": _pauses,
    "mm-hm": lambda name, script: Scene(name, script.over("backchannel", script.backchannel)),
    "cough": lambda name, script: Scene(name, script.over("cough", cough, with_stray=True)),
    "knock": lambda name, script: Scene(name, script.over("knock", knock, with_stray=True)),
    "side talk": lambda name, script: Scene(name, script.over("side talk", script.side_talk)),
    "barge-in": lambda name, script: Scene(name, script.over("interruption", script.interruption)),
    "noise 20 dB": _noisy(20.0),
    "noise 10 dB": _noisy(10.0),
    "noise 5 dB": _noisy(5.0),
    "echo": lambda name, script: Scene(name, script.clean(), ECHO),
    "echo barge-in": lambda name, script: Scene(name, script.over("interruption", script.interruption), ECHO),
    "jitter": lambda name, script: Scene(name, script.clean(), LATE),
    "loss": lambda name, script: Scene(name, script.clean(), LOSSY),
}


def recording(call: ScriptedCall) -> Samples:
    """Stereo recording: microphone left, played replies right.  # [2, time]"""
    microphone = call.caller.microphone
    spoken = np.concatenate(microphone.record) if microphone.record else np.zeros(0, np.float32)
    heard = call.caller.loudspeaker.read(microphone.began, len(spoken))
    return np.clip(np.stack([spoken, heard]), -1.0, 1.0)
