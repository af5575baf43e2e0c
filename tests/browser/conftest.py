from tests.server.conftest import running, server

__all__ = ["running", "server"]
