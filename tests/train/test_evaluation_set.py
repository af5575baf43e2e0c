"""The phrasings for evaluation alone: none of them is known to training, and each has one right reply."""

from vivavoce.train.front_desk import SPLITS, judge, language, templates
from vivavoce.train.front_desk.evaluation_set import evaluation_dialogues
from vivavoce.train.front_desk.templates import NearDuplicates


def _as_template(text, slots, desk):
    for slot, value in slots:
        said = sorted((way.lower() for way in desk.ways_to_say(slot, value)), key=len, reverse=True)
        text = next((text.replace(way, f"{{{slot}}}") for way in said if way in text), text)
    return text


def test_no_question_is_a_near_duplicate_of_a_phrasing():
    desk = language("en", 2)
    known = [template for intent in desk.intents for split in SPLITS for template in templates(intent, split, desk)]
    near = NearDuplicates(known, desk.plain_words)
    assert "could you call me a taxi, please?" in near
    asked = [line[-1] for line in evaluation_dialogues()]
    assert [each.user for each in asked if _as_template(each.user.lower(), each.slots, desk) in near] == []


def test_there_are_two_hundred_distinct_ones_of_all_intents():
    lines = evaluation_dialogues()
    assert len({line[-1].user for line in lines}) == len(lines) >= 200
    assert {line[-1].intent for line in lines} == set(language("en").intents)


def test_every_value_is_one_of_the_desk_and_repeated_by_the_reply():
    desk = language("en")
    for line in evaluation_dialogues():
        assert all(value in desk.values[slot] for exchange in line for slot, value in exchange.slots)
        assert judge(line[-1].reply, line[-1])
    assert evaluation_dialogues()[-1][-1].reply == desk.replies["decline"]
