"""Overlaps to learn from: calls with a reply, its echo, and sounds over it, heard through the real audio front end.

A call has one user with a voice, a usual level, a room and a line, and several sounds one after the other:
interruptions, backchannels, coughs and other noises, other voices or the user's own turned away, or nothing but the
echo. Rooms are random boxes, none of the duplex lab's. All is drawn from a seed.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.level import rms_dbfs
from vivavoce.audio.vad import WINDOW, VoiceActivity
from vivavoce.dialogue.barge_in import END_WINDOWS, UserLevel
from vivavoce.dialogue.front_end import AudioWindow, window_features
from vivavoce.dialogue.overlap_model import (
    CONTEXT,
    INPUTS,
    OverlapInputs,
    SoundKind,
)
from vivavoce.evaluation.overlaps import heard_each, speech_flags
from vivavoce.evaluation.room_acoustics import Room, impulse_response
from vivavoce.train.barge_in.corpus import OverlapUtterance, part_at
from vivavoce.train.barge_in.sounds import MADE, loud_part, syllables
from vivavoce.train.corpus import FULL_SCALE
from vivavoce.train.voices import RATE

Samples = NDArray[np.float32]
MAX_WINDOWS = 72  # of an overlap, about 2.3 s
SOUNDS_A_CALL = 4
TOGETHER = 32  # calls that go through the front end together
GAPS = (0.45, 0.9)  # seconds of silence between the sounds
LEADS = (0.3, 1.6)  # seconds of the reply before the first
REPLY_DBFS = (-28.0, -16.0)
USER_DBFS = (-34.0, -16.0)
SHARES = {"turn": 0.34, "backchannel": 0.2, "noise": 0.2, "bystander": 0.26}
UNKNOWN = 0.12  # share of calls in which the user's level is not known yet
ECHOING = 0.45  # share of calls with a loudspeaker
GUARDED = 0.4  # share of the calls without one that have an echo guard
ECHO_DB = (-28.0, -3.0)
LEVELS_DB = {  # lowest, most frequent and highest level relative to the user's
    "turn": (-5.0, 0.0, 7.0),
    "backchannel": (-14.0, -5.0, 2.0),
    "noise": (-12.0, 0.0, 9.0),
    "bystander": (-24.0, -7.0, -2.0),
}
BAND_LIMITED = 0.35  # share of calls over a telephone
PEOPLE = 0.45  # share of calls by recorded people, where there are some
ANOTHER = 0.15  # share of turns that another person takes, as near as the user
TURNED_AWAY = 0.5  # share of other voices that are the user's own, turned away from the microphone
MIN_SAID = 2  # interruptions of a voice: one in the call, one before it
RECORDED = 0.5  # share of noises that are recordings, where there are some
ROOMS = 48  # of each distance
SYLLABLES = 0.3  # share of the turns of unknown users that are syllables made by arithmetic
TEMPOS = (0.85, 1.2)  # of speed and pitch together
NEAR, DISTANT = (0.3, 1.4), (1.8, 5.0)  # metres


@dataclass(frozen=True)
class Example:
    """An overlap: the network's inputs window by window, from `CONTEXT` windows before it on, and what it is."""

    inputs: NDArray[np.float32] = field(repr=False)  # [window, INPUTS]
    kind: SoundKind
    language: str = ""


@dataclass(frozen=True)
class Voices:
    """The sounds of one part of the corpus."""

    spoken: dict[str, list[OverlapUtterance]]
    """By kind."""
    recorded: Sequence[Samples] = ()
    """Noises."""
    people: frozenset[str] = frozenset()
    """Voices that are recorded, and say nothing but interruptions."""

    @classmethod
    def of(
        cls,
        utterances: Sequence[OverlapUtterance],
        recorded: Sequence[Samples],
        part: str,
        people: Sequence[OverlapUtterance] = (),
    ) -> "Voices":
        """The utterances of a part by kind, its recorded noises, and what people say in it."""
        kinds: dict[str, list[OverlapUtterance]] = {}
        for each in (*utterances, *people):
            if each.part == part:
                kinds.setdefault(each.kind, []).append(each)
        chosen = [sound for index, sound in enumerate(recorded) if part_at(index) == part]
        return cls(kinds, chosen, frozenset(each.voice for each in people))

    @cached_property
    def users(self) -> dict[str, dict[str, list[OverlapUtterance]]]:
        """What each voice says, by kind; only voices that say enough for a call and what came before it."""
        voices: dict[str, dict[str, list[OverlapUtterance]]] = {}
        for kind, said in self.spoken.items():
            for each in said:
                voices.setdefault(each.voice, {}).setdefault(kind, []).append(each)
        return {
            voice: said for voice, said in sorted(voices.items()) if len(said.get("interruption", ())) >= MIN_SAID
        } or {voice: said for voice, said in sorted(voices.items()) if said.get("interruption")}


@dataclass(frozen=True)
class CallUser:
    """Who makes a call: what they say by kind, where from, how loud and how fast, and over which line."""

    said: dict[str, list[OverlapUtterance]]
    near: Samples | None
    """Impulse response to the microphone."""
    level_db: float
    tempo: float
    line: tuple[float, float] | None
    """Its band in hertz; None: the whole."""


def sound_of(utterance: OverlapUtterance) -> Samples:
    """Its samples, from the first loud frame on."""
    return loud_part(utterance.samples.astype(np.float32) / FULL_SCALE)


class Rooms:
    """Impulse responses of random boxes at 16 kHz."""

    def __init__(self, seed: int) -> None:
        source = np.random.default_rng(seed)
        self.near = [self._response(source, NEAR) for _ in range(ROOMS)]
        self.distant = [self._response(source, DISTANT) for _ in range(ROOMS)]

    @staticmethod
    def _response(source: np.random.Generator, distances: tuple[float, float]) -> Samples:
        size = tuple(float(source.uniform(low, high)) for low, high in ((2.2, 9.0), (1.8, 7.0), (1.6, 3.6)))
        room = Room("random", (size[0], size[1], size[2]), float(source.uniform(0.35, 0.82)))
        return impulse_response(room, float(source.uniform(*distances)), int(source.integers(2**31)), RATE)


@dataclass(frozen=True)
class OverlapCall:
    """The sounds of a call, and the begin, end, kind and language of those over its reply."""

    microphone: Samples
    output: Samples
    placed: list[tuple[int, int, str, str]]
    levels: UserLevel
    is_guarded: bool


class Calls:
    """Random calls of the sounds of a part."""

    def __init__(self, voices: Voices, rooms: Rooms, activity: VoiceActivity, seed: str) -> None:
        self.voices, self.rooms, self.activity = voices, rooms, activity
        self.source = random.Random(f"barge-in calls {seed}")

    def examples(self, calls: int) -> list[Example]:
        """The overlaps of the next calls."""
        found: list[Example] = []
        for begin in range(0, calls, TOGETHER):
            made = [self._call() for _ in range(min(TOGETHER, calls - begin))]
            for is_guarded in (False, True):
                chosen = [call for call in made if call.is_guarded is is_guarded]
                sounds = [(call.microphone, call.output) for call in chosen]
                for call, windows in zip(chosen, heard_each(sounds, self.activity, is_guarded), strict=True):
                    found += self._examples(windows, call.placed, call.levels)
        return found

    def _call(self) -> OverlapCall:
        source = self.source
        noise = np.random.default_rng(source.randrange(2**31))
        user = self._user()
        is_known = source.random() >= UNKNOWN
        kinds = source.choices(list(SHARES), list(SHARES.values()), k=SOUNDS_A_CALL)
        placed: list[tuple[int, int, str, str]] = []
        pieces: list[Samples] = [np.zeros(round(source.uniform(*LEADS) * RATE), np.float32)]
        for kind in kinds:
            sound, language = self._sound(kind, user, noise, is_known)
            sound = at_speech_level(sound, user.level_db + _triangular(source, *LEVELS_DB[kind]))
            begin = sum(map(len, pieces))
            gap = np.zeros(round(source.uniform(*GAPS) * RATE), np.float32)
            placed.append((begin, begin + len(sound) + round(0.3 * RATE), kind, language))
            pieces += [sound, gap]
        microphone = np.concatenate(pieces)
        output = self._reply(len(microphone))
        is_echoing = source.random() < ECHOING
        is_guarded = is_echoing or source.random() < GUARDED
        if is_echoing:
            microphone = microphone + self._echo(output)
        floor = source.uniform(-85.0, -58.0) if source.random() < 0.6 else user.level_db - source.uniform(10.0, 30.0)
        microphone = _by_line(microphone + _room_noise(noise, len(microphone), floor), user.line)
        levels = self._usual(user, noise, floor) if is_known else UserLevel()
        return OverlapCall(microphone.clip(-1, 1).astype(np.float32), output, placed, levels, is_guarded)

    def _user(self) -> CallUser:
        source, users = self.source, self.voices.users
        people = [voice for voice in users if voice in self.voices.people]
        others = [voice for voice in users if voice not in self.voices.people]
        voice = source.choice(people if people and (not others or source.random() < PEOPLE) else others)
        return CallUser(
            said=users[voice],
            near=source.choice(self.rooms.near) if source.random() < 0.5 else None,
            level_db=source.uniform(*USER_DBFS),
            tempo=source.uniform(*TEMPOS),
            line=(source.uniform(150, 400), source.uniform(2600, 4500)) if source.random() < BAND_LIMITED else None,
        )

    def _usual(self, user: CallUser, noise: np.random.Generator, floor: float) -> UserLevel:
        """What the front end knows of the user from the question before."""
        chosen = self.source.sample(user.said["interruption"], min(len(user.said["interruption"]), 2))
        sound = np.concatenate([self._spoken(each, user) for each in chosen])
        sound = at_speech_level(sound, user.level_db)
        sound = _by_line(sound + _room_noise(noise, len(sound), floor), user.line)
        windows = sound[: len(sound) // WINDOW * WINDOW].reshape(-1, WINDOW)
        known = UserLevel(user.level_db + self.source.gauss(0.5, 1.5))
        for window in windows:
            if rms_dbfs(window) > user.level_db - UserLevel.SOFT_DB:
                known.loud.append(window)
        return known

    def _spoken(self, utterance: OverlapUtterance, user: CallUser) -> Samples:
        """As the microphone hears it from the user."""
        return _convolved(_tempo(sound_of(utterance), user.tempo), user.near)

    def _sound(self, kind: str, user: CallUser, noise: np.random.Generator, is_known: bool) -> tuple[Samples, str]:
        source = self.source
        if kind == "noise":
            return self._noise(user.near, noise), ""
        if kind == "bystander":
            return self._bystander(user)
        if kind == "turn" and not is_known and source.random() < SYLLABLES:
            return syllables(noise), ""
        wanted = ("interruption",) if kind == "turn" else ("backchannel", "filler")
        said = self.voices.spoken if kind == "turn" and source.random() < ANOTHER else user.said
        utterance = source.choice(
            [each for name in wanted for each in said.get(name, self.voices.spoken.get(name, []))]
        )
        return self._spoken(utterance, user), utterance.language

    def _bystander(self, user: CallUser) -> tuple[Samples, str]:
        """Another voice, mostly distant, or the user's own, turned away."""
        source = self.source
        is_user = source.random() < TURNED_AWAY
        utterance = source.choice(user.said["interruption"] if is_user else self.voices.spoken["interruption"])
        sound = _tempo(sound_of(utterance), user.tempo if is_user else source.uniform(*TEMPOS))
        if is_user or source.random() < 0.95:
            sound = _convolved(sound, source.choice(self.rooms.distant))
        if is_user:
            sound = _convolved(sound, user.near)
        if source.random() < 0.4:
            sound = _dulled(sound, source.uniform(1200, 5000))
        return sound, utterance.language

    def _noise(self, near: Samples | None, noise: np.random.Generator) -> Samples:
        source = self.source
        if self.voices.recorded and source.random() < RECORDED:
            recorded = _tempo(source.choice(self.voices.recorded), source.uniform(0.8, 1.3))
            sound = recorded[: round(source.uniform(0.3, 2.0) * RATE)]
        elif source.random() < 0.25 and self.voices.spoken.get("laugh"):
            sound = _tempo(sound_of(source.choice(self.voices.spoken["laugh"])), source.uniform(0.8, 1.3))
        else:
            sound = source.choice(MADE)(noise)
        return _convolved(sound, near)

    def _reply(self, size: int) -> Samples:
        pieces: list[Samples] = []
        while sum(map(len, pieces)) < size:
            pieces += [
                sound_of(self.source.choice(self.voices.spoken["interruption"])),
                np.zeros(RATE // 6, np.float32),
            ]
        return at_speech_level(np.concatenate(pieces)[:size], self.source.uniform(*REPLY_DBFS))

    def _echo(self, output: Samples) -> Samples:
        response = self.source.choice(self.rooms.near)
        echo = _convolved(output, (response / np.linalg.norm(response)).astype(np.float32))
        late = round(self.source.uniform(0.02, 0.15) * RATE)
        delayed = np.concatenate([np.zeros(late, np.float32), echo])[: len(output)]
        return (10 ** (self.source.uniform(*ECHO_DB) / 20) * delayed).astype(np.float32)

    def _examples(
        self, windows: Sequence[AudioWindow], placed: Sequence[tuple[int, int, str, str]], levels: UserLevel
    ) -> list[Example]:
        found, flags = [], list(speech_flags(windows))
        index = 0
        while index < len(windows):
            if not flags[index]:
                index += 1
                continue
            end = overlap_end(flags, index)
            kind, language = _kind_at(placed, index, min(end, index + 12))
            context = min(index, CONTEXT)
            rows = slice(index - context, min(end, index + MAX_WINDOWS))
            inputs = overlap_inputs(windows[rows], flags[rows], context, levels)
            missing = [np.zeros(INPUTS, np.float32)] * (CONTEXT - context)
            found.append(Example(np.stack(missing + inputs), kind, language))
            index = end
        return found


def overlap_inputs(
    windows: Sequence[AudioWindow], flags: Sequence[bool], context: int, levels: UserLevel
) -> list[Samples]:
    """The network's inputs for the windows of an overlap, the first ones its context, and which of them are speech."""
    inputs = OverlapInputs.of(levels, since=-context)
    return [
        inputs.add(window, window_features(window.samples), is_speech, levels.user)
        for window, is_speech in zip(windows, flags, strict=True)
    ]


def overlap_end(flags: Sequence[bool], begin: int) -> int:
    """The window after the last of an overlap that begins here: so many are silent before it."""
    silent = 0
    for index in range(begin, len(flags)):
        silent = 0 if flags[index] else silent + 1
        if silent >= END_WINDOWS:
            return index + 1
    return len(flags)


def _kind_at(placed: Sequence[tuple[int, int, str, str]], first: int, last: int) -> tuple[SoundKind, str]:
    """What sounds in these windows: the placed sound that begins before their end and is not over, else echo."""
    kinds = {
        "turn": SoundKind.TURN,
        "backchannel": SoundKind.BACKCHANNEL,
        "noise": SoundKind.NOISE,
        "bystander": SoundKind.BYSTANDER,
    }
    for begin, end, kind, language in placed:
        if begin < last * WINDOW and end > first * WINDOW:
            return kinds[kind], language
    return SoundKind.ECHO, ""


def at_speech_level(sound: Samples, dbfs: float) -> Samples:
    """Scaled so that its loud frames have this level."""
    frames = sound[: len(sound) // 160 * 160].reshape(-1, 160)
    power = np.square(frames, dtype=np.float64).mean(axis=1)
    loud = power[power > 1e-3 * power.max(initial=1e-12)]
    level = 10 * np.log10(loud.mean() + 1e-12) if loud.size else 0.0
    return (sound * np.float32(10 ** ((dbfs - level) / 20))).astype(np.float32)


def _triangular(source: random.Random, lowest: float, mode: float, highest: float) -> float:
    return source.triangular(lowest, highest, mode)


def _room_noise(source: np.random.Generator, size: int, dbfs: float) -> Samples:
    """Noise whose spectrum falls by a random slope."""
    padded = _transform_size(size)
    frequency = np.maximum(np.fft.rfftfreq(padded, 1 / RATE), 40.0)
    spectrum = np.fft.rfft(source.standard_normal(padded)) / frequency ** source.uniform(0.0, 1.0)
    noise = np.fft.irfft(spectrum)[:size]
    return (noise * 10 ** (dbfs / 20) / np.sqrt(np.square(noise).mean() + 1e-12)).astype(np.float32)


def _convolved(sound: Samples, response: Samples | None) -> Samples:
    if response is None:
        return sound
    size = len(sound) + len(response) - 1
    padded = _transform_size(size)
    return np.fft.irfft(np.fft.rfft(sound, padded) * np.fft.rfft(response, padded))[:size].astype(np.float32)


def _transform_size(size: int) -> int:
    """The next power of two: transforms of other sizes take up to ten times as long."""
    return 1 << max(1, size - 1).bit_length()


def _dulled(sound: Samples, hertz: float) -> Samples:
    size = _transform_size(len(sound))
    frequency = np.fft.rfftfreq(size, 1 / RATE)
    dulled = np.fft.irfft(np.fft.rfft(sound, size) / (1 + (frequency / hertz) ** 2))
    return dulled[: len(sound)].astype(np.float32)


def _by_line(sound: Samples, band: tuple[float, float] | None) -> Samples:
    """The band of a telephone line; None: all of the sound."""
    if band is None:
        return sound
    low, high = band
    size = _transform_size(len(sound))
    frequency = np.fft.rfftfreq(size, 1 / RATE)
    passed = 1 / (1 + np.exp(-(frequency - low) / 25)) / (1 + np.exp((frequency - high) / 60))
    return np.fft.irfft(np.fft.rfft(sound, size) * passed)[: len(sound)].astype(np.float32)


def _tempo(sound: Samples, factor: float) -> Samples:
    """Speed and pitch together."""
    return np.interp(np.arange(0, len(sound), factor), np.arange(len(sound)), sound).astype(np.float32)


def make_examples(
    utterances: Sequence[OverlapUtterance],
    noises: Sequence[Samples],
    people: Sequence[OverlapUtterance],
    part: str,
    calls: int,
    seed: int = 0,
) -> list[Example]:
    """The overlaps of so many calls of a part."""
    from vivavoce.audio.vad import voice_activity

    voices = Voices.of(utterances, noises, part, people)
    return Calls(voices, Rooms(seed), voice_activity(), f"{part} {seed}").examples(calls)


def write_examples(path: Path, examples: Sequence[Example]) -> None:
    """Write the inputs of examples, one after the other, with their lengths and kinds."""
    lengths = np.array([len(each.inputs) for each in examples])
    kinds = np.array([int(each.kind) for each in examples])
    inputs = np.concatenate([each.inputs for each in examples]).astype(np.float16)
    np.savez(path, inputs=inputs, lengths=lengths, kinds=kinds)


def read_examples(path: Path) -> list[Example]:
    """Read what `write_examples` wrote."""
    with np.load(path) as stored:
        parts = np.split(stored["inputs"].astype(np.float32), np.cumsum(stored["lengths"])[:-1])
        return [Example(inputs, SoundKind(int(kind))) for inputs, kind in zip(parts, stored["kinds"], strict=True)]
