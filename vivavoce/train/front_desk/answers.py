"""Replies of the front desk, text normalisation, and judging whether a transcript is the expected reply."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache

from vivavoce.train.front_desk.templates import (
    DAYS,
    DIRECTIONS,
    NAMES,
    NUMBERS,
    ONES,
    PRICES,
    SPOKEN_DAYS,
    TENS,
    TIMES,
    number_words,
)

DECLINE = "I am sorry, I did not understand that."
NOT_GIVEN = "You have not told me yet."
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
REMEMBERED = {  # intent: the slot it asks for
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
    """A user turn and its correct reply; `slots` are (name, value) pairs in the user text."""

    intent: str
    user: str
    reply: str
    slots: tuple[tuple[str, str], ...] = ()


@dataclass
class DialogueState:
    """State of one dialogue: known slots, the open booking, and the last reply."""

    known: dict[str, str] = field(default_factory=dict)
    booking: str | None = None  # "table" or "room" while slots are missing
    booked: str | None = None  # the last booking not cancelled
    last_reply: str | None = None

    def awaited(self) -> str | None:
        """The slot that was asked for and is still missing."""
        if self.booking is None:
            return None
        return next((slot for slot in WANTED[self.booking] if slot not in self.known), None)

    def answer(self, intent: str, slots: dict[str, str]) -> str:
        """The correct reply; updates the state."""
        self.last_reply = self._reply(intent, slots)
        return self.last_reply

    def _reply(self, intent: str, slots: dict[str, str]) -> str:
        if intent == "repeat":
            return self.last_reply or NOTHING_SAID
        if intent in FIXED:
            return FIXED[intent]
        if intent in REMEMBERED:
            slot = REMEMBERED[intent]
            return remembered(slot, self.known[slot]) if slot in self.known else NOT_GIVEN
        if intent == "cancel":
            return self._cancel()
        if intent in WANTED:
            self.booking = self.booked = intent
            self.known = {slot: value for slot, value in self.known.items() if slot == "dish"}
        if intent != "price":  # a price question is no order
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
        summary = echo(kind, intent, slots)
        awaited = self.awaited()
        if awaited is not None:
            return f"{summary} {ASK[awaited]}"
        self.booking = None
        thanks = f"Thank you, {self.known['name']}."
        return f"{thanks} {BOOKED[kind] if intent == 'give_name' else summary}"


def echo(kind: str, intent: str, slots: dict[str, str]) -> str:
    """Confirmation of the slots just given; "Certainly." if there are none."""
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
    return f"{count} night" if count == "one" else f"{count} nights"


def remembered(slot: str, value: str) -> str:
    """The reply to a question about a known slot."""
    if slot == "dish":
        return f"You ordered the {value}."
    if slot == "people":
        return f"You said {value} {'person' if value == 'one' else 'people'}."
    return f"You said {nights(value) if slot == 'nights' else value}."


def served(intent: str, slots: dict[str, str]) -> str:
    """The reply to directions, price, order and wake-up."""
    if intent == "directions":
        return DIRECTIONS[slots["place"]]
    if intent == "price":
        return f"The {slots['dish']} is {PRICES[slots['dish']]} euros."
    if intent == "order":
        return f"Certainly. One {slots['dish']}."
    return f"I will wake you at {slots['time']}."


def fixed_replies() -> tuple[str, ...]:
    """All replies without slots."""
    asks = [f"Certainly. {ASK[slot]}" for slot in ("people", "nights")]
    return (*FIXED.values(), *DIRECTIONS.values(), *asks, NOT_GIVEN, NOTHING_SAID, CANCELLED, NO_BOOKING)


def slotted_replies() -> Iterator[str]:
    """All replies with one slot, for each of its values."""
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


UNITS = {"$": "dollars", "€": "euros", "£": "pounds", "%": "percent"}
SPELLINGS = {
    **{"wi-fi": "wifi", "wi fi": "wifi", "check-in": "check in", "check-out": "check out", "o clock": "o'clock"},
    **{"icecream": "ice cream", "cheese burger": "cheeseburger", "carpark": "car park"},
}
ORDINALS = {"1st": "first", "2nd": "second", "3rd": "third", "4th": "fourth", "5th": "fifth"}


def clock_words(hour: int, minute: int) -> str:
    """A clock time in words: seven thirty, seven o'clock."""
    if minute == 0:
        return f"{number_words(hour)} o'clock"
    return f"{number_words(hour)} {'o ' if minute < 10 else ''}{number_words(minute)}"


def normalise(text: str) -> str:
    """Lower-case spoken words of a text, for comparing transcripts."""
    text = text.lower().replace("’", "'").replace("-", " ")
    text = re.sub(r"(\d),(\d{3})\b", r"\1\2", text)
    text = re.sub(r"\b(\d{1,2})[:.](\d{2})\b", lambda match: clock_words(int(match[1]), int(match[2])), text)
    text = re.sub(r"([$€£])\s*(\d+)", lambda match: f"{match[2]} {UNITS[match[1]]}", text)
    text = text.replace("%", " percent").replace("€", " euros").replace("&", " and ")
    text = re.sub(r"\b\d(?:st|nd|rd|th)\b", lambda match: ORDINALS.get(match[0], match[0]), text)
    text = re.sub(r"\d+", lambda match: f" {_digits(match[0])} ", text)
    text = re.sub(r"[^\w' ]|_", " ", text)
    text = " ".join(word.strip("'") for word in text.split())
    for written, spoken in SPELLINGS.items():
        text = re.sub(rf"\b{re.escape(written)}\b", spoken, text)
    return " ".join(text.split())


def _digits(digits: str) -> str:
    if len(digits) < 7 and (digits == "0" or not digits.startswith("0")):
        return number_words(int(digits))
    return " ".join(ONES[int(digit)] for digit in digits)


MAX_WORD_ERRORS = 0.45  # share of wrong words up to which a transcript can match a reply
MIN_SIMILARITY = 0.6  # spelling similarity from which two words are the same
HOMOPHONES = {"for": "four", "fore": "four", "to": "two", "too": "two", "ate": "eight", "won": "one", "sicks": "six"}
HOUR = f"({'|'.join(NUMBERS)})"
CLOCK = {  # pattern: minutes after the hour in it
    rf"(?:a )?quarter past {HOUR}": 15,
    rf"half past {HOUR}": 30,
    rf"(?:a )?quarter to {HOUR}": -15,
    rf"{HOUR} fifteen": 15,
    rf"{HOUR} thirty": 30,
    rf"{HOUR} forty five": 45,
    rf"{HOUR} o'?clock": 0,
}
NAME_WORDS = frozenset(name.lower() for name in NAMES)
DISH_WORDS = frozenset(word for dish in PRICES for word in dish.split()) - {"and"}
DAY_WORDS = frozenset((*DAYS, "today", "tonight", "tomorrow"))
NUMBER_WORDS = frozenset((*ONES, *TENS, "noon"))


def judge(transcript: str, expected: Exchange) -> bool:
    """Whether a transcript has the intent of the expected reply and all its numbers, times, names, dishes and days."""
    words, reply_words = spoken_words(transcript), spoken_words(expected.reply)
    pairs = aligned(reply_words, words)
    errors = word_errors(pairs)
    if errors > MAX_WORD_ERRORS * len(reply_words):
        return False
    if any(is_value(word) and not is_recognised_value(word, other) for word, other in pairs if word):
        return False
    return errors == 0 or all(errors <= word_errors(aligned(reply, words)) for reply in _every_reply())


def spoken_words(text: str) -> tuple[str, ...]:
    """Normalised words, with each clock time and number as one word."""
    text = re.sub(r"\ba clock\b", "o'clock", normalise(text))
    text = re.sub(rf"\b({'|'.join(HOMOPHONES)})(?= o'clock\b)", lambda match: HOMOPHONES[match[1]], text)
    for pattern, minutes in CLOCK.items():
        for hour in dict.fromkeys(re.findall(rf"\b{pattern}\b", text)):
            text = re.sub(rf"\b{pattern.replace(HOUR, hour)}\b", _clock(hour, minutes), text)
    text = re.sub(rf"\b({'|'.join(TENS[2:])}) ({'|'.join(ONES[1:10])})\b", r"\1-\2", text)
    return tuple(text.replace("'", "").split())


def aligned(expected: Sequence[str], transcribed: Sequence[str]) -> list[tuple[str, str]]:
    """Minimum-edit alignment of expected and transcribed words; "" for a missing or extra word."""
    cost = [[row + column for column in range(len(transcribed) + 1)] for row in range(len(expected) + 1)]
    for row, word in enumerate(expected, 1):
        for column, other in enumerate(transcribed, 1):
            swap = cost[row - 1][column - 1] + (not same_word(word, other))
            cost[row][column] = min(swap, cost[row - 1][column] + 1, cost[row][column - 1] + 1)
    pairs: list[tuple[str, str]] = []
    row, column = len(expected), len(transcribed)
    while row or column:
        total = cost[row][column]
        if (
            row
            and column
            and total == cost[row - 1][column - 1] + (not same_word(expected[row - 1], transcribed[column - 1]))
        ):
            row, column = row - 1, column - 1
            pairs.append((expected[row], transcribed[column]))
        elif row and total == cost[row - 1][column] + 1:
            row -= 1
            pairs.append((expected[row], ""))
        else:
            column -= 1
            pairs.append(("", transcribed[column]))
    return pairs[::-1]


def word_errors(pairs: Sequence[tuple[str, str]]) -> int:
    return sum(not same_word(word, other) for word, other in pairs)


def is_value(word: str) -> bool:
    """Whether a word is a value: number, time, name, dish or day."""
    return ":" in word or bool({word.partition("-")[0]} & (NUMBER_WORDS | NAME_WORDS | DISH_WORDS | DAY_WORDS))


@cache
def same_word(word: str, other: str) -> bool:
    """Whether two words count as the same: homophones and small spelling differences do."""
    if word == other or HOMOPHONES.get(other) == word:
        return True
    if ":" in word:  # "seven" matches seven o'clock
        return word == f"{other}:0"
    if not word or not other or word.partition("-")[0] in NUMBER_WORDS:
        return False
    return _similarity(word, other) >= MIN_SIMILARITY


def is_recognised_value(word: str, other: str) -> bool:
    """Whether a value was recognised and not confused with another of its kind."""
    if not same_word(word, other):
        return False
    return not any(
        _similarity(rival, other) > _similarity(word, other)
        for kind in (NAME_WORDS, DISH_WORDS, DAY_WORDS)
        if word in kind
        for rival in kind
    )


@cache
def _similarity(word: str, other: str) -> float:
    return SequenceMatcher(None, word, other, autojunk=False).ratio()


def _clock(hour: str, minutes: int) -> str:
    if minutes < 0:
        return f"{NUMBERS[NUMBERS.index(hour) - 1]}:{60 + minutes}"
    return f"{hour}:{minutes}"


@cache
def _every_reply() -> tuple[tuple[str, ...], ...]:
    return tuple(dict.fromkeys(spoken_words(reply) for reply in (*fixed_replies(), *slotted_replies())))
