"""Figures for Prometheus: sessions, latencies, missed deadlines, underruns, the event loop's lag, the host's own."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from vivavoce.errors import MissingDependencyError
from vivavoce.server.host import Host
from vivavoce.server.realtime.jitter import Arrivals
from vivavoce.server.realtime.output import Schedule

LATENCY_BUCKETS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0)
LAG_SECONDS = 0.1
SLACK_SECONDS = 15.0
ARRIVALS = 2048  # pieces of sound whose time of arrival is remembered


class Metrics:
    """The figures of one server."""

    def __init__(self, host: Host) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise MissingDependencyError("serving needs prometheus-client: pip install 'vivavoce[server]'") from error
        self.registry = prometheus.CollectorRegistry()
        common: Any = {"registry": self.registry, "namespace": "viva"}
        self.sessions = prometheus.Gauge("sessions", "Sessions that are open.", **common)
        self.detached = prometheus.Gauge("sessions_detached", "Sessions that wait for their client.", **common)
        self.opened = prometheus.Counter("sessions_opened", "Sessions opened.", ["transport"], **common)
        self.tidied = prometheus.Counter("sessions_tidied", "Ended sessions whose memory was given back.", **common)
        self.refused = prometheus.Counter("sessions_refused", "Sessions refused.", ["reason"], **common)
        self.resumed = prometheus.Counter("sessions_resumed", "Clients that came back.", **common)
        self.dropped = prometheus.Counter("connections_dropped", "Connections cut by us.", ["reason"], **common)
        self.replies = prometheus.Counter("replies", "Replies told to their end.", ["reason"], **common)
        self.errors = prometheus.Counter("errors", "Error events sent.", ["code"], **common)
        self.ttfa = prometheus.Histogram(
            "ttfa_seconds",
            "From the end of a turn, or the request, to the first sound sent.",
            buckets=LATENCY_BUCKETS,
            **common,
        )
        self.v2v = prometheus.Histogram(
            "v2v_seconds",
            "From the arrival of a turn's last sample to the first sound sent.",
            buckets=LATENCY_BUCKETS,
            **common,
        )
        self.sound = prometheus.Counter("sound_sent_seconds", "Sound of replies sent.", **common)
        self.missed = prometheus.Counter("deadlines_missed", "Pieces of sound sent late.", **common)
        self.underruns = prometheus.Counter("underruns", "Times a listener ran dry within a reply.", **common)
        self.slack = prometheus.Gauge(
            "slack_seconds", "Least time left before a listener ran dry, of the replies of the last moments.", **common
        )
        self.slack.set_function(self._least_slack)
        self._slacks: deque[tuple[float, float]] = deque()  # when a reply was over, and its slack
        self.lag = prometheus.Histogram(
            "event_loop_lag_seconds",
            "Lateness of a timer.",
            buckets=(0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5),
            **common,
        )
        self.exceptions = prometheus.Counter(
            "exceptions", "Exceptions that were logged, by logger.", ["where"], **common
        )
        self.registry.register(_HostGauges(host))

    @contextmanager
    def counting_exceptions(self) -> Iterator[None]:
        """Count the exceptions that are logged by the package, the event loop and uvicorn."""
        counter = _ExceptionCounter(self.exceptions)
        loggers = [logging.getLogger(name) for name in ("vivavoce", "asyncio", "uvicorn")]
        for logger in loggers:
            logger.addHandler(counter)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(counter)

    def sound_sent(self, schedule: Schedule) -> None:
        """All sound of a reply went out."""
        self.sound.inc(schedule.sent)
        self.missed.inc(schedule.missed)
        self.underruns.inc(schedule.underruns)
        if schedule.slack < math.inf:
            self._slacks.append((time.monotonic(), schedule.slack))

    def _least_slack(self) -> float:
        """Not a number where nobody was spoken to."""
        while self._slacks and self._slacks[0][0] < time.monotonic() - SLACK_SECONDS:
            self._slacks.popleft()
        return min((slack for _, slack in self._slacks), default=math.nan)

    def replied(self, reason: str) -> None:
        """A reply was told to its end."""
        self.replies.labels(reason).inc()

    async def watch_loop(self) -> None:
        """Measure, for ever, how late the event loop is."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self.lag.observe(max(loop.time() - due, 0.0))

    def page(self) -> tuple[bytes, str]:
        """The figures as Prometheus reads them, and their content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class _ExceptionCounter(logging.Handler):
    """Counts records that carry an exception, from warnings upwards: below, they are no faults."""

    def __init__(self, counter: Any) -> None:
        super().__init__(logging.WARNING)
        self._counter = counter

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None:
            self._counter.labels(record.name).inc()


class _HostGauges:
    """What the host says of itself, asked when the page is read."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import GaugeMetricFamily

        for name, value in self._host.gauges().items():
            yield GaugeMetricFamily(f"viva_{name}", "Told by the models' host.", value)


class TurnClock:
    """How long one session's user waits for an answer."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrivals: deque[tuple[float, float]] = deque(maxlen=ARRIVALS)  # milliseconds heard, and when
        self.arrivals = Arrivals()
        self._heard_ms = 0.0
        self._ended: float | None = None
        self._last_voice: float | None = None
        self.last_ttfa: float | None = None

    @property
    def heard_ms(self) -> float:
        """Milliseconds of sound that came in."""
        return self._heard_ms

    @property
    def waiting_seconds(self) -> float:
        """How long the user has been waiting for an answer."""
        return 0.0 if self._ended is None else self._now() - self._ended

    def heard(self, seconds: float) -> None:
        """Sound came in."""
        self._heard_ms += seconds * 1000
        self._arrivals.append((self._heard_ms, self._now()))
        self.arrivals.note(self._now(), self._heard_ms / 1000)

    def turn_ended(self, last_voice_ms: int) -> None:
        """The user's turn is over; its last voiced sample was so far into the sound."""
        self._ended = self._now()
        arrived = [at for heard_ms, at in self._arrivals if heard_ms >= last_voice_ms]
        self._last_voice = arrived[0] if arrived else self._ended

    def asked(self) -> None:
        """The client asked for a reply."""
        self._ended, self._last_voice = self._now(), None

    def sounded(self) -> None:
        """The first sound of a reply goes out."""
        if self._ended is not None:
            self.last_ttfa = self._now() - self._ended
            self._metrics.ttfa.observe(self.last_ttfa)
        if self._last_voice is not None:
            self._metrics.v2v.observe(self._now() - self._last_voice)
        self._ended = self._last_voice = None

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class TraceSpan(Protocol):
    """A reply as it is traced."""

    def sounded(self) -> None:
        """Its first sound went out."""
        ...

    def end(self, reason: str) -> None:
        """It is over."""
        ...


class NoSpan:
    """Where nobody traces."""

    def sounded(self) -> None:
        pass

    def end(self, reason: str) -> None:
        pass


class OpenTelemetrySpan:
    """A span of the OpenTelemetry API; without an SDK it goes nowhere."""

    def __init__(self, tracer: Any, session: str, reply: str, waited_seconds: float) -> None:
        began = time.time_ns() - round(waited_seconds * 1e9)
        self._span = tracer.start_span("viva.reply", start_time=began)
        self._span.set_attribute("viva.session", session)
        self._span.set_attribute("viva.reply", reply)

    def sounded(self) -> None:
        self._span.add_event("first_sound")

    def end(self, reason: str) -> None:
        self._span.set_attribute("viva.end_reason", reason)
        self._span.end()


def new_span(session: str, reply: str, waited_seconds: float) -> TraceSpan:
    """A span for a reply that somebody has been waiting for. It never holds what is said."""
    try:
        from opentelemetry import trace
    except ImportError:
        return NoSpan()
    return OpenTelemetrySpan(trace.get_tracer("vivavoce.server"), session, reply, waited_seconds)
