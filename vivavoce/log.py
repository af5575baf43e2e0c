"""Standard `logging`, set up for servers and the command line; importing the package configures nothing.

What was said is never logged. Exceptions are: their tracebacks, and their messages where these cannot quote it.
"""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, TextIO, get_args

from vivavoce.errors import CapacityError, CheckpointError, InputError, MissingDependencyError

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

HIDDEN = "(message not logged: it may quote what was said)"
# The messages of these name files, devices, shapes, attributes and types; others may quote a text.
QUOTES_NO_TEXT = (
    *(OSError, RuntimeError, MemoryError, AttributeError, ImportError, TypeError, AssertionError),
    *(CapacityError, CheckpointError, MissingDependencyError),
)


def log_failure(logger: logging.Logger, error: BaseException, message: str, *args: object) -> None:
    """Log an exception that is not raised further; bad input of a caller is noted, and is no fault."""
    if isinstance(error, InputError | CapacityError):
        logger.info(f"{message}: %s", *args, type(error).__name__, stacklevel=2)
    else:
        logger.error(message, *args, exc_info=without_content(error), stacklevel=2)


def without_content(error: BaseException) -> BaseException:
    """The exception as it may be logged, with its traceback and its causes."""
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
    # A class of the same name: constructors of others' exceptions take what they like.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_Shown,), names)(*([shown] if shown else []))


class _Shown(Exception):
    """An exception as it is logged."""


class TextFormatter(logging.Formatter):
    """One line a record, and the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; the record's cached traceback is not used, because another formatter may have made it."""
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + _rendered(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """A JSON object a line: time, level, logger, message, and of an exception its type and traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
        line["message"] = record.getMessage()
        if record.exc_info and record.exc_info[0] is not None:
            line |= {"exception": record.exc_info[0].__name__, "traceback": _rendered(record.exc_info)}
        return json.dumps(line, ensure_ascii=False)


class _Handler(logging.StreamHandler[TextIO]):
    """The one that `configure` installs, and replaces when it is called again."""


def configure(level: LogLevel = "info", format: LogFormat = "text", stream: TextIO | None = None) -> None:
    """Send the log of this process to stderr or another stream.

    The level is the package's own: that of other libraries stays at warning, because their lines may hold the queries,
    keys and sound of clients.
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
