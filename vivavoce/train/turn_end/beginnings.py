"""Beginnings of arbitrary sentences, after which a speaker goes on: up to a word that ends no sentence, or a filler."""

import random
import re

from vivavoce.train.turn_end.texts import WORDS

ENGLISH_CONTINUED = frozenset(
    re.findall(
        r"\S+",
        "a an the my your his her our their its this these every some any no of to for with from in into on at by "
        "about and or but because if when while than as that which who whose is are was were am be been can could will "
        "would should must may might do does did has have had not very really quite more most i you he she we they "
        "there where what how let's i'd i'm it's we're going want need like between through during under over",
    )
)
"""Words after which an English sentence goes on."""
MANDARIN_CONTINUED = re.compile(
    "(?:的|是|在|和|跟|把|被|給|给|對|对|從|从|要|想|會|会|能|可以|因為|因为|如果|所以|但是|不過|不过|還有|还有|或者|然後|然后|我們|我们|"
    "我|你|他|她|這個|这个|那個|那个|一個|一个|幾|几|很|太|比|讓|让|請|请|想要|可不可以|有沒有|有没有|為|为|到|往|用|這|这|那|每|第)$"
)
"""Endings after which a Mandarin sentence goes on."""
WITH_FILLER = 0.35  # share of beginnings with a filler behind them
WITHOUT_MARK = 0.6  # share of the others that end without a comma


def beginning(sentence: str, language: str, source: random.Random) -> str | None:
    """A random beginning that is no sentence; None if none was found."""
    place = _place(sentence, language, source)
    if place is None:
        return None
    kept = sentence[:place].rstrip(" ,，;；:：")
    if source.random() < WITH_FILLER:
        return kept + source.choice(WORDS[language].fillers).rstrip()
    return kept if source.random() < WITHOUT_MARK else kept + ("," if language == "en" else "，")


def _place(sentence: str, language: str, source: random.Random) -> int | None:
    if language == "en":
        ends = [
            match.end()
            for match in re.finditer(r"[\w']+(?= [\w'])", sentence)
            if match.group().lower() in ENGLISH_CONTINUED
        ]
    else:
        ends = [
            place
            for place in range(2, len(sentence) - 2)
            if MANDARIN_CONTINUED.search(sentence[:place]) and re.match(r"\w{2}", sentence[place:])
        ]
    ends = [end for end in ends if end >= (8 if language == "en" else 3)]
    return source.choice(ends) if ends else None
