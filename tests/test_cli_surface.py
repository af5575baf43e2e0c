"""Every command and option that was published is still there; new ones may be added."""

import json
from pathlib import Path

import pytest
import typer

from vivavoce.cli import app

PUBLISHED: dict[str, dict[str, list[str]]] = json.loads(
    (Path(__file__).parent / "cli_surface.json").read_text(encoding="utf8")
)


def surface(command, path: tuple[str, ...] = ()) -> dict[str, dict[str, list[str]]]:
    """The options and arguments of a command and of all commands below it, by their words."""
    options = [each for each in command.params if each.param_type_name == "option"]
    found = {
        " ".join(path): {
            "options": sorted({name for each in options for name in (*each.opts, *each.secondary_opts)}),
            "arguments": [each.name for each in command.params if each.param_type_name == "argument"],
        }
    }
    for name, child in getattr(command, "commands", {}).items():
        found |= surface(child, (*path, name))
    return found


CURRENT = surface(typer.main.get_command(app))


@pytest.mark.parametrize("command", PUBLISHED, ids=lambda words: words or "viva")
def test_published_commands_and_options_exist(command):
    assert command in CURRENT
    assert set(PUBLISHED[command]["options"]) <= set(CURRENT[command]["options"])
    assert CURRENT[command]["arguments"] == PUBLISHED[command]["arguments"]
