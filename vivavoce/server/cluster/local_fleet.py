"""Replicas in processes of this machine, one for each device, behind an ingress in this process.

`viva serve --devices 0,1` runs it. A replica that ends is started again, and its sessions go on at another one.
"""

import asyncio
import logging
import pickle
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Self

import aiohttp
import uvicorn
from starlette.applications import Starlette

from vivavoce.errors import VivaError
from vivavoce.server.child_processes import Backoff, ProcessEnd, keep_running, start_module
from vivavoce.server.cluster.ingress import ingress_app
from vivavoce.server.cluster.options import FleetOptions, PoolOptions
from vivavoce.server.cluster.registry import RegistryActor, RegistryClient, ReplicaReport
from vivavoce.server.cluster.replica_server import ReplicaReporter, private_options
from vivavoce.server.config import ServerOptions
from vivavoce.server.uvicorn_settings import uvicorn_config

logger = logging.getLogger(__name__)

REPLICA = "vivavoce.server.hosting.replica_process"
LOOPBACK = "127.0.0.1"
BACKOFF = Backoff(0.5, 30.0)
END_SECONDS = 5.0  # beyond the time that a replica's own replies may take
LOOK_SECONDS = 0.05


class LocalFleet:
    """The replica processes, and the registry that their ingress reads. Use as `async with`."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.registry = RegistryClient(RegistryActor().call)
        self.http: aiohttp.ClientSession
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._supervisors: list[asyncio.Task[None]] = []
        self._is_stopping = False

    async def __aenter__(self) -> Self:
        self.http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._is_stopping = True
        for process in self._processes.values():
            process.kill()
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        await self.http.close()

    async def start(self, role: str, pool: PoolOptions, environment: dict[str, str]) -> ReplicaReport:
        """Start a replica; returns when it is ready. It is started again when it ends; VivaError if it never is."""
        key = secrets.token_urlsafe(32)
        options = private_options(self.options, LOOPBACK, key, pool.sessions)
        name = f"{role}-{len(self._supervisors)}"
        report = ReplicaReport(name, role, f"http://{LOOPBACK}:{options.port}", key, pool.sessions, 0, 0)
        is_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        payload = pickle.dumps((role, pool, options))
        self._supervisors.append(asyncio.create_task(self._supervise(report, payload, environment, is_ready)))
        await is_ready
        return report

    async def drain(self, is_hurried: Callable[[], bool]) -> None:
        """Let the replicas finish their replies, and end."""
        self._is_stopping = True
        for process in self._processes.values():
            process.terminate()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.options.drain_seconds + END_SECONDS
        while self._processes and loop.time() < deadline and not is_hurried():
            await asyncio.sleep(LOOK_SECONDS)

    async def _supervise(
        self, report: ReplicaReport, payload: bytes, environment: dict[str, str], is_ready: asyncio.Future[None]
    ) -> None:
        """Run a replica; run it again when it ends."""

        async def ended(end: ProcessEnd) -> None:
            if not is_ready.done():
                raise VivaError(f"replica {report.replica} ended before it was ready, {end}")
            await self.registry.mark_lost(report.replica)

        run = partial(self._run, report, payload, environment, is_ready)
        try:
            await keep_running(f"replica {report.replica}", run, lambda: self._is_stopping, BACKOFF, ended)
        except VivaError as error:
            is_ready.set_exception(error)

    async def _run(
        self, report: ReplicaReport, payload: bytes, environment: dict[str, str], is_ready: asyncio.Future[None]
    ) -> ProcessEnd:
        """Run a replica until it ends, and report its load. It was stable if it was ready."""
        process = await self._spawn(payload, environment)
        self._processes[report.replica] = process
        ended = asyncio.create_task(process.wait())
        seconds = self.options.piece_ms / 1000
        reporter = ReplicaReporter(replace(report, pid=process.pid), self.registry, self.http, seconds)
        reporting: asyncio.Task[None] | None = None
        try:
            if await reporter.wait_until_ready(ended.done):
                reporting = asyncio.create_task(reporter.run())
                if not is_ready.done():
                    is_ready.set_result(None)
            code = await ended
        finally:
            if reporting is not None:
                reporting.cancel()
            if process.returncode is None:
                process.kill()
            del self._processes[report.replica]
        return ProcessEnd(code, reporting is not None)

    @staticmethod
    async def _spawn(payload: bytes, environment: dict[str, str]) -> asyncio.subprocess.Process:
        """Start a process; it ends when its input does, that is with this process."""
        process = await start_module(REPLICA, environment=environment, is_apart=True)  # this process drains it
        assert process.stdin is not None
        process.stdin.write(payload)
        await process.stdin.drain()
        return process


class FleetServer(uvicorn.Server):
    """uvicorn with an ingress, which drains the replicas before it closes its sockets."""

    def __init__(self, fleet: LocalFleet) -> None:
        pools = {"speech": PoolOptions(sessions=fleet.options.max_sessions)}
        self._app: Starlette = ingress_app(FleetOptions(pools, fleet.options), fleet.registry)
        super().__init__(uvicorn_config(self._app, fleet.options))
        self._fleet = fleet

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close the sockets and end the application."""
        self._app.state.ingress.stop()
        await self._fleet.drain(lambda: self.force_exit)
        await super().shutdown(sockets)
