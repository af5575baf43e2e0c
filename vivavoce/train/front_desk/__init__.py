"""A restaurant and hotel front desk in English: what guests say, what the desk answers, and who remembers what."""

import random
import re
from collections.abc import Callable, Sequence
from functools import cache

from vivavoce.errors import InputError
from vivavoce.train.front_desk.answers import (
    DECLINE,
    REMEMBERED,
    Desk,
    Exchange,
    fixed_replies,
    slotted_replies,
)
from vivavoce.train.front_desk.bookings import BOOKINGS
from vivavoce.train.front_desk.general import general_sentences
from vivavoce.train.front_desk.judging import judge
from vivavoce.train.front_desk.normalising import normalise
from vivavoce.train.front_desk.outside import OUTSIDE, WORDS
from vivavoce.train.front_desk.questions import QUESTIONS
from vivavoce.train.front_desk.words import DAYS, VALUES, ways_to_say

__all__ = [
    "DECLINE",
    "INTENTS",
    "SPLITS",
    "Desk",
    "Exchange",
    "dialogues",
    "general_sentences",
    "judge",
    "normalise",
    "reply_sentences",
    "templates",
    "user_sentences",
]

SPLITS = ("train", "held_out")
HELD_OUT_EVERY = 7  # one template in seven is never spoken in training
TEMPLATES = {**QUESTIONS, **BOOKINGS, "decline": OUTSIDE}
INTENTS = tuple(TEMPLATES)
NEEDS_MEMORY = ("repeat", "cancel", *REMEMBERED)
ANSWERS = ("give_people", "give_time", "give_nights", "give_name")  # said only when the desk has asked
OPENERS = tuple(intent for intent in INTENTS if intent not in (*NEEDS_MEMORY, *ANSWERS, "goodbye"))
WEIGHTS = {"table": 5.0, "room": 2.5, "decline": 9.0, "directions": 3.0, "price": 2.5, "order": 2.5, "wake_up": 2.0}
OPTIONAL = 0.4  # chance of an optional part
BEFORE = ("um, ", "excuse me, ", "hello, ", "hi, ", "sorry, ", "well, ", "okay, ", "so, ", "oh, ", "and ", "uh, ")
PLAIN = ("greeting", "thanks", "goodbye", "repeat", "how_are_you", *ANSWERS)  # no filler makes these more natural


@cache
def templates(intent: str, split: str) -> tuple[str, ...]:
    """The templates of one intent that one side of the split may use."""
    if intent not in TEMPLATES or split not in SPLITS:
        raise InputError(f"no templates of {intent!r} in {split!r}; intents: {', '.join(INTENTS)}; splits: {SPLITS}")
    every = [" ".join(template.split()) for template in TEMPLATES[intent].split("|")]
    held_out = every[3::HELD_OUT_EVERY] + ([every[-1]] if len(every) % HELD_OUT_EVERY > 3 else [])
    return tuple(template for template in every if (template in held_out) == (split == "held_out"))


def dialogues(split: str, count: int, seed: int, turns: tuple[int, int] = (1, 4)) -> list[list[Exchange]]:
    """Conversations in which every reply is the right one, given all that came before it."""
    random_source = random.Random(f"dialogues {split} {seed}")
    return [_dialogue(split, random_source.randint(*turns), random_source) for _ in range(count)]


def user_sentences(split: str, count: int, seed: int) -> list[str]:
    """Distinct sentences of guests, every intent among them."""
    random_source = random.Random(f"sentences {split} {seed}")
    weights = [max(WEIGHTS.get(intent, 1.0), 1.0) for intent in INTENTS]

    def draw() -> str:
        (intent,) = random_source.choices(INTENTS, weights)
        return _phrase(intent, split, random_source)[0]

    return _distinct(draw, count, "sentences of guests")


def reply_sentences(count: int, seed: int) -> list[str]:
    """Distinct replies: every fixed one, every value of every slot, then bookings that mix several."""
    random_source = random.Random(f"replies {seed}")
    replies = dict.fromkeys([*fixed_replies(), *slotted_replies()])

    def draw() -> str:
        desk = Desk()
        phrase = _phrase("table", "train", random_source)
        return desk.answer("table", dict(phrase[1]))

    while len(replies) < count:
        replies.update(dict.fromkeys(_distinct(draw, min(200, count - len(replies)), "replies")))
    ordered = list(replies)
    return ordered if len(ordered) <= count else _spread(ordered, count, random_source)


def _spread(replies: Sequence[str], count: int, random_source: random.Random) -> list[str]:
    """The fixed replies and a draw of the others."""
    fixed = list(dict.fromkeys(fixed_replies()))
    others = [reply for reply in replies if reply not in fixed]
    return (fixed + random_source.sample(others, max(0, count - len(fixed))))[:count]


def _dialogue(split: str, turns: int, random_source: random.Random) -> list[Exchange]:
    desk = Desk()
    exchanges: list[Exchange] = []
    for turn in range(turns):
        intent = _next_intent(desk, turn, turns, random_source)
        user, slots = _phrase(intent, split, random_source)
        exchanges.append(Exchange(intent, user, desk.answer(intent, dict(slots)), slots))
    return exchanges


def _next_intent(desk: Desk, turn: int, turns: int, random_source: random.Random) -> str:
    awaited = desk.awaited()
    if awaited is not None and random_source.random() < 0.75:
        return f"give_{awaited}"
    chance = random_source.random()
    if turn > 0 and turn == turns - 1 and chance < 0.12:
        return random_source.choice(("goodbye", "thanks"))
    told = [intent for intent, slot in REMEMBERED.items() if slot in desk.known]
    if told and chance < 0.5:
        return random_source.choice(told)
    if chance > (0.9 if turn else 0.97):
        return _needs_memory(desk, random_source)
    weights = [WEIGHTS.get(intent, 1.0) for intent in OPENERS]
    return random_source.choices(OPENERS, weights)[0]


def _needs_memory(desk: Desk, random_source: random.Random) -> str:
    """Saying again, cancelling, or asking for what was never told."""
    if random_source.random() < 0.6:
        return "repeat"
    both = {"memory_people", "memory_nights"}  # "how many?" means whichever was told
    untold = [intent for intent, slot in REMEMBERED.items() if slot not in desk.known]
    if desk.known.keys() & {"people", "nights"}:
        untold = [intent for intent in untold if intent not in both]
    return random_source.choice([*untold, "cancel"])


def _phrase(intent: str, split: str, random_source: random.Random) -> tuple[str, tuple[tuple[str, str], ...]]:
    """One way to say an intent, and the slots it names."""
    template = random_source.choice(templates(intent, split))
    slots: dict[str, str] = {}

    def fill(match: re.Match[str]) -> str:
        return _fill(match.group(1), intent, slots, random_source)

    text = re.sub(r"\{(\w+)\}", fill, _choose(template, random_source))
    if intent not in PLAIN and random_source.random() < 0.25:
        text = random_source.choice(BEFORE) + text
    return _sentence(text), tuple(slots.items())


def _fill(gap: str, intent: str, slots: dict[str, str], random_source: random.Random) -> str:
    if gap == "weekday":
        return random_source.choice(DAYS)
    if gap in WORDS:
        return random_source.choice(WORDS[gap])
    if gap == "number":
        slot = "nights" if intent == "give_nights" else "people"
        slots[slot] = random_source.choice(VALUES[slot])
        return slots[slot]
    slots[gap] = random_source.choice(VALUES[gap])
    return random_source.choice(ways_to_say(gap, slots[gap]))


def _choose(template: str, random_source: random.Random) -> str:
    """The template with its optional parts kept or dropped, and one of each choice."""

    def keep(match: re.Match[str]) -> str:
        return match[1] + match[2] if random_source.random() < OPTIONAL else ""

    text = re.sub(r"(\s*)\[([^\]]*)\]", keep, template)
    return re.sub(r"\(([^)]*)\)", lambda match: random_source.choice(match[1].split("/")), text)


def _sentence(text: str) -> str:
    """Written as a sentence: a capital, the English "I", days with capitals, a full stop where nothing else ends it."""
    text = re.sub(r"\bi\b", "I", text)
    text = re.sub(rf"\b({'|'.join(DAYS)})\b", lambda match: match.group(1).capitalize(), text)
    return text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else ".")


def _distinct(draw: Callable[[], str], count: int, what: str) -> list[str]:
    found: dict[str, None] = {}
    for _ in range(200 * count + 10_000):
        if len(found) == count:
            break
        found.setdefault(draw())
    if len(found) < count:
        raise InputError(f"only {len(found)} distinct {what} were found, {count} were asked for; ask for fewer")
    return list(found)
