"""Without a model, the best recogniser of the cache transcribes; nothing is downloaded for that."""

import pytest
from typer.testing import CliRunner

from vivavoce import hub
from vivavoce.asr.default import MINIATURE, default_recogniser, explain
from vivavoce.cli import app


@pytest.fixture
def cached(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))

    def cache(name: str) -> None:
        """Files of the right names and sizes, which is all that the choice looks at."""
        model = hub.known(name)
        for file in model.listed:
            place = hub.listed_folder(model) / file.name
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("wb") as stream:
                stream.truncate(file.bytes)

    return cache


def test_the_best_in_the_cache_is_chosen_by_language(cached):
    assert default_recogniser() == default_recogniser("zh") == MINIATURE
    cached("whisper-tiny.en")
    assert (default_recogniser(), default_recogniser("en"), default_recogniser("zh")) == (
        *("whisper-tiny.en", "whisper-tiny.en"),
        MINIATURE,
    )
    cached("moonshine-base-en")
    assert default_recogniser("en") == "moonshine-base-en"
    assert default_recogniser("en", needs_whisper=True) == "whisper-tiny.en"
    cached("whisper-base")
    assert default_recogniser() == default_recogniser("zh") == default_recogniser("en", needs_whisper=True)
    assert default_recogniser() == "whisper-base"
    assert "viva models fetch whisper-base" in explain(MINIATURE) and "the best in the cache" in explain("whisper-base")


def test_the_command_says_which_model_transcribes(cached):
    file = min((hub.BUNDLED / "questions").glob("*.[!j]*"))
    done = CliRunner().invoke(app, ["transcribe", str(file), "--device", "cpu"])
    assert done.exit_code == 0 and done.stdout.strip()
    assert done.stderr.startswith("model: mini-asr, a miniature")
