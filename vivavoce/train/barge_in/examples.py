"""Overlaps to learn from: calls with a reply, its echo, and sounds over it, heard through the real audio front end.

A call has one user with a usual level, a room and a line, and several sounds one after the other: interruptions,
backchannels, coughs and other noises, other voices, or nothing but the echo. Rooms are random boxes, none of the duplex
lab's. All is drawn from a seed.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.vad import WINDOW, VoiceActivity
from vivavoce.dialogue.barge_in import END_WINDOWS
from vivavoce.dialogue.front_end import AudioWindow, window_features
from vivavoce.dialogue.overlap_model import CONTEXT, INPUTS, OverlapWindow, SoundKind, network_inputs
from vivavoce.evaluation.overlaps import heard_each, speech_flags
from vivavoce.evaluation.room_acoustics import Room, impulse_response
from vivavoce.train.barge_in.corpus import OverlapUtterance
from vivavoce.train.barge_in.sounds import MADE, loud_part, syllables
from vivavoce.train.corpus import FULL_SCALE
from vivavoce.train.voices import RATE

Samples = NDArray[np.float32]
MAX_WINDOWS = 48  # of an overlap, about 1.5 s
SOUNDS_A_CALL = 4
TOGETHER = 32  # calls that go through the front end together
GAPS = (0.45, 0.9)  # seconds of silence between the sounds
LEADS = (0.3, 1.6)  # seconds of the reply before the first
REPLY_DBFS = (-28.0, -16.0)
USER_DBFS = (-34.0, -16.0)
SHARES = {"turn": 0.34, "backchannel": 0.22, "noise": 0.24, "bystander": 0.2}
UNKNOWN = 0.12  # share of calls in which the user's level is not known yet
ECHOING = 0.45  # share of calls with a loudspeaker
GUARDED = 0.4  # share of the calls without one that have an echo guard
ECHO_DB = (-28.0, -3.0)
LEVELS_DB = {  # lowest, most frequent and highest level relative to the user's
    "turn": (-6.0, 0.0, 7.0),
    "backchannel": (-14.0, -5.0, 2.0),
    "noise": (-12.0, 0.0, 9.0),
    "bystander": (-26.0, -7.0, -4.0),
}
BAND_LIMITED = 0.4  # share of sounds, of every kind, that come over a telephone: most of the recorded coughs do
RECORDED = 0.5  # share of noises that are recordings, where there are some
ROOMS = 48  # of each distance
SYLLABLES = 0.1  # share of turns that are syllables made by arithmetic
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

    @classmethod
    def of(cls, utterances: Sequence[OverlapUtterance], recorded: Sequence[Samples], part: str) -> "Voices":
        """The utterances of a part by kind, and its recordings."""
        kinds: dict[str, list[OverlapUtterance]] = {}
        for each in utterances:
            if each.part == part:
                kinds.setdefault(each.kind, []).append(each)
        chosen = [sound for index, sound in enumerate(recorded) if (index % 8 == 0) == (part == "check")]
        return cls(kinds, chosen)


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
    user_db: float | None
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
                    found += self._examples(windows, call.placed, call.user_db)
        return found

    def _call(self) -> OverlapCall:
        source = self.source
        noise = np.random.default_rng(source.randrange(2**31))
        user_db = source.uniform(*USER_DBFS)
        near = source.choice(self.rooms.near) if source.random() < 0.5 else None
        kinds = source.choices(list(SHARES), list(SHARES.values()), k=SOUNDS_A_CALL)
        placed: list[tuple[int, int, str, str]] = []
        pieces: list[Samples] = [np.zeros(round(source.uniform(*LEADS) * RATE), np.float32)]
        for kind in kinds:
            sound, language = self._sound(kind, near, noise)
            if source.random() < BAND_LIMITED:
                sound = _by_line(sound, source.uniform(150, 400), source.uniform(2600, 4500))
            sound = at_speech_level(sound, user_db + _triangular(source, *LEVELS_DB[kind]))
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
        floor = source.uniform(-85.0, -58.0) if source.random() < 0.6 else user_db - source.uniform(10.0, 30.0)
        microphone = microphone + _room_noise(noise, len(microphone), floor)
        known = None if source.random() < UNKNOWN else user_db + source.gauss(0.5, 1.5)
        return OverlapCall(microphone.clip(-1, 1).astype(np.float32), output, placed, known, is_guarded)

    def _sound(self, kind: str, near: Samples | None, noise: np.random.Generator) -> tuple[Samples, str]:
        source = self.source
        if kind == "noise":
            return self._noise(near, noise), ""
        if kind == "bystander":
            utterance = source.choice(self.voices.spoken["interruption"])
            sound = sound_of(utterance)
            if source.random() < 0.85:
                sound = _convolved(sound, source.choice(self.rooms.distant))
            if source.random() < 0.4:
                sound = _dulled(sound, source.uniform(1200, 5000))
            return sound, utterance.language
        if kind == "turn" and source.random() < SYLLABLES:
            return syllables(noise), ""
        spoken = self.voices.spoken
        chosen = spoken["interruption"] if kind == "turn" else [*spoken["backchannel"], *spoken.get("filler", [])]
        utterance = source.choice(chosen)
        sound = _tempo(sound_of(utterance), source.uniform(*TEMPOS))
        return (_convolved(sound, near) if near is not None else sound), utterance.language

    def _noise(self, near: Samples | None, noise: np.random.Generator) -> Samples:
        source = self.source
        if self.voices.recorded and source.random() < RECORDED:
            recorded = _tempo(source.choice(self.voices.recorded), source.uniform(0.8, 1.3))
            sound = recorded[: round(source.uniform(0.3, 2.0) * RATE)]
        elif source.random() < 0.25 and self.voices.spoken.get("laugh"):
            sound = _tempo(sound_of(source.choice(self.voices.spoken["laugh"])), source.uniform(0.8, 1.3))
        else:
            sound = source.choice(MADE)(noise)
        return _convolved(sound, near) if near is not None else sound

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
        self, windows: Sequence[AudioWindow], placed: Sequence[tuple[int, int, str, str]], user_db: float | None
    ) -> list[Example]:
        found, flags = [], list(speech_flags(windows))
        index = 0
        while index < len(windows):
            if not flags[index]:
                index += 1
                continue
            end = overlap_end(flags, index)
            kind, language = _kind_at(placed, index, min(end, index + 12))
            rows = range(max(0, index - CONTEXT), min(end, index + MAX_WINDOWS))
            inputs = [overlap_inputs(windows, row, row - index, user_db) for row in rows]
            missing = CONTEXT - (index - rows.start)
            found.append(Example(np.stack([np.zeros(INPUTS, np.float32)] * missing + inputs), kind, language))
            index = end
        return found


def overlap_inputs(windows: Sequence[AudioWindow], row: int, since: int, user_db: float | None) -> NDArray[np.float32]:
    """The network's inputs for a window of a call."""
    window = windows[row]
    before = windows[row - 1].samples if row > 0 and since > -CONTEXT else np.zeros(WINDOW, np.float32)
    features = window_features(window.samples)
    return network_inputs(
        OverlapWindow(window.samples, before, features, window.probability, window.echo, since, user_db)
    )


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
    frequency = np.maximum(np.fft.rfftfreq(size, 1 / RATE), 40.0)
    spectrum = np.fft.rfft(source.standard_normal(size)) / frequency ** source.uniform(0.0, 1.0)
    noise = np.fft.irfft(spectrum, size)
    return (noise * 10 ** (dbfs / 20) / np.sqrt(np.square(noise).mean() + 1e-12)).astype(np.float32)


def _convolved(sound: Samples, response: Samples) -> Samples:
    size = len(sound) + len(response) - 1
    return np.fft.irfft(np.fft.rfft(sound, size) * np.fft.rfft(response, size), size).astype(np.float32)


def _dulled(sound: Samples, hertz: float) -> Samples:
    frequency = np.fft.rfftfreq(len(sound), 1 / RATE)
    return np.fft.irfft(np.fft.rfft(sound) / (1 + (frequency / hertz) ** 2), len(sound)).astype(np.float32)


def _by_line(sound: Samples, low: float, high: float) -> Samples:
    """The band of a telephone line."""
    frequency = np.fft.rfftfreq(len(sound), 1 / RATE)
    passed = 1 / (1 + np.exp(-(frequency - low) / 25)) / (1 + np.exp((frequency - high) / 60))
    return np.fft.irfft(np.fft.rfft(sound) * passed, len(sound)).astype(np.float32)


def _tempo(sound: Samples, factor: float) -> Samples:
    """Speed and pitch together."""
    return np.interp(np.arange(0, len(sound), factor), np.arange(len(sound)), sound).astype(np.float32)


def make_examples(
    utterances: Sequence[OverlapUtterance], noises: Sequence[Samples], part: str, calls: int, seed: int = 0
) -> list[Example]:
    """The overlaps of so many calls of a part."""
    from vivavoce.audio.vad import voice_activity

    voices = Voices.of(utterances, noises, part)
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
