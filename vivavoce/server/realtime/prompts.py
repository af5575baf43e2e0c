"""Stored prompts: files of instructions in a folder, with variables that a session fills in."""

import re
from pathlib import Path

from vivavoce.server.config import ServerOptions
from vivavoce.server.realtime.session_types import Prompt, PromptText
from vivavoce.server.wire import WireError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
VARIABLE = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}\}")
SUFFIXES = (".md", ".txt")


class PromptFolder:
    """Templates by id: `ID.md` or `ID.txt`, and `ID@VERSION.md` for a version; read whenever they are used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def text(self, prompt: Prompt, param: str) -> str:
        """The instructions of a prompt, its variables filled in; WireError where it cannot be used."""
        template = self._template(prompt, param)
        given = _texts(prompt, f"{param}.variables")
        wanted = set(VARIABLE.findall(template))
        if unknown := sorted(given.keys() - wanted):
            message = f"Unknown prompt variables: {', '.join(unknown)}."
            raise WireError(message, "unknown_parameter", f"{param}.variables.{unknown[0]}")
        if missing := sorted(wanted - given.keys()):
            message = f"Missing prompt variables: {', '.join(missing)}."
            raise WireError(message, "missing_required_parameter", f"{param}.variables.{missing[0]}")
        return VARIABLE.sub(lambda match: given[match[1]], template).strip()

    def _template(self, prompt: Prompt, param: str) -> str:
        version = prompt.version or ""
        if not NAME.fullmatch(prompt.id) or (version and not NAME.fullmatch(version)):
            raise _not_found(prompt, param)
        stem = f"{prompt.id}@{version}" if version else prompt.id
        file = next((file for suffix in SUFFIXES if (file := self._folder / f"{stem}{suffix}").is_file()), None)
        if file is None:
            raise _not_found(prompt, param)
        return file.read_bytes().decode("utf8", "replace")


def prompt_folder(options: ServerOptions) -> PromptFolder | None:
    """The stored prompts of a server; None where it has no folder of them."""
    return None if options.prompts is None else PromptFolder(Path(options.prompts))


def _not_found(prompt: Prompt, param: str) -> WireError:
    version = f" and version {prompt.version!r}" if prompt.version else ""
    return WireError(f"Prompt with id {prompt.id!r}{version} not found.", param=f"{param}.id")


def _texts(prompt: Prompt, param: str) -> dict[str, str]:
    """The variables as text; pictures and files cannot stand in instructions."""
    texts = {}
    for name, value in (prompt.variables or {}).items():
        text = value.text if isinstance(value, PromptText) else value
        if not isinstance(text, str):
            raise WireError("Prompt variables are text here.", "unknown_parameter", f"{param}.{name}")
        texts[name] = text
    return texts
