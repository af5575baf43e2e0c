"""Functions that the desk calls: what they take, when a call is right, what they return, and the reply after it.

A booking is made by `book_table` or `book_room` as soon as its required values are known, an order by `order`, and
what the desk is asked about is found by `look_up`. Everything else is answered without a call.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vivavoce.dialogue.settings import Tool
from vivavoce.s2s.text_branch import NO_CALL
from vivavoce.train.front_desk.answers import DialogueState, Exchange, Reply
from vivavoce.train.front_desk.english_values import NUMBERS, PRICES, TIMES, number_words
from vivavoce.train.front_desk.language import SpokenLanguage

REQUIRED = {"table": ("people", "time"), "room": ("nights",)}
SUBJECTS = {  # of `look_up`, by intent, with what it finds
    "restaurant_hours": ("restaurant hours", "noon to 11, every day"),
    "breakfast": ("breakfast", "7 to 10 in the morning"),
    "menu": ("menu", "soup, salmon, chicken, steak, curry"),
    "room_price": ("room price", "{price} {currency} a night, with breakfast"),
    "wifi": ("wifi", "free, password garden"),
    "check_in": ("check in", "from 3 in the afternoon"),
    "check_out": ("check out", "by 11 in the morning"),
}
ROOM_EUROS = 90
FULL = 0.1  # share of bookings that are not possible
OTHER_PRICE = 0.5  # share of prices that are not the usual ones, so that the output is what counts
EUROS = (3, 39)
USUAL = {dish: next(n for n in range(100) if number_words(n) == words) for dish, words in PRICES.items()}
CLOCK = {time: f"{1 + index // 4}:{15 * (index % 4):02d}" for index, time in enumerate(TIMES)}


TOOLS = {
    tool.name: tool
    for tool in (
        Tool.plain(
            "book_table",
            "Books a table.",
            ("people", "time"),
            people="integer",
            time="string",
            day="string",
            name="string",
        ),
        Tool.plain("book_room", "Books a room.", ("nights",), nights="integer", name="string"),
        Tool.plain("order", "Orders a dish.", ("dish",), dish="string"),
        Tool.plain("look_up", "Finds hours, prices and services.", ("subject",), subject="string"),
    )
}
OTHERS = (  # tools that nothing said to the desk asks for
    Tool.plain("print_report", "Prints the report of a day.", ("day",), day="string"),
    Tool.plain("assign_shift", "Assigns a shift to a worker.", ("worker",), worker="string", hours="integer"),
    Tool.plain("check_printer", "Tells whether the printer has paper."),
    Tool.plain("count_stock", "Counts the goods in a store.", ("store",), store="string"),
    Tool.plain("lock_gate", "Locks the gate.", ("gate",), gate="integer"),
    Tool.plain("read_meter", "Reads a meter.", ("meter",), meter="integer"),
    Tool.plain("open_curtains", "Opens the curtains."),
    Tool.plain("set_temperature", "Sets the temperature of a room.", ("room",), room="integer", degrees="number"),
    Tool.plain("hang_up", "Ends the call."),
)


def written_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as models write it."""
    return json.dumps({"name": name, "arguments": dict(arguments)})


def tool_of(call: str) -> str:
    """The name of the tool that a written call is for."""
    return str(json.loads(call)["name"])


@dataclass
class ToolDialogueState(DialogueState):
    """A dialogue whose desk calls functions."""

    wanted: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: REQUIRED)
    random_source: random.Random = field(default_factory=lambda: random.Random(0))
    used: tuple[str, str] = (NO_CALL, "")
    """The call of the last turn and its output."""
    currency: tuple[str, int] = ("euros", 1)
    """Of the last turn's language, and what one euro is in it."""

    def exchange(
        self, intent: str, user: str, slots: tuple[tuple[str, str], ...], language: SpokenLanguage
    ) -> Exchange:
        """A user turn with its call, output and reply; updates the state."""
        self.used, self.currency = (NO_CALL, ""), (language.currency, language.per_euro)
        reply = self.answer(intent, dict(slots), language)
        return Exchange(intent, user, reply, slots, *self.used)

    def _reply(self, intent: str, slots: dict[str, str]) -> Reply:
        reply = super()._reply(intent, slots)
        if intent == "order":
            self._use("order", {"dish": slots["dish"]}, {"status": "ok"})
        elif intent == "price":
            is_other = self.random_source.random() < OTHER_PRICE
            currency, per_euro = self.currency
            price = per_euro * (self.random_source.randint(*EUROS) if is_other else USUAL[slots["dish"]])
            self._use("look_up", {"subject": slots["dish"]}, {currency: price})
            return (("price", {**slots, "price": str(price)}),)
        elif intent in SUBJECTS:
            subject, found = SUBJECTS[intent]
            currency, per_euro = self.currency
            found = found.format(price=ROOM_EUROS * per_euro, currency=currency)
            self._use("look_up", {"subject": subject}, {"found": found})
        return reply

    def _take_booking(self, intent: str, slots: dict[str, str]) -> Reply:
        if self.awaited() is not None:
            return super()._take_booking(intent, slots)
        kind = self.booking or self.booked or "table"
        values = {slot: value for slot, value in self.known.items() if slot != "dish"}
        self.booking = None
        is_full = self.random_source.random() < FULL
        self._use(f"book_{kind}", _arguments(kind, values), {"status": "full" if is_full else "booked"})
        if not is_full:
            return ((f"asked_{kind}", values), (f"booked_{kind}", {}))
        self.booked = None
        self.known = {slot: value for slot, value in self.known.items() if slot == "dish"}
        return (("full", {}),)

    def _use(self, name: str, arguments: Mapping[str, Any], output: Mapping[str, Any]) -> None:
        self.used = (written_call(name, arguments), json.dumps(dict(output)))


def _arguments(kind: str, values: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of a booking, in the order of its schema."""
    said: dict[str, Any] = {}
    for name, schema in TOOLS[f"book_{kind}"].parameters["properties"].items():
        if name in values:
            value = values[name]
            if schema["type"] == "integer":
                said[name] = 1 + NUMBERS.index(value)
            else:
                said[name] = CLOCK[value] if name == "time" else value.removeprefix("on ")
    return said
