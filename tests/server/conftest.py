import contextlib

import openai
import pytest
import pytest_asyncio

from tests.server.fleets import fleet_of  # noqa: F401 - a fixture
from tests.server.harness import RunningServer
from tests.server.local_site import site  # noqa: F401 - a fixture
from tests.server.scripted import ScriptedHost
from vivavoce.server.config import ServerOptions


@pytest.fixture
async def running():
    """Starts servers with options of one's own; they end with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(host: ScriptedHost | None = None, **options) -> RunningServer:
            defaults = {"opens_per_minute": 100_000.0}
            return await stack.enter_async_context(
                RunningServer(host or ScriptedHost(), ServerOptions(**(defaults | options)))
            )

        yield start


@pytest.fixture
async def server(running):
    return await running()


@pytest.fixture
async def official():
    """Makes official clients, which do not try again, and closes them."""
    made = []

    def client(url: str, key: str) -> openai.AsyncOpenAI:
        made.append(openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0))
        return made[-1]

    yield client
    for each in made:
        await each.close()


@pytest_asyncio.fixture(loop_scope="module")
async def stack():
    """Ends what is entered with the test, in tests that share an event loop."""
    async with contextlib.AsyncExitStack() as stack:
        yield stack
