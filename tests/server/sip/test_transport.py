import asyncio
import socket

import pytest

from vivavoce.server.sip.addresses import Destination
from vivavoce.server.sip.transport import Transports

ANY_PORT = [Destination("udp", "127.0.0.1", 0), Destination("tcp", "127.0.0.1", 0)]


@pytest.fixture
def taken():
    """A port on which another program listens for TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def transports(listen: list[Destination]) -> Transports:
    return Transports(listen, None, lambda *_: None, lambda: None)


async def test_a_port_that_is_free_for_udp_alone_is_not_chosen(monkeypatch, taken):
    loop = asyncio.get_running_loop()
    bind, chosen = loop.create_datagram_endpoint, [taken, taken]

    async def steered(factory, local_addr):
        return await bind(factory, local_addr=(local_addr[0], chosen.pop() if chosen else local_addr[1]))

    monkeypatch.setattr(loop, "create_datagram_endpoint", steered)
    sockets = transports(ANY_PORT)
    await sockets.start()
    assert not chosen
    assert sockets.local("udp") == sockets.local("tcp") != ("127.0.0.1", taken)
    assert len(sockets.udp) == 1
    await sockets.close()


async def test_a_port_that_is_named_and_taken_is_an_error_and_leaves_nothing_open(taken):
    with pytest.raises(OSError, match="in use"):
        await transports([Destination(each, "127.0.0.1", taken) for each in ("udp", "tcp")]).start()
    await asyncio.sleep(0)  # asyncio closes a socket in the next turn of its loop
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", taken))
