"""User sentences: phrasing templates and slot values of the intents, and general sentences on any subject.

The templates and word lists are in `templates.toml` and `words.toml` beside this file.
"""

import itertools
import random
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
TEMPLATES = tomllib.loads((FOLDER / "templates.toml").read_text(encoding="utf8"))
WORDS = tomllib.loads((FOLDER / "words.toml").read_text(encoding="utf8"))


def phrasings(text: str) -> list[str]:
    """Split a text of templates at the bars."""
    return [" ".join(template.split()) for template in text.split("|")]


WRITTEN: dict[str, list[str]] = {intent: phrasings(text) for intent, text in TEMPLATES["written"].items()}
TRAINING_ONLY: dict[str, list[str]] = {intent: phrasings(text) for intent, text in TEMPLATES["training_only"].items()}
OPENINGS: dict[str, list[str]] = {kind: phrasings(text) for kind, text in TEMPLATES["openings"].items()}
CORES: dict[str, dict[str, list[str]]] = {
    intent: {kind: phrasings(text) for kind, text in kinds.items()} for intent, kinds in TEMPLATES["cores"].items()
}
SLOT_WORDS: dict[str, list[str]] = {slot: phrasings(text) for slot, text in WORDS["slots"].items()}
ACTIONS, LOCATIONS, LEAD_INS, ORDERS, FIXED_SENTENCES = (
    phrasings(WORDS["phrases"][name]) for name in ("actions", "locations", "lead_ins", "orders", "fixed_sentences")
)
PEOPLE, THINGS, QUALITIES, MOVES, ADVERBS, EVERYDAY_WORDS = (
    WORDS["words"][name].split() for name in ("people", "things", "qualities", "moves", "adverbs", "everyday")
)
ONES, TENS, NAMES = (tuple(WORDS["words"][name].split()) for name in ("ones", "tens", "names"))


NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
PRICES = {  # in euros; none ends in -teen, which sounds like -ty
    "tomato soup": "six",
    "onion soup": "seven",
    "garden salad": "eight",
    "garlic bread": "five",
    "grilled salmon": "twenty two",
    "roast chicken": "twenty",
    "beef steak": "twenty six",
    "fish and chips": "twenty one",
    "mushroom risotto": "twelve",
    "vegetable curry": "eleven",
    "spaghetti": "ten",
    "cheeseburger": "nine",
    "apple pie": "seven",
    "chocolate cake": "eight",
    "ice cream": "four",
    "black coffee": "three",
}
SHORT_DISHES: dict[str, tuple[str, ...]] = {  # short names
    dish: (dish, short)
    for dish, short in {
        "grilled salmon": "salmon",
        "roast chicken": "chicken",
        "beef steak": "steak",
        "mushroom risotto": "risotto",
        "vegetable curry": "curry",
        "black coffee": "coffee",
        "cheeseburger": "burger",
        "garden salad": "salad",
    }.items()
}
PLACES: dict[str, tuple[str, ...]] = {  # synonyms
    "toilets": ("toilets", "toilet", "bathroom", "restroom", "men's room", "ladies room"),
    "lift": ("lift", "elevator", "lifts", "elevators"),
    "breakfast room": ("breakfast room", "breakfast buffet", "breakfast hall"),
    "restaurant": ("restaurant", "dining room", "dining hall"),
    "pool": ("pool", "swimming pool", "indoor pool"),
    "gym": ("gym", "fitness room", "fitness center"),
    "bar": ("bar", "hotel bar", "lounge bar"),
    "car park": ("car park", "parking", "parking lot", "garage"),
    "station": ("station", "train station", "railway station"),
    "bus stop": ("bus stop", "nearest bus stop", "next bus stop"),
    "pharmacy": ("pharmacy", "drugstore", "nearest pharmacy"),
    "beach": ("beach", "seaside", "nearest beach"),
}
DIRECTIONS = {  # the replies
    "toilets": "The toilets are down the stairs, on the left.",
    "lift": "The lift is behind the front desk.",
    "breakfast room": "The breakfast room is on the first floor.",
    "restaurant": "The restaurant is across the garden.",
    "pool": "The pool is on the top floor.",
    "gym": "The gym is next to the sauna.",
    "bar": "The bar is at the end of the hall.",
    "car park": "The car park is under the building.",
    "station": "The station is ten minutes away on foot.",
    "bus stop": "The bus stop is across the street.",
    "pharmacy": "The pharmacy is two streets away, on the right.",
    "beach": "The beach is five minutes away by bus.",
}
PARTIES: dict[str, tuple[str, ...]] = {  # ways to say a party size
    **{number: (number, f"{number} people", f"{number} persons") for number in NUMBERS},
    "one": ("one", "one person", "just me", "just one"),
    "two": ("two", "two people", "the two of us", "my wife and me", "my husband and me"),
}
STAYS: dict[str, tuple[str, ...]] = {
    **{number: (f"{number} nights",) for number in NUMBERS},
    "one": ("one night", "a single night"),
}


def _hour_after(hour: str) -> str:
    return NUMBERS[(NUMBERS.index(hour) + 1) % 12]


def _times() -> dict[str, tuple[str, ...]]:
    """Clock times as in replies, with the ways users say them."""
    times: dict[str, tuple[str, ...]] = {}
    for hour in NUMBERS:
        following = _hour_after(hour)
        times[f"{hour} o'clock"] = (hour, f"{hour} o'clock", f"{hour} o'clock", f"{hour} sharp")
        times[f"a quarter past {hour}"] = (f"quarter past {hour}", f"a quarter past {hour}", f"{hour} fifteen")
        times[f"half past {hour}"] = (f"half past {hour}", f"{hour} thirty")
        times[f"a quarter to {following}"] = (
            f"quarter to {following}",
            f"a quarter to {following}",
            f"{hour} forty five",
        )
    return times


TIMES = _times()
SPOKEN_DAYS: dict[str, tuple[str, ...]] = {
    "today": ("today", "this evening"),
    "tonight": ("tonight",),
    "tomorrow": ("tomorrow", "tomorrow evening", "tomorrow night"),
    **{f"on {day}": (f"on {day}", f"this {day}", f"for {day}") for day in DAYS},
}
WAYS_TO_SAY: dict[str, dict[str, tuple[str, ...]]] = {
    "time": TIMES,
    "day": SPOKEN_DAYS,
    "people": PARTIES,
    "nights": STAYS,
    "dish": SHORT_DISHES,
    "place": PLACES,
}


def ways_to_say(slot: str, value: str) -> tuple[str, ...]:
    """Ways to say a slot value."""
    return WAYS_TO_SAY.get(slot, {}).get(value, (value,))


VALUES: dict[str, tuple[str, ...]] = {
    "people": NUMBERS,
    "nights": NUMBERS,
    "time": tuple(TIMES),
    "day": tuple(SPOKEN_DAYS),
    "name": NAMES,
    "dish": tuple(PRICES),
    "place": tuple(DIRECTIONS),
}

CANONICAL_WORDS = {  # words treated as equal when comparing phrasings
    **dict.fromkeys(("could", "may", "would", "will"), "can"),
    **{"we": "i", "us": "me", "our": "my", "we'd": "i'd", "i'll": "i can", "we'll": "i can", "i'd": "i can"},
    **{
        "what's": "what is",
        "where's": "where is",
        "name's": "name is",
        "i'm": "i am",
        "it's": "it is",
        "we're": "i am",
    },
    **{"can't": "cannot", "don't": "do not", "didn't": "did not"},
}
POLITE = frozenset(("please", "um", "uh", "sorry", "hello", "hi", "well", "okay", "so", "oh", "and"))
MIN_WORDS = 5  # phrasings of at least this many words that differ in one word are near duplicates


def composed(intent: str) -> list[str]:
    """All combinations of openings and cores of the same kind."""
    combined: dict[str, None] = {}
    for kind, cores in CORES[intent].items():
        for opening, core in itertools.product(OPENINGS[kind], cores):
            combined.update(dict.fromkeys(expanded(opening.replace("~", core))))
    return list(combined)


def expanded(template: str) -> Iterator[str]:
    """All expansions of a template's choices and optional parts."""
    match = re.search(r"(\s*)\[([^\]]*)\]|\(([^)]*)\)", template)
    if match is None:
        yield " ".join(template.split()).replace(" ,", ",")
        return
    ways = match[3].split("/") if match[3] is not None else ("", match[1] + match[2])
    for way in ways:
        yield from expanded(template[: match.start()] + way + template[match.end() :])


def plain_words(phrasing: str) -> tuple[str, ...]:
    """Canonical words of a phrasing: without politeness, with synonyms merged."""
    words = re.sub(r"[^\w'{} ]", " ", phrasing.lower()).split()
    plain = " ".join(CANONICAL_WORDS.get(word, word) for word in words if word not in POLITE)
    return tuple(plain.replace("{number}", "{people}").split())


class NearDuplicates:
    """Membership test for near duplicates of a list of templates."""

    def __init__(self, templates: list[str]) -> None:
        every = {plain_words(way) for template in templates for way in expanded(template)}
        self._exact = every
        self._shorter = {short for words in every if len(words) > MIN_WORDS for short in _without_one_word(words)}
        self._gapped = {gapped for words in every if len(words) >= MIN_WORDS for gapped in _with_one_gap(words)}

    def __contains__(self, phrasing: str) -> bool:
        words = plain_words(phrasing)
        if words in self._exact or words in self._shorter:
            return True
        if len(words) < MIN_WORDS:
            return False
        return any(gapped in self._gapped for gapped in _with_one_gap(words)) or any(
            len(short) >= MIN_WORDS and short in self._exact for short in _without_one_word(words)
        )


def _without_one_word(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [words[:index] + words[index + 1 :] for index in range(len(words))]


def _with_one_gap(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [(*words[:index], "", *words[index + 1 :]) for index in range(len(words))]


def number_words(number: int) -> str:
    """A whole number below a million in words."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f" {ONES[number % 10]}" if number % 10 else "")
    size, word = (100, "hundred") if number < 1000 else (1000, "thousand")
    rest = number % size
    return f"{number_words(number // size)} {word}" + (f" {number_words(rest)}" if rest else "")


def general_sentences(count: int, seed: int) -> list[str]:
    """Distinct general sentences: statements, orders, questions, opinions, numbers."""
    source = random.Random(f"general {seed}")
    kinds = (_statement, _statement, _move, _opinion, _order, _question, _number, _comparison, _list)
    sentences = dict.fromkeys(_written(sentence) for sentence in FIXED_SENTENCES[:count])
    while len(sentences) < count:
        sentences.setdefault(_written(source.choice(kinds)(source)))
    return list(sentences)


def _written(text: str) -> str:
    text = " ".join("I" if word == "i" else word for word in text.split())
    return text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else ".")


def _person(source: random.Random) -> str:
    owner = source.choice(("the", "the", "a", "my", "your", "his", "her", "our", "their", "every", "this", "that"))
    quality = f"{source.choice(QUALITIES)} " if source.random() < 0.35 else ""
    return _noun(owner, quality + source.choice(PEOPLE))


def _thing(source: random.Random) -> str:
    owner = source.choice(("the", "the", "a", "my", "your", "his", "her", "our", "their", "another", "no", "some"))
    quality = f"{source.choice(QUALITIES)} " if source.random() < 0.5 else ""
    return _noun(owner, quality + source.choice(THINGS))


def _noun(owner: str, rest: str) -> str:
    return f"{'an' if owner == 'a' and rest[0] in 'aeiou' else owner} {rest}"


def _statement(source: random.Random) -> str:
    ending = f" {source.choice(LOCATIONS)}" if source.random() < 0.5 else ""
    how = f"{source.choice(ADVERBS)} " if source.random() < 0.25 else ""
    return f"{_person(source)} {how}{source.choice(ACTIONS)} {_thing(source)}{ending}"


def _move(source: random.Random) -> str:
    how = f" {source.choice(ADVERBS)}" if source.random() < 0.6 else ""
    return f"{_person(source)} {source.choice(MOVES)}{how} {source.choice(LOCATIONS)}"


def _opinion(source: random.Random) -> str:
    matter = _statement(source) if source.random() < 0.5 else f"{_thing(source)} is {source.choice(QUALITIES)}"
    return f"{source.choice(LEAD_INS)} {matter}"


def _order(source: random.Random) -> str:
    ending = f" {source.choice(LOCATIONS)}" if source.random() < 0.5 else ""
    return f"{source.choice(ORDERS)} {_thing(source)}{ending}"


def _question(source: random.Random) -> str:
    opening = source.choice(("where is", "who has", "have you seen", "why do you want", "how old is", "what about"))
    if source.random() < 0.5:
        return f"{opening} {_thing(source)}?"
    asked = source.choice(("did you hear that", "when did you learn that", "who told you that", "is it true that"))
    return f"{asked} {_person(source)} {source.choice(MOVES)} {source.choice(LOCATIONS)}?"


def _number(source: random.Random) -> str:
    number = number_words(source.choice((source.randrange(20), source.randrange(100), source.randrange(10_000))))
    return source.choice(
        (
            f"{_person(source)} counted {number} {source.choice(THINGS)}s {source.choice(LOCATIONS)}",
            f"you have {number} new messages in {_thing(source)}",
            f"the answer to {_thing(source)} is {number}",
            f"it costs {number} dollars to repair {_thing(source)}",
            f"please call extension {' '.join(number_words(source.randrange(10)) for _ in range(4))}",
        )
    )


def _comparison(source: random.Random) -> str:
    pattern = source.choice(("is not as {} as", "looks more {} than", "was just as {} as", "became less {} than"))
    return f"{_thing(source)} {pattern.format(source.choice(QUALITIES))} {_thing(source)}"


def _list(source: random.Random) -> str:
    first, second, third = source.sample(THINGS, 3)
    return (
        f"{source.choice(('there was', 'i need', 'we found', 'she packed'))} {_noun('a', first)}, {second} and {third}"
    )


ENDINGS = ("", "", "", "s", "ing", "ed", "er", "ly")
VOWELS = "aeiou"


def word_strings(count: int, seed: int, lengths: tuple[int, int] = (3, 9)) -> list[str]:
    """Distinct random word strings, many with an inflection: they cover letter-to-sound rules and word boundaries."""
    source = random.Random(f"word strings {seed}")
    strings: dict[str, None] = {}
    while len(strings) < count:
        words = [
            _with_ending(source.choice(EVERYDAY_WORDS), source.choice(ENDINGS)) for _ in range(source.randint(*lengths))
        ]
        strings.setdefault(" ".join(words).capitalize() + source.choice("...?"))
    return list(strings)


def _with_ending(word: str, ending: str) -> str:
    """The word with an ending by English spelling rules."""
    if ending == "s" and word.endswith(("s", "sh", "ch", "x", "z")):
        return word + "es"
    if ending and word.endswith("y") and word[-2] not in VOWELS and ending != "ing":
        return word[:-1] + ("ies" if ending == "s" else "i" + ending)
    if ending[:1] in ("i", "e") and word.endswith("e"):
        return word[:-1] + ending
    return word + ending
