"""The cost of spoken replies on a CPU, for admission control.

Engine steps and vocoder passes take time on the threads of the executor, and make some seconds of sound. Their ratio is
known after a few seconds of the first reply, long before the sessions that were opened meanwhile are answered. A gap
between chunks is no such measure: the vocoder computes the most urgent chunk first, so that gaps stay short until the
cores are overloaded.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

MIN_SOUND_SECONDS = 3.0  # that were measured, from which on the cost is known
AVERAGED_SECONDS = 60.0  # of sound
START_SECONDS = 1.0  # of later sound that the start of a reply costs in addition: its prompt, and chunks that are small
DECISION_SECONDS = 2.0  # of sound that a decision on tools costs: the prompt with the tools, and a call
REPLY_SECONDS = 10.0  # length of a reply that is assumed


class BusySeconds(NamedTuple):
    """Total seconds of engine steps and vocoder passes, also of those that were run at the same time."""

    engine: float = 0.0
    vocoder: float = 0.0


@dataclass
class SpeechCost:
    """The running mean of the busy seconds for each second of sound, after the start of a reply."""

    threads: int
    """Steps and passes that are run at a time."""
    vocoder_workers: int = 1
    """Vocoder passes among them."""
    sound: float = 0.0
    """Seconds of sound measured, and those that starts and decisions count as; older ones with less weight."""
    busy: BusySeconds = field(default_factory=BusySeconds)
    """What they took, with the same weights."""
    total: BusySeconds = field(default_factory=BusySeconds)
    """Counters of engine and vocoder at the last measurement."""

    def note(self, sound: float, total: BusySeconds, is_start: bool = False) -> None:
        """Add sound that was made since the last measurement; the counters now have these values."""
        self._note(sound + START_SECONDS * is_start, total)

    def note_decision(self, total: BusySeconds) -> None:
        """Add a decision on tools, which makes no sound; the counters now have these values.

        Until sound was measured nothing is known of the vocoder: decisions before do not count.
        """
        if self.sound:
            self._note(DECISION_SECONDS, total)
        else:
            self.restart(total)

    def _note(self, counted: float, total: BusySeconds) -> None:
        kept = math.exp(-counted / AVERAGED_SECONDS)
        self.sound = kept * self.sound + counted
        self.busy = BusySeconds(
            kept * self.busy.engine + total.engine - self.total.engine,
            kept * self.busy.vocoder + total.vocoder - self.total.vocoder,
        )
        self.total = total

    def restart(self, total: BusySeconds) -> None:
        """Forget all measurements: the first passes of a process take longer than all others."""
        self.sound, self.busy, self.total = 0.0, BusySeconds(), total

    def load(self, replies: int) -> float | None:
        """Share of the time that this many concurrent replies need, above 1 more than there is; None: unknown."""
        if self.sound < MIN_SOUND_SECONDS:
            return None
        engine, vocoder = self.busy
        busiest = max(engine, vocoder / self.vocoder_workers, (engine + vocoder) / self.threads)
        return replies * (1 + START_SECONDS / REPLY_SECONDS) * busiest / self.sound
