"""Level control of a telephone line: quiet callers are raised, loud ones limited."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.level import Limiter, SpeechGain, from_db

Samples = NDArray[np.float32]


class LineLevel:
    """Raises the speech of one line towards -23 dBFS by at most 15 dB, 3 dB a second; 2 ms of delay.

    The gain is held while a reply is played: its echo on the line says nothing about the level of the caller.
    """

    MAX_GAIN_DB = 15.0

    def __init__(self, rate: int) -> None:
        self._gain = SpeechGain(rate, max_gain_db=self.MAX_GAIN_DB, min_gain_db=0.0)
        self._limiter = Limiter(rate)
        self._gain_state = self._gain.initial_state()
        self._limiter_state = self._limiter.initial_state()

    @property
    def gain_db(self) -> float:
        """The gain at present."""
        return self._gain_state.gain_db

    def step(self, samples: Samples, is_held: bool) -> Samples:
        """The samples with the gain applied; `is_held` leaves the gain unchanged.  # [time] → [time]"""
        if is_held:
            self._gain_state = replace(self._gain_state, slope_db=0.0, block_power=0.0, filled=0)
            raised = samples[None] * np.float32(from_db(self._gain_state.gain_db))
        else:
            raised, self._gain_state = self._gain.step(self._gain_state, samples[None])
        output, self._limiter_state = self._limiter.step(self._limiter_state, raised)
        return output[0]
