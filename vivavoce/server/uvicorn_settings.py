"""How uvicorn serves the sockets of clients, in this process or in door processes."""

from typing import TYPE_CHECKING

import uvicorn

from vivavoce.server.config import ServerOptions
from vivavoce.server.connections import QuietWebSocketProtocol, bounded_protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def uvicorn_config(app: "ASGIApp", options: ServerOptions) -> uvicorn.Config:
    """The configuration of uvicorn. Its message limit is above ours, so that we can answer with an error event."""
    return uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        http=bounded_protocol(options),
        ws=QuietWebSocketProtocol,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
        ws_max_size=options.max_event_bytes + (1 << 20),
        ws_per_message_deflate=False,
        ws_ping_interval=20,
        ws_ping_timeout=20,
        timeout_graceful_shutdown=5,
        access_log=False,
        server_header=False,
        log_config=None,  # its records go to the root logger, like ours
        log_level="warning",  # at lower levels it logs connections with their query strings
    )
