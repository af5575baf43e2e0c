"""What the README and docs/ show in Python: names that exist, and the README's own first example, run as it stands."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vivavoce import hub
from vivavoce.audio.io import read, write

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


EXAMPLES = [
    pytest.param(text, id=f"{page.stem}-{number}") for page in PAGES for number, text in enumerate(_examples(page))
]


@pytest.mark.parametrize("text", EXAMPLES)
def test_an_example_imports_only_what_exists(text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("vivavoce"):
            module = importlib.import_module(node.module)
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            if missing:  # a module of the package is no attribute before it is imported
                for name in missing:
                    importlib.import_module(f"{node.module}.{name}")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "vivavoce":
            assert hasattr(importlib.import_module("vivavoce"), node.attr)


def test_the_first_example_of_the_readme_runs(tmp_path: Path) -> None:
    (example,) = [text for text in _examples(PAGES[0]) if text.startswith("import vivavoce\n")]
    write(tmp_path / "question.wav", read(hub.BUNDLED / "questions" / "15-breakfast.opus"))
    command = [sys.executable, "-c", example]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    heard, said = run.stdout.splitlines()[:2]
    assert "breakfast" in heard.lower()
    assert "seven" in said
