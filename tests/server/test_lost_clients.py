"""Clients that are gone at any moment of a lively session, or in the middle of a request: nobody else notices."""

import asyncio
import contextlib
import json

import httpx
from websockets.exceptions import ConnectionClosed

from tests.server.harness import Client, RunningServer, connected, eventually
from tests.server.scripted import RATE, ScriptedHost, tone
from tests.server.test_audio_api import ToneListener, ToneMaker
from vivavoce.server.app import build_app
from vivavoce.server.config import ServerOptions
from vivavoce.server.realtime.audio_formats import WireFormat

TOOL = {"type": "function", "name": "book", "parameters": {"type": "object"}}
TYPES_OF_A_LIVELY_SESSION = {
    *("session.created", "session.updated", "conversation.created", "input_audio_buffer.speech_started"),
    *("input_audio_buffer.speech_stopped", "input_audio_buffer.committed", "conversation.item.added"),
    *("conversation.item.done", "conversation.item.input_audio_transcription.completed", "response.created"),
    *("response.output_audio.delta", "response.output_item.added", "response.content_part.added", "response.done"),
    *("response.function_call_arguments.done", "conversation.item.retrieved", "conversation.item.deleted"),
    *("conversation.item.truncated", "error", "input_audio_buffer.cleared"),
}
MAX_SECONDS = 400


async def lively(client: Client) -> None:
    """A spoken turn, a tool call, an answer that is cut, items looked at and taken away, and a mistake."""
    transcription = {"input": {"transcription": {"model": "any"}}}
    await client.send("session.update", session={"audio": transcription, "tools": [TOOL]})
    await client.speak(tone(440, 0.3, 24_000), WireFormat())
    await client.speak(tone(440, 0.6, 24_000, amplitude=0.0), WireFormat())
    await client.until("response.done")
    await client.say("please book it")
    call = client.of_type("response.output_item.done")[-1]["item"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "a long one"}
    await client.send("conversation.item.create", item=output)
    await client.send("response.create")
    said = (await client.until("response.output_audio.delta"))["item_id"]
    await client.send("conversation.item.truncate", item_id=said, content_index=0, audio_end_ms=50)
    await client.until("conversation.item.truncated")
    await client.send("conversation.item.retrieve", item_id=call["id"])
    await client.send("conversation.item.delete", item_id=call["id"])
    await client.send("input_audio_buffer.clear")
    await client.until("input_audio_buffer.cleared")
    await client.send("response.cancel")
    await client.error()


class Leaving(Client):
    """Is gone after so many events."""

    def __init__(self, socket, events: int) -> None:
        super().__init__(socket)
        self.left = events

    async def next(self) -> dict:
        if len(self.events) >= self.left:
            self.socket.transport.abort()
            raise ConnectionResetError
        return await super().next()


async def leave_after(server: RunningServer, events: int) -> None:
    async with connected(server, close_timeout=0.2) as client:
        with contextlib.suppress(ConnectionClosed, ConnectionResetError):
            await lively(Leaving(client.socket, events))


def test_a_client_may_vanish_at_every_event_of_a_lively_session():
    async def main() -> None:
        options = ServerOptions(resume_seconds=0.0, opens_per_minute=1e6, max_sessions=MAX_SECONDS)
        async with RunningServer(ScriptedHost(), options) as server:
            async with connected(server) as whole:
                await lively(whole)
            types = [event["type"] for event in whole.events]
            assert set(types) >= TYPES_OF_A_LIVELY_SESSION, TYPES_OF_A_LIVELY_SESSION - set(types)
            assert len(types) < MAX_SECONDS
            async with connected(server) as bystander:
                firsts = [place for place, kind in enumerate(types) if kind not in types[:place]]
                for start in range(0, len(firsts), 8):  # together, but not so many that all are late
                    await asyncio.gather(*(leave_after(server, events) for events in firsts[start : start + 8]))
                answer = await bystander.say("am I alone?", output_modalities=["text"])
                assert answer["output"][0]["content"][0]["text"] == "You said: am I alone?"
                await eventually(lambda: len(server.host.alive) == 1, "their conversations are closed")

    asyncio.run(main())


async def cut_off(server: RunningServer, request: bytes, length: int) -> None:
    """So many bytes of a request, and then nobody."""
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request[:length])
    await writer.drain()
    writer.transport.abort()


def request_of(path: str, content_type: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n".encode() + body


def test_requests_that_end_in_the_middle(caplog):
    form = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        + b"RIFF" * 2000
        + b"\r\n--x--\r\n"
    )
    spoken = json.dumps({"model": "x", "input": "hello", "voice": "ada", "response_format": "wav"}).encode()
    requests = [
        request_of("/v1/audio/transcriptions", "multipart/form-data; boundary=x", form),
        request_of("/v1/audio/speech", "application/json", spoken),
        request_of("/v1/realtime/calls", "application/sdp", b"v=0\r\n" * 200),
        request_of("/v1/realtime/client_secrets", "application/json", b'{"session": {}}'),
    ]

    async def main() -> None:
        server = RunningServer(ScriptedHost(), ServerOptions())
        server.use(build_app(server.host, server.options, ToneMaker(), ToneListener()))
        async with server:
            for request in requests:
                lengths = {1, 20, len(request) // 2, len(request) - 1, len(request)}
                await asyncio.gather(*(cut_off(server, request, length) for length in lengths))
            async with httpx.AsyncClient() as http:
                whole = await http.post(f"{server.http}/v1/audio/speech", content=spoken)
                assert whole.status_code == 200 and len(whole.content) > RATE
                assert (await http.get(f"{server.http}/healthz")).status_code == 200

    asyncio.run(main())
    assert not [record for record in caplog.records if record.exc_info], "a client that leaves is no fault of ours"


async def answered(server: RunningServer, pieces: list[bytes], pause: float) -> bytes:
    """What is said to a request that comes in pieces, up to when the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.transport.abort()


def test_a_body_that_never_comes_is_refused_and_one_that_comes_slowly_is_not():
    spoken = json.dumps({"model": "x", "input": "hello", "voice": "ada", "response_format": "wav"}).encode()
    whole = request_of("/v1/audio/speech", "application/json", spoken)
    whole = whole.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    body = len(whole) - len(spoken)

    async def main() -> None:
        server = RunningServer(ScriptedHost(), ServerOptions(stall_seconds=1.0))
        server.use(build_app(server.host, server.options, ToneMaker(), ToneListener()))
        async with server:
            unfinished = [[whole[:length]] for length in (body, body + 1, len(whole) - 1)]
            for said in await asyncio.gather(*(answered(server, pieces, 0) for pieces in unfinished)):
                assert said.startswith(b"HTTP/1.1 408") and b"request_timeout" in said
            cuts = range(body, len(whole), len(spoken) // 4)
            slowly = [whole[:body], *(whole[cut : cut + len(spoken) // 4] for cut in cuts)]
            assert (await answered(server, slowly, 0.3)).startswith(b"HTTP/1.1 200")

    asyncio.run(main())
