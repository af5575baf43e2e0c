"""Phrasings that a chat model writes: rules, agreement, splits, and runs that resume."""

import asyncio
import json
from dataclasses import replace

import pytest

from vivavoce.errors import InputError
from vivavoce.train.front_desk import LANGUAGES, SPLITS, language, single_questions, templates
from vivavoce.train.front_desk.phrasing_rules import INTENTS, Kept, Phrasing, cleaned, fault, split_of
from vivavoce.train.phrasings import PhrasingRun, Request, main, prompt, requests, write_phrasings

ENGLISH = LANGUAGES["en"]
CASES = [
    ("en", "price", "and the {dish}, what would that set me back?", None),
    ("en", "price", "what would that set me back?", "slots"),
    ("en", "price", "is the {dish} cheaper than the {dish}?", "slots"),
    ("en", "taxi", "get me a ride to the {place}, will you?", "slots"),
    ("en", "table", "squeeze us in for dinner, {people}, would you?", None),
    ("en", "table", "squeeze two of us in for dinner", "value"),
    ("en", "taxi", "of course, your taxi is on its way", "answer"),
    ("en", "wifi", "the wifi is free, the password is garden", "answer"),
    ("en", "taxi", "bitte rufen sie ein taxi für mich", "language"),
    ("en", "taxi", "", "length"),
    ("en", "taxi", "i " + "really " * 16 + "need a taxi", "length"),
    ("zh", "price", "{dish}要花我多少銀子？", None),
    ("zh", "taxi", "能不能找輛小黃載我們？", None),
    ("zh", "taxi", "Can you call 計程車？", "language"),
    ("zh", "taxi", "请帮我叫车", "language"),
    ("zh", "table", "我想帶三個朋友來吃飯", "value"),
    ("zh", "taxi", "沒問題，馬上幫您叫車", "answer"),
    ("zh", "taxi", "", "length"),
]


@pytest.mark.parametrize(("code", "intent", "text", "expected"), CASES)
def test_rules_keep_questions_and_drop_the_rest(code, intent, text, expected):
    assert fault(Phrasing(code, intent, text), LANGUAGES[code]) == expected


@pytest.mark.parametrize(
    ("code", "line", "text"),
    [
        ("en", '3. "Could I get a cab?"', "could i get a cab?"),
        ("en", "- I need a lift to town!", "i need a lift to town"),
        ("zh", "1、请问餐厅几点开?", "請問餐廳幾點開？"),
        ("zh", "「幫我叫車。」", "幫我叫車"),
    ],
)
def test_a_line_becomes_a_template(code, line, text):
    assert cleaned(line, LANGUAGES[code]) == text


def test_what_the_desk_has_already_and_what_comes_twice_is_a_duplicate():
    kept = Kept(ENGLISH)
    assert kept.fault(Phrasing("en", "taxi", "could you please call me a taxi?")) == "duplicate"
    assert kept.fault(Phrasing("en", "taxi", "be so kind and fetch me a cab")) is None
    assert kept.fault(Phrasing("en", "taxi", "be so kind and fetch us a cab, please")) == "duplicate"


def test_every_intent_is_described_with_its_slots():
    for code, desk in LANGUAGES.items():
        assert INTENTS.keys() == set(language(code, 2).intents)
        for intent, wanted in INTENTS.items():
            named = {*wanted.get("slots", ()), *wanted.get("may", ())}
            assert named <= desk.values.keys()
            system, user = prompt(Request(code, intent, 0), desk, 0)
            assert system and wanted[code] in user and all(f"{{{slot}}}" in user for slot in named)


REPLIES = {
    "taxi": "1. Could you find me a ride into town?\n2. Sure, I will.\n3. Could you find me a ride into town, please?",
    "bill": "1. What is the damage?\n2. Let me settle up",
}


class ScriptedChat:
    """Writes REPLIES and names an intent by its words, as a chat model would; it counts what it was asked."""

    def __init__(self, fail_after: int = 1_000) -> None:
        self.asked: list[str] = []
        self.fail_after = fail_after

    async def __call__(self, system: str, user: str, temperature: float, max_tokens: int) -> str:
        if len(self.asked) == self.fail_after:
            raise ConnectionError
        self.asked.append(user)
        if "different sentences" in user:
            return next(reply for intent, reply in REPLIES.items() if INTENTS[intent]["en"] in user)
        return "taxi" if "ride" in user else "bill" if "settle" in user else "other"


def run(chat, out):
    return asyncio.run(PhrasingRun(chat, out, 0, lambda _: None)(requests(["en"], ["taxi", "bill"], 1)))


def test_only_phrasings_that_the_model_names_rightly_are_kept(tmp_path):
    chat = ScriptedChat()
    kept = run(chat, tmp_path)
    assert {(each.intent, each.text) for each in kept} == {
        ("taxi", "could you find me a ride into town?"),
        ("bill", "let me settle up"),
    }
    assert len(chat.asked) == 2 + 3  # two requests, three lines without a fault
    counts = write_phrasings(tmp_path, kept, 0)
    assert sum(counts.values()) == 2
    lines = [json.loads(line) for line in (tmp_path / "phrasings.en.jsonl").read_text().splitlines()]
    assert [(line["intent"], line["split"]) for line in lines] == [
        (each.intent, split_of(each, ENGLISH, 0)) for each in sorted(kept, key=lambda each: each.intent)
    ]


@pytest.mark.parametrize("fail_after", [1, 2, 4])
def test_a_stopped_run_asks_only_for_what_is_missing(tmp_path, fail_after):
    with pytest.raises(ConnectionError):
        run(ScriptedChat(fail_after), tmp_path)
    with (tmp_path / "written.jsonl").open("a") as file:
        file.write('{"language": "en", "int')  # cut off while it was written
    chat = ScriptedChat()
    assert run(chat, tmp_path) == run(ScriptedChat(), tmp_path / "whole")
    assert len(chat.asked) == 5 - fail_after


def test_a_split_depends_on_the_normalised_form_and_the_seed():
    texts = [
        f"could you {verb} me a cab?" for verb in ("find", "get", "send", "hail", "fetch", "bring", "book", "phone")
    ]
    splits = [split_of(Phrasing("en", "taxi", text), ENGLISH, 0) for text in texts]
    assert splits == [split_of(Phrasing("en", "taxi", text.replace("?", ", please?")), ENGLISH, 0) for text in texts]
    assert set(splits) <= set(SPLITS)
    assert any(splits != [split_of(Phrasing("en", "taxi", text), ENGLISH, seed) for text in texts] for seed in (1, 2))


def test_edition_2_has_added_phrasings_in_their_splits_without_near_duplicates():
    held_out, learned = "what would the {dish} set me back tonight?", "is the {dish} a bargain?"
    near = "what would the {dish} set us back tonight?"
    added = {"train": {"price": [learned, near]}, "held_out": {"price": [held_out]}}
    enlarged = replace(language("en", 2), added=added)
    assert templates("price", "held_out", enlarged)[-1] == held_out
    assert templates("price", "train", enlarged)[-1] == learned and near not in templates("price", "train", enlarged)
    asked = " ".join(each.user for each in single_questions(["price"], 400, 0, language=enlarged))
    assert "a bargain" in asked and "set me back" not in asked and "set us back" not in asked


@pytest.mark.parametrize("code", ["en", "zh"])
def test_reviewed_phrasings_follow_the_rules_and_are_in_edition_2_alone(code):
    desk, kept = language(code, 2), Kept(LANGUAGES[code])
    for split, by_intent in desk.added.items():
        for intent, texts in by_intent.items():
            for text in texts:
                phrasing = Phrasing(code, intent, text)
                assert kept.fault(phrasing) is None, phrasing
                assert split_of(phrasing, desk, 0) == split, phrasing
                assert text in templates(intent, split, desk) or split == "train"
                assert text not in LANGUAGES[code].written.get(intent, [])


def test_an_unknown_intent_is_named():
    with pytest.raises(InputError, match="no intent sauna"):
        requests(["en"], ["sauna"], 1)


@pytest.mark.full
@pytest.mark.published
def test_a_published_model_writes_phrasings(published_model, tmp_path):
    published_model("qwen2.5-coder-0.5b-instruct")
    options = ["--languages", "en", "--intents", "taxi", "--rounds", "1", "--device", "cpu"]
    main(["--out", str(tmp_path), "--model", "qwen2.5-coder-0.5b-instruct", *options])
    (written,) = (json.loads(line) for line in (tmp_path / "written.jsonl").read_text().splitlines())
    assert written["intent"] == "taxi" and len(written["reply"].splitlines()) >= 3
    for line in (tmp_path / "phrasings.en.jsonl").read_text().splitlines():
        assert fault(Phrasing("en", "taxi", json.loads(line)["text"]), ENGLISH) is None
