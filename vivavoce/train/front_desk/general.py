"""English sentences that are no question to the front desk: on any subject, and random strings of everyday words."""

import random

from vivavoce.train.front_desk.english_values import number_words
from vivavoce.train.front_desk.templates import phrasings, read

WORDS = read("words", "en")
ACTIONS, LOCATIONS, LEAD_INS, ORDERS, FIXED_SENTENCES = (
    phrasings(WORDS["phrases"][name]) for name in ("actions", "locations", "lead_ins", "orders", "fixed_sentences")
)
PEOPLE, THINGS, QUALITIES, MOVES, ADVERBS, EVERYDAY_WORDS = (
    WORDS["words"][name].split() for name in ("people", "things", "qualities", "moves", "adverbs", "everyday")
)


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
