"""What the front desk needs of a language: phrasings, values, replies, and how texts are compared."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from vivavoce.train.front_desk.templates import expanded

DERIVED = {"persons": "people", "price": "dish", "directions": "place"}  # words in replies: the slot they come from


@dataclass(frozen=True, eq=False)
class SpokenLanguage:
    """A language of the desk. Slot values are the same in all languages: the English words (`half past seven`)."""

    code: str
    written: Mapping[str, list[str]]
    """Templates by intent, of which some are held out."""
    training_only: Mapping[str, list[str]]
    openings: Mapping[str, list[str]]
    cores: Mapping[str, Mapping[str, list[str]]]
    """By intent and kind, joined with `openings` of that kind at "~"."""
    corrections: Mapping[str, list[str]]
    """Templates of the intents with which a guest corrects a value, from edition 2 on."""
    slot_words: Mapping[str, Sequence[str]]
    """Words of slots that no reply depends on."""
    values: Mapping[str, tuple[str, ...]]
    ways: Mapping[str, Mapping[str, tuple[str, ...]]]
    """Ways to say a value, by slot and value."""
    words: Mapping[str, Mapping[str, str]]
    """How replies say a value, by slot and value."""
    replies: Mapping[str, str]
    """Replies by intent or form; a part in brackets is said if its slot is known."""
    separator: str
    """Between the sentences of a reply."""
    fillers: tuple[str, ...]
    training_fillers: tuple[str, ...]
    endings: tuple[str, ...]
    polite: str
    """A phrasing with this word gets no ending."""
    sentence: Callable[[str], str]
    """A phrasing as a written sentence."""
    plain_words: Callable[[str], tuple[str, ...]]
    """The canonical words of a phrasing, for finding near duplicates."""
    spoken_words: Callable[[str], tuple[str, ...]]
    """The words of a transcript that are compared with those of a reply."""
    is_value: Callable[[str], bool]
    """Whether one of these words is a number, time, name, dish or day."""
    same_word: Callable[[str, str], bool]
    is_recognised_value: Callable[[str, str], bool]
    number_words: Callable[[int], str]
    currency: str
    per_euro: int
    """What one euro is in this currency."""
    edition: int = 1
    added: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict)
    """Phrasings of edition 2, by split and intent."""

    @property
    def intents(self) -> tuple[str, ...]:
        """The names of all intents."""
        return (*self.written, *(self.corrections if self.edition > 1 else ()))

    def ways_to_say(self, slot: str, value: str) -> tuple[str, ...]:
        """Ways to say a slot value."""
        return self.ways.get(slot, {}).get(value, (value,))

    def reply(self, form: str, slots: Mapping[str, str]) -> str:
        """A sentence of a reply."""

        def word(match: re.Match[str]) -> str:
            name = match[1]
            if name in DERIVED and name in slots:  # another price than the desk's own
                return self.number_words(int(slots[name]))
            value = slots[DERIVED.get(name, name)]
            return self.words.get(name, {}).get(value, value)

        def optional(match: re.Match[str]) -> str:
            names = re.findall(r"\{(\w+)\}", match[1])
            return match[1] if all(name in slots for name in names) else ""

        return re.sub(r"\{(\w+)\}", word, re.sub(r"\[([^\]]*)\]", optional, self.replies[form]))

    def composed(self, intent: str) -> list[str]:
        """All combinations of openings and cores of the same kind."""
        combined: dict[str, None] = {}
        for kind, cores in self.cores.get(intent, {}).items():
            for opening, core in itertools.product(self.openings[kind], cores):
                combined.update(dict.fromkeys(expanded(opening.replace("~", core))))
        return list(combined)
