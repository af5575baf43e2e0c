"""Our own sound in the user's microphone, taken out by knowing what was played.

A partitioned frequency-domain filter learns the way from loudspeaker to microphone: delay, room and all. Its step is a
Kalman filter's, so that it learns fast while only we speak and stands still while both do. What is left of the echo is
as large as the filter is unsure; where that explains the sound, the sound is turned down to nothing.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vivavoce.errors import InputError

Samples = NDArray[np.float32]
Spectrum = NDArray[np.complex64]
Power = NDArray[np.float32]

BLOCK = 512  # samples at 16 kHz
PRACTICE = 32  # blocks in which the way is learned anew after a silence: the client may have buffered more or less
LOUDEST_ECHO = 0.25  # of our own power: while the way is being learned, what is softer may be echo
FAINT_ECHO = 0.001  # a microphone that stays under this while we play hears us hardly, as with headphones
CALM = 14  # blocks of which that is known: most clients play within half a second
LOUDEST_FAINT_ECHO = 0.0025


@dataclass(frozen=True)
class EchoState:
    """What is known of the room. Arrays are never changed in place."""

    reference: Samples  # [block]: the last one
    played: Spectrum  # [partition, bin]: newest first
    path: Spectrum  # [partition, bin]
    doubt: Power  # [partition, bin]: how far the path may be off, as power
    residue: Power  # [bin]: power of what the path does not explain
    quiet: int  # blocks since something was played
    practice: int  # blocks of sound heard since the last long silence
    calm: int  # blocks of them in which the microphone hardly heard us; stays once it is CALM
    loudest: float  # power a sample of the loudest block played of late
    turn: int  # the partition whose path is trimmed next
    gain: float
    passed_over: tuple[Samples, ...] = ()  # [block] each: played of late, and not in `played` yet


class EchoGuard:
    """Takes the echo of `reference` out of a microphone, 512 samples at a time; without one, it changes nothing."""

    def __init__(
        self, reach_seconds: float = 0.768, rate: int = 16_000, coupling_db: float = -10.0, forgetting: float = 0.9985
    ) -> None:
        self.partitions = max(1, round(reach_seconds * rate / BLOCK))
        self.forgetting = forgetting
        self._bins = BLOCK + 1
        self._prior = np.float32(10 ** (coupling_db / 10) / 4)
        self._speech = _speech_weights(self._bins, rate)

    def initial_state(self) -> EchoState:
        """Nothing known but how loud an echo usually is."""
        shape = (self.partitions, self._bins)
        # Sound comes soon or not at all: later partitions are less likely to matter.
        fading = np.exp(-np.arange(self.partitions) / 8, dtype=np.float32)[:, None]
        return EchoState(
            np.zeros(BLOCK, np.float32),
            np.zeros(shape, np.complex64),
            np.zeros(shape, np.complex64),
            np.broadcast_to(self._prior * fading, shape).astype(np.float32),
            np.full(self._bins, 1e-4, np.float32),
            quiet=self.partitions + 1,
            practice=0,
            calm=0,
            loudest=0.0,
            turn=0,
            gain=1.0,
        )

    def step(self, state: EchoState, microphone: Samples, reference: Samples) -> tuple[Samples, float, EchoState]:
        """The microphone's sound without ours, and which share of it was ours.  # [512], [512] → [512]"""
        if np.shape(microphone) != (BLOCK,) or np.shape(reference) != (BLOCK,):
            sizes = list(np.shape(microphone)), list(np.shape(reference))
            raise InputError(f"the echo guard takes windows of {BLOCK} samples, not {sizes[0]} and {sizes[1]}")
        loud = float(np.square(reference).mean())
        quiet = 0 if loud > 1e-9 else state.quiet + 1
        if quiet > self.partitions:
            return microphone, 0.0, replace(state, reference=reference, quiet=quiet, gain=1.0)
        state = self._resumed(state) if state.quiet > self.partitions else state
        heard = float(np.square(microphone).mean())
        if state.calm >= CALM and heard < FAINT_ECHO * max(loud, state.loudest):
            return microphone, 0.0, self._passed_over(state, reference, loud, quiet)
        played = self._played(state, reference)
        left = microphone - np.fft.irfft((played * state.path).sum(axis=0))[BLOCK:].astype(np.float32)
        error = np.fft.rfft(np.concatenate([np.zeros(BLOCK, np.float32), left])).astype(np.complex64)
        state = replace(
            state,
            reference=reference,
            played=played,
            quiet=quiet,
            practice=state.practice + (loud > 1e-7),
            calm=_calm(state, loud, heard),
            loudest=max(loud, 0.97 * state.loudest),
            passed_over=(),
        )
        loudness, power = _power(played), _power(error)
        expected = 0.5 * (loudness * state.doubt).sum(axis=0)  # half, because half of each transform is padding
        learned = self._learn(state, error, power, loudness, expected)
        return self._gated(microphone, left, power, expected, state, learned)

    def _passed_over(self, state: EchoState, reference: Samples, loud: float, quiet: int) -> EchoState:
        """Headphones and a silent room: there is nothing to take out or to learn, only to remember what was played."""
        return replace(
            state,
            passed_over=(*state.passed_over, reference)[-self.partitions :],
            quiet=quiet,
            practice=state.practice + (loud > 1e-7),
            loudest=max(loud, 0.97 * state.loudest),
            gain=1.0,
        )

    def _played(self, state: EchoState, reference: Samples) -> Spectrum:
        """The spectra of what was played, this block's first."""
        blocks = np.concatenate([state.reference, *state.passed_over, reference])
        pairs = np.lib.stride_tricks.sliding_window_view(blocks, 2 * BLOCK)[::BLOCK]
        newest = np.fft.rfft(pairs).astype(np.complex64)[::-1]
        return np.concatenate([newest, state.played])[: self.partitions]

    def _resumed(self, state: EchoState) -> EchoState:
        """After a silence the way may be a little longer or shorter."""
        doubt = np.maximum(state.doubt, 0.1 * self.initial_state().doubt)
        silence = np.zeros_like(state.played)
        return replace(state, played=silence, doubt=doubt, practice=0, calm=0, loudest=0.0, passed_over=())

    def _learn(self, state: EchoState, error: Spectrum, power: Power, loud: Power, explained: Power) -> EchoState:
        """The path and its doubt after what was left unexplained: `error`, and its power."""
        played, doubt = state.played, state.doubt
        residue = 0.8 * state.residue + 0.2 * power
        unexplained = np.maximum(residue - explained, 0.1 * residue) + 1e-6
        step = doubt / (explained + unexplained)
        path = state.path + step * played.conj() * error
        path[state.turn] = _trimmed(path[state.turn])
        kept = self.forgetting**2
        drift = (1 - kept) * (_power(path) + 0.02 * self._prior)
        doubt = kept * np.maximum(1 - 0.5 * step * loud, 0.0) * doubt + drift
        turn = (state.turn + 1) % self.partitions
        return replace(
            state,
            path=path.astype(np.complex64),
            doubt=doubt.astype(np.float32),
            residue=residue.astype(np.float32),
            turn=turn,
        )

    def _gated(
        self, microphone: Samples, left: Samples, power: Power, expected: Power, before: EchoState, after: EchoState
    ) -> tuple[Samples, float, EchoState]:
        """What is left, turned down as far as the filter's own doubt, `expected`, explains its power."""
        explained = float((self._speech * np.minimum(3.0 * expected, power)).sum())
        total = float((self._speech * power).sum()) + 1e-9
        share = explained / total if before.calm < CALM else 0.0
        loudest_echo = LOUDEST_ECHO if before.calm < CALM else LOUDEST_FAINT_ECHO
        if before.practice < PRACTICE and float(np.square(left).mean()) < loudest_echo * before.loudest:
            share = 1.0
        wanted = float(np.clip((0.75 - share) / 0.35, 0.0, 1.0))
        # Quick to close, slow to open: an echo has syllables too.
        gain = wanted if wanted < before.gain else before.gain + 0.5 * (wanted - before.gain)
        ramp = np.linspace(before.gain, gain, BLOCK, dtype=np.float32)
        heard = float(np.square(microphone).sum()) + 1e-9
        ours = 1.0 - float(np.square(left * ramp).sum()) / heard
        return left * ramp, float(np.clip(ours, 0.0, 1.0)), replace(after, gain=gain)


def _calm(state: EchoState, played: float, heard: float) -> int:
    """For how many blocks of our sound the microphone has hardly heard us."""
    if state.calm >= CALM or played <= 1e-7:
        return state.calm
    return state.calm + 1 if heard < FAINT_ECHO * max(played, state.loudest) else 0


def _power(spectrum: Spectrum) -> Power:
    return np.square(spectrum.real) + np.square(spectrum.imag)


def _trimmed(path: Spectrum) -> Spectrum:
    """The path of a partition without what would wrap around."""
    response = np.fft.irfft(path)
    response[BLOCK:] = 0
    return np.fft.rfft(response).astype(np.complex64)


def _speech_weights(bins: int, rate: int) -> Power:
    """Weight of each bin in the echo share: rumble and hiss do not count."""
    frequencies = np.arange(bins) * rate / 2 / (bins - 1)
    return ((frequencies > 150) & (frequencies < 5000)).astype(np.float32)
