"""The steps of `viva train`: listed by their present names, reachable by the former ones too."""

import argparse

import pytest
from typer.testing import CliRunner

from vivavoce.cli import app
from vivavoce.cli.train import FORMER_NAMES, STEPS
from vivavoce.train import add_option


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


FORMER_OPTIONS = {
    ("assemble", "--ear"): "--speech-encoder",
    ("asr", "--ear"): "--speech-encoder",
    ("flow", "--ear"): "--speech-encoder",
    ("vocoder", "--ear"): "--speech-encoder",
    ("lm-data", "--ear"): "--speech-encoder",
    ("lm-data", "--spelled"): "--pseudo-codes",
    ("lm-data", "--valued"): "--slot-questions",
    ("evaluate-asr", "--people"): "--human-recordings",
    ("medusa", "--places"): "--heads",
}


@pytest.mark.parametrize(("step", "former"), FORMER_OPTIONS)
def test_the_help_lists_an_option_by_its_present_name(step, former):
    listed = shown(step, "--help")
    assert FORMER_OPTIONS[step, former] in listed and f"{former} " not in listed


@pytest.mark.parametrize("name", ["--new-name", "--old-name"])
def test_an_option_is_accepted_by_both_names_and_the_former_one_warns(name, capsys):
    parser = argparse.ArgumentParser()
    add_option(parser, "--new-name", "--old-name", type=int, required=True)
    add_option(parser, "--switch", "--old-switch", action="store_true")
    add_option(parser, "--codes", "--old-codes", type=int, nargs="?", const=256)
    assert parser.parse_args([name, "3"]) == argparse.Namespace(new_name=3, switch=False, codes=None)
    assert ("--old-name is deprecated; use --new-name" in capsys.readouterr().err) == (name == "--old-name")
    options = parser.parse_args([name, "3", "--old-switch", "--old-codes"])
    assert options.switch and options.codes == 256
    with pytest.raises(SystemExit):
        parser.parse_args([])
