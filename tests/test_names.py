"""Names say what a thing is in the words of the field: no identifier holds a word of the list."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vivavoce"
WORDS = {  # metaphors, people in place of objects, and words for which docs/glossary.md has another
    *("ear", "ears", "mouth", "mouths", "mind", "minds", "desk", "lane", "lanes", "duty", "duties", "seat"),
    *("seats", "sitting", "roll", "ledger", "twin", "twins", "crowd", "handover", "rehearsal", "rehearse", "rehearsed"),
    *("tell", "tells", "told", "teller", "telling", "gathering", "remembering", "remember", "remembers", "spelling"),
    *(
        "wish",
        "wishes",
        "wished",
        "manner",
        "manners",
        "lean",
        "straight",
        "straighten",
        "straightened",
        "narrow",
        "narrowed",
    ),
    *("lesson", "lessons", "course", "courses", "exam", "exams", "judgement", "judgements", "ship", "shipped", "ships"),
    *("hearing", "hearings", "far", "here", "laid", "reordered", "owe", "owed", "owes", "pay", "pays"),
    *("most", "least", "longest", "shortest", "fewest", "reckon", "reckoned", "reckons"),
    *("whoever", "nobody", "nobodys", "somebody", "everybody", "whom", "who", "whose"),
}
PLAIN = {"front_desk", "FRONT_DESK", "straight_through"}  # a hotel's; a term of the field
LIBRARY = {"most_common", "narrow", "roll", "tell"}  # methods of torch, files and collections
# Former names that are still accepted, for a release.
SHIMS: dict[str, set[str]] = {
    "asr/__init__.py": {"longest_silence"},
    "export/trtllm/runner.py": {"most"},
    "server/cluster/options.py": {"least", "least_slack_ms", "most"},
    "server/config.py": {
        "least_lead_ms",
        "most_event_bytes",
        "most_pending_bytes",
        "most_sessions",
        "most_upload_bytes",
    },
    "tts/cosyvoice.py": {"manner"},
    "tts/frame_model.py": {"manner"},
}


def identifiers(source: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno


def has_old_word(name: str) -> bool:
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return name not in PLAIN | LIBRARY and any(part.lower() in WORDS for part in parts)


def old_names(file: Path) -> set[str]:
    names = {name for name, _ in identifiers(file.read_text(encoding="utf8")) if has_old_word(name)}
    return names - SHIMS.get(str(file.relative_to(PACKAGE)), set())


def test_no_identifier_holds_an_old_word_but_the_shims():
    found = {
        str(file.relative_to(PACKAGE)): sorted(names) for file in PACKAGE.rglob("*.py") if (names := old_names(file))
    }
    assert found == {}


def test_the_list_of_shims_holds_nothing_else():
    for name, listed in SHIMS.items():
        used = {each for each, _ in identifiers((PACKAGE / name).read_text(encoding="utf8"))}
        assert listed <= used, f"{name}: {sorted(listed - used)} can be taken off the list"


def test_no_module_is_named_by_an_old_word():
    assert not [str(file) for file in PACKAGE.rglob("*.py") if has_old_word(file.stem)]


def test_public_class_names_are_unique():
    homes: dict[str, list[str]] = {}
    elsewhere = {"moss_speech_network.py", "moss_speech_pytorch.py"}  # written into exports, with names of TensorRT-LLM
    for file in sorted(file for file in PACKAGE.rglob("*.py") if file.name not in elsewhere):
        for node in ast.parse(file.read_text(encoding="utf8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(file.relative_to(PACKAGE)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


@pytest.mark.parametrize(
    ("name", "is_old"),
    [
        ("FarCodec", True),
        ("open_ear", True),
        ("most_rows", True),
        ("early", False),
        ("farm", False),
        ("front_desk", False),
    ],
)
def test_what_counts_as_an_old_word(name, is_old):
    assert has_old_word(name) is is_old
