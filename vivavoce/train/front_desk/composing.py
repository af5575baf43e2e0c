"""Phrasings put together, for training alone: what a guest wants, in the many ways in which people ask for anything.

A core is a clause ("where the pool is"), a favour ("call a taxi"), a deed of the guest's ("pay by card"), a thing ("the
bill") or a subject ("the wifi password"); each kind has openings of its own.
"""

import itertools
import re
from collections.abc import Iterator

from vivavoce.train.front_desk.booking_cores import BOOKING_CORES
from vivavoce.train.front_desk.question_cores import QUESTION_CORES

OPENINGS: dict[str, str] = {
    "clause": """
can you tell me ~? | could you tell me ~? | can you tell us ~? | would you tell me ~? | do you know ~?
| do you happen to know ~? | would you happen to know ~? | i would like to know ~ | i'd like to know ~
| i want to know ~ | i need to know ~ | i was wondering ~ | i wonder ~ | we were wondering ~ | may i ask ~?
| can i ask ~? | could i ask you ~? | i wanted to ask ~ | any idea ~? | have you any idea ~? | please tell me ~
| tell me ~ | tell me please, ~? | let me know ~ | i am not sure ~ | i don't know ~ | we would like to know ~
| could you let me know ~? | i have to find out ~ | you don't know ~, do you?""",
    "favour": """
can you ~? | could you ~? | would you ~? | will you ~? | can you please ~? | could you please ~?
| would you please ~? | please ~ | ~, please | ~ | ~ now, please | i would like you to ~ | i want you to ~
| i'd like you to ~ | is it possible for you to ~? | would you be so kind and ~? | be so kind and ~
| can somebody ~? | could someone ~? | i need you to ~ | if you could ~, please | i wanted to ask you to ~
| do you think you could ~? | just ~, please""",
    "deed": """
can i ~? | could i ~? | may i ~? | can we ~? | could we ~? | may we ~? | i would like to ~ | i'd like to ~
| i want to ~ | we would like to ~ | we'd like to ~ | we want to ~ | i need to ~ | we need to ~ | i have to ~
| is it possible to ~? | would it be possible to ~? | i was hoping to ~ | we were hoping to ~ | i am calling to ~
| i'm here to ~ | i'd love to ~ | am i able to ~? | i wish to ~ | let me ~ | how can i ~? | is there a way to ~?
| i would love to ~, please""",
    "thing": """
can i have ~? | could i have ~? | may i have ~? | can we have ~? | could we have ~? | may we have ~? | can i get ~?
| could i get ~? | can we get ~? | could we get ~? | i would like ~ | i'd like ~ | i'd like ~, please
| we would like ~ | we'd like ~ | i want ~ | we want ~ | i need ~ | we need ~ | i would love ~ | i'd love ~
| i could use ~ | ~, please | ~ | could you give me ~? | can you get us ~? | could you get me ~? | please give me ~
| please get me ~ | let me have ~ | let us have ~ | i am after ~ | i was hoping for ~ | is it possible to have ~?
| would it be possible to get ~? | we could do with ~ | get me ~, please""",
    "subject": """
~ | ~, please | ~? | what about ~? | and ~? | what can you tell me about ~? | tell me about ~
| i have a question about ~ | a question about ~ | can i ask about ~? | it's about ~ | i am calling about ~
| something about ~ | how about ~? | could you tell me about ~? | i need to know about ~
| i would like to know about ~ | about ~""",
    "whole": "~",
}
CORES = QUESTION_CORES | BOOKING_CORES
SAME = {  # words that make no other phrasing of one
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
LONG = 5  # words from which a phrasing that differs in one word only is the same one


def phrasings(text: str) -> list[str]:
    """The templates between bars."""
    return [" ".join(template.split()) for template in text.split("|")]


def composed(intent: str) -> list[str]:
    """Every opening of each kind before every core of that kind."""
    found: dict[str, None] = {}
    for kind, cores in CORES[intent].items():
        for opening, core in itertools.product(phrasings(OPENINGS[kind]), phrasings(cores)):
            found.update(dict.fromkeys(expanded(opening.replace("~", core))))
    return list(found)


def expanded(template: str) -> Iterator[str]:
    """A template with each of its choices made, and optional parts there and not."""
    found = re.search(r"(\s*)\[([^\]]*)\]|\(([^)]*)\)", template)
    if found is None:
        yield " ".join(template.split()).replace(" ,", ",")
        return
    ways = found[3].split("/") if found[3] is not None else ("", found[1] + found[2])
    for way in ways:
        yield from expanded(template[: found.start()] + way + template[found.end() :])


def plain_words(phrasing: str) -> tuple[str, ...]:
    """What tells a phrasing from another: its words without politeness, "could we" being no other than "can I"."""
    words = re.sub(r"[^\w'{} ]", " ", phrasing.lower()).split()
    plain = " ".join(SAME.get(word, word) for word in words if word not in POLITE)
    return tuple(plain.replace("{number}", "{people}").split())


class Near:
    """Knows which phrasings are no more than copies of some given ones."""

    def __init__(self, templates: list[str]) -> None:
        every = {plain_words(way) for template in templates for way in expanded(template)}
        self._same = every
        self._shorter = {short for words in every if len(words) > LONG for short in _one_left_out(words)}
        self._gapped = {gapped for words in every if len(words) >= LONG for gapped in _one_hidden(words)}

    def __contains__(self, phrasing: str) -> bool:
        words = plain_words(phrasing)
        if words in self._same or words in self._shorter:
            return True
        if len(words) < LONG:
            return False
        return any(gapped in self._gapped for gapped in _one_hidden(words)) or any(
            len(short) >= LONG and short in self._same for short in _one_left_out(words)
        )


def _one_left_out(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [words[:place] + words[place + 1 :] for place in range(len(words))]


def _one_hidden(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [(*words[:place], "", *words[place + 1 :]) for place in range(len(words))]
