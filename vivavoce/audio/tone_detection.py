"""Detection of telephone tones: which frequencies explain a short block of sound, and how tones follow each other.

Each block is projected onto sines of the frequencies looked for, which is what Goertzel's recursion computes one by
one: the share of the block's power that they explain tells tones from speech.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.tones import DIGIT_COLUMNS, DIGIT_KEYS, DIGIT_ROWS, Frequencies

Samples = NDArray[np.float32]

MIN_POWER = 10 ** (-40 / 10)  # of a tone


class Blocks:
    """Cuts a stream into blocks; each begins `hop` samples after the one before."""

    def __init__(self, size: int, hop: int) -> None:
        self.size, self.hop = size, hop
        self._held: Samples = np.zeros(0, np.float32)

    def add(self, samples: Samples) -> NDArray[np.float64]:
        """The blocks that these samples complete.  # [block, size]"""
        self.hold(samples)
        return self.take()

    def hold(self, samples: Samples) -> None:
        """Add samples, whose blocks are taken or skipped next."""
        self._held = np.concatenate([self._held, samples], dtype=np.float32)

    @property
    def energy(self) -> float:
        """Of what is held: no block has more."""
        return float(np.dot(self._held, self._held))

    def take(self) -> NDArray[np.float64]:
        """The blocks that are complete.  # [block, size]"""
        count = self._count
        # A view made by hand: numpy's sliding_window_view takes longer than the copy.
        blocks = np.ndarray((count, self.size), np.float32, self._held, 0, (4 * self.hop, 4)).astype(np.float64)
        self._held = self._held[count * self.hop :]
        return blocks

    def skip(self) -> int:
        """Drop the blocks that are complete, and return their number."""
        count = self._count
        self._held = self._held[count * self.hop :]
        return count

    @property
    def _count(self) -> int:
        return max(0, (len(self._held) - self.size) // self.hop + 1)


class ToneProjection:
    """The power of blocks, and the share of it that each set of frequencies explains."""

    def __init__(self, sets: Sequence[Frequencies], size: int, rate: int) -> None:
        phase = 2 * np.pi * np.arange(size)[:, None] / rate
        bases = []
        for frequencies in sets:
            angles = phase * np.asarray(frequencies, np.float64)
            bases.append(np.linalg.qr(np.concatenate([np.cos(angles), np.sin(angles)], axis=1))[0])
        self._basis = np.concatenate(bases, axis=1)  # [size, dimension]
        self._starts = np.cumsum([0] + [basis.shape[1] for basis in bases[:-1]])

    def measure(self, blocks: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean power of each block, and shares.  # [block], [block, set]"""
        energy = np.square(blocks).sum(axis=1)
        explained = np.add.reduceat(np.square(blocks @ self._basis), self._starts, axis=1)
        return energy / blocks.shape[1], explained / np.maximum(energy, 1e-12)[:, None]


class DigitToneDetector:
    """Telephone keys in sound (DTMF), each reported once.

    A key needs 40 ms, a row and a column frequency within 8 dB of each other, and 80 % of the power. Speech seldom
    has that, but can: use RTP events where the peer sends them.
    """

    BLOCK_SECONDS, HOP_SECONDS = 0.0256, 0.0128
    MIN_SHARE = 0.8
    MAX_TWIST_DB = 8.0
    MIN_ABOVE_DB = 6.0  # of the strongest row and column over the others
    MIN_BLOCKS = 2  # that agree
    MIN_PAUSE = 2  # blocks without a key, before the same one counts again

    def __init__(self, rate: int) -> None:
        size = round(self.BLOCK_SECONDS * rate)
        self._blocks = Blocks(size, round(self.HOP_SECONDS * rate))
        self._single = ToneProjection([(each,) for each in (*DIGIT_ROWS, *DIGIT_COLUMNS)], size, rate)
        pairs = [(row, column) for row in DIGIT_ROWS for column in DIGIT_COLUMNS]
        self._pairs = ToneProjection(pairs, size, rate)
        self._candidate: str | None = None
        self._count = 0
        self._pressed: str | None = None
        self._pause = 0

    def step(self, samples: Samples) -> str:
        """The keys that these samples complete."""
        self._blocks.hold(samples)
        if self._blocks.energy < MIN_POWER * self._blocks.size:
            for _ in range(self._blocks.skip()):
                self._follow(None)
            return ""
        blocks = self._blocks.take()
        if not len(blocks):
            return ""
        power, shares = self._single.measure(blocks)
        _, explained = self._pairs.measure(blocks)
        keys = (self._key(*each) for each in zip(power, shares, explained, strict=True))
        return "".join(filter(None, map(self._follow, keys)))

    def _key(self, power: float, shares: NDArray[np.float64], explained: NDArray[np.float64]) -> str | None:
        row, column = int(np.argmax(shares[:4])), int(np.argmax(shares[4:]))
        if power < MIN_POWER or explained[4 * row + column] < self.MIN_SHARE:
            return None
        decibels = 10 * np.log10(np.maximum(shares, 1e-9))
        rows, columns = np.sort(decibels[:4]), np.sort(decibels[4:])
        if abs(rows[-1] - columns[-1]) > self.MAX_TWIST_DB:
            return None
        if min(rows[-1] - rows[-2], columns[-1] - columns[-2]) < self.MIN_ABOVE_DB:
            return None
        return DIGIT_KEYS[row][column]

    def _follow(self, key: str | None) -> str | None:
        """The key where it is newly pressed."""
        self._count = self._count + 1 if key == self._candidate else 1
        self._candidate = key
        if key is None:
            if self._count >= self.MIN_PAUSE:
                self._pressed = None
            return None
        if self._count < self.MIN_BLOCKS or key == self._pressed:
            return None
        self._pressed = key
        return key


@dataclass(frozen=True)
class Cadence:
    """How long a tone sounds and pauses, in ranges of seconds, and how many periods are needed."""

    name: str
    tones: frozenset[str]
    sound: tuple[float, float]
    pause: tuple[float, float]
    periods: int


LONG_PAUSE = 1.4  # seconds; a tone that stays away for longer is one of a ringing telephone
TONES: dict[str, tuple[Frequencies, ...]] = {  # with the tolerance of a block, about 1.5 %
    "350+440": ((350, 440),),
    "440+480": ((440, 480),),
    "480+620": ((480, 620),),
    "400+450": ((400, 450),),
    "425": ((425,),),
    "400": ((400,),),
    "950": ((950,), (913.8,), (985.2,)),
    "1400": ((1400,), (1370.6,), (1428.5,)),
    "1800": ((1776.7,), (1800,)),
}
BUSY_TONES = frozenset({"480+620", "425", "400"})
CADENCES = (
    Cadence("ringback", frozenset({"440+480"}), (0.6, 2.5), (LONG_PAUSE, 7.0), 1),
    Cadence("ringback", frozenset({"425"}), (0.6, 1.7), (LONG_PAUSE, 7.0), 1),
    Cadence("ringback", frozenset({"400+450"}), (0.3, 0.5), (0.1, 0.3), 1),
    Cadence("busy", BUSY_TONES, (0.33, 0.7), (0.33, 0.7), 2),
    Cadence("congestion", BUSY_TONES, (0.15, 0.32), (0.15, 0.32), 3),
)
CADENCE_TONES = frozenset().union(*(cadence.tones for cadence in CADENCES))
SPECIAL_SEQUENCE = ("950", "1400", "1800")
SPECIAL_SECONDS = (0.2, 0.5)  # of each


class CallProgressDetector:
    """Ringback, busy, congestion and special information tones, of North America, Europe and the United Kingdom.

    A tone is reported when its cadence is certain: ringback after the first ring and 1.4 s of pause, busy after two
    periods, congestion after three, special information after its third tone; then again at each later period.
    """

    BLOCK_SECONDS = 0.025
    MIN_SHARE = 0.85
    PAIR_PENALTY = 0.03
    MAX_DROPOUT = 2  # blocks of something else within a tone or pause

    def __init__(self, rate: int) -> None:
        size = round(self.BLOCK_SECONDS * rate)
        self._blocks = Blocks(size, size)
        sets = [(label, frequencies) for label, some in TONES.items() for frequencies in some]
        self._labels = [label for label, _ in sets]
        self._projection = ToneProjection([frequencies for _, frequencies in sets], size, rate)
        # A pair explains more than one of its frequencies alone, be it noise.
        self._penalties = np.array([self.PAIR_PENALTY * (len(frequencies) - 1) for _, frequencies in sets])
        self._label = ""  # of the run; empty for anything that is no tone
        self._run = 0  # blocks
        self._other, self._other_run = "", 0  # what may follow
        self._tone: tuple[str, float] | None = None  # the last, and its seconds
        self._special: list[str] = []
        self._periods: dict[str, int] = {}
        self._was_paused = False  # longer than any short cadence

    @property
    def is_sounding(self) -> bool:
        """Whether a tone of ringing or of a busy line sounds now, after 75 ms of it."""
        return self._label in CADENCE_TONES

    def step(self, samples: Samples) -> list[str]:
        """The tones that these samples make certain."""
        blocks = self._blocks.add(samples)
        if not len(blocks):
            return []
        power, shares = self._projection.measure(blocks)
        found: list[str] = []
        for level, row in zip(power, shares, strict=True):
            strongest = int(np.argmax(row - self._penalties))
            is_tone = level >= MIN_POWER and row[strongest] >= self.MIN_SHARE
            found += self._follow(self._labels[strongest] if is_tone else "")
        return found

    def _follow(self, label: str) -> list[str]:
        if label == self._label:
            self._run += 1 + self._other_run
            self._other_run = 0
        elif label == self._other and self._other_run:
            self._other_run += 1
        else:
            self._run += self._other_run
            self._other, self._other_run = label, 1
        if self._other_run > self.MAX_DROPOUT:
            return self._change()
        if not self._label and not self._was_paused and self._run * self.BLOCK_SECONDS >= LONG_PAUSE:
            self._was_paused = True
            return self._end_period(LONG_PAUSE)
        return []

    def _change(self) -> list[str]:
        """End the run; what followed it is the next."""
        seconds, label = self._run * self.BLOCK_SECONDS, self._label
        self._label, self._run, self._other_run = self._other, self._other_run, 0
        if not label:
            was_paused, self._was_paused = self._was_paused, False
            return [] if was_paused else self._end_period(seconds)
        self._tone = (label, seconds)
        is_next = label in SPECIAL_SEQUENCE and SPECIAL_SECONDS[0] <= seconds <= SPECIAL_SECONDS[1]
        self._special = [*self._special, label][-3:] if is_next else []
        return ["special information"] if tuple(self._special) == SPECIAL_SEQUENCE else []

    def _end_period(self, pause: float) -> list[str]:
        tone, self._tone = self._tone, None
        if tone is None:
            self._periods.clear()
            return []
        label, sound = tone
        found = []
        for cadence in CADENCES:
            fits = label in cadence.tones and _within(sound, cadence.sound) and _within(pause, cadence.pause)
            key = f"{cadence.name} {label}"
            if fits:
                self._periods[key] = self._periods.get(key, 0) + 1
                if self._periods[key] >= cadence.periods:
                    found.append(cadence.name)
            elif label in cadence.tones and cadence.name in ("busy", "congestion"):
                self._periods.pop(key, None)
        return found


def _within(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]


@dataclass(frozen=True)
class Beep:
    """A pure tone that has ended."""

    frequency: float
    seconds: float


class BeepDetector:
    """A pure tone of any frequency that lasts, as after the greeting of voice mail; reported at its end."""

    BLOCK_SECONDS = 0.032
    MIN_SECONDS, MAX_SECONDS = 0.15, 2.0
    MIN_FREQUENCY, MAX_FREQUENCY = 300.0, 2_500.0
    MIN_SHARE = 0.93  # of the power, around the strongest frequency
    MAX_CHANGE = 20.0  # Hz, from block to block

    def __init__(self, rate: int) -> None:
        size = round(self.BLOCK_SECONDS * rate)
        self._blocks = Blocks(size, size // 2)
        self._window = np.hanning(size)
        self._bin = rate / size
        self._frequency: float | None = None
        self._seconds = 0.0

    def step(self, samples: Samples) -> list[Beep]:
        """The beeps that have ended."""
        return [beep for block in self._blocks.add(samples) if (beep := self._follow(self._pure_frequency(block)))]

    def _pure_frequency(self, block: NDArray[np.float64]) -> float | None:
        if np.square(block).mean() < MIN_POWER:
            return None
        power = np.abs(np.fft.rfft(block * self._window)) ** 2
        strongest = int(np.argmax(power))
        near = power[max(strongest - 2, 0) : strongest + 3]
        frequency = float(np.dot(near, np.arange(max(strongest - 2, 0), strongest + 3)[: len(near)]) / near.sum())
        frequency *= self._bin
        is_pure = near.sum() >= self.MIN_SHARE * power.sum()
        return frequency if is_pure and self.MIN_FREQUENCY <= frequency <= self.MAX_FREQUENCY else None

    def _follow(self, frequency: float | None) -> Beep | None:
        before, seconds = self._frequency, self._seconds
        hop = self.BLOCK_SECONDS / 2
        if before is not None and frequency is not None and abs(frequency - before) <= self.MAX_CHANGE:
            self._seconds += hop
            return None
        self._frequency, self._seconds = frequency, 0.0 if frequency is None else hop
        if before is None or not self.MIN_SECONDS <= seconds <= self.MAX_SECONDS:
            return None
        return Beep(before, seconds)
