"""When sound may go out: by absolute deadlines, a little ahead of the listener, who may interrupt at any time."""

import math
from dataclasses import dataclass

import numpy as np

from vivavoce.dialogue.interface import Samples

LATE_SECONDS = 0.02  # a timer's own lateness is no missed deadline
RAMP_SECONDS = 0.01


@dataclass
class Schedule:
    """One reply's sound: when the next piece is due, and how much the listener has heard. Times are of any clock."""

    lead: float
    """Seconds by which sound is sent before it is to be heard."""
    began: float | None = None
    """When the first sample was sent, shifted by every gap since."""
    sent: float = 0.0
    """Seconds of sound."""
    underruns: int = 0
    missed: int = 0
    slack: float = math.inf
    """The least time that was left before the listener ran dry; less than nothing where it did."""
    is_cut: bool = False

    def due(self, now: float) -> float:
        """When the next piece may be sent: at once for the first, then at its place in the sound minus the lead."""
        return now if self.began is None else self.began + self.sent - self.lead

    def send(self, now: float, seconds: float, was_waiting: bool) -> None:
        """A piece goes out; `was_waiting` tells that it had been there at its deadline."""
        if self.began is None:
            self.began = now
        else:
            self.slack = min(self.slack, self.began + self.sent - now)
        if now > self.began + self.sent:  # the listener ran dry: go on from here, without a burst to catch up
            self.underruns += 1
            self.began = now - self.sent
        if was_waiting and now - self.due(now) > LATE_SECONDS:
            self.missed += 1
        self.sent += seconds

    def resume(self, now: float) -> None:
        """Somebody listens again after a while: what was sent before is heard by now, and the gap is not ours."""
        if self.began is not None:
            self.began = max(self.began, now - self.sent)

    def cut(self, now: float) -> None:
        """What was not heard yet will not be."""
        self.sent, self.is_cut = self.heard(now), True

    def heard(self, now: float) -> float:
        """Seconds that a listener who plays at once has heard."""
        return 0.0 if self.began is None else min(max(now - self.began, 0.0), self.sent)


@dataclass
class Volume:
    """How loud the sound goes out; changes are ramped, so that they do not click."""

    rate: int
    gain: float = 1.0
    _reached: float = 1.0

    def apply(self, samples: Samples) -> Samples:
        """The samples at the volume asked for, going there from the one before."""
        if self._reached == self.gain == 1.0:
            return samples
        curve = np.full(len(samples), self.gain, np.float32)
        ramp = min(len(samples), round(RAMP_SECONDS * self.rate))
        if self._reached != self.gain and ramp:
            curve[:ramp] = np.linspace(self._reached, self.gain, ramp + 1, dtype=np.float32)[1:]
        if len(samples):
            self._reached = self.gain
        return samples * curve
