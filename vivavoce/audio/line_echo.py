"""Echo cancellation of a telephone line: what is sent comes back later and softer, from the other end's hybrid.

Frames that are sent and received at the same tick of a call are exactly aligned, and the jitter buffer says by how much
it has changed its delay, so the delay of the echo is known once it was found by cross-correlation. The few milliseconds
of dispersion around it are found by least squares. A block in which the filter explains little of what was heard, as
the caller speaks or the line has no echo, teaches nothing.
"""

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.echo import IS_ECHO, correlation_peak

Samples = NDArray[np.float32]

FRAME_SECONDS = 0.02
BLOCK_SECONDS = 0.16  # of which the filter is learned at once
REACH_SECONDS = 0.6  # of the delay
FILTER_SECONDS = 0.012
LEAD_SHARE = 0.25  # of the filter that lies before the delay with the largest correlation
MIN_POWER = 4e-6  # of a block that may have an echo
LEARNED = 0.01  # share of the power that is left, under which a block teaches nothing new
EXPLAINED = 0.25  # share of the power that may be left of a block that teaches something
FORGETTING = 0.97
REGULARISATION = 1e-2  # of the power of what was sent


class RecentSamples:
    """The last samples of a stream."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._buffer = np.zeros(4 * count, np.float32)
        self._end = count

    def append(self, samples: Samples) -> None:
        """Add samples, fewer than are stored."""
        if self._end + len(samples) > len(self._buffer):
            self._buffer[: self.count] = self.last(self.count)
            self._end = self.count
        self._buffer[self._end : self._end + len(samples)] = samples
        self._end += len(samples)

    def last(self, count: int, before: int = 0) -> Samples:
        """The last samples up to `before` the end; valid until samples are added."""
        end = self._end - before
        return self._buffer[end - count : end]


class LineEchoCanceller:
    """Removes the echo of one line, frame by frame, without delay."""

    def __init__(self, rate: int) -> None:
        self._block, self._taps = round(BLOCK_SECONDS * rate), round(FILTER_SECONDS * rate)
        self._reach = round(REACH_SECONDS * rate)
        self._sent = RecentSamples(self._reach + self._taps + self._block)
        self._heard = RecentSamples(self._block)
        self._silence = np.zeros(round(FRAME_SECONDS * rate), np.float32)
        self._silent = self._sent.count + 1  # samples since the last that was not silence
        self._new = 0  # samples since the filter was learned, or the delay has changed
        self._sent_count = 0
        self._ahead: int | None = None  # position of the line less the samples that were sent
        self._forget()

    def _forget(self) -> None:
        self._delay: int | None = None
        self._filter: Samples = np.zeros(self._taps, np.float32)
        self._sent_correlation = self._echo_correlation = np.zeros(self._taps)

    @property
    def delay_samples(self) -> int | None:
        """The delay before the filter; None as long as no echo was found."""
        return self._delay

    def note_sent(self, samples: Samples | None) -> None:
        """What is sent at the time of the next frame; None: nothing.  # [time]"""
        frame = self._silence if samples is None else samples
        self._sent_count += len(frame)
        self._silent = self._silent + len(frame) if samples is None or not samples.any() else 0
        if self._is_active:
            self._sent.append(frame)

    @property
    def _is_active(self) -> bool:
        """Whether something was sent whose echo might be heard."""
        return self._silent <= self._sent.count

    def step(self, heard: Samples, position: int | None = None) -> Samples:
        """A frame of the line without echo, and the position in the peer's stream at which it ends.  # [time] → [time]

        A position tells that the jitter buffer has skipped or added something; None: it did not.
        """
        if position is not None:
            ahead = position - self._sent_count
            if self._ahead is not None and ahead != self._ahead:
                self._shift(ahead - self._ahead)
            self._ahead = ahead
        if not self._is_active:
            return heard
        self._heard.append(heard)
        left = heard if self._delay is None else heard - self._echo(self._delay, self._filter, len(heard))
        self._new += len(heard)
        if self._new >= self._block:
            self._new = 0
            self._learn()
        return left

    def _shift(self, skipped: int) -> None:
        """What is heard from now on is this much later in the peer's stream, so its echo comes sooner."""
        self._new = 0
        if self._delay is not None:
            self._delay -= skipped
            if not 0 <= self._delay <= self._reach:
                self._forget()

    def _source(self, delay: int, count: int) -> Samples:
        """What was sent, as far as it is in the echo of the last `count` samples."""
        return self._sent.last(count + self._taps - 1, before=delay)

    def _echo(self, delay: int, taps: Samples, count: int) -> Samples:
        return np.convolve(self._source(delay, count), taps, "valid")

    def _learn(self) -> None:
        heard = self._heard.last(self._block)
        power = float(np.square(heard).mean())
        if power < MIN_POWER:
            return
        if self._delay is not None:
            left = heard - self._echo(self._delay, self._filter, self._block)
            if float(np.square(left).mean()) < LEARNED * power or self._fit(self._delay, power):
                return
        found, lag = correlation_peak(heard, self._sent.last(self._sent.count))
        delay = min(max(0, lag - round(LEAD_SHARE * self._taps)), self._reach)
        if found > IS_ECHO and delay != self._delay:
            self._forget()
            self._fit(delay, power)

    def _fit(self, delay: int, power: float) -> bool:
        """Learn the filter from the last block; whether it explains the block."""
        heard, source = self._heard.last(self._block), self._source(delay, self._block)
        sent = FORGETTING * self._sent_correlation + np.correlate(source, source[self._taps - 1 :], "valid")[::-1]
        echo = FORGETTING * self._echo_correlation + np.correlate(source, heard, "valid")[::-1]
        offsets = np.arange(self._taps)
        matrix = sent[np.abs(offsets[:, None] - offsets)]
        matrix[offsets, offsets] += REGULARISATION * sent[0] + 1e-6
        taps = np.linalg.solve(matrix, echo).astype(np.float32)
        left = heard - self._echo(delay, taps, self._block)
        if float(np.square(left).mean()) > EXPLAINED * power:
            return False
        self._delay, self._filter, self._sent_correlation, self._echo_correlation = delay, taps, sent, echo
        return True
