"""The log: its two formats, what it leaves out, and that only a server sets it up."""

import io
import json
import logging
import subprocess
import sys

import pytest

from vivavoce import log
from vivavoce.errors import CapacityError, InputError, VivaError

SECRET = "my mother's maiden name"


@pytest.fixture
def stream():
    level = logging.getLogger().level
    yield io.StringIO()
    log.remove()
    logging.getLogger().setLevel(level)


def fail_twice() -> None:
    try:
        int(SECRET)
    except ValueError as error:
        raise VivaError(f"this is no number: {SECRET}") from error


def test_importing_the_package_configures_nothing():
    code = """
import logging
import vivavoce, vivavoce.server.app, vivavoce.server.hosting, vivavoce.dialogue.session
for name in (None, "vivavoce", "uvicorn", "asyncio"):
    logger = logging.getLogger(name)
    assert not logger.handlers and logger.level in (logging.NOTSET, logging.WARNING), name
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_json_has_an_object_a_line_and_the_traceback_in_it(stream):
    log.configure("debug", "json", stream)
    logger = logging.getLogger("vivavoce.somewhere")
    logger.debug("step %d", 3)
    try:
        raise RuntimeError("CUDA error: an illegal memory access")
    except RuntimeError as error:
        log.log_failure(logger, error, "session %s failed", "sess_1")
    plain, failed = map(json.loads, stream.getvalue().splitlines())
    assert plain.keys() == {"time", "level", "logger", "message"}
    assert (plain["level"], plain["logger"], plain["message"]) == ("debug", "vivavoce.somewhere", "step 3")
    assert plain["time"].endswith("Z") and "T" in plain["time"]
    assert failed["message"] == "session sess_1 failed" and failed["exception"] == "RuntimeError"
    assert "test_log.py" in failed["traceback"] and "an illegal memory access" in failed["traceback"]


@pytest.mark.parametrize("format", ["text", "json"])
def test_messages_that_may_quote_what_was_said_are_left_out(stream, format):
    log.configure("debug", format, stream)
    for name in ("vivavoce.somewhere", "asyncio", "uvicorn.error"):
        try:
            try:
                fail_twice()
            except VivaError as error:
                raise ExceptionGroup(SECRET, [error, KeyError(SECRET)]) from error
        except ExceptionGroup as error:
            log.log_failure(logging.getLogger("vivavoce"), error, "a reply failed")
            logging.getLogger(name).exception("a task failed")  # by others, who know no rule
    written = stream.getvalue()
    assert SECRET not in written
    assert written.count("in fail_twice") >= 6 and "ValueError" in written and "vivavoce.errors.VivaError" in written
    assert "KeyError" in written and log.HIDDEN in written


def test_any_handler_gets_the_exception_without_its_message(caplog):
    try:
        fail_twice()
    except VivaError as error:
        log.log_failure(logging.getLogger("vivavoce"), error, "a reply failed")
    (record,) = caplog.records
    assert record.exc_info[0].__name__ == "VivaError" and SECRET not in caplog.text
    assert (
        "in fail_twice" in caplog.text and record.funcName == "test_any_handler_gets_the_exception_without_its_message"
    )


@pytest.mark.parametrize("error", [InputError(SECRET), CapacityError("no pages left")])
def test_a_caller_s_own_mistake_is_noted_and_no_fault(caplog, error):
    caplog.set_level("INFO")
    log.log_failure(logging.getLogger("vivavoce"), error, "an event was refused")
    (record,) = caplog.records
    assert record.levelname == "INFO" and record.exc_info is None
    assert record.getMessage() == f"an event was refused: {type(error).__name__}"


def test_a_recurring_failure_is_logged_once_in_a_while_and_the_others_are_counted(caplog):
    time = [0.0]
    failures = log.FailureLog(logging.getLogger("vivavoce"), seconds=60.0, now=lambda: time[0])

    def fail(kind: type[Exception]) -> None:
        try:
            raise kind(SECRET)
        except kind as error:
            failures.log(error, "step %d failed", time[0])

    for time[0] in (0.0, 1.0, 59.0, 60.0, 61.0):
        fail(ValueError)
    fail(KeyError)
    assert [record.getMessage() for record in caplog.records] == [
        "step 0 failed",
        "step 60 failed (2 more since the last such record)",
        "step 61 failed",
    ]
    assert all(record.exc_info is not None for record in caplog.records) and SECRET not in caplog.text


def test_the_level_is_ours_alone_and_a_second_call_replaces_the_first(stream):
    log.configure("error", "text", io.StringIO())
    log.configure("debug", "text", stream)
    logging.getLogger("vivavoce.dialogue").debug("ours")
    logging.getLogger("aiortc").info("theirs")
    logging.getLogger("aiortc").warning("their warning")
    lines = stream.getvalue().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "DEBUG vivavoce.dialogue: ours",
        "WARNING aiortc: their warning",
    ]
    with pytest.raises(InputError, match="debug"):
        log.configure("loud")
