"""A reply whose client vanished waits: it takes nothing from the others, and goes on when the client is back."""

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from tests.server.harness import Client, RunningServer, connected, eventually
from tests.server.scripted import tone
from tests.server.test_live_conversation import RATE, Chat, Listener, LiveHost
from tests.server.test_resume import numbers, resuming, vanish
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue.session import LiveConversation
from vivavoce.server.config import ServerOptions
from vivavoce.server.hosting import load_host
from vivavoce.server.realtime.audio_formats import WireFormat, decode

LONG = 40  # rows: 3 s of sound
# Sound is sent as soon as it is made, and a client may be away for as long as a slow machine takes.
OPTIONS = ServerOptions(lead_ms=20_000, min_lead_ms=20_000, resume_seconds=600.0)


async def ask(client: Client, rows: int) -> tuple[str, str]:
    """Request a reply of so many rows; the session's id and its token."""
    session = (await client.until("session.created"))["session"]
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Tell me everything."}]}
    await client.send("conversation.item.create", item=item)
    await client.send("response.create", response={"max_output_tokens": rows})
    return session["id"], session["viva"]["resume_token"]


@pytest.fixture
async def spoken(model):
    """A server of the untrained miniature, whose replies are the same each time."""
    host = load_host(model, device="cpu")
    host.pipeline.options = replace(
        host.pipeline.options, seed=3, max_loop=None, min_output_tokens=LONG, captioner=None, admission=None
    )
    async with host.pipeline:
        await host.warm_up()
        async with RunningServer(host, OPTIONS) as server:
            yield server


def generated(server: RunningServer) -> list[int]:
    """Rows that the replies in progress have so far."""
    sequences = list(server.host.pipeline.core.scheduler.sequences.values())
    return [sequence.generated for sequence in sequences if sequence.is_generating]


async def test_a_reply_to_nobody_is_not_generated_until_its_client_is_back(spoken):
    async with connected(spoken) as whole:
        await ask(whole, LONG)
        await whole.until("response.done")
    async with connected(spoken) as client:
        session, token = await ask(client, LONG)
        await client.until("response.output_audio.delta")
        vanish(client)
    scheduler = spoken.host.pipeline.core.scheduler
    await eventually(lambda: any(each.is_suspended for each in scheduler.sequences.values()), "its reply waits")
    before = generated(spoken)
    assert len(before) == 1 and before[0] < LONG
    async with connected(spoken) as other:
        await ask(other, LONG)
        assert (await other.until("response.done"))["response"]["usage"]["output_tokens"] >= LONG
    assert generated(spoken) == before
    assert not spoken.host.pipeline.speaking
    async with connected(spoken, resuming(session, token, client.events[-1]["event_id"])) as again:
        assert (await again.next())["lost_events"] == 0
        await again.until("response.done")
        assert numbers(client) + numbers(again) == list(range(1, len(client.events) + len(again.events)))
        sound, expected = (decode(each, WireFormat()) for each in (client.sound() + again.sound(), whole.sound()))
        assert len(sound) == len(expected)
        assert np.abs(sound - expected).max() < 0.01


@pytest.mark.full
async def test_a_reply_that_is_asked_for_by_a_client_that_is_gone_at_once_waits_too(spoken):
    async with connected(spoken) as client:
        session, token = await ask(client, LONG)
        vanish(client)
    await eventually(lambda: not any(each.connections for each in spoken.sessions), "the server noticed")
    async with connected(spoken) as other:
        await ask(other, LONG)
        await other.until("response.done")
    assert sum(generated(spoken)) < LONG
    async with connected(spoken, resuming(session, token, None)) as again:
        assert (await again.until("response.done"))["response"]["usage"]["output_tokens"] >= LONG


@dataclass
class CountedVoice:
    """Speaks a piece for each permit."""

    rate: int = RATE
    spoken: int = 0
    permits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))

    async def speak(self, text, voice, speed):
        for _ in range(20):
            await self.permits.acquire()
            self.spoken += 1
            yield tone(300, 0.1, RATE, amplitude=0.1)


@dataclass
class CascadeHost(LiveHost):
    voice: CountedVoice = field(default_factory=CountedVoice)

    def open(self, settings, model):
        self.opened.append(LiveConversation(CascadeBackend(WholeTurns(Listener()), Chat(), self.voice), settings))
        return self.opened[-1]


async def test_a_cascade_speaks_to_nobody_either():
    host = CascadeHost()
    async with RunningServer(host, OPTIONS) as server:
        async with connected(server) as client:
            session, token = await ask(client, 100)
            await client.until("response.output_audio.delta")
            vanish(client)
        await eventually(lambda: not any(each.connections for each in server.sessions), "the server noticed")
        for _ in range(18):
            host.voice.permits.release()
        for _ in range(50):
            await asyncio.sleep(0)
        assert host.voice.spoken <= 3
        async with connected(server, resuming(session, token, client.events[-1]["event_id"])) as again:
            done = (await again.until("response.done"))["response"]
            assert done["status"] == "completed" and host.voice.spoken == 20
            assert len(decode(client.sound() + again.sound(), WireFormat())) == 2 * RATE
