"""A replica: the whole server of one model on a private port, whose load is reported to the registry."""

import asyncio
import logging
import math
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import aiohttp
import ray
from ray import serve

from vivavoce.dialogue.backend import EndpointRef
from vivavoce.errors import CapacityError, InputError
from vivavoce.log import configure
from vivavoce.server.cluster.options import PARTS, POOL, PoolOptions
from vivavoce.server.cluster.registry import RemoteRegistry, ReplicaReport
from vivavoce.server.config import ServerOptions

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
HEARTBEAT_SECONDS = 1.0
READY_SECONDS = 1800.0  # for a large model on a slow disk
UNLIMITED = 1e9


class PoolResolver:
    """A `Resolver`: the least busy replica of a pool."""

    def __init__(self, registry: RemoteRegistry, role: str) -> None:
        self._registry, self.role = registry, role

    async def __call__(self, gone: EndpointRef | None = None) -> EndpointRef:
        """A replica of the pool; CapacityError where there is none."""
        if gone is not None:
            await self._registry.mark_lost(gone.name)
        report = await self._registry.pick(self.role)
        if report is None:
            raise CapacityError(f"no {self.role} replica is ready")
        return EndpointRef(f"{report.url}/v1", report.key, report.replica)

    async def wait(self) -> EndpointRef:
        """A replica of the pool, however long its models take to load."""
        while True:
            try:
                return await self()
            except CapacityError:
                await asyncio.sleep(POLL_SECONDS)

    def __str__(self) -> str:
        return f"the {self.role} pool"


async def resolve_pools(
    model: Mapping[str, object], registry: RemoteRegistry, http: aiohttp.ClientSession
) -> dict[str, object]:
    """A model's options in which parts of other pools are resolvers, once those pools are ready."""
    options: dict[str, object] = dict(model)
    for name in PARTS:
        if options.get(name) == POOL:
            resolver = options[name] = PoolResolver(registry, name)
            endpoint = await resolver.wait()
            if name == "codec":
                async with http.get(f"{endpoint.url}/codec") as response:
                    options[name] = (resolver, await response.json())
    return options


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


class Replica:
    """A Ray Serve deployment. It is running once its model is warm, and ends when its sessions have left."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, role: str, pool: PoolOptions, options: ServerOptions, registry: Any, drain_seconds: float
    ) -> None:
        configure(options.log_level, options.log_format)
        self.role, self.pool, self._drain_seconds = role, pool, drain_seconds
        self._registry = RemoteRegistry(registry)
        self.name = serve.get_replica_context().replica_id.unique_id
        self.key = secrets.token_urlsafe(32)
        address = ray.util.get_node_ip_address()
        self._options = replace(
            options,
            host=address,
            port=_free_port(address),
            api_keys=(self.key,),
            max_sessions=pool.sessions,
            opens_per_minute=UNLIMITED,  # all sessions are opened by the ingresses
        )
        self.url = f"http://{address}:{self._options.port}"
        self.is_draining = False
        self._metrics = self._scaling_metrics = ReplicaMetrics()
        self._http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.key}"})
        self._server = asyncio.create_task(self._serve())
        await self._wait_until_ready()
        self._reporting = asyncio.create_task(self._report())

    async def check_health(self) -> None:
        """Raise RuntimeError where the server has ended, so that Ray replaces this replica."""
        if self._server.done() or self._reporting.done():
            raise RuntimeError(f"the server of replica {self.name} ended")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The metrics by which the pool is scaled."""
        previous, self._scaling_metrics = self._scaling_metrics, self._metrics
        late = self._metrics.late_share(previous, self._options.piece_ms / 1000)
        stats = {"sessions": float(self._metrics.sessions), "late_share": late}
        return stats if self._metrics.slack is None else stats | {"slack": self._metrics.slack}

    async def __del__(self) -> None:
        """Drain: the ingresses move idle sessions away, the other sessions may end."""
        self.is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                await self._send_report()
                while self._metrics.sessions:
                    await asyncio.sleep(POLL_SECONDS)
        for task in (self._reporting, self._server):
            task.cancel()
        await asyncio.gather(self._reporting, self._server, return_exceptions=True)
        await self._http.close()

    async def _serve(self) -> None:
        pool = self.pool.with_defaults(self.role)
        assert pool.load is not None
        assert pool.serve is not None
        model = await resolve_pools(pool.model, self._registry, self._http)
        host = await asyncio.to_thread(import_object(pool.load), **model)
        run: Callable[[Any, ServerOptions], Awaitable[None]] = import_object(pool.serve)
        await run(host, self._options)

    async def _wait_until_ready(self) -> None:
        async with asyncio.timeout(READY_SECONDS):
            while not self._server.done():
                with suppress(aiohttp.ClientError):
                    async with self._http.get(f"{self.url}/readyz") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.05)
        error = self._server.exception()
        raise CapacityError(f"the {self.role} server ended before it was ready: {error}") from error

    async def _report(self) -> None:
        loop, reported_at = asyncio.get_running_loop(), -HEARTBEAT_SECONDS
        while True:
            previous = self._metrics
            with suppress(aiohttp.ClientError, TimeoutError):
                async with self._http.get(f"{self.url}/metrics") as response:
                    self._metrics = ReplicaMetrics.read(await response.text())
                has_changed = (previous.sessions, previous.opened) != (self._metrics.sessions, self._metrics.opened)
                if has_changed or loop.time() - reported_at >= HEARTBEAT_SECONDS:
                    reported_at = loop.time()
                    await self._send_report()
            await asyncio.sleep(POLL_SECONDS)

    async def _send_report(self) -> None:
        report = ReplicaReport(
            replica=self.name,
            role=self.role,
            url=self.url,
            key=self.key,
            capacity=self.pool.sessions,
            sessions=self._metrics.sessions,
            opened=self._metrics.opened,
            late_share=self._metrics.late_share(self._scaling_metrics, self._options.piece_ms / 1000),
            is_draining=self.is_draining,
            pid=os.getpid(),
            slack=self._metrics.slack,
        )
        try:
            await self._registry.report(report)
        except Exception:  # the registry is being restarted; the next report comes soon
            logger.warning("replica %s could not report", self.name, exc_info=True)


def import_object(path: str) -> Any:
    """The object of a path such as `package.module:function`."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{path!r} cannot be loaded: {error}") from error


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
