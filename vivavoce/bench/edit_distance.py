"""How far a text is from the one that was meant."""

from collections.abc import Sequence
from typing import Any


def edit_distance(meant: Sequence[Any], got: Sequence[Any]) -> int:
    """How many insertions, deletions and replacements lie between two sequences."""
    row = list(range(len(got) + 1))
    for place, wanted in enumerate(meant, start=1):
        before, row[0] = row[0], place
        for index, given in enumerate(got, start=1):
            before, row[index] = row[index], min(row[index] + 1, row[index - 1] + 1, before + (wanted != given))
    return row[-1]


def error_rate(meant: Sequence[Sequence[Any]], got: Sequence[Sequence[Any]]) -> float:
    """Edits over length, of letters in sentences or words in lists of words."""
    edits = sum(edit_distance(one, other) for one, other in zip(meant, got, strict=True))
    return edits / max(1, sum(map(len, meant)))


def word_errors(meant: str, heard: str) -> int:
    """Words to insert, delete or replace to get from one to the other."""
    return edit_distance(meant.split(), heard.split())
