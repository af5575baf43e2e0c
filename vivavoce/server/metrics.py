"""Prometheus metrics of a server, the turn latencies of its sessions, and OpenTelemetry spans of replies."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from vivavoce.server.admission import LoopLoad
from vivavoce.server.host import Host
from vivavoce.server.realtime.output import Arrivals, Schedule

try:  # tracing is optional and belongs to no extra
    from opentelemetry import trace
except ImportError:
    IS_TRACING = False
else:
    IS_TRACING = True

LATENCY_BUCKETS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0)
SLACK_SECONDS = 15.0
ARRIVALS = 2048  # audio chunks whose time of arrival is stored
COUNTED_LOGGERS = ("vivavoce", "asyncio", "uvicorn")


@dataclass(frozen=True)
class DoorStatistics:
    """What a door process reports once a second."""

    load: LoopLoad = field(default_factory=LoopLoad)
    connections: int = 0


class Metrics:
    """The metrics of one server."""

    def __init__(self, host: Host) -> None:
        self.registry = CollectorRegistry()
        common: Any = {"registry": self.registry, "namespace": "viva"}
        self.sessions = Gauge("sessions", "Sessions that are open.", **common)
        self.detached = Gauge("sessions_detached", "Sessions that wait for their client.", **common)
        self.opened = Counter("sessions_opened", "Sessions opened.", ["transport"], **common)
        self.released = Counter("sessions_tidied", "Ended sessions whose memory was released.", **common)
        self.refused = Counter("sessions_refused", "Sessions refused.", ["reason"], **common)
        self.resumed = Counter("sessions_resumed", "Sessions resumed by their client.", **common)
        self.calls = Gauge("calls", "Telephone calls in progress.", ["provider"], **common)
        self.calls_ended = Counter(
            "calls_ended", "Telephone calls that ended or were refused.", ["provider", "reason"], **common
        )
        self.calls_dialled = Counter(
            "calls_dialled", "Outgoing calls that were answered, or failed.", ["outcome"], **common
        )
        self.calls_answered_by = Counter("calls_answered_by", "What has answered outgoing calls.", ["answer"], **common)
        self.sip_registered = Gauge("sip_registered", "Whether SIP is registered with its registrar.", **common)
        self.sip_malformed = Counter("sip_malformed", "SIP messages that could not be read.", **common)
        self.dropped = Counter("connections_dropped", "Connections closed by the server.", ["reason"], **common)
        self.replies = Counter("replies", "Replies that ended.", ["reason"], **common)
        self.ignored = Counter("turns_ignored", "Turns that were dropped, not answered.", ["reason"], **common)
        self.overlaps = Counter("overlaps", "Sounds over replies, by what they were taken for.", ["verdict"], **common)
        self.errors = Counter("errors", "Error events sent.", ["code"], **common)
        self.ttfa = Histogram(
            "ttfa_seconds",
            "From the end of a turn, or the request, to the first audio sent.",
            buckets=LATENCY_BUCKETS,
            **common,
        )
        self.v2v = Histogram(
            "v2v_seconds",
            "From the arrival of a turn's last sample to the first audio sent.",
            buckets=LATENCY_BUCKETS,
            **common,
        )
        self.sound = Counter("sound_sent_seconds", "Audio of replies sent.", **common)
        self.missed = Counter("deadlines_missed", "Audio chunks sent late.", **common)
        self.underruns = Counter("underruns", "Playback underruns within a reply.", **common)
        self.slack = Gauge(
            "slack_seconds",
            f"Minimum time before an underrun, of replies of the last {SLACK_SECONDS:g} s.",
            **common,
        )
        self.slack.set_function(self._min_slack)
        self._slacks: deque[tuple[float, float]] = deque()  # when a reply ended, and its slack
        self.lag = Histogram(
            "event_loop_lag_seconds",
            "Lateness of a timer.",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5),
            **common,
        )
        self.door_statistics: Callable[[], Mapping[int, DoorStatistics]] = dict
        self.exceptions = ExceptionCounter(self.registry)
        self.registry.register(_HostGauges(host))

    def count_sent_audio(self, schedule: Schedule) -> None:
        """Count a reply whose audio was sent completely."""
        self.sound.inc(schedule.sent)
        self.missed.inc(schedule.missed)
        self.underruns.inc(schedule.underruns)
        if schedule.slack < math.inf:
            self._slacks.append((time.monotonic(), schedule.slack))

    def _min_slack(self) -> float:
        """NaN where no reply ended recently."""
        while self._slacks and self._slacks[0][0] < time.monotonic() - SLACK_SECONDS:
            self._slacks.popleft()
        return min((slack for _, slack in self._slacks), default=math.nan)

    def count_reply(self, reason: str) -> None:
        """Count a reply that ended."""
        self.replies.labels(reason).inc()

    def watch_doors(self, statistics: Callable[[], Mapping[int, DoorStatistics]]) -> None:
        """Include what the door processes report."""
        self.door_statistics = statistics
        self.registry.register(_DoorGauges(statistics))

    def page(self) -> tuple[bytes, str]:
        """The metrics in Prometheus' text format, and their content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class ExceptionCounter(logging.Handler):
    """`viva_exceptions_total`: log records with an exception, at warning level or above, by logger."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__(logging.WARNING)
        self.metric = Counter(
            "exceptions", "Exceptions that were logged, by logger.", ["where"], namespace="viva", registry=registry
        )

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count exceptions logged by the package, the event loop and uvicorn, within this context."""
        loggers = [logging.getLogger(name) for name in COUNTED_LOGGERS]
        for logger in loggers:
            logger.addHandler(self)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None:
            self.metric.labels(record.name).inc(1 + getattr(record, "omitted", 0))  # of `vivavoce.log.FailureLog`


class _HostGauges:
    """The gauges of the host, read when the metrics are collected."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def collect(self) -> Iterable[Any]:
        for name, value in self._host.gauges().items():
            yield GaugeMetricFamily(f"viva_{name}", "Reported by the host of the models.", value)


class _DoorGauges:
    """The gauges of the door processes, by their numbers."""

    def __init__(self, statistics: Callable[[], Mapping[int, DoorStatistics]]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterable[Any]:
        lag = GaugeMetricFamily(
            "viva_door_event_loop_lag_seconds",
            "Lateness of timers in the last seconds, 99th percentile.",
            None,
            ["door"],
        )
        cpu = GaugeMetricFamily("viva_door_cpu_ratio", "Share of one core used in the last seconds.", None, ["door"])
        open_ = GaugeMetricFamily("viva_door_connections", "Open connections.", None, ["door"])
        for number, door in sorted(self._statistics().items()):
            labels = [str(number)]
            lag.add_metric(labels, door.load.worst_lag)
            cpu.add_metric(labels, door.load.busy)
            open_.add_metric(labels, door.connections)
        return [lag, cpu, open_]


class TurnClock:
    """Measures how long the user of a session waits for replies."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrivals: deque[tuple[float, float]] = deque(maxlen=ARRIVALS)  # milliseconds received, and when
        self.arrivals = Arrivals()
        self._received_ms = 0.0
        self._turn_ended_at: float | None = None
        self._last_speech: float | None = None
        self.last_ttfa: float | None = None

    @property
    def received_ms(self) -> float:
        """Milliseconds of audio received."""
        return self._received_ms

    @property
    def waiting_seconds(self) -> float:
        """Seconds since the end of the turn or the request, while no reply has started."""
        return 0.0 if self._turn_ended_at is None else self._now() - self._turn_ended_at

    def note_received_audio(self, seconds: float) -> None:
        """Note received audio."""
        now = self._now()
        self._received_ms += seconds * 1000
        self._arrivals.append((self._received_ms, now))
        self.arrivals.note(now, self._received_ms / 1000)

    def note_turn_end(self, last_voice_ms: int) -> None:
        """Note the end of a turn whose last voiced sample is at this time of the received audio."""
        self._turn_ended_at = self._now()
        arrived = [at for received_ms, at in self._arrivals if received_ms >= last_voice_ms]
        self._last_speech = arrived[0] if arrived else self._turn_ended_at

    def note_turn_ignored(self) -> None:
        """Note that the turn that ended was dropped: no reply is awaited."""
        self._turn_ended_at = self._last_speech = None

    def note_reply_request(self) -> None:
        """Note that the client requested a reply."""
        self._turn_ended_at, self._last_speech = self._now(), None

    def note_first_audio(self) -> None:
        """Note that the first audio of a reply is sent."""
        if self._turn_ended_at is not None:
            self.last_ttfa = self._now() - self._turn_ended_at
            self._metrics.ttfa.observe(self.last_ttfa)
        if self._last_speech is not None:
            self._metrics.v2v.observe(self._now() - self._last_speech)
        self._turn_ended_at = self._last_speech = None

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class TraceSpan(Protocol):
    """The trace of one reply."""

    def note_first_audio(self) -> None:
        """Record that the first audio was sent."""
        ...

    def end(self, reason: str) -> None:
        """End the span."""
        ...


class NoSpan:
    """Used where OpenTelemetry is not installed."""

    def note_first_audio(self) -> None:
        pass

    def end(self, reason: str) -> None:
        pass


class OpenTelemetrySpan:
    """A span of the OpenTelemetry API; without an SDK it is not exported."""

    def __init__(
        self, tracer: Any, session: str, reply: str, waited_seconds: float, attributes: Mapping[str, str]
    ) -> None:
        start = time.time_ns() - round(waited_seconds * 1e9)
        self._span = tracer.start_span("viva.reply", start_time=start)
        self._span.set_attribute("viva.session", session)
        self._span.set_attribute("viva.reply", reply)
        for name, value in attributes.items():
            self._span.set_attribute(name, value)

    def note_first_audio(self) -> None:
        self._span.add_event("first_sound")

    def end(self, reason: str) -> None:
        self._span.set_attribute("viva.end_reason", reason)
        self._span.end()


def new_span(session: str, reply: str, waited_seconds: float, attributes: Mapping[str, str]) -> TraceSpan:
    """A span for a reply, started `waited_seconds` ago, with the client's attributes; it never holds content."""
    if not IS_TRACING:
        return NoSpan()
    return OpenTelemetrySpan(trace.get_tracer("vivavoce.server"), session, reply, waited_seconds, attributes)
