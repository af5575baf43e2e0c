"""One thread gives a device its work, round by round, while there is any; those who wait for it never meet.

Were everybody to take a lock and work, whoever works would take it again before the others wake up, and texts asked for
together would be said one after another.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
Part = Callable[[], bool]  # does what has gathered, and says whether there was any


class DeviceLoop:
    """What is asked for is done first, then each part of the round, over and over until there is nothing left."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._asked: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._is_wanted = self._is_running = False
        self._thread: int | None = None  # that runs the rounds, by its identity

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller runs on the thread of the rounds."""
        return self._thread == threading.get_ident()

    def ask(self, action: Callable[[], Result]) -> Result:
        """What an action gives that must have the device to itself; it is done between rounds.

        On the thread of the rounds it is done at once: that thread cannot wait for itself.
        """
        if self.is_own_thread:
            return action()
        answer: Future[Result] = Future()

        def answered() -> None:
            try:
                answer.set_result(action())
            except BaseException as error:
                answer.set_exception(error)

        self._asked.append(answered)
        self.wake()
        return answer.result()

    def post(self, action: Callable[[], None]) -> None:
        """Do an action between rounds, without waiting for it."""

        def guarded() -> None:
            try:
                action()
            except Exception:
                logger.exception("a posted action failed")

        self._asked.append(guarded)
        self.wake()

    def wake(self) -> None:
        """There is work: begin, or do not end yet."""
        with self._lock:
            self._is_wanted = True
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="viva-rounds", daemon=True).start()

    def _run(self) -> None:
        while self._goes_on():
            busy = True
            while busy:
                busy = self._answer()
                for part in self.parts:
                    busy = self._do(part) or busy

    def _do(self, part: Part) -> bool:
        try:
            return part()
        except Exception:  # without its thread, every later `ask` would wait for ever
            logger.exception("a part of the round failed")
            return False

    def _goes_on(self) -> bool:
        with self._lock:
            self._is_running, self._is_wanted = self._is_wanted, False
            self._thread = threading.get_ident() if self._is_running else None
            return self._is_running

    def _answer(self) -> bool:
        asked = [self._asked.popleft() for _ in range(len(self._asked))]
        for action in asked:
            action()
        return bool(asked)
