"""The front desk: what guests may say, the one right answer, and who judges it."""

import hashlib
import random
import re

import pytest

from vivavoce.errors import InputError
from vivavoce.train.front_desk import (
    DECLINE,
    INTENTS,
    DialogueState,
    Exchange,
    dialogues,
    general_sentences,
    judge,
    normalise,
    reply_sentences,
    templates,
    user_sentences,
)
from vivavoce.train.front_desk.english_text import plain_words
from vivavoce.train.front_desk.english_values import DAYS, NAMES, PRICES, TIMES
from vivavoce.train.front_desk.templates import NearDuplicates, expanded


def said(state: DialogueState, intent: str, **slots: str) -> str:
    return state.answer(intent, slots)


@pytest.mark.parametrize("intent", INTENTS)
def test_every_intent_keeps_phrasings_from_training_and_copies_of_them_too(intent):
    train, held_out = templates(intent, "train"), templates(intent, "held_out")
    assert len(train) >= 90 and len(held_out) >= 4
    asked = {normalise(way) for template in held_out for way in expanded(template)}
    assert not asked & {normalise(way) for template in train for way in expanded(template)}


def test_what_is_held_out_stays_what_it_was():
    listed = "\n".join(f"{intent}: {template}" for intent in INTENTS for template in templates(intent, "held_out"))
    assert hashlib.sha256(listed.encode()).hexdigest()[:16] == "111615b1f349b4bc"
    asked = repr(dialogues("held_out", 60, 1000, (1, 1)))
    assert hashlib.sha256(asked.encode()).hexdigest()[:16] == "2b3be7a2a86ab256"


@pytest.mark.parametrize(
    ("phrasing", "is_copy"),
    [
        ("could we book a table for {people}, please?", True),
        ("when do you want the room back?", True),
        ("when exactly do you need the room back?", True),
        ("do you need the room back?", True),
        ("what time do you need the room back?", False),
        ("what can we eat?", True),
        ("what can we drink?", False),
    ],
)
def test_a_copy_of_a_phrasing_differs_in_politeness_or_in_one_word_of_many(phrasing, is_copy):
    held_out = ["can i book a table for {people}?", "when do you need the room back?", "what can i eat?"]
    near = NearDuplicates(held_out, plain_words)
    assert (phrasing in near) == is_copy


def test_templates_expand_to_every_choice():
    assert set(expanded("(a/b) table[, please]?")) == {"a table?", "b table?", "a table, please?", "b table, please?"}


def test_no_held_out_sentence_is_a_training_sentence():
    assert not set(user_sentences("train", 20_000, 0)) & set(user_sentences("held_out", 3_000, 1))


def test_sentences_are_distinct_and_the_same_for_the_same_seed():
    sentences = user_sentences("train", 2_000, 5)
    assert len(set(sentences)) == 2_000
    assert sentences == user_sentences("train", 2_000, 5)
    assert sentences != user_sentences("train", 2_000, 6)
    general = general_sentences(2_000, 5)
    assert len(set(general)) == 2_000
    assert general == general_sentences(2_000, 5)


def test_sentences_are_speakable():
    for sentence in user_sentences("train", 3_000, 1) + general_sentences(1_000, 1) + reply_sentences(900, 1):
        assert re.fullmatch(r"[A-Z][A-Za-z' ,.?]*[.?]", sentence), sentence


def test_there_are_more_sentences_outside_the_domain_than_one_can_list():
    strange = {
        exchange.user
        for dialogue in dialogues("train", 12_000, 0)
        for exchange in dialogue
        if exchange.intent == "decline"
    }
    assert len(strange) > 1_500


def test_replies_hold_every_value_of_every_slot():
    spoken = " ".join(reply_sentences(900, 0)).lower()
    for value in (*TIMES, *PRICES, *PRICES.values(), *DAYS, *(name.lower() for name in NAMES)):
        assert value in spoken
    assert DECLINE in reply_sentences(60, 0)


def test_a_booking_in_pieces_is_asked_for_piece_by_piece_and_remembered():
    state = DialogueState()
    assert said(state, "table") == "Certainly. For how many people?"
    assert said(state, "give_people", people="three") == "A table for three. At what time, please?"
    assert said(state, "give_time", time="half past seven") == "At half past seven. And your name, please?"
    assert said(state, "repeat") == "At half past seven. And your name, please?"
    assert said(state, "give_name", name="Miller") == "Thank you, Miller. Your table is booked."
    assert said(state, "memory_people") == "You said three people."
    assert said(state, "memory_time") == "You said half past seven."
    assert said(state, "memory_name") == "You said Miller."
    assert said(state, "memory_nights") == "You have not told me yet."


def test_a_booking_at_once_is_confirmed_at_once():
    reply = said(DialogueState(), "table", people="two", day="on friday", time="eight o'clock", name="Anna")
    assert reply == "Thank you, Anna. A table for two on friday at eight o'clock."


def test_a_question_between_leaves_the_booking_open():
    state = DialogueState()
    said(state, "room", nights="two")
    assert said(state, "wifi") == "The wifi is free. The password is garden."
    assert state.awaited() == "name"
    assert said(state, "give_name", name="Novak") == "Thank you, Novak. Your room is booked."


def test_asking_for_a_price_orders_nothing():
    state = DialogueState()
    said(state, "price", dish="apple pie")
    assert said(state, "memory_order") == "You have not told me yet."
    said(state, "order", dish="onion soup")
    assert said(state, "memory_order") == "You ordered the onion soup."


def test_cancelling_needs_a_booking_and_forgets_it():
    state = DialogueState()
    assert said(state, "cancel") == "You have no booking yet."
    said(state, "table", people="two")
    assert said(state, "cancel") == "Your booking is cancelled."
    assert said(state, "memory_people") == "You have not told me yet."


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_dialogues_have_the_correct_replies(split):
    heard = set()
    for dialogue in dialogues(split, 1_500, 3, turns=(1, 5)):
        assert 1 <= len(dialogue) <= 5
        state = DialogueState()
        for exchange in dialogue:
            if exchange.intent.startswith("give_"):
                assert exchange.intent == f"give_{state.awaited()}"
            assert exchange.reply == state.answer(exchange.intent, dict(exchange.slots))
            heard.add(exchange.intent)
    assert heard == set(INTENTS)


def test_an_unknown_split_is_named():
    with pytest.raises(InputError, match="held_out"):
        dialogues("test", 1, 0)


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("A table for 4, at 7:30!", "a table for four at seven thirty"),
        ("It’s €18.", "it's eighteen euros"),
        ("The Wi-Fi is free", "the wifi is free"),
        ("at 7:00", "at seven o'clock"),
        ("twenty-six", "twenty six"),
        ("1,250 rooms", "one thousand two hundred fifty rooms"),
        ("check-in on the 1st floor", "check in on the first floor"),
    ],
)
def test_normalised_text_is_as_spoken(written, spoken):
    assert normalise(written) == spoken
    assert normalise(spoken) == spoken


RIGHT = [
    ("A table for 4 at 7:30. And your name, please?", "A table for four at half past seven. And your name, please?"),
    ("table for for at seven thirty and your name", "A table for four at half past seven. And your name, please?"),
    ("A table for four at 7. And your name?", "A table for four at seven o'clock. And your name, please?"),
    ("Thank you Myller, your table is booked.", "Thank you, Miller. Your table is booked."),
    ("The roast chicken is €20.", "The roast chicken is twenty euros."),
    ("The beef stake is 26 euros", "The beef steak is twenty six euros."),
    ("You set for a clock.", "You said four o'clock."),
    ("A table for 2 at 3 a clock, and your name?", "A table for two at three o'clock. And your name, please?"),
    ("The icecream is four euros.", "The ice cream is four euros."),
    ("Certainly, one cheese burger.", "Certainly. One cheeseburger."),
    ("The car park's under the building", "The car park is under the building."),
    ("A table for 9 at 8:45, and your name please", "A table for nine at a quarter to nine. And your name, please?"),
    ("The Wi-Fi is free. The password is Garden.", "The wifi is free. The password is garden."),
    ("I'm sorry, I didn't understand that.", DECLINE),
    ("a table for two Friday at 7:45", "A table for two on friday at a quarter to eight."),
    ("Breakfast is served from 7 until 10 in the morning.", "Breakfast is served from seven until ten in the morning."),
]  # fmt: skip
WRONG = [
    ("A table for 5 at 7:30. And your name, please?", "A table for four at half past seven. And your name, please?"),
    ("A table for four at 7. And your name?", "A table for four at half past seven. And your name, please?"),
    ("Thank you, Watson. Your table is booked.", "Thank you, Wilson. Your table is booked."),
    ("Thank you, Wilson. Your room is booked.", "Thank you, Wilson. Your table is booked."),
    ("The roast chicken is 12 euros.", "The roast chicken is twenty euros."),
    ("The onion soup is six euros.", "The tomato soup is six euros."),
    ("The breakfast room is on the first floor.", "The pool is on the top floor."),
    ("You said four nights.", "You said four people."),
    ("A table for two on Monday at 8.", "A table for two on friday at eight o'clock."),
    ("The chocolate cake is 80 rows.", "The chocolate cake is eight euros."),
    ("A table for nine at 9:45. And your name?", "A table for nine at a quarter to nine. And your name, please?"),
    ("You set for a clock.", "You said five o'clock."),
    ("A table for to add for a clock.", "A table for two at five o'clock. And your name, please?"),
    ("I will wake you at U. A.", "I will wake you at two o'clock."),
    ("You are welcome.", DECLINE),
    ("", DECLINE),
]  # fmt: skip


@pytest.mark.parametrize(("transcript", "reply"), RIGHT)
def test_a_right_answer_is_right_however_it_is_written(transcript, reply):
    assert judge(transcript, Exchange("any", "", reply))


@pytest.mark.parametrize(("transcript", "reply"), WRONG)
def test_a_wrong_value_or_a_wrong_reply_is_wrong(transcript, reply):
    assert not judge(transcript, Exchange("any", "", reply))


def test_judge_distinguishes_all_replies():
    source = random.Random(0)
    replies = reply_sentences(700, 0)
    for reply in source.sample(replies, 150):
        other = source.choice(replies)
        assert judge(reply.lower().rstrip("."), Exchange("any", "", reply))
        assert reply == other or not judge(other, Exchange("any", "", reply))
