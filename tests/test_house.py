"""The rules of the house that a machine can check: who imports whom, what a bare box needs, what the docs promise."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import typer
from packaging.requirements import Requirement
from packaging.version import Version
from typer.testing import CliRunner

from vivavoce.cli import app
from vivavoce.cli.doctor import EXTRAS
from vivavoce.errors import EXTRA_OF_MODULE

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "vivavoce"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]

# Which package may import which. The engine sees models through one file, their interface.
MAY_IMPORT = {
    "errors": set(),
    "cores": set(),
    "thread_stacks": set(),
    "log": {"errors"},
    "cpu_speed": {"nn.process_settings"},
    "device": {"errors", "cpu_speed"},
    "implementations": {"errors", "cpu_speed", "device", "kernels", "models.registry"},
    "hub": {"errors", "hub"},
    "audio": {"errors", "audio", "kernels", "nn.modules"},
    "kernels": {"kernels", "nn.paged_kv", "nn.quantised_weight"},
    "nn": {"errors", "cores", "device", "log", "kernels", "nn"},
    "models": {"errors", "device", "log", "audio", "kernels", "nn", "models"},
    "engine": {"errors", "device", "log", "kernels", "nn", "engine", "models.interface"},
    "runtime": {"errors", "cores", "device", "log", "nn", "engine", "models.interface", "runtime"},
    "dialogue": {"errors", "log", "audio", "nn.modules", "engine.sampling", "engine.sliding_maximum", "dialogue"},
    "stacks": {"errors", "hub"},
    "asr": {"errors", "device", "log", "hub", "audio", "models", "engine", "runtime", "asr"},
    "tts": {"errors", "cores", "device", "log", "hub", "audio", "nn", "models", "engine", "runtime", "tts"},
    "s2s": {"errors", "device", "log", "hub", "audio", "nn", "models", "engine", "runtime", "dialogue", "s2s"},
    "cascade": {
        *("errors", "cores", "device", "log", "hub", "audio", "nn", "models", "engine", "runtime", "dialogue"),
        *("asr", "tts", "cascade"),
    },
    "server": {
        *("errors", "cores", "log", "audio", "dialogue", "engine.schema_limits", "engine.sliding_maximum", "server"),
        "thread_stacks",
    },
}
for may_import in MAY_IMPORT.values():  # where the device is known, so is what is fast on it and which class runs
    may_import.add("_deprecated")
    if "device" in may_import:
        may_import.update({"cpu_speed", "implementations"})
# Below `server`: loading models behind the wire may use everything but the tools.
HOSTING = "server.hosting"
# The tools behind `viva`: each may import those before it, and nothing outside imports any of them.
TOOLS = ("minis", "evaluation", "train", "quant", "export", "plan", "bench", "talk", "cli")
FRONT_AND_TOOLS = {"__init__", "_deprecated", "api", *TOOLS}
BARE = {
    "errors",
    "cores",
    "thread_stacks",
    "log",
    "cpu_speed",
    "device",
    "implementations",
    "nn",
    "kernels",
    "models",
    "engine",
}
ON_A_BARE_BOX = {"torch", "numpy", "safetensors", "jinja2"}  # torch needs jinja2 itself
NOT_ON_A_BARE_BOX = [
    *("tokenizers", "huggingface_hub", "typer", "rich", "soundfile", "soxr", "av", "onnxruntime", "matplotlib"),
    *("transformers", "triton", "scipy", "torchaudio", "torch_npu"),
]
# Which modules may import the packages of which extras at their top; they are loaded only where the extra is asked for.
NEEDS_EXTRAS = {
    "asr.backends.ctranslate2": {"asr"},
    "asr.backends.moonshine": {"onnx"},
    "audio.media": {"media"},
    "audio.onnx": {"onnx"},
    "bench": {"asr", "judge", "media", "onnx", "peer", "plot", "server"},
    "cli.demo": {"microphone"},
    "export": {"export", "onnx", "peer"},
    "models.cosyvoice.folder": {"onnx"},
    "plan": {"plot"},
    "quant": {"onnx", "peer", "plot", "quality"},
    "s2s.remote_codec": {"fleet"},
    "server": {"media", "server"},
    "server.cluster": {"fleet", "ray"},
    "train": {"media", "onnx", "peer", "train"},
    "tts.onnx": {"onnx"},
}
BAGS = {"utils", "util", "helpers", "helper", "common", "misc"}
TOP_COMMANDS = ["pip install -e . && viva demo", "pip install -e '.[test]' && pytest"]
DOCS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *PACKAGE.glob("minis/*/README.md")])
VIVA = typer.main.get_command(app)
TORCH = next(each for each in map(Requirement, PROJECT["dependencies"]) if each.name == "torch")


@dataclass(frozen=True)
class Import:
    """One imported module, and whether loading the file needs it (in functions and in `try` it does not)."""

    module: str
    line: int
    needed: bool


def imports(source: str) -> list[Import]:
    """Every import of a file, wherever it stands."""
    return list(_imports(ast.parse(source), needed=True))


@cache
def imports_of(file: Path) -> list[Import]:
    return imports(file.read_text(encoding="utf8"))


def _imports(node: ast.AST, needed: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, needed) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            module = "." * child.level + (child.module or "")
            names = [f"vivavoce.{alias.name}" for alias in child.names] if module == "vivavoce" else [module]
            yield from (Import(name, child.lineno, needed) for name in names)
        else:
            yield from _imports(child, needed and not _may_be_absent(child))


def _may_be_absent(node: ast.AST) -> bool:
    typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    return typing_only or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Try)


def modules() -> list[tuple[str, str, Path]]:
    """Room, dotted name without the package, and path of every file of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found.append((parts[0], ".".join(parts), path))
    return found


def of_ours(module: str) -> str | None:
    name = module.removeprefix("vivavoce.")
    return None if name == module or name.startswith("__") else name


def allowed(module: str, may: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in may)


MODULES = modules()
ROOMS = {room: [(name, path) for place, name, path in MODULES if place == room] for room, _, _ in MODULES}


def test_the_reader_of_imports_sees_every_form():
    source = "\n".join(
        [
            "import torch.nn",
            "from vivavoce import hub",
            "from vivavoce.nn.vocoder import CausalConv1d",
            "try:\n    import triton\nexcept ImportError:\n    triton = None",
            "if TYPE_CHECKING:\n    import av",
            "class A:\n    def f(self):\n        import scipy",
            "from . import near",
        ]
    )
    assert {item.module: item.needed for item in imports(source)} == {
        "torch.nn": True,
        "vivavoce.hub": True,
        "vivavoce.nn.vocoder": True,
        "triton": False,
        "av": False,
        "scipy": False,
        ".": True,
    }


def test_every_room_has_its_rule():
    assert ROOMS.keys() <= MAY_IMPORT.keys() | FRONT_AND_TOOLS


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_look_only_where_they_may(room):
    for name, path in ROOMS[room]:
        found = imports_of(path)
        assert not [item for item in found if item.module.startswith(".")], f"{name}: write imports in full"
        ours = [(item.line, module) for item in found if (module := of_ours(item.module))]
        if name.startswith(HOSTING) or room == "api":
            assert not [(name, line, module) for line, module in ours if allowed(module, set(TOOLS))]
        elif room in MAY_IMPORT:
            assert not [(name, line, module) for line, module in ours if not allowed(module, MAY_IMPORT[room])]


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_import_only_those_before_them(tool):
    later = set(TOOLS[TOOLS.index(tool) + 1 :])
    found = [(name, item.line, of_ours(item.module) or "") for name, path in ROOMS[tool] for item in imports_of(path)]
    assert not [each for each in found if allowed(each[-1], later)]


@pytest.mark.parametrize("room", ROOMS)
def test_importing_a_file_needs_only_what_a_plain_install_has(room):
    plain = {re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in PROJECT["dependencies"]}
    may = (ON_A_BARE_BOX if room in BARE else plain) | set(sys.stdlib_module_names) | {"vivavoce"}
    for name, path in ROOMS[room]:
        here = may | packages_of_extras(name) | ({"triton"} if is_kernel(name) else set())
        needed = [item for item in imports_of(path) if item.needed]
        assert not [(name, item.line, item.module) for item in needed if item.module.partition(".")[0] not in here]


def packages_of_extras(name: str) -> set[str]:
    """What a module may need besides a plain install."""
    extras = {extra for prefix, some in NEEDS_EXTRAS.items() if allowed(name, {prefix}) for extra in some}
    return {module for module, extra in EXTRA_OF_MODULE.items() if extra in extras}


def test_a_plain_install_loads_the_command_line_and_the_models():
    code = f"""
import sys
for absent in {sorted(EXTRA_OF_MODULE)}:
    sys.modules[absent] = None
import vivavoce.api, vivavoce.asr, vivavoce.cli, vivavoce.tts
from vivavoce.cli import doctor
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_table_of_extras_is_that_of_the_project():
    extras = PROJECT["optional-dependencies"]
    assert set(EXTRA_OF_MODULE.values()) <= extras.keys()
    assert {extra for some in NEEDS_EXTRAS.values() for extra in some} <= extras.keys()


def is_kernel(name: str) -> bool:
    """Files that need Triton; only the door of their room, which knows whether it is there, loads them."""
    return name.startswith("kernels.") and name != "kernels.__init__"


def test_only_their_own_door_loads_the_kernels():
    for _, name, path in MODULES:
        kernels = [item for item in imports_of(path) if is_kernel(of_ours(item.module) or "")]
        assert not kernels or name.startswith("kernels"), (name, kernels)


def test_the_bare_rooms_load_with_torch_numpy_and_safetensors_alone():
    bare = [name.removesuffix(".__init__") for room, name, _ in MODULES if room in BARE and not is_kernel(name)]
    code = f"""
import sys
for absent in {NOT_ON_A_BARE_BOX}:
    sys.modules[absent] = None
import importlib
for name in {bare}:
    importlib.import_module("vivavoce." + name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_torchaudio_is_nowhere():
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    users = [str(file) for file in files for item in imports_of(file) if "torchaudio" in item.module]
    assert not users


def test_no_file_is_a_bag():
    files = [*PACKAGE.rglob("*"), *(ROOT / "tests").rglob("*")]
    assert not [str(file.relative_to(ROOT)) for file in files if file.stem.strip("_").lower() in BAGS]


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_the_two_commands_stand_at_the_top(readme):
    first_block = re.search(r"```\w*\n(.*?)```", (ROOT / readme).read_text(encoding="utf8"), re.DOTALL)
    lines = [line.partition("  #")[0].strip() for line in first_block[1].splitlines()]
    assert lines == TOP_COMMANDS


def test_both_readmes_have_the_same_build():
    def shape(name: str) -> list[tuple[str, int]]:
        lines = (ROOT / name).read_text(encoding="utf8").splitlines()
        marks = ("#", "|", "```")
        return [(mark, len(line) - len(line.lstrip("#"))) for line in lines for mark in marks if line.startswith(mark)]

    assert shape("README.md") == shape("README.zh.md")


def test_extras_that_are_named_exist():
    named = {
        extra
        for file in [*PACKAGE.rglob("*.py"), *DOCS]
        for group in re.findall(r"(?:vivavoce|'\.)\[([a-z, ]+)\]", file.read_text(encoding="utf8"))
        for extra in re.split(r"[, ]+", group)
    }
    assert "modelscope" in named
    assert named <= PROJECT["optional-dependencies"].keys()
    assert EXTRAS.keys() == PROJECT["optional-dependencies"].keys()


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_options_files_and_links_in_the_docs_exist(doc):
    text = doc.read_text(encoding="utf8")
    assert not unknown_options(text)
    assert set(re.findall(r"python -m vivavoce\.([a-z_.]+[a-z])", text)) <= {name for _, name, _ in MODULES}
    named = set(re.findall(r"(?:^|[`&] ?)viva ([a-z-]+)", text, re.MULTILINE))
    assert named <= set(VIVA.commands)
    files = re.findall(r"`([a-z_]+(?:/[a-z0-9_]+)+\.(?:py|js))`", text)
    assert not [file for file in files if not ((PACKAGE / file).exists() or (ROOT / file).exists())]
    links = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    assert not [target for target in links if target and not (doc.parent / target).exists()]


def unknown_options(text: str) -> list[tuple[str, str]]:
    """Options that a text gives to a command of ours which has no such option."""
    unknown = []
    for line in re.findall(r"\bviva ([a-z-]+[^`\n#|&]*)", text.replace("\\\n", " ")):
        path, command, words = (), VIVA, line.split()
        while words and words[0] in getattr(command, "commands", ()):
            path, command = (*path, words[0]), command.commands[words.pop(0)]
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", " ".join(words)))
        unknown += [(line, option) for option in sorted(named - options(path))]
    return unknown


@cache
def options(path: tuple[str, ...]) -> set[str]:
    """The options of a command, as its help names them."""
    shown = CliRunner(env={"COLUMNS": "1000"}).invoke(app, [*path, "--help"])
    assert shown.exit_code == 0, shown.output
    return {"--help"} | set(re.findall(r"--[a-z][a-z0-9-]*", shown.stdout))


def test_an_option_that_no_command_has_is_found():
    text = "`viva say --file a --vioce b`, and\nviva bench lm \\\n  --shape small --sise 3  # --not-meant"
    assert [option for _, option in unknown_options(text)] == ["--vioce", "--sise"]


def test_torch_is_one_that_was_tried():
    assert all(each in TORCH.specifier for each in ("2.11.0", "2.12.1", "2.13.0"))
    assert not any(each in TORCH.specifier for each in ("2.10.0", "2.13.1", "2.14.0"))
    assert Version(torch.__version__).public in TORCH.specifier
    image = re.search(r"^ARG TORCH=(\S+)$", (ROOT / "deploy/Dockerfile").read_text(encoding="utf8"), re.MULTILINE)
    assert image is not None
    assert image[1] in TORCH.specifier
