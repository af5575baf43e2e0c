"""Phrasings for evaluation alone: English questions that no template, phrasing or training run has.

`evaluation.en.jsonl` has a dialogue a line; its last turn is the one that is asked, the turns before it give it a
context ("For how many people?"). Replies are those of the desk's rules.
"""

import json
from functools import cache

from vivavoce.train.front_desk.answers import DialogueState, Exchange
from vivavoce.train.front_desk.templates import FOLDER

FILE = FOLDER / "evaluation.en.jsonl"


@cache
def evaluation_dialogues() -> tuple[tuple[Exchange, ...], ...]:
    """The dialogues with the right reply to every turn."""
    return tuple(_dialogue(json.loads(line)["turns"]) for line in FILE.read_text(encoding="utf8").splitlines())


def _dialogue(turns: list[dict[str, object]]) -> tuple[Exchange, ...]:
    state = DialogueState()
    exchanges = []
    for turn in turns:
        intent, slots = str(turn["intent"]), turn["slots"]
        assert isinstance(slots, dict)
        exchanges.append(Exchange(intent, str(turn["user"]), state.answer(intent, dict(slots)), tuple(slots.items())))
    return tuple(exchanges)
