"""Connections that never become requests: large heads, slow heads, and many that wait."""

import asyncio
import contextlib
import os

import pytest

from tests.server.harness import RunningServer, connected, eventually

GET = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
UPGRADE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
LARGE = 32 << 20
HEADS = {
    "one header": GET + b"X-Large: " + b"x" * LARGE,
    "one header's name": GET + b"x" * LARGE,
    "many headers": GET + b"X-Many: 1\r\n" * (LARGE // 11),
    "folded headers": GET + b"X-Half: " + b"x" * (33 << 10) + b"\r\nX-Half: " + b"x" * (33 << 10) + b"\r\n\r\n",
    "the URL": b"GET /" + b"x" * LARGE,
    "a handshake": UPGRADE + b"X-Large: " + b"x" * LARGE,
    "trailers": b"POST /v1/audio/speech HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-Large: "
    + b"x" * LARGE,
}


async def refusal(server: RunningServer, data: bytes) -> tuple[bytes, int]:
    """What the server says to these bytes, and how many of them it took before it closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    sent = 0
    try:
        with contextlib.suppress(ConnectionError):
            for begin in range(0, len(data), 1 << 16):
                writer.write(data[begin : begin + (1 << 16)])
                await asyncio.wait_for(writer.drain(), 20)
                sent += 1 << 16
                await asyncio.sleep(0)
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(reader.read(), 20), sent
        return b"", sent
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("head", HEADS, ids=lambda name: name.replace(" ", "-"))
async def test_a_large_head_is_refused_before_it_has_come(server, head):
    said, sent = await refusal(server, HEADS[head])
    assert sent < LARGE // 2
    if said and head != "trailers":  # nothing is read where the refusal came while the client was sending
        assert said.startswith(b"HTTP/1.1 431 ")
    async with connected(server) as client:
        await client.until("session.created")


async def test_a_head_just_over_the_limit_is_answered(server):
    said, _ = await refusal(server, GET + b"X-Large: " + b"x" * (65 << 10) + b"\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 431 ")
    said, _ = await refusal(server, GET + b"X-Fits: " + b"x" * (50 << 10) + b"\r\nConnection: close\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("start", [b"", b"\r\n", b"G", GET, UPGRADE], ids=["nothing", "blank", "G", "GET", "handshake"])
async def test_a_head_that_is_never_complete_is_refused(running, start):
    server = await running(head_seconds=0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(start)
    assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_a_second_request_that_is_never_complete_is_refused_too(running):
    server = await running(head_seconds=0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(GET + b"\r\n")
    assert (await asyncio.wait_for(reader.readuntil(b'"ok"}'), 20)).startswith(b"HTTP/1.1 200 ")
    writer.write(GET)
    assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_a_session_outlives_the_time_for_its_handshake(running):
    server = await running(head_seconds=0.1)
    async with connected(server) as client:
        await client.until("session.created")
        await asyncio.sleep(0.3)
        assert (await client.say("still here", output_modalities=["text"]))["status"] == "completed"


async def test_half_open_requests_are_closed_and_do_not_block_other_clients(running):
    server = await running(max_pending_per_address=16)
    descriptors = len(os.listdir("/proc/self/fd"))
    streams = []
    for _ in range(300):
        streams.append(await asyncio.open_connection("127.0.0.1", server.port))
        streams[-1][1].write(GET)
    async with connected(server) as client:
        await client.until("session.created")
    closed = streams[: 300 - 16 - 1]
    for reader, _ in closed:
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 408 ")
    for _, writer in streams:
        writer.transport.abort()
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "all descriptors are returned")


async def test_the_limit_of_all_addresses_together(running):
    server = await running(max_pending_connections=4)
    streams = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(5)]
    assert (await asyncio.wait_for(streams[0][0].read(), 20)).startswith(b"HTTP/1.1 408 ")
    for _, writer in streams:
        writer.transport.abort()
