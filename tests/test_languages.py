"""Which languages a model knows, as its checkpoint or the catalogue says, and what stacks and the demo make of it."""

import json

import pytest
from typer.testing import CliRunner

from vivavoce import hub
from vivavoce.cli import app
from vivavoce.cli.demo import run
from vivavoce.cli.demo_languages import hotel_instructions, require_language
from vivavoce.errors import CheckpointError, InputError
from vivavoce.evaluation.questions import bundled_questions
from vivavoce.hub.languages import language_names, spoken_languages
from vivavoce.minis.untrained import CONFIG, untrained_codec, write_untrained
from vivavoce.models.checkpoint import save_weights
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.stacks import STACKS
from vivavoce.train.front_desk import LANGUAGES
from vivavoce.train.package import main as package

BOTH = ("en", "zh")


def checkpoint(folder, **generation):
    folder.mkdir(exist_ok=True)
    (folder / hub.GENERATION_CONFIG).write_text(json.dumps(generation))
    return folder


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fnlp/MOSS-Speech", BOTH),
        ("hf:OpenMOSS-Team/MOSS-Speech@abc", BOTH),
        ("whisper-base", BOTH),
        ("openai/whisper-large-v2", BOTH),
        ("moonshine-base-en", ("en",)),
        ("hibari", ("en",)),
        ("mini-asr", ("en",)),
        ("mini-tts", ("en",)),
        ("someone/a-model-of-theirs", BOTH),
        ("http://localhost:1/v1", BOTH),
    ],
)
def test_a_name_that_is_not_fetched_says_its_languages(name, expected):
    assert spoken_languages(name) == expected


def test_a_checkpoint_lists_its_languages(tmp_path):
    assert spoken_languages(str(checkpoint(tmp_path / "model"))) == BOTH, "nothing says that it lacks one"
    assert spoken_languages(str(checkpoint(tmp_path / "model", languages=["zh"]))) == ("zh",)
    (tmp_path / "model" / hub.CODEC_FOLDER).mkdir()
    assert spoken_languages(str(checkpoint(tmp_path / "model", languages=["en", "zh"]))) == BOTH
    assert spoken_languages(str(checkpoint(tmp_path / "model", left_chunks=4))) == ("en",), "as before it was listed"


@pytest.mark.parametrize("listed", ["zh", ["zh", "klingon"], [1], {"zh": True}])
def test_a_list_that_is_none_is_damage(tmp_path, listed):
    with pytest.raises(CheckpointError, match=r"languages is .*, not a list of en, zh"):
        spoken_languages(str(checkpoint(tmp_path, languages=listed)))
    (tmp_path / hub.GENERATION_CONFIG).write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        spoken_languages(str(tmp_path))


def test_a_stack_has_the_languages_that_all_its_models_know(tmp_path):
    assert STACKS["assistant"].languages == STACKS["s2s"].languages == BOTH
    assert STACKS["assistant"].with_parts(tts="mini-tts").languages == ("en",)
    assert STACKS["mini"].languages == spoken_languages("mini-speech")
    mandarin = str(checkpoint(tmp_path, languages=["en", "zh"]))
    assert STACKS["mini"].with_parts(model=mandarin).languages == BOTH
    desk = STACKS["desk"].with_parts(model=mandarin)
    assert desk.languages == ("en",) and desk.with_parts(asr="whisper-base").languages == BOTH


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"speech_speech": {"by_language": {"zh": {}, "en": {}}}, "tools": {}}, {"languages": ["en", "zh"]}),
        ({"speech_speech": {"by_language": {"en": {}}}}, {"languages": ["en"]}),
        ({"speech_speech": {}}, {}),
    ],
)
def test_a_package_lists_the_languages_of_the_evaluation(tmp_path, figures, expected):
    write_untrained(tmp_path)
    untrained_codec().save(tmp_path / "codec")
    save_weights(MossSpeech.random(CONFIG, seed=0), tmp_path)
    (tmp_path / "metrics.json").write_text(json.dumps(figures))
    package(["--lm", str(tmp_path), "--codec", str(tmp_path / "codec"), "--out", str(tmp_path / "out")])
    said = json.loads((tmp_path / "out" / hub.GENERATION_CONFIG).read_text())
    assert {name: value for name, value in said.items() if name == "languages"} == expected
    assert ("tool_calls" in said) == ("tools" in figures)


def test_the_demo_refuses_a_language_by_the_name_of_the_model_that_lacks_it(tmp_path):
    english = str(checkpoint(tmp_path / "english", languages=["en"]))
    done = CliRunner().invoke(app, ["demo", "--model", english, "--language", "zh"])
    assert isinstance(done.exception, InputError)
    assert f"{english} knows English, not Mandarin" in str(done.exception)
    for stack in ("desk", "mini"):
        done = CliRunner().invoke(app, ["demo", "--stack", stack, "--language", "fr"])
        assert isinstance(done.exception, InputError) and "in en or zh, not in 'fr'" in str(done.exception)
    done = CliRunner().invoke(app, ["demo", "--cascade", "--language", "zh"])
    assert isinstance(done.exception, InputError) and "mini-asr knows English" in str(done.exception)
    with pytest.raises(InputError, match="give --language zh"):
        require_language("en", "whisper-base", checkpoint(tmp_path / "mandarin", languages=["zh"]))


def test_the_demo_asks_a_model_that_lists_mandarin_in_mandarin(tmp_path):
    for part in hub.resolve("mini-speech").iterdir():
        if part.name != hub.GENERATION_CONFIG:
            (tmp_path / part.name).symlink_to(part)
    stored = json.loads((hub.resolve("mini-speech") / hub.GENERATION_CONFIG).read_text())
    checkpoint(tmp_path, **stored | {"languages": ["en", "zh"]})
    result = run("cpu", str(tmp_path), language="zh")
    (asked,) = [question for question in bundled_questions("zh") if question.intent == "breakfast"]
    assert result["expected"] == {"heard": asked.text, "said": asked.reply} and result["seconds_of_speech"] > 0


@pytest.mark.parametrize("code", LANGUAGES)
def test_the_instructions_of_a_cascade_contain_the_right_reply(code):
    (asked,) = [question for question in bundled_questions(code) if question.intent == "breakfast"]
    assert asked.reply in hotel_instructions(code)


def test_languages_have_names():
    assert language_names(BOTH) == "English and Mandarin"
