"""Runs coroutines on uvloop where it is installed, and reads blocking iterators from coroutines."""

import asyncio
import atexit
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from vivavoce.log import log_failure

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`, on uvloop where it is installed."""
    with asyncio.Runner(loop_factory=_factory()) as runner:
        return runner.run(main)


def _factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on every platform
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


logger = logging.getLogger(__name__)

Item = TypeVar("Item")
MAX_WAITING = 16
EXIT_SECONDS = 2.0
_iterators: dict[threading.Thread, Callable[[], None]] = {}  # threads of `iterate_on_thread`, and what ends them


@atexit.register
def _stop_iterators() -> None:
    """The interpreter kills daemon threads when it ends; one that is inside torch then would abort the process."""
    iterators = list(_iterators.items())
    for _, stop in iterators:
        stop()
    for thread, _ in iterators:
        thread.join(EXIT_SECONDS)


@dataclass(frozen=True)
class _Over:
    error: Exception | None = None


class ReaderGoneError(Exception):
    """The reader of an iterator has closed it."""


class Reader:
    """The reader of an iterator on a thread: it can pause the iterator, and be gone, within an item too."""

    def __init__(self) -> None:
        self.is_gone = False
        self._wants_more = threading.Event()
        self._wants_more.set()

    def pause(self) -> None:
        """Let the iterator wait at its next `await_reader`."""
        if not self.is_gone:
            self._wants_more.clear()

    def resume(self) -> None:
        """Let it go on."""
        self._wants_more.set()

    def leave(self) -> None:
        """End the iterator at its next `await_reader`."""
        self.is_gone = True
        self._wants_more.set()

    def wait(self) -> None:
        """Wait while paused; ReaderGoneError once the reader is gone."""
        self._wants_more.wait()
        if self.is_gone:
            raise ReaderGoneError


_thread = threading.local()


def await_reader() -> None:
    """For iterators, between two parts of an item: wait while the reader has paused, and end where it is gone.

    Raises ReaderGoneError, which only `iterate_on_thread` may catch. Does nothing on threads that it did not start.
    """
    reader: Reader | None = getattr(_thread, "reader", None)
    if reader is not None:
        reader.wait()


async def iterate_on_thread(
    make: Callable[[], Iterator[Item]], max_waiting: int = MAX_WAITING, reader: Reader | None = None
) -> AsyncGenerator[Item, None]:
    """Iterate over a blocking iterator on a thread of its own, with at most `max_waiting` items unread.

    For iterators that block on a socket, or on work that the device's executor runs for them: public generators of
    recognition and speech models, and HTTP responses. Closing this one stops the thread after its current item, or
    where that calls `await_reader`.
    """
    reader = reader or Reader()
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[Item | _Over] = asyncio.Queue()
    room = threading.Semaphore(max_waiting)

    def send(item: Item | _Over) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(items.put_nowait, item)

    def work() -> None:
        _thread.reader = reader
        try:
            for item in make():
                send(item)
                room.acquire()
                reader.wait()
            send(_Over())
        except ReaderGoneError:
            return
        except Exception as error:
            if reader.is_gone:
                log_failure(logger, error, "an iterator failed after its reader had closed it")
            send(_Over(error))
        finally:
            del _iterators[threading.current_thread()]

    def stop() -> None:
        reader.leave()
        room.release()

    thread = threading.Thread(target=work, name="viva-iterator", daemon=True)
    _iterators[thread] = stop
    thread.start()
    try:
        while not isinstance(item := await items.get(), _Over):
            room.release()
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stop()
