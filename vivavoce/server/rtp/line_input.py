"""What a line sounds like to a session: without echo and key tones, quiet callers raised, at another rate."""

from vivavoce.audio.line_echo import LineEchoCanceller
from vivavoce.audio.line_level import LineLevel
from vivavoce.audio.tone_detection import DigitToneDetector
from vivavoce.dialogue.items import Samples
from vivavoce.server.realtime.audio_formats import resampler


class LineInput:
    """The received audio of one call, from the rate of the line to that of the session."""

    def __init__(self, rate: int, session_rate: int) -> None:
        self.rate = rate
        self._echo = LineEchoCanceller(rate)
        self._level = LineLevel(rate)
        self._digits: DigitToneDetector | None = None
        self._resampler = resampler(rate, session_rate)
        self._state = self._resampler.initial_state()

    def detect_digits(self, is_wanted: bool) -> None:
        """Detect key tones from now on, or not: a peer that sends key presses as events needs no detection."""
        self._digits = DigitToneDetector(self.rate) if is_wanted else None

    def note_sent(self, samples: Samples | None) -> None:
        """What is sent at the time of the next samples, at the rate of the line; None: nothing."""
        self._echo.note_sent(samples)

    def step(self, samples: Samples, is_held: bool, position: int | None = None) -> tuple[Samples, str]:
        """The next samples for the session, and the keys that they complete; `is_held` keeps the gain.

        They end at this position of the peer's stream; None: it pauses.
        """
        samples = self._echo.step(samples, position)
        keys = "" if self._digits is None else self._digits.step(samples)
        output, self._state = self._resampler.step(self._state, self._level.step(samples, is_held)[None])
        return output[0], keys
