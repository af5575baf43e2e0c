"""Acoustic echo cancellation: removes the output from the user's microphone signal, given what was played.

A partitioned frequency-domain filter learns the path from loudspeaker to microphone, delay and room included. Its step
size is that of a Kalman filter, so that it adapts fast while only the output sounds and hardly during double talk. The
residual echo is estimated from the filter's uncertainty; where it explains the sound, the sound is attenuated to zero.

In the first second of output the path is hardly known, and soft sound may be echo. There the cross-correlation of the
last 128 ms with the output decides: echo resembles what was played at some delay, the user's speech does not.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vivavoce.errors import InputError

Samples = NDArray[np.float32]
Spectrum = NDArray[np.complex64]
Power = NDArray[np.float32]

BLOCK = 512  # samples at 16 kHz
PRACTICE = 32  # blocks in which the path is learned again after a silence: the client's buffer may have changed
LOUDEST_ECHO = 0.25  # of the output's power: while the path is being learned, softer sound may be echo
FAINT_ECHO = 0.001  # of the output's power: a microphone signal under this has hardly any echo, as with headphones
CALM = 14  # blocks until that counts as known: most clients play within half a second
LOUDEST_FAINT_ECHO = 0.0025
RECENT = 4  # blocks of the microphone that are correlated with the output
AUDIBLE = 0.01  # of the output's power: in softer sound noise may hide an echo
NO_ECHO = 0.25  # a correlation under this is that of another sound
IS_ECHO = 0.6  # a correlation over this is that of an echo; what lies between decides nothing


@dataclass(frozen=True)
class EchoState:
    """The filter's state. Arrays are never changed in place."""

    played: Spectrum  # [partition, bin]: newest first
    path: Spectrum  # [partition, bin]
    uncertainty: Power  # [partition, bin]: variance of the path
    residue: Power  # [bin]: power that the path does not explain
    quiet: int  # blocks since the last output
    practice: int  # blocks of output since the last long silence
    calm: int  # blocks of them with hardly any echo; once it is CALM, constant until there is an echo
    loudest: float  # mean power of the loudest recent block of output
    turn: int  # the partition whose path is trimmed next
    gain: float
    heard: tuple[Samples, ...]  # [block] each: RECENT blocks of the microphone
    output: tuple[Samples, ...]  # [block] each: as many blocks of output, and those whose echo may be in them
    correlation: float = IS_ECHO  # of the two, when it was last computed
    skipped: int = 0  # blocks of output that are not in `played` yet


class EchoGuard:
    """Removes the echo of `reference` from a microphone signal, 512 samples at a time."""

    def __init__(
        self, reach_seconds: float = 0.768, rate: int = 16_000, coupling_db: float = -10.0, forgetting: float = 0.9985
    ) -> None:
        self.partitions = max(1, round(reach_seconds * rate / BLOCK))
        self.forgetting = forgetting
        self._bins = BLOCK + 1
        self.prior = np.float32(10 ** (coupling_db / 10) / 4)
        self.speech_weights = _speech_weights(self._bins, rate)

    def initial_state(self) -> EchoState:
        """A state with a prior on the level of the echo."""
        shape = (self.partitions, self._bins)
        # Echo is more likely at short delays.
        fading = np.exp(-np.arange(self.partitions) / 8, dtype=np.float32)[:, None]
        return EchoState(
            np.zeros(shape, np.complex64),
            np.zeros(shape, np.complex64),
            np.broadcast_to(self.prior * fading, shape).astype(np.float32),
            np.full(self._bins, 1e-4, np.float32),
            quiet=self.partitions + 1,
            practice=0,
            calm=0,
            loudest=0.0,
            turn=0,
            gain=1.0,
            heard=(np.zeros(BLOCK, np.float32),) * RECENT,
            output=(np.zeros(BLOCK, np.float32),) * (self.partitions + RECENT),
        )

    def step(self, state: EchoState, microphone: Samples, reference: Samples) -> tuple[Samples, float, EchoState]:
        """The microphone's sound without echo, and the share of echo in it.  # [512], [512] → [512]"""
        if np.shape(microphone) != (BLOCK,) or np.shape(reference) != (BLOCK,):
            sizes = list(np.shape(microphone)), list(np.shape(reference))
            raise InputError(f"the echo guard takes windows of {BLOCK} samples, not {sizes[0]} and {sizes[1]}")
        loud = float(np.square(reference).mean())
        quiet = 0 if loud > 1e-9 else state.quiet + 1
        state = replace(state, heard=(*state.heard[1:], microphone), output=(*state.output[1:], reference))
        if quiet > self.partitions:
            return microphone, 0.0, replace(state, quiet=quiet, gain=1.0)
        state = self._resumed(state) if state.quiet > self.partitions else state
        heard = float(np.square(microphone).mean())
        state = replace(state, correlation=_correlation(state, loud))
        if state.correlation > IS_ECHO and state.calm >= CALM:
            state = replace(state, calm=0, practice=0)
        if state.correlation < NO_ECHO or (state.calm >= CALM and not _may_be_faint_echo(state, loud, heard)):
            return microphone, 0.0, self._skip(state, loud, quiet)
        played = self._played(state)
        left = microphone - np.fft.irfft((played * state.path).sum(axis=0))[BLOCK:].astype(np.float32)
        error = np.fft.rfft(np.concatenate([np.zeros(BLOCK, np.float32), left])).astype(np.complex64)
        state = replace(
            state,
            played=played,
            quiet=quiet,
            practice=state.practice + (loud > 1e-7),
            calm=_calm(state, loud, heard),
            loudest=max(loud, 0.97 * state.loudest),
            skipped=0,
        )
        loudness, power = _power(played), _power(error)
        expected = 0.5 * (loudness * state.uncertainty).sum(axis=0)  # half, because half of each transform is padding
        learned = self._learn(state, error, power, loudness, expected)
        return self._gated(microphone, left, power, expected, state, learned)

    def _skip(self, state: EchoState, loud: float, quiet: int) -> EchoState:
        """Without echo (headphones, a silent room, another sound) compute nothing."""
        return replace(
            state,
            skipped=min(state.skipped + 1, self.partitions),
            quiet=quiet,
            practice=state.practice + (loud > 1e-7),
            loudest=max(loud, 0.97 * state.loudest),
            gain=1.0,
        )

    def _played(self, state: EchoState) -> Spectrum:
        """The spectra of the output, newest first."""
        blocks = np.concatenate(state.output[-state.skipped - 2 :])
        pairs = np.lib.stride_tricks.sliding_window_view(blocks, 2 * BLOCK)[::BLOCK]
        newest = np.fft.rfft(pairs).astype(np.complex64)[::-1]
        return np.concatenate([newest, state.played])[: self.partitions]

    def _resumed(self, state: EchoState) -> EchoState:
        """Raise the uncertainty after a silence: the delay may have changed a little."""
        uncertainty = np.maximum(state.uncertainty, 0.1 * self.initial_state().uncertainty)
        silence = np.zeros_like(state.played)
        calm = state.calm if state.calm >= CALM else 0  # a headset stays on
        return replace(
            state,
            played=silence,
            uncertainty=uncertainty,
            practice=0,
            calm=calm,
            loudest=0.0,
            correlation=IS_ECHO,
            skipped=0,
        )

    def _learn(self, state: EchoState, error: Spectrum, power: Power, loud: Power, explained: Power) -> EchoState:
        """Update the path and its uncertainty by the residual `error` and its power."""
        played, uncertainty = state.played, state.uncertainty
        residue = 0.8 * state.residue + 0.2 * power
        unexplained = np.maximum(residue - explained, 0.1 * residue) + 1e-6
        step = uncertainty / (explained + unexplained)
        path = state.path + step * played.conj() * error
        path[state.turn] = _trimmed(path[state.turn])
        retained = self.forgetting**2
        drift = (1 - retained) * (_power(path) + 0.02 * self.prior)
        uncertainty = retained * np.maximum(1 - 0.5 * step * loud, 0.0) * uncertainty + drift
        turn = (state.turn + 1) % self.partitions
        return replace(
            state,
            path=path.astype(np.complex64),
            uncertainty=uncertainty.astype(np.float32),
            residue=residue.astype(np.float32),
            turn=turn,
        )

    def _gated(
        self, microphone: Samples, left: Samples, power: Power, expected: Power, previous: EchoState, learned: EchoState
    ) -> tuple[Samples, float, EchoState]:
        """Attenuate the residual as far as `expected`, the filter's uncertainty, explains its power."""
        explained = float((self.speech_weights * np.minimum(3.0 * expected, power)).sum())
        total = float((self.speech_weights * power).sum()) + 1e-9
        share = explained / total if previous.calm < CALM else 0.0
        loudest_echo = LOUDEST_ECHO if previous.calm < CALM else LOUDEST_FAINT_ECHO
        if previous.practice < PRACTICE and float(np.square(left).mean()) < loudest_echo * previous.loudest:
            share = 1.0
        wanted = float(np.clip((0.75 - share) / 0.35, 0.0, 1.0))
        # Fast attack, slow release: echo has syllables too.
        gain = wanted if wanted < previous.gain else previous.gain + 0.5 * (wanted - previous.gain)
        ramp = np.linspace(previous.gain, gain, BLOCK, dtype=np.float32)
        heard = float(np.square(microphone).sum()) + 1e-9
        echo = 1.0 - float(np.square(left * ramp).sum()) / heard
        return left * ramp, float(np.clip(echo, 0.0, 1.0)), replace(learned, gain=gain)


def _correlation(state: EchoState, loud: float) -> float:
    """The correlation of the microphone with the output, computed where it may decide something."""
    if state.practice >= PRACTICE and state.calm < CALM:
        return IS_ECHO
    if state.practice >= PRACTICE and state.practice % RECENT:
        return state.correlation
    return echo_correlation(np.concatenate(state.heard), np.concatenate(state.output), max(loud, state.loudest))


def echo_correlation(microphone: Samples, output: Samples, loudest: float) -> float:
    """The correlation of the last blocks of microphone and output, as far as the level lets it decide."""
    level = float(np.square(microphone).mean()) / loudest
    if level < FAINT_ECHO:
        return IS_ECHO
    found, _ = correlation_peak(microphone, output)
    return found if level >= AUDIBLE else max(found, NO_ECHO)


def correlation_peak(microphone: Samples, output: Samples) -> tuple[float, int]:
    """The largest normalised cross-correlation of a sound with a longer output, 0 to 1, and its lag in samples."""
    heard, played = _emphasised(microphone), _emphasised(output)
    size = len(played)  # what wraps around lies beyond the delays that are read
    crossed = np.fft.irfft(np.fft.rfft(played) * np.fft.rfft(heard, size).conj(), size)[: size - len(heard) + 1]
    energy = np.concatenate([[0.0], np.cumsum(np.square(played, dtype=np.float64))])
    energy = energy[len(heard) :] - energy[: -len(heard)]
    energy = np.maximum(energy, 0.02 * energy.max() + 1e-9)  # hardly any output correlates with everything
    normalised = np.abs(crossed) / np.sqrt(energy * np.square(heard, dtype=np.float64).sum() + 1e-12)
    at = int(np.argmax(normalised))
    return float(normalised[at]), len(output) - len(microphone) - at


def _emphasised(samples: Samples) -> Samples:
    """High frequencies raised, so that low voices of two people do not correlate."""
    before = np.concatenate([samples[:1], samples[:-1]])
    return (samples - 0.95 * before).astype(np.float32)


def _may_be_faint_echo(state: EchoState, played: float, heard: float) -> bool:
    """Whether sound in the first second of output is as soft as the echo of a headset."""
    share = heard / max(played, state.loudest)
    return state.practice < PRACTICE and FAINT_ECHO <= share < LOUDEST_FAINT_ECHO


def _calm(state: EchoState, played: float, heard: float) -> int:
    """The number of consecutive output blocks with hardly any echo."""
    if state.calm >= CALM or played <= 1e-7:
        return state.calm
    return state.calm + 1 if heard < FAINT_ECHO * max(played, state.loudest) else 0


def _power(spectrum: Spectrum) -> Power:
    return np.square(spectrum.real) + np.square(spectrum.imag)


def _trimmed(path: Spectrum) -> Spectrum:
    """The path of a partition, constrained to a causal response without circular wrap-around."""
    response = np.fft.irfft(path)
    response[BLOCK:] = 0
    return np.fft.rfft(response).astype(np.complex64)


def _speech_weights(bins: int, rate: int) -> Power:
    """Weight of each bin in the echo share: rumble and hiss do not count."""
    frequencies = np.arange(bins) * rate / 2 / (bins - 1)
    return ((frequencies > 150) & (frequencies < 5000)).astype(np.float32)
