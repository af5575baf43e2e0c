"""Models, a package or module per family. This file must load without torch: ONNX speech synthesis runs without it."""

import json
from pathlib import Path
from typing import Any

from vivavoce.errors import CheckpointError


def read_config(file: str | Path, kind: str) -> dict[str, Any]:
    """The settings in a JSON file; `kind` names the expected model in error messages."""
    file = Path(file)
    try:
        values = json.loads(file.read_text(encoding="utf8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file.parent} has no {file.name}; is this a {kind} folder?") from error
    except NotADirectoryError as error:
        raise CheckpointError(f"{file.parent} is a file; give a {kind} folder") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); is this a {kind} folder?") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} is a JSON {type(values).__name__}, not an object; is this a {kind} folder?")
    return values
