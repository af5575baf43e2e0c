"""Requests to a chat endpoint share kept connections; the official server side is `http.server`."""

import asyncio
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from vivavoce.cascade.interfaces import ChatText
from vivavoce.cascade.remote import ChatEndpoint
from vivavoce.dialogue.settings import ConversationSettings


class KeepingHandler(BaseHTTPRequestHandler):
    """Answers with one word over connections that it keeps, in chunks."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.ports.append(self.client_address[1])
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        event = {"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop"}]}
        for line in (f"data: {json.dumps(event)}\n\n", "data: [DONE]\n\n"):
            self.wfile.write(f"{len(line):x}\r\n{line}\r\n".encode())
        self.wfile.write(b"0\r\n\r\n")
        self.close_connection = self.server.closes

    def log_message(self, *args):
        """Quiet."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    closes = False
    """Whether it closes connections after a response, without having said so."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), KeepingHandler)
        self.ports: list[int] = []


@pytest.fixture
def server():
    with Server() as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def endpoint(server):
    endpoint = ChatEndpoint(f"http://127.0.0.1:{server.server_port}/v1", "m")
    yield endpoint
    endpoint.close()


async def ask(endpoint: ChatEndpoint) -> str:
    pieces = [piece async for piece in endpoint.reply([], ConversationSettings())]
    return "".join(piece.text for piece in pieces if isinstance(piece, ChatText))


async def test_replies_one_after_another_use_one_connection(server, endpoint):
    assert [await ask(endpoint) for _ in range(3)] == ["yes"] * 3
    assert len(set(server.ports)) == 1


async def test_replies_at_the_same_time_have_connections_of_their_own(server, endpoint):
    assert await asyncio.gather(*(ask(endpoint) for _ in range(3))) == ["yes"] * 3
    assert len(server.ports) == 3


async def test_a_connection_that_the_endpoint_has_closed_is_opened_again(server, endpoint):
    server.closes = True
    assert [await ask(endpoint) for _ in range(3)] == ["yes"] * 3
    assert len(set(server.ports)) == 3


async def test_a_reply_that_is_stopped_leaves_no_connection_behind(server, endpoint):
    stream = endpoint.reply([], ConversationSettings())
    await anext(stream)
    await stream.aclose()
    assert await ask(endpoint) == "yes"
