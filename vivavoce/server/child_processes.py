"""Modules of this package in processes of their own, which read their options from their input."""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import vivavoce


async def start_module(
    module: str,
    *arguments: str,
    environment: Mapping[str, str],
    inherited: Sequence[int] = (),
    is_apart: bool = False,
) -> asyncio.subprocess.Process:
    """Start a module with this package, wherever it was loaded from. `is_apart`: Ctrl-C does not reach it."""
    package = str(Path(vivavoce.__file__).parents[1])
    search = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        env=os.environ | environment | {"PYTHONPATH": search},
        pass_fds=inherited,
        start_new_session=is_apart,
    )
