"""The front desk in Mandarin: phrasings, the one right answer, both scripts, and calls in two languages."""

import hashlib
import random
import re
from itertools import product

import pytest

from vivavoce.errors import InputError
from vivavoce.train.front_desk import (
    LANGUAGES,
    SPLITS,
    DialogueState,
    Exchange,
    dialogues,
    judge,
    language,
    language_of,
    languages,
    reply_sentences,
    templates,
    user_sentences,
)
from vivavoce.train.front_desk.answers import REMEMBERED, fixed_replies, slotted_replies
from vivavoce.train.front_desk.mandarin_text import spoken_words
from vivavoce.train.front_desk.mandarin_values import counted, number_value, number_words
from vivavoce.train.front_desk.scripts import is_traditional, simplified, traditional
from vivavoce.train.front_desk.templates import expanded

ENGLISH, MANDARIN = LANGUAGES["en"], LANGUAGES["zh"]
SLOTS = re.compile(r"\{(\w+)\}")


def said(state: DialogueState, intent: str, **slots: str) -> str:
    return state.answer(intent, slots, MANDARIN)


def every_template(code: str, edition: int) -> list[tuple[str, str, str]]:
    """Intent, split and expanded template."""
    desk = language(code, edition)
    return [
        (intent, split, way)
        for intent, split in product(desk.intents, SPLITS)
        for template in templates(intent, split, desk)
        for way in expanded(template)
    ]


@pytest.mark.parametrize("edition", [1, 2])
@pytest.mark.parametrize("code", ["en", "zh"])
def test_templates_expand_to_slots_that_have_values(code, edition):
    desk = language(code, edition)
    for intent, _, way in every_template(code, edition)[:: 1 if code == "zh" else 7]:
        assert way and not set("()[]|~") & set(way), (intent, way)
        for slot in SLOTS.findall(way):
            assert slot in desk.slot_words or slot in desk.values or slot == "number", (intent, way)


@pytest.mark.parametrize("edition", [1, 2])
def test_no_mandarin_phrasing_has_two_intents(edition):
    intents_of: dict[str, set[str]] = {}
    for intent, _, way in every_template("zh", edition):
        intents_of.setdefault(re.sub(r"[^\w{}]", "", way), set()).add(intent)
    assert not {phrasing: intents for phrasing, intents in intents_of.items() if len(intents) > 1}


@pytest.mark.parametrize("edition", [1, 2])
def test_no_held_out_mandarin_phrasing_is_trained_on(edition):
    by_split = {split: set() for split in SPLITS}
    for _, split, way in every_template("zh", edition):
        by_split[split].add(MANDARIN.plain_words(way))
    assert not by_split["train"] & by_split["held_out"]
    desk = language("zh", edition)
    assert not set(user_sentences("train", 4_000, 0, desk)) & set(user_sentences("held_out", 1_000, 1, desk))


def test_mandarin_phrasings_and_replies_are_written_in_traditional_script():
    texts = {way for _, _, way in every_template("zh", 2)} | set(reply_sentences(500, 0, MANDARIN))
    texts |= {way for ways in MANDARIN.ways.values() for said in ways.values() for way in said}
    for text in sorted(texts):
        plain = re.sub(r"[A-Za-z{}_ ]", "", text)
        assert is_traditional(plain), text
        re.sub("[啰鲑]", "", simplified(plain)).encode("gb2312")  # every Traditional character is in the table


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("codes", [("zh",), ("en", "zh")])
@pytest.mark.parametrize("edition", [1, 2])
def test_a_call_has_one_right_reply_a_turn_in_the_language_of_the_turn(split, codes, edition):
    chosen = languages(codes, edition)
    heard, changed = set(), 0
    for dialogue in dialogues(split, 1_000, 3, (1, 5), chosen):
        state = DialogueState()
        spoken = [language_of(exchange.user) for exchange in dialogue]
        changed += len(set(spoken)) > 1
        for exchange, used in zip(dialogue, spoken, strict=True):
            assert language_of(exchange.reply) is used, exchange
            assert exchange.reply == state.answer(exchange.intent, dict(exchange.slots), used)
            heard.add(exchange.intent)
    assert heard == set(chosen[0].intents)
    assert bool(changed) == (len(codes) > 1)


def test_a_mandarin_booking_is_asked_for_piece_by_piece_and_corrected():
    state = DialogueState()
    assert said(state, "table") == "沒問題。請問幾位？"
    assert said(state, "give_people", people="two") == "訂桌，兩位。請問幾點？"
    assert said(state, "correct_people", people="four") == "訂桌，四位。請問幾點？"
    assert said(state, "give_time", time="half past two") == "好的，兩點半。請問您的大名？"
    assert said(state, "give_name", name="Chen Zhiming") == "謝謝您，陳志明。桌子已經訂好了。"
    assert said(state, "correct_time", time="a quarter to eight") == "謝謝您，陳志明。好的，七點四十五分。"
    assert said(state, "memory_people") == "您說四位。"
    assert said(state, "memory_nights") == "您還沒有告訴我。"


def test_what_was_said_in_one_language_is_remembered_in_the_other():
    state = DialogueState()
    state.answer("table", {"people": "three", "time": "half past seven"}, MANDARIN)
    assert state.answer("repeat", {}) == "A table for three at half past seven. And your name, please?"
    assert state.answer("give_name", {"name": "Miller"}) == "Thank you, Miller. Your table is booked."
    assert said(state, "memory_name") == "您說米勒。"
    assert said(state, "memory_time") == "您說七點半。"
    state.answer("give_name", {"name": "Lin Meiling"}, MANDARIN)
    assert state.answer("memory_name", {}) == "You said Lin Meiling."


def test_english_names_have_a_mandarin_form():
    assert all(MANDARIN.reply("known_name", {"name": name}) != f"您說{name}。" for name in ENGLISH.values["name"])
    assert {slot: set(values) for slot, values in MANDARIN.values.items() if slot != "name"} == {
        slot: set(values) for slot, values in ENGLISH.values.items() if slot != "name"
    }


def test_numbers_round_trip():
    for number in (*range(2_000), *range(2_000, 100_000, 37)):
        assert number_value(number_words(number)) == number
        assert number_value(str(number)) == number
    written = {2: "二", 12: "十二", 20: "二十", 105: "一百零五", 210: "兩百一十", 350: "三百五十", 3150: "三千一百五十"}
    assert {number: number_words(number) for number in written} == written
    assert (counted(2, "位"), counted(12, "點"), counted(3, "晚")) == ("兩位", "十二點", "三晚")
    assert number_value("二百零五") == number_value("两百零五") == 205


def test_every_reply_is_judged_right_for_itself_alone_in_both_scripts():
    replies = list(dict.fromkeys((*fixed_replies(MANDARIN), *slotted_replies(MANDARIN))))
    words = {spoken_words(reply): reply for reply in replies}
    assert len(words) == len(replies)
    source = random.Random(0)
    for reply in source.sample(replies, 40):
        expected = Exchange("any", "", reply)
        assert judge(reply, expected) and judge(simplified(reply).rstrip("。"), expected)
        for other in source.sample(replies, 10):
            assert other == reply or not judge(other, expected), (other, reply)
            assert other == reply or not judge(simplified(other), expected)


def test_no_question_of_one_intent_is_answered_as_another():
    """The reply to a first turn is judged right for this intent's reply alone."""
    for desk in (ENGLISH, MANDARIN):
        first = {
            exchange.intent: exchange
            for (exchange,) in dialogues("train", 1_500, 2, (1, 1), [desk])
            if exchange.intent not in (*REMEMBERED, "repeat", "cancel")
        }
        assert len(first) == 24
        pairs = [pair for pair in product(first, first) if pair[0] != pair[1]]
        for intent, other in random.Random(1).sample(pairs, 150):
            assert not judge(first[other].reply, first[intent]), (first[other].reply, first[intent].reply)


RIGHT = [
    ("訂桌，4位。請問幾點？", "訂桌，四位。請問幾點？"),
    ("房間一晚3,150元,含早餐。", "房間一晚三千一百五十元，含早餐。"),
    ("我会在6.45分叫醒您。", "我會在六點四十五分叫醒您。"),
    ("订桌四位请问几点", "訂桌，四位。請問幾點？"),
    ("好的,2點半。請問您的大名?", "好的，兩點半。請問您的大名？"),
    ("好的 2:30 请问您的大名", "好的，兩點半。請問您的大名？"),
    ("好的，两点三十分，请问您的大名", "好的，兩點半。請問您的大名？"),
    ("我會在七點一刻叫醒您", "我會在七點十五分叫醒您。"),
    ("我會在差一刻八點叫醒您", "我會在七點四十五分叫醒您。"),
    ("义大利面一份350元", "義大利麵一份三百五十元。"),
    ("早餐厅在2楼", "早餐廳在二樓。"),
    ("謝謝您，程智明。桌子已經訂好了。", "謝謝您，陳志明。桌子已經訂好了。"),
    ("訂桌，禮拜五，七點，兩位。請問您的大名？", "訂桌，星期五，七點，兩位。請問您的大名？"),
    ("很抱歉我聽不懂你的意思", "很抱歉，我聽不懂您的意思。"),
    ("不客气", "不客氣。"),
]
WRONG = [
    ("訂桌，五位。請問幾點？", "訂桌，四位。請問幾點？"),
    ("好的，三點半。請問您的大名？", "好的，兩點半。請問您的大名？"),
    ("好的，兩點。請問您的大名？", "好的，兩點半。請問您的大名？"),
    ("義大利麵一份三百一十五元。", "義大利麵一份三百五十元。"),
    ("早餐廳在三樓。", "早餐廳在二樓。"),
    ("謝謝您，林美玲。桌子已經訂好了。", "謝謝您，陳志明。桌子已經訂好了。"),
    ("謝謝您，陳志明。房間已經訂好了。", "謝謝您，陳志明。桌子已經訂好了。"),
    ("訂桌，星期四。請問幾位？", "訂桌，星期五。請問幾位？"),
    ("您說住三晚。", "您說三位。"),
    ("番茄湯一份兩百一十元。", "洋蔥湯一份兩百四十五元。"),
    ("You said three people.", "您說三位。"),
    ("您說三位。", "You said three people."),
    ("", "不客氣。"),
]


@pytest.mark.parametrize(("transcript", "reply"), RIGHT)
def test_a_right_mandarin_answer_is_right_however_it_is_written(transcript, reply):
    assert judge(transcript, Exchange("any", "", reply))


@pytest.mark.parametrize(("transcript", "reply"), WRONG)
def test_a_wrong_mandarin_value_or_reply_is_wrong(transcript, reply):
    assert not judge(transcript, Exchange("any", "", reply))


def test_scripts_convert():
    assert simplified("請問義大利麵多少錢？") == "请问义大利面多少钱？"
    assert traditional("请问后面的餐厅几点开始，我们两位") == "請問後面的餐廳幾點開始，我們兩位"
    assert traditional("皇后离这里几公里？") == "皇后離這裡幾公里？", "words keep their own characters"
    assert traditional("有沒有限制？離車站一公里") == "有沒有限制？離車站一公里", "Traditional text stays as it is"
    assert is_traditional("餐廳在哪裡？") and not is_traditional("餐厅在哪里？")


def test_english_sentences_are_those_the_bundled_miniatures_were_trained_on():
    asked = repr(dialogues("train", 500, 5, (1, 5)))
    assert hashlib.sha256(asked.encode()).hexdigest()[:16] == "708435045b751ea8"
    assert ENGLISH.edition == 1 and not set(ENGLISH.intents) & ENGLISH.corrections.keys()


def test_an_unknown_language_or_edition_is_named():
    with pytest.raises(InputError, match="en, zh"):
        language("fr")
    with pytest.raises(InputError, match="edition 3"):
        language("en", 3)
