"""What a benchmark is doing, while it does it: on stderr, a spinner where somebody watches, else a line."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stage(text: str) -> Iterator[None]:
    """Show that this part is under way."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        console.print(f"… {text}")
        yield
