"""The OpenAI Realtime protocol: typed events, sessions, and the WebSocket and WebRTC transports."""

from vivavoce.errors import MissingDependencyError

try:
    import msgspec as _msgspec  # noqa: F401
except ImportError as error:
    raise MissingDependencyError("serving needs msgspec: pip install 'vivavoce[server]'") from error
