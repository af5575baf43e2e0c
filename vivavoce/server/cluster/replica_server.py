"""What replicas have in common, on Ray and in processes of one machine: their server, its load, and their reports."""

import asyncio
import logging
import math
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import aiohttp

from vivavoce.errors import InputError
from vivavoce.server.cluster.options import PoolOptions
from vivavoce.server.cluster.registry import RegistryClient, ReplicaReport
from vivavoce.server.config import ServerOptions

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
HEARTBEAT_SECONDS = 1.0
READY_SECONDS = 1800.0  # for a large model on a slow disk
UNLIMITED = 1e9


@dataclass(frozen=True)
class ReplicaMetrics:
    """The load of a server, read from its `/metrics`."""

    sessions: int = 0
    """Sessions and requests in progress."""
    opened: int = 0
    missed: float = 0.0
    sound_seconds: float = 0.0
    slack: float | None = None
    """Minimum seconds by which audio, or rows of the engine, were ahead of an underrun; None: no playback."""

    @classmethod
    def read(cls, page: str) -> "ReplicaMetrics":
        """From the text of `/metrics`."""
        values: dict[str, float] = {}
        for line in page.splitlines():
            name, _, value = line.rpartition(" ")
            if name and not line.startswith("#"):
                values[name.partition("{")[0]] = values.get(name.partition("{")[0], 0.0) + float(value)
        slacks = [values.get(name, math.nan) for name in ("viva_slack_seconds", "viva_engine_slack_seconds")]
        slack = min((each for each in slacks if not math.isnan(each)), default=None)
        return cls(
            int(values.get("viva_sessions", 0) + values.get("viva_audio_requests", 0)),
            int(values.get("viva_sessions_opened_total", 0) + values.get("viva_audio_requests_begun", 0)),
            values.get("viva_deadlines_missed_total", 0.0),
            values.get("viva_sound_sent_seconds_total", 0.0),
            slack,
        )

    def late_share(self, previous: "ReplicaMetrics", piece_seconds: float) -> float:
        """The share of the audio chunks sent since `before` that were late."""
        pieces = (self.sound_seconds - previous.sound_seconds) / piece_seconds
        return min((self.missed - previous.missed) / pieces, 1.0) if pieces >= 1 else 0.0


class ReplicaReporter:
    """Reads the load of a replica's server, and reports it to the registry."""

    def __init__(
        self, report: ReplicaReport, registry: RegistryClient, http: aiohttp.ClientSession, piece_seconds: float
    ) -> None:
        """`report` is that of an idle replica; `piece_seconds` is the length of an audio chunk."""
        self.name, self._url = report.replica, report.url
        self._idle, self._registry, self._http, self._piece_seconds = report, registry, http, piece_seconds
        self._headers = {"Authorization": f"Bearer {report.key}"}
        self.metrics = ReplicaMetrics()
        self.late_since = self.metrics
        """The load before the audio chunks of which `late_share` is a share."""
        self.is_draining = False

    def late_share(self) -> float:
        """The share of the latest audio chunks that were late."""
        return self.metrics.late_share(self.late_since, self._piece_seconds)

    async def wait_until_ready(self, has_ended: Callable[[], bool]) -> bool:
        """Return when the server is ready; False where it ended before."""
        async with asyncio.timeout(READY_SECONDS):
            while not has_ended():
                with suppress(aiohttp.ClientError):
                    async with self._http.get(f"{self._url}/readyz", headers=self._headers) as response:
                        if response.status == 200:
                            return True
                await asyncio.sleep(0.05)
        return False

    async def run(self) -> None:
        """Report changes at once, and the same load with every heartbeat."""
        loop, reported_at = asyncio.get_running_loop(), -HEARTBEAT_SECONDS
        while True:
            previous = self.metrics
            with suppress(aiohttp.ClientError, TimeoutError):
                async with self._http.get(f"{self._url}/metrics", headers=self._headers) as response:
                    self.metrics = ReplicaMetrics.read(await response.text())
                has_changed = (previous.sessions, previous.opened) != (self.metrics.sessions, self.metrics.opened)
                if has_changed or loop.time() - reported_at >= HEARTBEAT_SECONDS:
                    reported_at = loop.time()
                    await self.send()
            await asyncio.sleep(POLL_SECONDS)

    async def send(self) -> None:
        """Report the last load."""
        report = replace(
            self._idle,
            sessions=self.metrics.sessions,
            opened=self.metrics.opened,
            late_share=self.late_share(),
            is_draining=self.is_draining,
            slack=self.metrics.slack,
        )
        try:
            await self._registry.report(report)
        except Exception:  # the registry is being restarted; the next report comes soon
            logger.warning("replica %s could not report", self.name, exc_info=True)


async def serve_pool(role: str, pool: PoolOptions, options: ServerOptions) -> None:
    """Load the models of a pool and serve them until interrupted."""
    pool = pool.with_defaults(role)
    assert pool.load is not None
    assert pool.serve is not None
    host = await asyncio.to_thread(import_object(pool.load), **pool.model)
    run: Callable[[Any, ServerOptions], Awaitable[None]] = import_object(pool.serve)
    await run(host, options)


def import_object(path: str) -> Any:
    """The object of a path such as `package.module:function`."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{path!r} cannot be loaded: {error}") from error


def private_options(options: ServerOptions, address: str, key: str, sessions: int) -> ServerOptions:
    """The options of a replica's server, on a free port of an address: keys, TLS and rates are the ingress's."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        port = int(probe.getsockname()[1])
    return replace(
        options,
        host=address,
        port=port,
        doors=0,
        tls_cert=None,
        tls_key=None,
        api_keys=(key,),
        max_sessions=sessions,
        opens_per_minute=UNLIMITED,  # all sessions are opened by the ingresses
    )
