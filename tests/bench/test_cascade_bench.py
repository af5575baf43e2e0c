"""General questions to a cascade of published models: understood, answered and spoken, begun early or not."""

import json

import pytest

from vivavoce.bench import cascade
from vivavoce.bench.cascade import LANGUAGES, GeneralQuestion
from vivavoce.bench.spoken_texts import spoken_characters, spoken_words
from vivavoce.errors import InputError


def test_there_are_twenty_questions_in_each_language():
    listed = json.loads(cascade.QUESTIONS.read_text(encoding="utf8"))
    assert set(listed) == set(LANGUAGES)
    for entries in listed.values():
        assert len({entry["text"] for entry in entries}) == 20 and all(entry["expected"] for entry in entries)


def test_an_answer_is_right_with_any_expected_word():
    question = GeneralQuestion("What is two plus three?", ("five", "5"), None)
    assert question.is_right("Five.") and question.is_right("2 + 3 = 5") and not question.is_right("Four.")


def test_texts_are_compared_as_they_are_spoken():
    assert spoken_words("There are 7 days.") == spoken_words("there are seven days")


def test_chinese_is_compared_in_one_script():
    pytest.importorskip("opencc")
    assert spoken_characters("一个国家。") == spoken_characters("一個國家") != spoken_characters("一个过家")
    assert GeneralQuestion("天空是什么颜色的？", ("蓝",), None).is_right("天空是藍色的。")
    for written, spoken in (
        ("一周有7天。", "一周有七天"),
        ("1分钟等于60秒", "一分钟等于六十秒"),
        ("有24小时，200人，2个", "有二十四小时，两百人，两个"),
        ("2024年增长3.5%", "二零二四年增长百分之三点五"),
        ("3个", "３個"),
    ):
        assert spoken_characters(written) == spoken_characters(spoken)
    assert spoken_characters("60秒") != spoken_characters("16秒")


def test_a_language_without_questions_is_refused():
    with pytest.raises(InputError, match="not in 'fr'"):
        cascade.run("fr")


@pytest.mark.published
@pytest.mark.full
@pytest.mark.parametrize("language", LANGUAGES)
def test_published_models_answer_spoken_questions(language, tmp_path, published_model):
    pytest.importorskip("hibari")  # also speaks for Kokoro: its phonemes
    pytest.importorskip("misaki")
    pytest.importorskip("opencc")
    for name in ("kokoro-82m", "whisper-base", "moonshine-base-en", cascade.CHAT):
        published_model(name)
    early = cascade.run(language, count=3, sounds=tmp_path, device="cpu", out=tmp_path)
    late = cascade.run(language, count=3, sounds=tmp_path, device="cpu", is_early=False, judge=None)
    words = spoken_words if language == "en" else spoken_characters
    assert early["answered"] == 3 and early["right"] >= 2
    for one, other in zip(early["questions"], late["questions"], strict=True):
        assert words(one["heard"]) == words(other["heard"])
        assert len(one["heard"]) < 1.5 * len(one["question"]), "Whisper repeats short Mandarin turns if it can"
        assert one["unread_tokens"] <= other["unread_tokens"]
        assert set(one["stages"]) == set(cascade.STAGES)
    assert early["wer"] <= 0.1 if language == "en" else early["cer"] <= 0.25, "the judge writes homophones"
    kept = json.loads((tmp_path / f"cascade_{language}.json").read_text(encoding="utf8"))
    assert kept["questions"] == early["questions"]
