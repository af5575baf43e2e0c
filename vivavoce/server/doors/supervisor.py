"""Starts door processes, restarts those that end, and drains them; the server that runs behind them."""

import asyncio
import logging
import shutil
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp
from uvicorn.config import STARTUP_FAILURE

from vivavoce.server.admission import LoopLoad
from vivavoce.server.child_processes import Backoff, ProcessEnd, keep_running, start_module
from vivavoce.server.config import ServerOptions
from vivavoce.server.doors.door import door_options
from vivavoce.server.doors.engine import DoorLink
from vivavoce.server.doors.sockets import IS_BALANCED, bind
from vivavoce.server.drain import Drain, DrainingServer
from vivavoce.server.metrics import DoorStatistics
from vivavoce.server.uvicorn_settings import uvicorn_config

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
DRAIN_SECONDS = 8.0  # more than the doors give to their requests
BACKOFF = Backoff(0.1, 5.0)
WATCH_SECONDS = 1.0
MAX_SILENT_REPORTS = 15  # reports missing in a row, after which a door is taken for stuck
STABLE_SECONDS = 10.0  # after which a door that ends is restarted at once again


class Doors:
    """The door processes of a server."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app, self._options = app, options
        self.links: list[DoorLink] = []
        """Of the doors that listen."""
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self._changed = asyncio.Condition()
        self._supervisors: list[asyncio.Task[None]] = []
        self._is_stopping = False

    @property
    def port(self) -> int:
        """The port that the doors listen on."""
        return int(self._sockets[0].getsockname()[1])

    def statistics(self) -> dict[int, DoorStatistics]:
        """The last reports of the doors, by their numbers."""
        return {link.door: link.statistics for link in self.links}

    def loads(self) -> dict[str, LoopLoad]:
        """The loads of their event loops, by name."""
        return {f"door {number}": each.load for number, each in self.statistics().items()}

    async def start(self) -> None:
        """Start the doors; returns when all of them listen."""
        self._sockets = bind(self._options)
        if not IS_BALANCED:
            for each in self._sockets:
                each.listen()
        self._folder = Path(tempfile.mkdtemp(prefix="viva-doors-"))  # accessible to this user only
        path = str(self._folder / "link")
        self._server = await asyncio.get_running_loop().create_unix_server(self._new_link, path)
        count = self._options.door_count
        self._supervisors = [
            asyncio.create_task(self._watch()),
            *(asyncio.create_task(self._supervise(number, path)) for number in range(count)),
        ]
        async with asyncio.timeout(START_SECONDS), self._changed:
            await self._changed.wait_for(lambda: len(self.links) == count)

    async def drain(self) -> None:
        """Let the doors close their connections and exit."""
        self._is_stopping = True
        links = list(self.links)
        for link in links:
            link.drain()
        for number in self.processes.keys() - {link.door for link in links}:
            self.processes[number].kill()  # it has just been started
        ended = [asyncio.create_task(process.wait()) for process in self.processes.values()]
        if ended:
            await asyncio.wait(ended, timeout=DRAIN_SECONDS)
        for link in links:
            await link.finished()

    async def close(self) -> None:
        """End the doors and remove their link."""
        self._is_stopping = True
        for process in self.processes.values():
            process.kill()
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        self._server.close()
        for each in self._sockets:
            each.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _new_link(self) -> asyncio.Protocol:
        return DoorLink(self._app, self._listens, self._lost).link

    def _listens(self, link: DoorLink) -> None:
        self.links.append(link)
        self._notify()

    def _lost(self, link: DoorLink) -> None:
        if link in self.links:
            self.links.remove(link)
            self._notify()

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._notifying = asyncio.create_task(notify())

    async def _supervise(self, number: int, path: str) -> None:
        """Run a door; run it again when it ends."""
        await keep_running(f"door {number}", partial(self._run, number, path), lambda: self._is_stopping, BACKOFF)

    async def _watch(self) -> None:
        """Kill doors that are stuck: the kernel would go on to give them connections."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for link in self.links:
                link.missing_reports += 1  # a stall of this process counts as one
                if link.missing_reports > MAX_SILENT_REPORTS and link.door in self.processes:
                    logger.error("door %d does not respond and is killed", link.door)
                    self.processes[link.door].kill()

    async def _run(self, number: int, path: str) -> ProcessEnd:
        loop = asyncio.get_running_loop()
        started = loop.time()
        inherited = [] if IS_BALANCED else [each.fileno() for each in self._sockets]
        process = await start_module(
            "vivavoce.server.doors.door",
            *(str(number), path, *map(str, inherited)),
            environment={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            inherited=inherited,
        )
        self.processes[number] = process
        try:
            await process.communicate(door_options(self._options, self.port))
            return ProcessEnd(process.returncode or 0, loop.time() - started > STABLE_SECONDS)
        finally:
            if process.returncode is None:
                process.kill()
            del self.processes[number]


class EngineServer(DrainingServer):
    """uvicorn's lifespan and signals for an application whose sockets are served by doors."""

    def __init__(self, config: uvicorn.Config, drain: Drain, doors: Doors) -> None:
        super().__init__(config, drain)
        self.doors = doors

    @property
    def port(self) -> int:
        """The port that the doors listen on."""
        return self.doors.port

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then its doors."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        self.servers = []
        try:
            await self.doors.start()
        except BaseException:
            await self.doors.close()
            await self.lifespan.shutdown()
            raise
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain the application, then its doors; then end it."""
        await self.drain()
        await self.doors.drain()
        await self.lifespan.shutdown()
        await self.doors.close()


def new_server(app: Starlette, options: ServerOptions) -> DrainingServer:
    """The server of an application: in this process, or behind doors."""
    config, server = uvicorn_config(app, options), app.state.server
    if not options.door_count:
        return DrainingServer(config, server.drain)
    doors = Doors(app, options)
    server.metrics.watch_doors(doors.statistics)
    server.admission.other_loops = doors.loads
    return EngineServer(config, server.drain, doors)
