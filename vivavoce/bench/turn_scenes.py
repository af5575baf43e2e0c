"""The script: what is said in each scene, and how a caller plays it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from vivavoce.bench.turn_caller import BenchCaller, CallEnvironment, CallerUtterance
from vivavoce.bench.turn_client import Line
from vivavoce.bench.turn_player import PlayedReply
from vivavoce.bench.turn_sounds import (
    RATE,
    Material,
    Samples,
    SpokenQuestion,
    cough,
    far_off,
    hesitated,
    knock,
    voiced_bounds,
)
from vivavoce.errors import InputError

PAUSES = (0.4, 0.6, 0.5, 0.8, 0.7)
MOMENTS = (0.6, 0.9, 0.75, 1.1)
"""How long a reply has been heard when somebody makes a sound over it, in seconds."""


@dataclass(frozen=True)
class Timing:
    """How patient a caller is, in seconds."""

    before: float = 0.7
    """Silence before the first word."""
    patience: float = 8.0
    """How long a reply is waited for."""
    longest_reply: float = 8.0
    """After so much of a reply the caller has heard enough, and stops it."""
    between: float = 0.4
    after_sound: float = 2.0
    """How long the caller listens what a sound has done."""


@dataclass(frozen=True)
class Disturbance:
    """A sound that is no question, or not at its time."""

    kind: str
    sound: Samples = field(repr=False)
    at: float = 0.0
    """Seconds into the reply."""


@dataclass(frozen=True)
class ScriptedExchange:
    """One question, a sound over its reply, and one after it."""

    question: SpokenQuestion
    pause: float = 0.0
    over: Disturbance | None = None
    stray: Disturbance | None = None


@dataclass(frozen=True)
class Scene:
    """What is said, and where."""

    name: str
    exchanges: tuple[ScriptedExchange, ...]
    surroundings: CallEnvironment = field(default_factory=CallEnvironment)

    def calls(self) -> list["Scene"]:
        """What each voice says of it: a person keeps theirs for a call, and servers get to know how loud it is."""
        voices = dict.fromkeys(each.question.voice for each in self.exchanges)
        return [
            replace(self, exchanges=tuple(each for each in self.exchanges if each.question.voice == voice))
            for voice in voices
        ]


@dataclass
class Played:
    """An exchange as it happened."""

    exchange: ScriptedExchange
    asked: CallerUtterance
    reply: PlayedReply | None = None
    """The one that was first heard after the question."""
    over: CallerUtterance | None = None
    stray: CallerUtterance | None = None


@dataclass
class ScriptedCall:
    """A scene, or what one voice said of it, as it happened; times are of one clock."""

    scene: Scene
    caller: BenchCaller
    number: int = 0
    played: list[Played] = field(default_factory=list)
    failure: str | None = None


async def play(call: ScriptedCall, timing: Timing) -> None:
    """Play a scene; what happens is in the call, and in its caller."""
    caller = call.caller
    await caller.wait(caller.now() + timing.before)
    for exchange in call.scene.exchanges:
        await _play_exchange(call, exchange, timing)


async def _play_exchange(call: ScriptedCall, exchange: ScriptedExchange, timing: Timing) -> None:
    caller = call.caller
    played = Played(exchange, _ask(caller, exchange))
    call.played.append(played)
    await caller.wait(played.asked.last)
    await caller.until(lambda: caller.heard_since(played.asked.last) is not None, timing.patience)
    played.reply = caller.heard_since(played.asked.last)
    if exchange.over is not None and played.reply is not None:
        played.over = await _speak_over(caller, played.reply, exchange.over)
    await _come_to_rest(caller, timing)
    if exchange.stray is not None:
        played.stray = caller.say(exchange.stray.sound, exchange.stray.kind)
        await caller.wait(played.stray.last + timing.after_sound)
        await _come_to_rest(caller, timing)


def _ask(caller: BenchCaller, exchange: ScriptedExchange) -> CallerUtterance:
    sound = exchange.question.sound
    if not exchange.pause:
        return caller.say(sound, "question")
    sound, cut = hesitated(sound, exchange.pause)
    return caller.say(sound, "question", (cut, cut + round(exchange.pause * RATE)))


async def _speak_over(caller: BenchCaller, reply: PlayedReply, sound: Disturbance) -> CallerUtterance | None:
    """Make the sound when the reply has been heard for its time; None where it is over before."""
    began = reply.heard_at(reply.voice_at or 0) or caller.now()
    await caller.wait(began + sound.at)
    if not reply.is_audible(caller.now()):
        return None
    made = caller.say(sound.sound, sound.kind)
    await caller.wait(made.end)
    if sound.kind == "interruption":  # it wants an answer
        await caller.until(lambda: caller.heard_since(made.last) is not None, 2.0)
    return made


async def _come_to_rest(caller: BenchCaller, timing: Timing) -> None:
    """Hear the replies out, or stop them."""
    if not await caller.until(lambda: caller.is_quiet, timing.longest_reply):
        await caller.hush()
        await caller.until(lambda: caller.is_quiet, timing.patience)
    await caller.wait(caller.now() + timing.between)


def script(material: Material, turns: int, names: list[str] | None = None) -> list[Scene]:
    """The script; each scene asks `turns` questions. `names` chooses among `SCENES`, or is "none"."""
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
        """Every reply is disturbed, each at another moment; with `with_stray` the silence after it too."""
        exchanges = []
        for number in range(self.turns):
            disturbance = Disturbance(kind, sound(number), MOMENTS[number % len(MOMENTS)])
            stray = Disturbance(kind, sound(number + self.turns)) if with_stray and number % 2 == 0 else None
            exchanges.append(ScriptedExchange(self.question(number), over=disturbance, stray=stray))
        return tuple(exchanges)

    def backchannel(self, number: int) -> Samples:
        return self.material.backchannels[number % len(self.material.backchannels)]

    def interruption(self, number: int) -> Samples:
        """Another question of the same voice, where there is one, from its first voiced sample on."""
        asked, others = self.question(number), self.material.questions
        same = [each for each in others if each.voice == asked.voice and each is not asked] or others
        sound = same[number % len(same)].sound
        return sound[voiced_bounds(sound)[0] :]

    def side_talk(self, number: int) -> Samples:
        """What another voice says to somebody else."""
        asked, others = self.question(number), self.material.questions
        different = [each for each in others if each.voice != asked.voice] or others
        return far_off(different[(number + 1) % len(different)].sound)


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
    """The call as it was: the microphone on the left, what was heard on the right.  # [2, time]"""
    microphone = call.caller.microphone
    spoken = np.concatenate(microphone.record) if microphone.record else np.zeros(0, np.float32)
    heard = call.caller.loudspeaker.read(microphone.began, len(spoken))
    return np.clip(np.stack([spoken, heard]), -1.0, 1.0)
