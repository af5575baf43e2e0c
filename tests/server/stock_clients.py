"""Frameworks that are not installed with the package: `pip install --target FOLDER pipecat-ai livekit-plugins-openai`,
and `VIVA_STOCK_CLIENTS=FOLDER`. Their folder comes last on the path, so that it replaces nothing."""

import os
import sys

import pytest


def stock_client(module: str):
    """The module of a framework; the test is skipped where it is not installed."""
    folder = os.environ.get("VIVA_STOCK_CLIENTS")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    return pytest.importorskip(module, reason=f"{module} is not installed; see stock_clients.py")
