"""What a benchmark is doing, while it does it: on stderr, a spinner where somebody watches, else a line."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stage(text: str) -> Iterator[None]:
    """Show that this part is under way."""
    try:
        from rich.console import Console
    except ImportError:
        print(f"… {text}", file=sys.stderr, flush=True)
        yield
        return
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        console.print(f"… {text}")
        yield
