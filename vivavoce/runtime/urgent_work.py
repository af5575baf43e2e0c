"""Urgent work of a device: long passes of other work wait for it between their parts."""

import threading
from collections.abc import Callable, Hashable


class UrgentWork:
    """What is waited for now, such as the first sounds of replies.

    A GPU runs the kernels of all streams side by side, whatever their priority: a first sound takes three to four times
    as long beside a long pass. Such a pass therefore waits while there is urgent work.
    """

    def __init__(self, after: Callable[[], None] = lambda: None) -> None:
        """`after` is called whenever the last piece of urgent work is removed."""
        self._after = after
        self._members: set[Hashable] = set()
        self._is_none = threading.Event()
        self._is_none.set()

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: Hashable) -> None:
        """Add a piece of work. On one thread, as `discard`."""
        self._members.add(member)
        self._is_none.clear()

    def discard(self, member: Hashable) -> None:
        """Remove a piece of work, if it is there."""
        if member not in self._members:
            return
        self._members.remove(member)
        if not self._members:
            self._is_none.set()
            self._after()

    def wait(self, seconds: float) -> None:
        """Wait until there is none, for at most so long; on any thread."""
        if seconds > 0:
            self._is_none.wait(seconds)
