"""The steps of `viva train`: listed by their present names, reachable by the former ones too."""

import pytest
from typer.testing import CliRunner

from vivavoce.cli import app
from vivavoce.cli.train import FORMER_NAMES, STEPS


def shown(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["train", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_help_lists_present_names_alone():
    listed = {words[1] for line in shown("--help").splitlines() if len(words := line.split()) > 1 and words[0] == "│"}
    assert listed >= STEPS.keys()
    assert not listed & FORMER_NAMES.keys()


@pytest.mark.parametrize("name", [*STEPS, *FORMER_NAMES])
def test_every_step_has_its_own_help(name):
    assert f"usage: viva train {name}" in shown(name, "--help")
