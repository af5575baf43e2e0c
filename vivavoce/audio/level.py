"""How loud a sound is, and making it louder or safe without clipping it or pumping it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.pcm import check_finite
from vivavoce.audio.resample import resample
from vivavoce.audio.sound import Sound

Samples = NDArray[np.float32]

SILENCE_DBFS = -120.0
BLOCK_SECONDS = 0.02
PAUSE_DB = 25.0  # a block this far under the loudest is a pause between words, not speech
TRUE_PEAK_DBFS = -1.0  # leaves room for what a player's converter makes between two samples


def peak(samples: Samples) -> float:
    """The largest absolute sample."""
    return float(np.abs(samples).max(initial=0.0))


def true_peak(samples: Samples, rate: int) -> float:
    """The largest absolute value of the sound between its samples too, from four times as many of them."""
    return max(peak(samples), peak(resample(samples, rate, 4 * rate))) if np.size(samples) else 0.0


def rms_dbfs(samples: Samples) -> float:
    """Root mean square in dB of full scale; silence is SILENCE_DBFS."""
    return to_db(float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))) if np.size(samples) else SILENCE_DBFS


def speech_dbfs(sound: Sound) -> float:
    """Root mean square of the speech in a sound, its pauses left out, in dB of full scale."""
    size = max(1, round(BLOCK_SECONDS * sound.rate))
    power = np.square(sound.mono().samples[0], dtype=np.float64)
    if power.size < size:
        return rms_dbfs(sound.mono().samples)
    blocks = power[: power.size - power.size % size].reshape(-1, size).mean(axis=1)
    speech = blocks[blocks >= blocks.max() * 10 ** (-PAUSE_DB / 10)]
    return to_db(float(np.sqrt(speech.mean())))


def normalise_speech(sound: Sound, target_dbfs: float = -23.0, max_gain_db: float = 18.0) -> Sound:
    """The sound raised by one gain towards the target, as far as its true peak allows; never turned down."""
    wanted = target_dbfs - speech_dbfs(sound)
    headroom = TRUE_PEAK_DBFS - to_db(true_peak(sound.samples, sound.rate))
    gain = from_db(max(0.0, min(wanted, headroom, max_gain_db)))
    return sound if gain == 1.0 else Sound(sound.samples * np.float32(gain), sound.rate)


def to_db(amplitude: float) -> float:
    """An amplitude in dB of full scale, not under SILENCE_DBFS."""
    return max(SILENCE_DBFS, 20.0 * float(np.log10(max(amplitude, 1e-30))))


def from_db(decibel: float) -> float:
    """The amplitude of a level in dB."""
    return float(10.0 ** (decibel / 20.0))


@dataclass(frozen=True)
class SpeechGainState:
    """Where one stream's gain stands."""

    gain_db: float  # at the end of the last whole block
    slope_db: float  # by which the running block changes it
    speech_power: float  # running mean over speech; 0 before the first
    block_power: float  # sum over the samples of the running block
    filled: int  # samples of the running block so far


class SpeechGain:
    """A slow hand on the fader: brings a stream of speech to a target level without delay and without pumping.

    The gain moves at most `slope_db_per_second`, only while there is speech, and towards the level of the last
    seconds of speech; pauses leave it where it is. What it raises too far, a `Limiter` after it catches.
    """

    MEMORY_SECONDS = 3.0  # of speech
    FORGET_SECONDS = 8.0  # of what is far under the last speech
    GATE_DBFS = -50.0  # under this nothing is speech

    def __init__(
        self, rate: int, target_dbfs: float = -23.0, max_gain_db: float = 12.0, slope_db_per_second: float = 3.0
    ) -> None:
        self.rate, self.target_dbfs, self.max_gain_db = rate, target_dbfs, max_gain_db
        self.block = max(1, round(BLOCK_SECONDS * rate))
        self.step_db = slope_db_per_second * self.block / rate

    def initial_state(self) -> SpeechGainState:
        """The state before the first sample: no gain, nothing heard."""
        return SpeechGainState(0.0, 0.0, 0.0, 0.0, 0)

    def step(self, state: SpeechGainState, samples: Samples) -> tuple[Samples, SpeechGainState]:
        """The samples with the gain on them, as many as came in.  # [channel, time] → [channel, time]"""
        check_finite(samples)
        outputs = [samples[:, :0]]
        while samples.shape[1]:
            piece, samples = np.split(samples, [self.block - state.filled], axis=1)
            progress = (state.filled + 1 + np.arange(piece.shape[1])) / self.block
            gain = 10.0 ** ((state.gain_db + state.slope_db * progress) / 20.0)
            outputs.append((piece * gain).astype(np.float32))
            state = self._heard(state, piece)
        return np.concatenate(outputs, axis=1), state

    def forward(self, samples: Samples) -> Samples:
        """The whole sound as a stream would give it.  # [channel, time] → [channel, time]"""
        return self.step(self.initial_state(), samples)[0]

    def _heard(self, state: SpeechGainState, piece: Samples) -> SpeechGainState:
        power = state.block_power + float(np.square(piece, dtype=np.float64).mean(axis=0).sum())
        filled = state.filled + piece.shape[1]
        if filled < self.block:
            return SpeechGainState(state.gain_db, state.slope_db, state.speech_power, power, filled)
        gain_db, power = state.gain_db + state.slope_db, power / self.block
        if power < 10 ** (self.GATE_DBFS / 10):
            return SpeechGainState(gain_db, 0.0, state.speech_power, 0.0, 0)
        if power < state.speech_power * 10 ** (-PAUSE_DB / 10):
            # A shout must not make all later speech count as a pause for ever.
            fading = float(np.exp(-BLOCK_SECONDS / self.FORGET_SECONDS))
            return SpeechGainState(gain_db, 0.0, state.speech_power * fading, 0.0, 0)
        keep = np.exp(-BLOCK_SECONDS / self.MEMORY_SECONDS) if state.speech_power else 0.0
        speech_power = float(keep * state.speech_power + (1 - keep) * power)
        wanted = np.clip(self.target_dbfs - to_db(speech_power**0.5), -self.max_gain_db, self.max_gain_db)
        slope = float(np.clip(wanted - gain_db, -self.step_db, self.step_db))
        return SpeechGainState(gain_db, slope, speech_power, 0.0, 0)
