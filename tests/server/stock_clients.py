"""Frameworks that are not installed with the package, as they would replace packages of its environment.

`pip install --target FOLDER 'pipecat-ai[openai]' livekit-plugins-openai`, and `VIVA_STOCK_CLIENTS=FOLDER`. The folder
comes last on the path, so that it replaces nothing. Without the variable their tests are skipped; with it they run.
"""

import importlib
import os
import sys
from types import ModuleType

import pytest


def stock_client(module: str) -> ModuleType:
    """The module of a framework."""
    folder = os.environ.get("VIVA_STOCK_CLIENTS")
    if not folder:
        pytest.skip(f"{module} is not installed; see stock_clients.py")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(module)
