"""One thread gives a device its work, round by round, while there is any; those who wait for it never meet.

Were everybody to take a lock and work, whoever works would take it again before the others wake up, and texts asked for
together would be said one after another.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")
Part = Callable[[], bool]  # does what has gathered, and says whether there was any


class Rounds:
    """What is asked for is done first, then each part of the round, over and over until there is nothing left."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._asked: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._is_wanted = self._is_running = False

    def ask(self, action: Callable[[], Result]) -> Result:
        """What an action gives that must have the device to itself; it is done between rounds."""
        answer: Future[Result] = Future()

        def answered() -> None:
            try:
                answer.set_result(action())
            except BaseException as error:
                answer.set_exception(error)

        self._asked.append(answered)
        self.wake()
        return answer.result()

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
                    busy = part() or busy

    def _goes_on(self) -> bool:
        with self._lock:
            self._is_running, self._is_wanted = self._is_wanted, False
            return self._is_running

    def _answer(self) -> bool:
        asked = [self._asked.popleft() for _ in range(len(self._asked))]
        for action in asked:
            action()
        return bool(asked)
