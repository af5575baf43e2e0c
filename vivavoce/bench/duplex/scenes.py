"""The scenes of the duplex lab: each is one call with one question, in the shape of Full-Duplex-Bench v1 and v1.5.

A scene depends on its name, language and number alone: the same sounds come out of every run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from vivavoce.bench.duplex import rooms, sounds, texts
from vivavoce.bench.duplex.interaction import UserSound
from vivavoce.bench.duplex.speech import Speak, SpokenText
from vivavoce.bench.turn_caller import CallEnvironment
from vivavoce.bench.turn_client import Line
from vivavoce.bench.turn_scenes import Disturbance, Scene, ScriptedExchange
from vivavoce.bench.turn_sounds import SPEECH_DBFS, Samples, SpokenQuestion, at_level, voiced_bounds
from vivavoce.errors import InputError
from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES
from vivavoce.evaluation.room_acoustics import Room

PAUSES = (0.4, 0.8, 1.2, 0.6, 1.0)
"""Seconds of the pauses inside sentences."""
DISTURB_AT = (0.5, 0.8, 0.6, 0.7)
"""Seconds into the reply at which the caller is heard."""
BACKCHANNEL_DB, SIDE_TALK_DB, BACKGROUND_DB, TELEVISION_DB = -6.0, -6.0, -10.0, -20.0
ECHO_DB = (-6.0, -10.0, -14.0, -18.0, -24.0, -30.0)
LOSSY = Line(loss=0.03, jitter=0.01, delay=0.02)
NOISY_DB = 15.0


@dataclass(frozen=True)
class DuplexScene:
    """One call: what it is, and what is played in it."""

    name: str
    language: str
    condition: str
    """Acoustics or line of the caller."""
    number: int
    scene: Scene = field(repr=False)
    over_name: str = ""
    pauses: tuple[tuple[int, int], ...] = ()
    """Sample ranges of the pauses in the question."""
    usual: Samples | None = field(default=None, repr=False)
    """How the person who interrupts usually sounds, where it is not the voice of the question."""

    @property
    def exchange(self) -> ScriptedExchange:
        return self.scene.exchanges[0]

    @property
    def seed(self) -> int:
        """Of the room noise and of the line."""
        return self.number


@dataclass(frozen=True)
class SceneSounds:
    """Where the sounds come from."""

    speak: Speak
    tics: Sequence[sounds.ShortSound]
    noises: Sequence[sounds.ShortSound]
    people: Sequence[sounds.ShortSound] = ()


def gather(speak: Speak, esc50: Path | None = None, people: Path | None = None) -> SceneSounds:
    """The sounds of the folders that are given, else made-up ones."""
    return SceneSounds(speak, sounds.tics(esc50), sounds.noises(esc50), sounds.people(people))


@dataclass(frozen=True)
class _Script:
    """One scene's language and number, and what may be said in it."""

    sounds: SceneSounds
    language: str
    number: int

    def of(self, bank: Mapping[str, tuple[str, ...]]) -> str:
        return bank[self.language][self.number % len(bank[self.language])]

    @property
    def voice(self) -> str:
        return HELD_OUT_VOICES[self.language][self.number % len(HELD_OUT_VOICES[self.language])]

    @property
    def other_voice(self) -> str:
        voices = HELD_OUT_VOICES[self.language]
        return voices[(self.number + 1) % len(voices)]

    @property
    def near_voice(self) -> str:
        """Another voice; where there are four, every other time one of the same sex."""
        voices = HELD_OUT_VOICES[self.language]
        return voices[(self.number + (2 if self.number % 2 and len(voices) > 2 else 1)) % len(voices)]

    def said(self, bank: Mapping[str, tuple[str, ...]]) -> SpokenText:
        return self.sounds.speak(self.of(bank), self.voice)

    @property
    def at(self) -> float:
        return DISTURB_AT[self.number % len(DISTURB_AT)]

    def room(self) -> Room:
        return rooms.ROOMS[self.number % len(rooms.ROOMS)]


@dataclass(frozen=True)
class _Played:
    """What a scene plays, before its condition is applied."""

    question: SpokenText
    over: Disturbance | None = None
    over_name: str = ""
    stray: Disturbance | None = None
    usual: Samples | None = None
    pause: float = 0.0
    environment: CallEnvironment = field(default_factory=CallEnvironment)
    condition: str = ""
    """Of scenes that bring their own; else the conditions take turns."""


def _pause(script: _Script) -> _Played:
    return _Played(script.said(texts.HESITATIONS), pause=PAUSES[script.number % len(PAUSES)])


def _monologue(script: _Script) -> _Played:
    return _Played(script.said(texts.MONOLOGUES))


def _smooth(script: _Script) -> _Played:
    return _Played(script.said(texts.QUESTIONS))


def _interruption(script: _Script) -> _Played:
    """Every other one is a recorded person, where there are recordings."""
    people = script.sounds.people
    if people and script.number % 2:
        person = people[script.number % len(people)]
        others = [each for each in people if each.source == person.source and each is not person]
        usual = others[script.number % len(others)].samples() if others else None
        return replace(_over(script, "interruption", person.samples(), person.name), usual=usual)
    spoken = script.said(texts.INTERRUPTIONS)
    return _over(script, "interruption", spoken.sound, spoken.text)


def _user_backchannel(script: _Script) -> _Played:
    spoken = script.said(texts.BACKCHANNELS)
    return _over(script, "backchannel", _louder(spoken.sound, BACKCHANNEL_DB), spoken.text)


def _vocal_tic(script: _Script) -> _Played:
    """Coughs, sneezes and laughs; every fourth is a filler word."""
    if script.number % 4 == 3:
        spoken = script.said(texts.TICS)
        return _over(script, "vocal tic", spoken.sound, spoken.text, with_stray=True)
    sound = script.sounds.tics[script.number % len(script.sounds.tics)]
    return _over(script, "vocal tic", sound.samples(), sound.name, with_stray=True)


def _noise(script: _Script) -> _Played:
    sound = script.sounds.noises[script.number % len(script.sounds.noises)]
    return _over(script, "noise", sound.samples(), sound.name, with_stray=True)


def _side_talk(script: _Script) -> _Played:
    """The caller turns away and speaks to another person in the room."""
    spoken = script.said(texts.SIDE_TALK)
    away = rooms.in_room(spoken.sound, rooms.ROOMS[2], 2.0, script.number)
    return _over(script, "side talk", _louder(away, SIDE_TALK_DB), spoken.text, with_stray=True)


def _bystander(script: _Script) -> _Played:
    """Another person beside the caller speaks, as loud as the caller."""
    spoken = script.sounds.speak(script.of(texts.SIDE_TALK), script.near_voice)
    return _over(script, "bystander", spoken.sound, spoken.text, with_stray=True)


def _background(script: _Script) -> _Played:
    """Another person speaks in the room while the reply is heard."""
    spoken = script.sounds.speak(script.of(texts.BROADCAST), script.other_voice)
    distant = rooms.in_room(spoken.sound, rooms.ROOMS[4], 3.0, script.number)
    return _over(script, "background", _louder(distant, BACKGROUND_DB), spoken.text)


def _television(script: _Script) -> _Played:
    """A television runs during the whole call."""
    spoken = script.sounds.speak(script.of(texts.BROADCAST), script.other_voice)
    distant = _louder(rooms.in_room(spoken.sound, rooms.ROOMS[4], 3.0, script.number), TELEVISION_DB)
    condition = f"television {TELEVISION_DB:.0f} dB"
    return _Played(script.said(texts.QUESTIONS), environment=CallEnvironment(background=distant), condition=condition)


def _echo(script: _Script) -> _Played:
    environment, condition = _loudspeaker(script)
    return _Played(script.said(texts.QUESTIONS), environment=environment, condition=condition)


def _echo_interruption(script: _Script) -> _Played:
    environment, condition = _loudspeaker(script)
    spoken = script.said(texts.INTERRUPTIONS)
    sound = Disturbance("interruption", _onset(spoken.sound), script.at)
    question = script.said(texts.QUESTIONS)
    return _Played(question, sound, spoken.text, environment=environment, condition=condition)


SCENES: dict[str, tuple[Callable[[_Script], _Played], UserSound | None]] = {  # and what its sound over the reply is
    "pause": (_pause, None),
    "monologue": (_monologue, None),
    "smooth": (_smooth, None),
    "interruption": (_interruption, UserSound.turn),
    "user backchannel": (_user_backchannel, UserSound.backchannel),
    "vocal tic": (_vocal_tic, UserSound.vocal_tic),
    "noise": (_noise, None),
    "side talk": (_side_talk, UserSound.non_directed),
    "bystander": (_bystander, None),
    "background": (_background, None),
    "television": (_television, None),
    "echo": (_echo, None),
    "echo interruption": (_echo_interruption, UserSound.turn),
}
CONDITIONS = ("headset", "room", "telephone", "loss", "noise")


def script(
    found: SceneSounds,
    count: int,
    names: Sequence[str] | None = None,
    languages: Sequence[str] = ("en", "zh"),
    conditions: Sequence[str] = CONDITIONS,
    first: int = 0,
) -> list[DuplexScene]:
    """`count` calls of each scene in each language, from the number `first` on.

    The conditions take turns, shifted by one in each round, so that none of them always has the same voice and text.
    """
    for kind, given, known in (
        ("scene", names or (), SCENES),
        ("language", languages, HELD_OUT_VOICES),
        ("condition", conditions, CONDITIONS),
    ):
        unknown = [each for each in given if each not in known]
        if unknown:
            raise InputError(f"there is no {kind} {', '.join(unknown)}; there are {', '.join(known)}")
    return [
        _scene(
            name, conditions[(number + number // len(conditions)) % len(conditions)], _Script(found, language, number)
        )
        for name in SCENES
        if names is None or name in names
        for language in languages
        for number in range(first, first + count)
    ]


def _scene(name: str, condition: str, script: _Script) -> DuplexScene:
    played = SCENES[name][0](script)
    sound, pauses = played.question.with_pauses(played.pause)
    change, environment = _condition(played.condition or condition, played.environment, script)
    question = SpokenQuestion(played.question.text, change(sound), played.question.voice)
    exchange = ScriptedExchange(question, over=_changed(played.over, change), stray=_changed(played.stray, change))
    return DuplexScene(
        name=name,
        language=script.language,
        condition=played.condition or condition,
        number=script.number,
        scene=Scene(name, (exchange,), environment),
        over_name=played.over_name,
        pauses=pauses if played.pause else (),
        usual=None if played.usual is None else change(played.usual),
    )


def _condition(
    name: str, environment: CallEnvironment, script: _Script
) -> tuple[Callable[[Samples], Samples], CallEnvironment]:
    """How a condition changes the caller's sounds, and where the call takes place."""
    if name == "room":
        return lambda sound: rooms.in_room(sound, script.room(), 1.0, script.number)[: len(sound)], environment
    if name == "telephone":
        return rooms.by_telephone, environment
    if name == "loss":
        return _unchanged, CallEnvironment(line=LOSSY)
    if name == "noise":
        return _unchanged, CallEnvironment(snr_db=NOISY_DB)
    return _unchanged, environment


def _loudspeaker(script: _Script) -> tuple[CallEnvironment, str]:
    decibels, room = ECHO_DB[script.number % len(ECHO_DB)], script.room()
    response = rooms.echo_response(room, script.number)
    return CallEnvironment(echo_db=decibels, echo_response=response), f"echo {decibels:.0f} dB, {room.name}"


def _over(script: _Script, kind: str, sound: Samples, name: str, with_stray: bool = False) -> _Played:
    """A sound over the reply; with `with_stray`, in every other call once more in the silence after it."""
    stray = Disturbance(kind, sound) if with_stray and script.number % 2 == 0 else None
    question = script.said(texts.QUESTIONS)
    return _Played(question, Disturbance(kind, _onset(sound), script.at), name, stray)


def _changed(disturbance: Disturbance | None, change: Callable[[Samples], Samples]) -> Disturbance | None:
    if disturbance is None:
        return None
    level = _level(disturbance.sound)
    changed = change(disturbance.sound)
    return Disturbance(disturbance.kind, at_level(changed, level), disturbance.at)


def _level(sound: Samples) -> float:
    """Level of the voiced part in dB of full scale."""
    first, last = voiced_bounds(sound)
    return float(10 * np.log10(np.square(sound[first:last], dtype=np.float64).mean() + 1e-12))


def _onset(sound: Samples) -> Samples:
    """Without leading silence, so that the disturbance begins when it is played."""
    return sound[voiced_bounds(sound)[0] :]


def _louder(sound: Samples, decibels: float) -> Samples:
    return at_level(sound, SPEECH_DBFS + decibels)


def _unchanged(sound: Samples) -> Samples:
    return sound
