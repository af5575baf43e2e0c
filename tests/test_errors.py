"""Messages about packages that are not installed."""

import subprocess
import sys

import pytest

from vivavoce.errors import MissingDependencyError, missing_dependency, optional_packages, shown


@pytest.mark.parametrize(
    ("module", "command"),
    [("starlette.applications", "'vivavoce[server]'"), ("av", "'vivavoce[media]'"), ("yaml", "pyyaml")],
)
def test_a_missing_package_is_named_with_what_installs_it(module, command):
    with pytest.raises(MissingDependencyError) as raised, optional_packages():
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    assert str(raised.value) == f"this needs the package {module.partition('.')[0]}: pip install {command}"


def test_an_import_that_fails_for_another_reason_stays_as_it_is():
    broken = ImportError("cannot import name 'x' from 'starlette'", name="starlette")
    assert missing_dependency(broken) is None
    with pytest.raises(ImportError, match="cannot import name"), optional_packages():
        raise broken
    assert missing_dependency(ModuleNotFoundError("no vivavoce.gone", name="vivavoce.gone")) is None


def test_the_command_line_says_it_in_one_line():
    code = """
import sys
from vivavoce import cli
sys.modules["prometheus_client"] = None
@cli.app.command()
def broken() -> None:
    import prometheus_client
sys.argv = ["viva", "broken"]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "error: this needs the package prometheus_client: pip install 'vivavoce[server]'"


def test_a_long_text_is_cut_where_it_is_quoted():
    assert shown("short") == "'short'"
    assert shown("x" * 40) == repr("x" * 30 + "…")
