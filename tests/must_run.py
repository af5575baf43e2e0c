"""Tests for which a machine lacks something: skipped with a message, or failed where they were meant to run."""

import os
from typing import NoReturn

import pytest

MUST_RUN = set(os.environ.get("VIVA_MUST_RUN", "").split())


def leave_out(marker: str, reason: str) -> NoReturn:
    """Skip a test with this marker; fail it where VIVA_MUST_RUN names the marker."""
    if marker in MUST_RUN:
        pytest.fail(f"{marker} test was meant to run here, but: {reason}")
    pytest.skip(reason)
