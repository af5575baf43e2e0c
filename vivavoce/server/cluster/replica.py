"""A replica on Ray Serve: the whole server of one model on a private port, whose load is reported to the registry."""

import asyncio
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import aiohttp
import ray
from ray import serve

from vivavoce.dialogue.backend import EndpointRef
from vivavoce.errors import CapacityError
from vivavoce.log import configure
from vivavoce.server.cluster.options import PARTS, POOL, PoolOptions
from vivavoce.server.cluster.registry import RegistryClient, ReplicaReport
from vivavoce.server.cluster.replica_server import POLL_SECONDS, ReplicaReporter, private_options, serve_pool
from vivavoce.server.config import ServerOptions


class PoolResolver:
    """A `Resolver`: the least busy replica of a pool."""

    def __init__(self, registry: RegistryClient, role: str) -> None:
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
    model: Mapping[str, object], registry: RegistryClient, http: aiohttp.ClientSession
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


class Replica:
    """A Ray Serve deployment. It is running once its model is warm, and ends when its sessions have left."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, role: str, pool: PoolOptions, options: ServerOptions, registry: Any, drain_seconds: float
    ) -> None:
        configure(options.log_level, options.log_format)
        self.role, self.pool, self._drain_seconds = role, pool, drain_seconds
        self._registry = RegistryClient(registry.call.remote)
        self.name = serve.get_replica_context().replica_id.unique_id
        self.key = secrets.token_urlsafe(32)
        self._options = private_options(options, ray.util.get_node_ip_address(), self.key, pool.sessions)
        self.url = f"http://{self._options.host}:{self._options.port}"
        self._http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.key}"})
        report = ReplicaReport(self.name, role, self.url, self.key, pool.sessions, 0, 0, pid=os.getpid())
        self._reporter = ReplicaReporter(report, self._registry, self._http, options.piece_ms / 1000)
        self._server = asyncio.create_task(self._serve())
        await self._wait_until_ready()
        self._reporting = asyncio.create_task(self._reporter.run())

    async def check_health(self) -> None:
        """Raise RuntimeError where the server has ended, so that Ray replaces this replica."""
        if self._server.done() or self._reporting.done():
            raise RuntimeError(f"the server of replica {self.name} ended")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The metrics by which the pool is scaled."""
        metrics, late = self._reporter.metrics, self._reporter.late_share()
        self._reporter.late_since = metrics
        stats = {"sessions": float(metrics.sessions), "late_share": late}
        return stats if metrics.slack is None else stats | {"slack": metrics.slack}

    async def __del__(self) -> None:
        """Drain: the ingresses move idle sessions away, the other sessions may end."""
        self._reporter.is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                await self._reporter.send()
                while self._reporter.metrics.sessions:
                    await asyncio.sleep(POLL_SECONDS)
        for task in (self._reporting, self._server):
            task.cancel()
        await asyncio.gather(self._reporting, self._server, return_exceptions=True)
        await self._http.close()

    async def _serve(self) -> None:
        model = await resolve_pools(self.pool.model, self._registry, self._http)
        await serve_pool(self.role, replace(self.pool, model=model), self._options)

    async def _wait_until_ready(self) -> None:
        if not await self._reporter.wait_until_ready(self._server.done):
            error = self._server.exception()
            raise CapacityError(f"the {self.role} server ended before it was ready: {error}") from error
