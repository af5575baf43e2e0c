"""Offers of tools as the language model reads them, and what it has to write after them.

The layout is that of `s2s/text_branch.py`: after the user's turn a system turn with the tools in the words of the Qwen
template, then a call in its tags, or that there is none. Sessions with tools have longer instructions than others, so
many are drawn.
"""

from collections.abc import Sequence

import numpy as np

from vivavoce.dialogue.items import ToolCall
from vivavoce.dialogue.settings import Tool
from vivavoce.s2s.text_branch import NO_CALL, call_turn, offer, output_turn
from vivavoce.train.front_desk import Exchange
from vivavoce.train.front_desk.tools import OTHERS, SUBJECTS, TOOLS, tool_of

OFFERS = 400  # distinct lists of tools; each is tokenised once
OFFERED = 0.6  # probability that a tool of the desk is in a list
MAX_OTHERS = 2
WITHHELD = 0.12  # share of calls whose tool is not offered, so that none is right
DECLINED, INCOMPLETE = "declined", "incomplete"  # kinds of turns without a call
DECISION_SHARES = {
    **{"book_table": 0.19, "book_room": 0.06, "order": 0.09, "look_up": 0.16},
    **{DECLINED: 0.22, INCOMPLETE: 0.1, NO_CALL: 0.18},
}
"""What is decided in a batch, by the tool that is called, or by the kind of a turn without a call."""
BOOKINGS = ("table", "room", "give_", "correct_")  # beginnings of the intents that make one

ROLES = (
    "You are the front desk of a restaurant with hotel.",
    "You are the front desk of the Garden Hotel.",
    "You answer the telephone of a hotel and its restaurant.",
    "You are the voice assistant of a small hotel.",
    "You are a helpful assistant.",
)
WHEN_TO_CALL = (
    "Call a function when the guest asks for what it does and all of its required values are known.",
    "Call a function only when the guest asks for exactly what it does; otherwise answer yourself.",
    "Use the functions for bookings, orders, hours and prices, and for nothing else.",
    "Ask for a value that a function needs and the guest has not given; never guess it.",
    "Use the tools when they help, and talk to the guest when they do not.",
)
HOW_TO_ANSWER = (
    "Give a function what was said and nothing else.",
    "Answer in one short sentence.",
    "Write times as 8:30.",
    "Be brief and friendly.",
    "If you do not know, say so.",
)
SUBJECT_LISTS = ("Subjects of look_up are {}, or a dish, for its price.", "look_up knows {}, and the price of a dish.")
LISTED = 0.6  # share of instructions that list the subjects

EVALUATED_TOOLS = (*OTHERS[:1], *TOOLS.values(), *OTHERS[-1:])


def has_tools(line: Sequence[Exchange]) -> bool:
    """Whether a dialogue has tools."""
    return any(exchange.call for exchange in line)


def decision_of(exchange: Exchange) -> str:
    """The tool that a turn calls, or that there is none."""
    return tool_of(exchange.call) if exchange.output else NO_CALL


def kind_of_decision(exchange: Exchange) -> str:
    """The tool that a turn calls; without a call what kind of turn it is."""
    decision = decision_of(exchange)
    if decision != NO_CALL:
        return decision
    if exchange.intent == "decline":
        return DECLINED
    return INCOMPLETE if exchange.intent.startswith(BOOKINGS) else NO_CALL


def written(exchange: Exchange) -> str:
    """What the model writes to make the call of a turn, or to make none."""
    if exchange.call == NO_CALL:
        return NO_CALL
    name, arguments = tool_of(exchange.call), exchange.call.partition('"arguments": ')[2][:-1]
    return str(call_turn(ToolCall("", name, arguments)).content)


def returned(exchange: Exchange) -> str:
    """The output of a turn's call, as the model reads it."""
    return str(output_turn(exchange.output).content)


def offer_text(tools: Sequence[Tool]) -> str:
    """The text of the turn that offers tools."""
    return str(offer(tools).content)


def tool_instructions(count: int, seed: int) -> list[str]:
    """Instructions of sessions with tools: who the model is, when it calls, how it answers, what can be looked up."""
    source = np.random.default_rng(seed)
    return [_instructions(source) for _ in range(count)]


def _instructions(source: np.random.Generator) -> str:
    sentences = [str(source.choice(ROLES))]
    for choices, limit in ((WHEN_TO_CALL, 2), (HOW_TO_ANSWER, 3)):
        sentences += source.choice(choices, int(source.integers(limit + 1)), replace=False).tolist()
    if source.random() < LISTED:
        subjects = list(dict.fromkeys(subject for subject, _ in SUBJECTS.values()))
        sentences.append(str(source.choice(SUBJECT_LISTS)).format(", ".join(source.permutation(subjects))))
    return " ".join(sentences)


class Offers:
    """Random lists of tools, in any order, with others that nothing asks for."""

    def __init__(self, seed: int = 0, count: int = OFFERS) -> None:
        source = np.random.default_rng(seed)
        drawn = [_draw(source) for _ in range(count)]
        self.texts = [offer_text(tools) for tools in drawn]
        names = [{tool.name for tool in tools} for tools in drawn]
        self._with = {name: [i for i, each in enumerate(names) if name in each] for name in TOOLS}
        self._without = {name: [i for i, each in enumerate(names) if name not in each] for name in TOOLS}

    def draw(self, exchange: Exchange, source: np.random.Generator) -> tuple[str, str]:
        """An offer, and what has to be written after it in this turn."""
        decision = decision_of(exchange)
        if decision == NO_CALL:
            return self.texts[int(source.integers(len(self.texts)))], NO_CALL
        is_withheld = source.random() < WITHHELD
        fitting = (self._without if is_withheld else self._with)[decision]
        return self.texts[fitting[int(source.integers(len(fitting)))]], NO_CALL if is_withheld else written(exchange)


def _draw(source: np.random.Generator) -> list[Tool]:
    chosen = [tool for tool in TOOLS.values() if source.random() < OFFERED]
    others = source.permutation(len(OTHERS))[: int(source.integers(MAX_OTHERS + 1))]
    tools = [*chosen, *(OTHERS[index] for index in others)] or [OTHERS[0]]
    return [tools[index] for index in source.permutation(len(tools))]
