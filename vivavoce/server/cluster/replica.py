"""A replica: the whole server of one model on a private port, and what the fleet needs to know of it."""

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
from typing import TYPE_CHECKING, Any

from vivavoce.dialogue.backend import EndpointRef
from vivavoce.errors import CapacityError, InputError
from vivavoce.log import configure
from vivavoce.server.cluster.options import PARTS, POOL, PoolOptions
from vivavoce.server.cluster.registry import RemoteRegistry, ReplicaReport
from vivavoce.server.config import ServerOptions

if TYPE_CHECKING:
    from aiohttp import ClientSession


LOOK_SECONDS = 0.25


class InPool:
    """A `Find`: whoever of a pool is least busy."""

    def __init__(self, roll: RemoteRegistry, role: str) -> None:
        self._roll, self.role = roll, role

    async def __call__(self, gone: EndpointRef | None = None) -> EndpointRef:
        """A replica of the pool; CapacityError where there is none."""
        if gone is not None:
            await self._roll.lost(gone.name)
        report = await self._roll.somebody(self.role)
        if report is None:
            raise CapacityError(f"no {self.role} replica is ready")
        return EndpointRef(f"{report.url}/v1", report.key, report.replica)

    async def wait(self) -> EndpointRef:
        """The same, however long its models take to load."""
        while True:
            try:
                return await self()
            except CapacityError:
                await asyncio.sleep(LOOK_SECONDS)

    def __str__(self) -> str:
        return f"the {self.role} pool"


async def with_pools(model: Mapping[str, Any], roll: RemoteRegistry, http: "ClientSession") -> dict[str, Any]:
    """A model's options with its parts that are in other pools, once those are there."""
    options = dict(model)
    for name in PARTS:
        if options.get(name) == POOL:
            find = options[name] = InPool(roll, name)
            place = await find.wait()
            if name == "codec":
                async with http.get(f"{place.url}/codec") as answer:
                    options[name] = (find, await answer.json())
    return options


logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
READY_SECONDS = 1800.0  # a large model is read from a slow disk
UNLIMITED = 1e9


@dataclass(frozen=True)
class Figures:
    """What a server's own metrics say."""

    sessions: int = 0
    """And requests under way."""
    opened: int = 0
    missed: float = 0.0
    sound_seconds: float = 0.0
    slack: float | None = None
    """Seconds by which sound, or the engine's rows, came before a listener ran dry, at worst; None: nobody listened."""

    @classmethod
    def read(cls, page: str) -> "Figures":
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

    def late_share(self, before: "Figures", piece_seconds: float) -> float:
        """Of the pieces sent since, the share that went out late."""
        pieces = (self.sound_seconds - before.sound_seconds) / piece_seconds
        return min((self.missed - before.missed) / pieces, 1.0) if pieces >= 1 else 0.0


class Replica:
    """A Ray Serve deployment. It is running once its model is warm, and goes when its sessions have gone."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, role: str, pool: PoolOptions, options: ServerOptions, desk: Any, drain_seconds: float
    ) -> None:
        import aiohttp
        import ray
        from ray import serve

        configure(options.log_level, options.log_format)
        self.role, self.pool, self._roll, self._drain_seconds = role, pool, RemoteRegistry(desk), drain_seconds
        self.name = serve.get_replica_context().replica_id.unique_id
        self.key = secrets.token_urlsafe(32)
        address = ray.util.get_node_ip_address()
        self._options = replace(
            options,
            host=address,
            port=_free_port(address),
            api_keys=(self.key,),
            most_sessions=pool.sessions,
            opens_per_minute=UNLIMITED,  # all come from the ingress
        )
        self.url = f"http://{address}:{self._options.port}"
        self.is_draining = False
        self._figures = self._before = Figures()
        self._http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self.key}"})
        self._server = asyncio.create_task(self._serve())
        await self._until_ready()
        self._reporting = asyncio.create_task(self._report())

    async def check_health(self) -> None:
        """Raise where the server is no more, so that another replica takes this one's place."""
        if self._server.done() or self._reporting.done():
            raise RuntimeError(f"the server of replica {self.name} ended")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the pool grows and shrinks by."""
        before, self._before = self._before, self._figures
        late = self._figures.late_share(before, self._options.piece_ms / 1000)
        told = {"sessions": float(self._figures.sessions), "late_share": late}
        return told if self._figures.slack is None else told | {"slack": self._figures.slack}

    async def __del__(self) -> None:
        """Drain: the ingresses move sessions away when they are quiet; those that cannot be moved may end."""
        self.is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self._drain_seconds):
                await self._tell_roll()
                while self._figures.sessions:
                    await asyncio.sleep(LOOK_SECONDS)
        for task in (self._reporting, self._server):
            task.cancel()
        await asyncio.gather(self._reporting, self._server, return_exceptions=True)
        await self._http.close()

    async def _serve(self) -> None:
        pool = self.pool.of(self.role)
        assert pool.load is not None
        assert pool.serve is not None
        model = await with_pools(pool.model, self._roll, self._http)
        host = await asyncio.to_thread(named(pool.load), **model)
        run: Callable[[Any, ServerOptions], Awaitable[None]] = named(pool.serve)
        await run(host, self._options)

    async def _until_ready(self) -> None:
        import aiohttp

        async with asyncio.timeout(READY_SECONDS):
            while not self._server.done():
                with suppress(aiohttp.ClientError):
                    async with self._http.get(f"{self.url}/readyz") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.05)
        error = self._server.exception()
        raise CapacityError(f"the {self.role} server ended before it was ready: {error}") from error

    async def _report(self) -> None:
        import aiohttp

        loop, told_at = asyncio.get_running_loop(), -HEARTBEAT_SECONDS
        while True:
            before = self._figures
            with suppress(aiohttp.ClientError, TimeoutError):
                async with self._http.get(f"{self.url}/metrics") as answer:
                    self._figures = Figures.read(await answer.text())
                has_changed = (before.sessions, before.opened) != (self._figures.sessions, self._figures.opened)
                if has_changed or loop.time() - told_at >= HEARTBEAT_SECONDS:
                    told_at = loop.time()
                    await self._tell_roll()
            await asyncio.sleep(LOOK_SECONDS)

    async def _tell_roll(self) -> None:
        figures, late = self._figures, self._figures.late_share(self._before, self._options.piece_ms / 1000)
        told = (figures.sessions, figures.opened, late, self.is_draining, os.getpid())
        report = ReplicaReport(self.name, self.role, self.url, self.key, self.pool.sessions, *told, figures.slack)
        try:
            await self._roll.report(report)
        except Exception:  # a roll that is being restarted; the next report comes soon
            logger.warning("replica %s could not report", self.name, exc_info=True)


def named(path: str) -> Any:
    """What a path such as `package.module:function` names."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{path!r} cannot be loaded: {error}") from error


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
