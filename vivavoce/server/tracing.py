"""Spans for OpenTelemetry, where it is installed: one for each reply, from the end of the user's turn to its own."""

import time
from typing import Any, Protocol


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
