"""Standard `logging`, set up for servers and the command line; importing the package configures nothing.

Spoken and written content is never logged. Exceptions are logged with their tracebacks, and with their messages where
these cannot quote content.
"""

import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, TextIO, get_args

from vivavoce.errors import CapacityError, CheckpointError, InputError, MissingDependencyError

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

REPEAT_SECONDS = 60.0  # for which a `FailureLog` leaves out repetitions of a failure
HIDDEN = "(message not logged: it may quote what was said)"
# The messages of these name files, devices, shapes, attributes and types; others may quote a text.
QUOTES_NO_TEXT = (
    *(OSError, RuntimeError, MemoryError, AttributeError, ImportError, TypeError, AssertionError),
    *(CapacityError, CheckpointError, MissingDependencyError),
)


def log_failure(logger: logging.Logger, error: BaseException, message: str, *args: object) -> None:
    """Log an exception that is not raised further: at info level for a caller's bad input or lack of capacity."""
    if isinstance(error, InputError | CapacityError):
        logger.info(f"{message}: %s", *args, type(error).__name__, stacklevel=2)
    else:
        logger.error(message, *args, exc_info=without_content(error), stacklevel=2)


class FailureLog:
    """Logs failures that may recur with every step: those of one kind at most once in `seconds`.

    The kind is the exception's class and the line that raised it. A later record tells how many were left out, and has
    their number as `omitted`, for whatever counts failures.
    """

    def __init__(
        self, logger: logging.Logger, seconds: float = REPEAT_SECONDS, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger, self._seconds, self._now = logger, seconds, now
        self._lock = threading.Lock()
        self._logged: dict[tuple[object, ...], tuple[float, int]] = {}  # by kind: time of the last record, repetitions

    def log(self, error: BaseException, message: str, *args: object) -> None:
        """Log a failure with its traceback, unless one of its kind was logged in the last `seconds`."""
        now, kind = self._now(), _kind(error)
        with self._lock:
            last, omitted = self._logged.get(kind, (float("-inf"), 0))
            is_due = now - last >= self._seconds
            self._logged[kind] = (now, 0) if is_due else (last, omitted + 1)
        if is_due:
            more = f" ({omitted} more since the last such record)" if omitted else ""
            counted = {"omitted": omitted}
            self._logger.error(
                message + "%s", *args, more, exc_info=without_content(error), extra=counted, stacklevel=2
            )


def _kind(error: BaseException) -> tuple[object, ...]:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    location = None if frame is None else (frame.tb_frame.f_code.co_filename, frame.tb_lineno)
    return type(error), location


def without_content(error: BaseException) -> BaseException:
    """A copy of the exception for the log, with its traceback and its causes, and without messages that may quote."""
    safe = _without_message(error)
    if error.__cause__ is not None:
        safe.__cause__ = without_content(error.__cause__)
    elif error.__context__ is not None and not error.__suppress_context__:
        safe.__context__ = without_content(error.__context__)
    return safe.with_traceback(error.__traceback__)


def _without_message(error: BaseException) -> BaseException:
    if isinstance(error, BaseExceptionGroup):
        return BaseExceptionGroup("several exceptions", [without_content(each) for each in error.exceptions])
    kind = type(error)
    shown = str(error) if isinstance(error, QUOTES_NO_TEXT) or str(error) in ("", HIDDEN) else HIDDEN
    # A class of the same name: constructors of other exceptions take arbitrary arguments.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_Shown,), names)(*([shown] if shown else []))


class _Shown(Exception):
    """An exception as it is logged."""


class TextFormatter(logging.Formatter):
    """One line per record, followed by the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line. The record's cached traceback is not used: another formatter may have filled it in."""
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + _rendered(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and the type and traceback of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        line["message"] = record.getMessage()
        if record.exc_info and record.exc_info[0] is not None:
            line |= {"exception": record.exc_info[0].__name__, "traceback": _rendered(record.exc_info)}
        return json.dumps(line, ensure_ascii=False)


class _Handler(logging.StreamHandler[TextIO]):
    """The handler of `configure`, which replaces it when called again."""


def configure(level: LogLevel = "info", format: LogFormat = "text", stream: TextIO | None = None) -> None:
    """Send the log of this process to stderr or another stream.

    The level is for this package only. Other libraries stay at warning, because their records may hold queries, keys
    and audio of clients.
    """
    if level not in get_args(LogLevel) or format not in get_args(LogFormat):
        raise InputError(f"a log has a level of {get_args(LogLevel)} and a format of {get_args(LogFormat)}")
    remove()
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("vivavoce").setLevel(level.upper())


def remove() -> None:
    """Undo `configure`."""
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, _Handler)]:
        root.removeHandler(handler)
    logging.getLogger("vivavoce").setLevel(logging.NOTSET)


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _rendered(ei: ExcInfo) -> str:
    if ei[1] is None:
        return ""
    return "".join(traceback.format_exception(without_content(ei[1]))).rstrip()
