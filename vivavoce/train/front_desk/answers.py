"""What the desk answers: one right reply to each intent, its slots, and what was said before."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from vivavoce.train.front_desk.words import DIRECTIONS, NAMES, NUMBERS, PRICES, SPOKEN_DAYS, TIMES

DECLINE = "I am sorry, I did not understand that."
NOT_TOLD = "You have not told me yet."
FIXED = {
    "greeting": "Welcome to the Garden Hotel. How can I help you?",
    "how_are_you": "I am very well, thank you. How can I help you?",
    "identity": "I am the voice of the front desk.",
    "help": "I can book a table or a room for you.",
    "restaurant_hours": "The restaurant is open every day from noon until eleven.",
    "breakfast": "Breakfast is served from seven until ten in the morning.",
    "menu": "We have soup, salmon, chicken, steak and curry.",
    "recommend": "I recommend the grilled salmon. It is very fresh.",
    "vegetarian": "The risotto and the curry have no meat.",
    "room_price": "A room is ninety euros a night, with breakfast.",
    "bill": "Of course. I will bring you the bill.",
    "pay_card": "You can pay by card or in cash.",
    "wifi": "The wifi is free. The password is garden.",
    "check_in": "You can check in from three in the afternoon.",
    "check_out": "Please check out by eleven in the morning.",
    "taxi": "I will call a taxi for you right away.",
    "thanks": "You are welcome.",
    "goodbye": "Goodbye, and have a nice day.",
    "decline": DECLINE,
}
ASK = {
    "people": "For how many people?",
    "nights": "For how many nights?",
    "time": "At what time, please?",
    "name": "And your name, please?",
}
WANTED = {"table": ("people", "time", "name"), "room": ("nights", "name")}
REMEMBERED = {  # intent: the slot asked back
    "memory_people": "people",
    "memory_time": "time",
    "memory_name": "name",
    "memory_nights": "nights",
    "memory_order": "dish",
}
NOTHING_SAID = "I have not said anything yet."
CANCELLED = "Your booking is cancelled."
NO_BOOKING = "You have no booking yet."
BOOKED = {kind: f"Your {kind} is booked." for kind in WANTED}


@dataclass(frozen=True)
class Exchange:
    """One turn of a guest and the one right reply to it; `slots` are what the guest named, as pairs."""

    intent: str
    user: str
    reply: str
    slots: tuple[tuple[str, str], ...] = ()


@dataclass
class Desk:
    """A desk in one conversation: what it was told, which booking is open, and what it said last."""

    known: dict[str, str] = field(default_factory=dict)
    booking: str | None = None  # "table" or "room" while it is being taken
    booked: str | None = None  # the last one that was begun and not cancelled
    last_reply: str | None = None

    def awaited(self) -> str | None:
        """The slot that the desk has asked for and not heard yet."""
        if self.booking is None:
            return None
        return next((slot for slot in WANTED[self.booking] if slot not in self.known), None)

    def answer(self, intent: str, slots: dict[str, str]) -> str:
        """The right reply, which the desk then remembers to have given."""
        self.last_reply = self._reply(intent, slots)
        return self.last_reply

    def _reply(self, intent: str, slots: dict[str, str]) -> str:
        if intent == "repeat":
            return self.last_reply or NOTHING_SAID
        if intent in FIXED:
            return FIXED[intent]
        if intent in REMEMBERED:
            slot = REMEMBERED[intent]
            return remembered(slot, self.known[slot]) if slot in self.known else NOT_TOLD
        if intent == "cancel":
            return self._cancel()
        if intent in WANTED:
            self.booking = self.booked = intent
            self.known = {slot: value for slot, value in self.known.items() if slot == "dish"}
        if intent != "price":  # asking for a price orders nothing
            self.known.update(slots)
        if intent in WANTED or intent.startswith("give_"):
            return self._take_booking(intent, slots)
        return served(intent, slots)

    def _cancel(self) -> str:
        if self.booked is None:
            return NO_BOOKING
        self.booking = self.booked = None
        self.known = {slot: value for slot, value in self.known.items() if slot == "dish"}
        return CANCELLED

    def _take_booking(self, intent: str, slots: dict[str, str]) -> str:
        kind = self.booking or "table"
        told = echo(kind, intent, slots)
        awaited = self.awaited()
        if awaited is not None:
            return f"{told} {ASK[awaited]}"
        self.booking = None
        thanks = f"Thank you, {self.known['name']}."
        return f"{thanks} {BOOKED[kind] if intent == 'give_name' else told}"


def echo(kind: str, intent: str, slots: dict[str, str]) -> str:
    """What the guest has just asked for, said back; "Certainly." where it was no more than the booking itself."""
    day = f" {slots['day']}" if "day" in slots else ""
    if intent == "give_time":
        return f"At {slots['time']}."
    if kind == "room":
        return f"A room for {nights(slots['nights'])}." if "nights" in slots else "Certainly."
    if not {"people", "time", "day"} & slots.keys():
        return "Certainly."
    people = f" for {slots['people']}" if "people" in slots else ""
    time = f" at {slots['time']}" if "time" in slots else ""
    return f"A table{people}{day}{time}."


def nights(count: str) -> str:
    """So many nights in words."""
    return f"{count} night" if count == "one" else f"{count} nights"


def remembered(slot: str, value: str) -> str:
    """A value that the guest named earlier, said back when asked for."""
    if slot == "dish":
        return f"You ordered the {value}."
    if slot == "people":
        return f"You said {value} {'person' if value == 'one' else 'people'}."
    return f"You said {nights(value) if slot == 'nights' else value}."


def served(intent: str, slots: dict[str, str]) -> str:
    """The reply to an intent that names a place, a dish or a time to wake."""
    if intent == "directions":
        return DIRECTIONS[slots["place"]]
    if intent == "price":
        return f"The {slots['dish']} is {PRICES[slots['dish']]} euros."
    if intent == "order":
        return f"Certainly. One {slots['dish']}."
    return f"I will wake you at {slots['time']}."


def fixed_replies() -> tuple[str, ...]:
    """Every reply that carries no slot."""
    asks = [f"Certainly. {ASK[slot]}" for slot in ("people", "nights")]
    return (*FIXED.values(), *DIRECTIONS.values(), *asks, NOT_TOLD, NOTHING_SAID, CANCELLED, NO_BOOKING)


def slotted_replies() -> Iterator[str]:
    """Every reply that carries one slot, for each of its values; what mixes several is left to dialogues."""
    for dish in PRICES:
        yield from (served("price", {"dish": dish}), served("order", {"dish": dish}), remembered("dish", dish))
    for time in TIMES:
        yield from (served("wake_up", {"time": time}), remembered("time", time), f"At {time}. {ASK['name']}")
        yield f"{echo('table', 'table', {'time': time})} {ASK['people']}"
    for number in NUMBERS:
        yield from (remembered("people", number), remembered("nights", number))
        yield f"{echo('table', 'table', {'people': number})} {ASK['time']}"
        yield f"{echo('room', 'room', {'nights': number})} {ASK['name']}"
    for name in NAMES:
        yield remembered("name", name)
        yield from (f"Thank you, {name}. {booked}" for booked in BOOKED.values())
    for day in SPOKEN_DAYS:
        yield f"{echo('table', 'table', {'day': day})} {ASK['people']}"
