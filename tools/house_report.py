"""Measure the structure of the package: size, duplicate names, files that a turn crosses, and second ways of one thing.

    python tools/house_report.py [--static] [--json FILE]

`--static` reads the source alone. Otherwise `viva serve` and `viva say` also run with the bundled miniatures on the
CPU, and the files whose functions they execute are counted (`traced_files.py`).
"""

import argparse
import ast
import importlib.util
import json
import re
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import traced_files
from traced_files import PACKAGE, ROOT

TOOLS = {"bench", "cli", "export", "minis", "plan", "quant", "train"}
DEVICE_KINDS = {"cpu", "cuda", "mps", "npu"}
VERBS = """Accept Add Admit Allow Apply Answer Ask Avoid Batch Bound Build Bump Cache Call Cap Carry Catch Change Check
    Choose Clean Close Collect Combine Commit Compare Compute Configure Convert Copy Correct Count Cover Create Cut
    Decode Define Delete Describe Detect Document Draw Drop Enable End Export Extend Fail Fetch Find Fix Follow Free
    Generate Give Group Guard Handle Hide Hold Ignore Implement Import Improve Initialise Install Introduce Keep Leave
    Let Limit Link List Load Log Make Map Mark Match Measure Merge Mirror Move Name Offer Open Order Pace Parse Pass Pin
    Place Play Point Prefer Prepare Print Prove Pull Put Quantise Raise Read Record Reduce Refuse Release Remove Rename
    Reorder Repair Replace Report Require Resolve Restore Return Reuse Revert Rewrite Round Route Run Save Say Schedule
    Send Separate Serve Set Share Ship Shorten Show Simplify Skip Split Start State Stop Store Stream Support Take Teach
    Tell Test Time Trace Track Train Translate Treat Try Turn Type Unify Unite Update Use Validate Wait Warm Warn
    Write"""


def sources(tools: bool = True) -> dict[Path, ast.Module]:
    """Every file of the package, parsed; without the tools if those are not asked for."""
    files = sorted(PACKAGE.rglob("*.py"))
    chosen = [each for each in files if tools or each.relative_to(PACKAGE).parts[0] not in TOOLS]
    return {each: ast.parse(each.read_text(encoding="utf8")) for each in chosen}


def size() -> str:
    """Files, lines and the median file; empty `__init__` files do not count."""
    lines = [len(each.read_text(encoding="utf8").splitlines()) for each in PACKAGE.rglob("*.py")]
    lines = [each for each in lines if each]
    small = sum(each < 60 for each in lines)
    return f"{len(lines)} / {sum(lines)} / {statistics.median(lines):.0f} ({small} under 60 lines)"


def duplicate_classes() -> str:
    """Public top-level classes whose name is defined in two or more files."""
    places: dict[str, set[str]] = defaultdict(set)
    for file, tree in sources().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(str(file.relative_to(PACKAGE)))
    return counted([name for name, files in sorted(places.items()) if len(files) > 1])


def choosers() -> str:
    """Functions named `choose_*`, and files besides device.py that compare a device's kind with a name."""
    functions, files = [], set()
    for file, tree in sources(tools=False).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith("choose_"):
                functions.append(f"{file.relative_to(PACKAGE)}:{node.name}")
            if isinstance(node, ast.Compare) and file.name != "device.py" and _tests_kind(node):
                files.add(str(file.relative_to(PACKAGE)))
    return f"functions {counted(functions)}; files that test a device kind {counted(sorted(files))}"


def _tests_kind(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    named = [each.value for side in sides for each in ast.walk(side) if isinstance(each, ast.Constant)]
    attributes = {each.attr for each in sides if isinstance(each, ast.Attribute)}
    return bool(attributes & {"kind", "type"}) and bool(
        DEVICE_KINDS & {each for each in named if isinstance(each, str)}
    )


def matching(pattern: str, under: Path = PACKAGE, tools: bool = False) -> list[str]:
    """Files whose text matches."""
    found = [each for each in sources(tools) if each.is_relative_to(under)]
    return [str(each.relative_to(PACKAGE)) for each in found if re.search(pattern, each.read_text(encoding="utf8"))]


def loaders() -> str:
    """Public functions that load a model."""
    found = []
    for file, tree in sources(tools=False).items():
        functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
        found += [f"{file.relative_to(PACKAGE)}:{node.name}" for node in functions if re.match(r"load(_|$)", node.name)]
    return counted(found)


def dropped_exceptions() -> str:
    """Handlers that catch everything and neither raise nor log, besides those reviewed in the test."""
    spec = importlib.util.spec_from_file_location("handlers", ROOT / "tests" / "test_exception_handlers.py")
    assert spec is not None
    assert spec.loader is not None
    handlers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(handlers)
    names = {each: str(each.relative_to(PACKAGE)) for each in PACKAGE.rglob("*.py")}
    found = [(name, each[0]) for file, name in names.items() for each in handlers.unlogged(file.read_text("utf8"))]
    return counted([":".join(each) for each in found if each not in handlers.REVIEWED])


def playback() -> str:
    """Classes that keep their own count of what was played, and files that wait for playback."""
    counting = [
        f"{file.relative_to(PACKAGE)}:{node.name}"
        for file, tree in sources(tools=False).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and {"feed", "lead"} <= {getattr(each, "name", "") for each in node.body}
    ]
    waiting = matching(r"\.due\(now\)|clock\.until\(")
    return f"clocks {counted(counting)}; files that delay sound {counted(waiting)}"


def commits() -> str:
    """Commits whose subject opens with an imperative verb, of all and of the newest 30."""
    log = subprocess.check_output(["git", "log", "--no-merges", "--format=%s"], cwd=ROOT, text=True)
    known = set(VERBS.split())
    verbs = [subject.split(" ")[0] in known for subject in log.splitlines()]
    return f"{sum(verbs)} of {len(verbs)}; {sum(verbs[:30])} of the newest {min(30, len(verbs))}"


def counted(names: list[str]) -> str:
    """How many, and the first of them."""
    shown = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
    return f"{len(names)}" + (f" ({shown})" if names else "")


def rows(static: bool) -> Iterator[tuple[str, str]]:
    """The table."""
    yield "files / lines / median file", size()
    yield "public class names defined twice or more", duplicate_classes()
    yield "places that choose an implementation", choosers()
    yield "files that drive `Engine.advance` or `.step`", counted(matching(r"\b_?(?:engine|core)\.(?:advance|step)\("))
    yield "playback", playback()
    server = PACKAGE / "server"
    yield "server files with `dict[str, Any]`", counted(matching(r"dict\[str, Any\]", server))
    yield "`except Exception` that neither raises nor logs", dropped_exceptions()
    yield "functions that load a model", loaders()
    yield "commits that open with an imperative verb", commits()
    if not static:
        with tempfile.TemporaryDirectory() as folder:
            yield "files of `viva say`", counted(traced_files.of_say(Path(folder)))
            turn = traced_files.of_turn(Path(folder))
            yield "files a microphone frame crosses until its reply is heard", counted(turn)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--static", action="store_true", help="read the source, run nothing")
    parser.add_argument("--json", type=Path, help="write the table here too")
    chosen = parser.parse_args()
    table = {}
    for name, value in rows(chosen.static):
        print(f"| {name} | {value} |", flush=True)
        table[name] = value
    if chosen.json:
        chosen.json.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
