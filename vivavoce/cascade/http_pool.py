"""Connections to one HTTP endpoint that are kept open between requests: a TLS handshake costs a round trip or two."""

import http.client
import threading
import time
from urllib.parse import SplitResult

MAX_IDLE_SECONDS = 30.0  # servers close idle connections after a while, most of them later
MAX_IDLE = 64


class ConnectionPool:
    """Idle connections of an endpoint; used from the threads of requests."""

    def __init__(self, address: SplitResult, timeout: float) -> None:
        self._address, self._timeout = address, timeout
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []
        self._lock = threading.Lock()

    def take(self) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was used before: the endpoint may have closed such a one meanwhile."""
        oldest = time.monotonic() - MAX_IDLE_SECONDS
        with self._lock:
            stale = [connection for since, connection in self._idle if since < oldest]
            self._idle = [each for each in self._idle if each[0] >= oldest]
            found = self._idle.pop()[1] if self._idle else None
        for connection in stale:
            connection.close()
        return (self.new(), False) if found is None else (found, True)

    def new(self) -> http.client.HTTPConnection:
        """A connection that is opened by its first request."""
        is_secure = self._address.scheme == "https"
        kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        return kind(self._address.hostname or "", self._address.port, timeout=self._timeout)

    def give_back(self, connection: http.client.HTTPConnection) -> None:
        """Keep a connection whose response was read to its end."""
        with self._lock:
            is_kept = connection.sock is not None and len(self._idle) < MAX_IDLE
            if is_kept:
                self._idle.append((time.monotonic(), connection))
        if not is_kept:
            connection.close()

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()
