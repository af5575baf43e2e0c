"""Fleets for tests: an ingress, and real servers behind it in this process."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from tests.server.harness import RunningServer
from tests.server.scripted import ScriptedHost
from vivavoce.server.app import build_app
from vivavoce.server.cluster.options import FleetOptions, PoolOptions
from vivavoce.server.cluster.registry import RegistryActor, RegistryClient, ReplicaRegistry, ReplicaReport
from vivavoce.server.config import ServerOptions
from vivavoce.server.host import ModelCard

RATE = 24_000
INNER_KEY = "key-of-a-replica"


class Fleet(RunningServer):
    """An ingress on a port, and servers behind it that report to its registry."""

    def __init__(self, server: dict, pools: dict) -> None:
        from vivavoce.server.cluster.ingress import ingress_app  # needs aiohttp, which not every machine has

        self.registry, self.behind = ReplicaRegistry(), {}
        self.options = ServerOptions(port=0, **server)
        self.port = 0
        fleet = FleetOptions(pools={role: PoolOptions() for role in {"speech", *pools}}, server=self.options)
        self.use(ingress_app(fleet, RegistryClient(RegistryActor(self.registry).call)))
        self.draining: set[str] = set()

    async def report(self) -> None:
        """Reports of all who are alive, for ever."""
        while True:
            for name, (role, server, places) in self.behind.items():
                opened = len(server.host.opened)
                load = (len(server.sessions), opened, 0.0, name in self.draining)
                self.registry.report(ReplicaReport(name, role, server.http, INNER_KEY, places, *load))
            await asyncio.sleep(0.02)

    def kill(self, name: str) -> None:
        """End a server as a power cut does."""
        _, server, _ = self.behind.pop(name)
        for listening in server._server.servers:
            listening.close()
        for connection in list(server._server.server_state.connections):
            connection.transport.abort()

    def home_of(self, session: str) -> str:
        return self.registry.locate(session)[0].replica


@pytest.fixture
async def fleet_of():
    """Starts fleets: places of each speech server, other pools, and options of the ingress."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*places: int, pools: dict | None = None, **server) -> Fleet:
            fleet = await stack.enter_async_context(Fleet(server, pools or {}))
            wanted = {f"speech-{number}": ("speech", many, {}) for number, many in enumerate(places)}
            wanted |= {role: (role, 4, makers) for role, makers in (pools or {}).items()}
            for name, (role, many, makers) in wanted.items():
                inner = ServerOptions(api_keys=(INNER_KEY,), max_sessions=many, opens_per_minute=1e9)
                host = ScriptedHost(models=(ModelCard(name),)) if makers else ScriptedHost()
                behind = RunningServer(host, inner)
                behind.use(build_app(host, replace(inner, port=0), **makers))
                fleet.behind[name] = (role, await stack.enter_async_context(behind), many)
            reporting = asyncio.create_task(fleet.report())
            stack.callback(reporting.cancel)
            await asyncio.sleep(0)
            return fleet

        yield start


async def said(client, text: str) -> str:
    """The words of the answer to a text."""
    response = await client.say(text, output_modalities=["text"])
    assert response["status"] == "completed"
    return response["output"][0]["content"][0]["text"]


async def texts(client) -> list[tuple[str, str]]:
    """The history as its replica has it: who, and the words."""
    items = {}
    for event in client.of_type("conversation.item.added", "conversation.item.done"):
        items[event["item"]["id"]] = None
    for id in items:
        await client.send("conversation.item.retrieve", item_id=id)
        item = (await client.until("conversation.item.retrieved"))["item"]
        part = item["content"][0]
        items[id] = (item["role"], part.get("text") or part.get("transcript") or "sound")
    return list(items.values())
