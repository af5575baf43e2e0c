"""The one right reply of the front desk to each turn of a dialogue, in the language of the turn."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from vivavoce.train.front_desk.english import DECLINE, ENGLISH
from vivavoce.train.front_desk.english_text import normalise
from vivavoce.train.front_desk.language import SpokenLanguage

__all__ = ["DECLINE", "REMEMBERED", "DialogueState", "Exchange", "fixed_replies", "normalise", "slotted_replies"]

FIXED = (  # intents whose reply depends on nothing
    *("greeting", "how_are_you", "identity", "help", "restaurant_hours", "breakfast", "menu", "recommend"),
    *("vegetarian", "room_price", "bill", "pay_card", "wifi", "check_in", "check_out", "taxi", "thanks", "goodbye"),
    "decline",
)
WANTED = {"table": ("people", "time", "name"), "room": ("nights", "name")}
REMEMBERED = {  # intent: the slot it asks for
    "memory_people": "people",
    "memory_time": "time",
    "memory_name": "name",
    "memory_nights": "nights",
    "memory_order": "dish",
}
GIVEN = ("give_", "correct_")  # beginnings of intents that give a value, and give another one
Reply = tuple[tuple[str, dict[str, str]], ...]  # forms of sentences with their slots


@dataclass(frozen=True)
class Exchange:
    """A user turn and its correct reply; `slots` are (name, value) pairs in the user text."""

    intent: str
    user: str
    reply: str
    slots: tuple[tuple[str, str], ...] = ()
    call: str = field(default="", repr=False)
    """In a dialogue with tools: the call before the reply as JSON, or that there is none; otherwise empty."""
    output: str = field(default="", repr=False)
    """What the called function returned."""


@dataclass
class DialogueState:
    """State of one dialogue, in no language: known slots, the open booking, and the last reply."""

    known: dict[str, str] = field(default_factory=dict)
    booking: str | None = None  # "table" or "room" while slots are missing
    booked: str | None = None  # the last booking not cancelled
    last: Reply | None = None
    wanted: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: WANTED)
    """The slots that the desk asks for, by kind of booking."""

    def awaited(self) -> str | None:
        """The slot that was asked for and is still missing."""
        if self.booking is None:
            return None
        return next((slot for slot in self.wanted[self.booking] if slot not in self.known), None)

    def correctable(self) -> list[str]:
        """The slots of the booking that have a value, which the guest may correct."""
        return [slot for slot in self.wanted[self.booked] if slot in self.known] if self.booked else []

    def answer(self, intent: str, slots: dict[str, str], language: SpokenLanguage = ENGLISH) -> str:
        """The correct reply in a language; updates the state."""
        self.last = self._reply(intent, slots)
        return language.separator.join(language.reply(form, values) for form, values in self.last)

    def exchange(
        self, intent: str, user: str, slots: tuple[tuple[str, str], ...], language: SpokenLanguage
    ) -> Exchange:
        """A user turn with its correct reply; updates the state."""
        return Exchange(intent, user, self.answer(intent, dict(slots), language), slots)

    def _reply(self, intent: str, slots: dict[str, str]) -> Reply:
        if intent == "repeat":
            return self.last or (("nothing_said", {}),)
        if intent in FIXED:
            return ((intent, {}),)
        if intent in REMEMBERED:
            slot = REMEMBERED[intent]
            return ((f"known_{slot}", dict(self.known)) if slot in self.known else ("not_given", {}),)
        if intent == "cancel":
            return ((self._cancel(), {}),)
        if intent in WANTED:
            self.booking = self.booked = intent
            self.known = {slot: value for slot, value in self.known.items() if slot == "dish"}
        if intent != "price":  # a price question is no order
            self.known.update(slots)
        if intent in WANTED or intent.startswith(GIVEN):
            return self._take_booking(intent, slots)
        return ((intent, slots),)

    def _cancel(self) -> str:
        if self.booked is None:
            return "no_booking"
        self.booking = self.booked = None
        self.known = {slot: value for slot, value in self.known.items() if slot == "dish"}
        return "cancelled"

    def _take_booking(self, intent: str, slots: dict[str, str]) -> Reply:
        kind = self.booking or self.booked or "table"
        summary = (_summary(kind, intent, slots), slots)
        awaited = self.awaited()
        if awaited is not None:
            return (summary, (f"ask_{awaited}", {}))
        self.booking = None
        is_name = intent.startswith(GIVEN) and "name" in slots
        return (("thanked", dict(self.known)), (f"booked_{kind}", {}) if is_name else summary)


def _summary(kind: str, intent: str, slots: dict[str, str]) -> str:
    """The form that confirms the slots just given."""
    if intent.startswith(GIVEN) and "time" in slots:
        return "asked_time"
    echoed = {"nights"} if kind == "room" else {"people", "time", "day"}
    return f"asked_{kind}" if echoed & slots.keys() else "certainly"


def fixed_replies(language: SpokenLanguage = ENGLISH) -> tuple[str, ...]:
    """All replies without slots."""
    directions = [language.reply("directions", {"place": place}) for place in language.values["place"]]
    asks = [_joined(language, ("certainly", {}), (f"ask_{slot}", {})) for slot in ("people", "nights")]
    others = [language.replies[form] for form in ("not_given", "nothing_said", "cancelled", "no_booking")]
    return (*(language.replies[intent] for intent in FIXED), *directions, *asks, *others)


def slotted_replies(language: SpokenLanguage = ENGLISH) -> Iterator[str]:
    """All replies with one slot, for each of its values."""

    def asking(form: str, asked: str, slots: dict[str, str]) -> str:
        return _joined(language, (form, slots), (f"ask_{asked}", {}))

    for dish in language.values["dish"]:
        yield from (language.reply(form, {"dish": dish}) for form in ("price", "order", "known_dish"))
    for time in language.values["time"]:
        yield from (language.reply(form, {"time": time}) for form in ("wake_up", "known_time"))
        yield asking("asked_time", "name", {"time": time})
        yield asking("asked_table", "people", {"time": time})
    for number in language.values["people"]:
        yield language.reply("known_people", {"people": number})
        yield language.reply("known_nights", {"nights": number})
        yield asking("asked_table", "time", {"people": number})
        yield asking("asked_room", "name", {"nights": number})
    for name in language.values["name"]:
        yield language.reply("known_name", {"name": name})
        for kind in WANTED:
            yield _joined(language, ("thanked", {"name": name}), (f"booked_{kind}", {}))
    for day in language.values["day"]:
        yield asking("asked_table", "people", {"day": day})


def _joined(language: SpokenLanguage, *reply: tuple[str, dict[str, str]]) -> str:
    return language.separator.join(language.reply(form, slots) for form, slots in reply)
