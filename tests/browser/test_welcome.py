"""The introduction on the page: its language, what may be asked and in which languages, run in Node."""

import json
import shutil
import subprocess
from dataclasses import asdict, replace

import pytest

from vivavoce.server.host import ModelCard
from vivavoce.server.rest.http import page_files
from vivavoce.stacks import HOTEL_EXAMPLES, HOTEL_INTRODUCTION

pytestmark = pytest.mark.debian("node")

DESK = ModelCard("desk", languages=("en", "zh"), introduction=HOTEL_INTRODUCTION, examples=HOTEL_EXAMPLES)
ENGLISH = replace(DESK, languages=("en",))
GENERAL = ModelCard("general", languages=("en", "zh"))
SCRIPT = """
globalThis.localStorage = { getItem: () => null, setItem: () => {} };
const { Strings } = await import("./strings.js");
const { welcome } = await import("./welcome.js");
const { tags, model } = JSON.parse(process.argv[2]);
const strings = new Strings(tags);
console.log(JSON.stringify({ language: strings.language, ...welcome(model, strings) }));
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page's modules, and a script that prints the first word to a browser with these languages."""
    folder = tmp_path_factory.mktemp("page")
    for name in ("strings.js", "welcome.js"):
        (folder / name).write_bytes(page_files()[name].content)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "welcomed.js").write_text(SCRIPT)
    return folder


def welcomed(page, model: ModelCard, *tags: str) -> tuple[str, str, list[str]]:
    """The language of the page, the text and the examples."""
    given = json.dumps({"tags": tags, "model": asdict(model)})
    command = [shutil.which("node"), page / "welcomed.js", given]
    done = subprocess.run(command, cwd=page, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    return said["language"], said["text"], [example["text"] for example in said["examples"]]


@pytest.mark.parametrize(
    ("tags", "language"),
    [
        (["zh-TW"], "zh-Hant"),
        (["zh-HK", "en"], "zh-Hant"),
        (["zh"], "zh-Hans"),
        (["en-GB", "zh-TW"], "en"),
        (["fr-FR", "zh-TW", "en"], "zh-Hant"),
        (["fr-FR"], "en"),
        ([], "en"),
    ],
    ids=str,
)
def test_the_page_takes_the_first_of_the_browsers_languages_that_it_has(page, tags, language):
    assert welcomed(page, DESK, *tags)[0] == language


@pytest.mark.parametrize(("tag", "other"), [("en", "zh-Hant"), ("zh-Hant", "en"), ("zh-Hans", "en")])
def test_a_model_of_two_languages_is_introduced_in_the_browsers_with_an_example_of_the_other(page, tag, other):
    expected = [*HOTEL_EXAMPLES[tag], HOTEL_EXAMPLES[other][-1]]
    assert welcomed(page, DESK, tag) == (tag, HOTEL_INTRODUCTION[tag], expected)


def test_a_page_in_mandarin_says_that_a_model_speaks_english_alone(page):
    _, text, examples = welcomed(page, ENGLISH, "zh-TW")
    assert text == HOTEL_INTRODUCTION["zh-Hant"] + "請說英文。"
    assert examples == list(HOTEL_EXAMPLES["en"])
    assert welcomed(page, ENGLISH, "en")[1:] == (HOTEL_INTRODUCTION["en"], list(HOTEL_EXAMPLES["en"]))


def test_other_models_have_a_general_line(page):
    assert welcomed(page, GENERAL, "en")[1] == "You may talk about anything."
    _, text, examples = welcomed(page, GENERAL, "zh-TW")
    assert text == "您可以聊任何話題。" and len(examples) == 4
    assert len(welcomed(page, ModelCard("unknown"), "zh-TW")[2]) == 3, "languages that are not known are not named"
