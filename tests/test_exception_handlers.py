"""Every handler that catches everything raises, logs, or stands in a reviewed list."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vivavoce"
CATCH_ALL = {"Exception", "BaseException"}
METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
HANDED_ON = "the exception is handed to the waiting caller, which raises it"
ATTRIBUTED = "logged where the failure is attributed to its sequence or text"
REFUSED = "`_refuse` logs it and answers the client event with an error"
REVIEWED = {  # (file, function): reason
    ("engine/engine.py", "advance"): ATTRIBUTED,
    ("engine/runner.py", "_attempt"): ATTRIBUTED,
    ("tts/cosyvoice_engine.py", "_receive"): ATTRIBUTED,
    ("tts/cosyvoice_engine.py", "_feed"): ATTRIBUTED,
    ("cli/__init__.py", "main"): "one line for the user; with VIVA_DEBUG=1 it is raised",
    ("bench/tts.py", "listen"): "raised after the threads have ended",
    ("bench/simulation.py", "work"): HANDED_ON,
    ("tts/nano.py", "start"): HANDED_ON,
    ("tts/cosyvoice_engine.py", "_hop"): HANDED_ON,
    ("runtime/executor.py", "run"): HANDED_ON,
    ("runtime/engine_task.py", "_step_if_due"): ATTRIBUTED,
    ("runtime/batcher.py", "_do"): HANDED_ON,
    ("asr/batch.py", "read"): HANDED_ON,
    ("asr/service.py", "_run"): HANDED_ON,
    ("asr/batch.py", "_go_on"): HANDED_ON,
    ("server/realtime/output.py", "_run_once"): HANDED_ON,
    ("server/realtime/session.py", "take_audio"): REFUSED,
    ("server/realtime/session.py", "_received"): REFUSED,
}


def unlogged(source: str) -> Iterator[tuple[str, int]]:
    """Function and line of every place that catches everything and neither raises nor logs."""
    yield from _unlogged(ast.parse(source), "<module>")


def _unlogged(node: ast.AST, function: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ExceptHandler) and _catches_all(child.type) and not _raises_or_logs(child):
            yield function, child.lineno
        if isinstance(child, ast.Call) and _name(child.func) == "suppress" and any(map(_catches_all, child.args)):
            yield function, child.lineno
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _unlogged(child, child.name if is_function else function)


def _catches_all(caught: ast.expr | None) -> bool:
    if caught is None:
        return True
    return any(_name(each) in CATCH_ALL for each in (caught.elts if isinstance(caught, ast.Tuple) else [caught]))


def _raises_or_logs(handler: ast.ExceptHandler) -> bool:
    for node in ast.walk(handler):
        if isinstance(node, ast.Raise):
            return True
        if isinstance(node, ast.Call) and (_name(node.func) == "log_failure" or _is_logger(node.func)):
            return True
    return False


def _is_logger(function: ast.expr) -> bool:
    """Whether it is a method of a logger, or of a `FailureLog`, which are named after the failures they log."""
    if not isinstance(function, ast.Attribute):
        return False
    owner = _name(function.value)
    return (owner == "logger" and function.attr in METHODS) or (owner.endswith("failures") and function.attr == "log")


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def test_no_exception_is_dropped():
    found = {
        (str(file.relative_to(PACKAGE)), function): line
        for file in PACKAGE.rglob("*.py")
        for function, line in unlogged(file.read_text(encoding="utf8"))
    }
    assert {place: line for place, line in found.items() if place not in REVIEWED} == {}


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        ("try:\n    a()\nexcept Exception:\n    pass", True),
        ("try:\n    a()\nexcept:\n    b()", True),
        ("try:\n    a()\nexcept (ValueError, BaseException) as error:\n    keep(error)", True),
        ("with contextlib.suppress(Exception):\n    a()", True),
        ("try:\n    a()\nexcept Exception as error:\n    math.log(2)", True),
        ("try:\n    a()\nexcept Exception as error:\n    self._failures.log(error, 'a')", False),
        ("try:\n    a()\nexcept Exception:\n    logger.exception('a failed')", False),
        ("try:\n    a()\nexcept Exception as error:\n    log_failure(logger, error, 'a failed')", False),
        ("try:\n    a()\nexcept Exception as error:\n    raise Other from error", False),
        ("try:\n    a()\nexcept ValueError:\n    pass", False),
        ("try:\n    a()\nexcept Exception:\n    parser.error('a failed')", True),
    ],
)
def test_what_counts_as_dropped(body, is_found):
    assert bool(list(unlogged(f"def f():\n    {body.replace(chr(10), chr(10) + '    ')}\n"))) is is_found
