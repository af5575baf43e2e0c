"""The listening sockets of door processes: each binds its own on Linux, elsewhere all share those of the engine."""

import socket
import sys

from vivavoce.errors import InputError
from vivavoce.server.config import ServerOptions

IS_BALANCED = sys.platform == "linux"
"""Whether the kernel distributes connections among sockets that are bound to one port."""


def bind(options: ServerOptions) -> list[socket.socket]:
    """A socket for each address of the host, at one port; InputError where it cannot be bound."""
    sockets: list[socket.socket] = []
    port, host = options.port, options.host.strip("[]")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, _, _, address in dict.fromkeys(found):
            each = socket.socket(family, kind)
            sockets.append(each)
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if IS_BALANCED:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            each.bind((address[0], port, *address[2:]))
            port = each.getsockname()[1]
    except OSError as error:
        for each in sockets:
            each.close()
        raise InputError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror}; choose another --port or --host"
        ) from error
    return sockets
