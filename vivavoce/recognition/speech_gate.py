"""Text that was written where nobody speaks is left out: recognisers imagine words in hiss, hum and music.

A detector of voices, which writes nothing and so imagines nothing, hears the sound too. A segment stays if somebody
speaks in it, even for a moment.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.voice_activity import speech_chances, voice_activity
from vivavoce.models.whisper_hearing import TranscriptSegment

RATE = 16_000
WINDOW = 512
AROUND = 0.3  # seconds before and after a segment that count as its own: its times are not exact


@dataclass(frozen=True)
class SpeechGate:
    """How likely a voice must be, and for how many windows of 32 ms."""

    least: float = 0.4
    windows: int = 3

    def heard(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """The chance of speech in every 32 ms of a sound, the last of them filled up with silence.  # [time]"""
        filled = np.pad(samples, (0, -len(samples) % WINDOW))
        return speech_chances(voice_activity(), filled)

    def lets_through(self, segment: TranscriptSegment, chances: NDArray[np.float32]) -> bool:
        """Whether somebody speaks in a segment of the sound with these chances."""
        first = max(0, int((segment.start - AROUND) * RATE / WINDOW))
        last = int((segment.end + AROUND) * RATE / WINDOW) + 1
        return int((chances[first:last] >= self.least).sum()) >= self.windows
