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


async def iterate_on_thread(
    make: Callable[[], Iterator[Item]], max_waiting: int = MAX_WAITING
) -> AsyncGenerator[Item, None]:
    """Iterate over a blocking iterator on a thread of its own, with at most `max_waiting` items unread.

    For iterators that block on a socket, or on work that the device's executor runs for them: public generators of
    recognition and speech models, and HTTP responses. Closing this one stops the thread after its current item.
    """
    loop = asyncio.get_running_loop()
    items: asyncio.Queue[Item | _Over] = asyncio.Queue()
    room = threading.Semaphore(max_waiting)
    is_closed = threading.Event()

    def send(item: Item | _Over) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(items.put_nowait, item)

    def work() -> None:
        try:
            for item in make():
                send(item)
                room.acquire()
                if is_closed.is_set():
                    return
            send(_Over())
        except Exception as error:
            if is_closed.is_set():
                log_failure(logger, error, "an iterator failed after its reader had closed it")
            send(_Over(error))
        finally:
            del _iterators[threading.current_thread()]

    def stop() -> None:
        is_closed.set()
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
