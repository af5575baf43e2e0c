"""Models, a package or module per family. This file must load without torch: ONNX speech synthesis runs without it."""

import json
from pathlib import Path
from typing import Any

from vivavoce.errors import CheckpointError


def read_config(file: str | Path, kind: str) -> dict[str, Any]:
    """The settings of a JSON file; `kind` names the expected model in the error where there are none."""
    file = Path(file)
    try:
        given = json.loads(file.read_text(encoding="utf8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file.parent} holds no {file.name}; is this a {kind} folder?") from error
    except NotADirectoryError as error:
        raise CheckpointError(f"{file.parent} is a file; give a {kind} folder") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); is this a {kind} folder?") from error
    if not isinstance(given, dict):
        raise CheckpointError(f"{file} holds a {type(given).__name__}, no settings; is this a {kind} folder?")
    return given
