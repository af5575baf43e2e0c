"""A replica process of `LocalFleet`: it reads what it serves from its input, and ends when that ends."""

import os
import pickle
import sys
import threading

from vivavoce.errors import VivaError
from vivavoce.log import configure
from vivavoce.runtime import event_loop
from vivavoce.server.cluster.replica_server import serve_pool


def end_with_parent() -> None:
    """Wait until the process that started this one has ended; no client can reach this one then."""
    while os.read(sys.stdin.fileno(), 1024):  # not the buffer, whose lock a daemon thread would keep at exit
        pass
    os._exit(1)


def main() -> None:
    """Serve until interrupted."""
    role, pool, options = pickle.load(sys.stdin.buffer)
    configure(options.log_level, options.log_format)
    threading.Thread(target=end_with_parent, name="viva-parent", daemon=True).start()
    try:
        event_loop.run(serve_pool(role, pool, options))
    except VivaError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
