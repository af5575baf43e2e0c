"""Requirements on the figures, such as `R_Y>=.95,pause.early<=.05`, for a verdict that a CI can use."""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vivavoce.errors import InputError

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Requirement:
    """A bound on one figure."""

    name: str
    relation: str
    bound: float

    def is_met(self, figures: Mapping[str, float | None]) -> bool:
        """Whether the figure is within its bound; one that was not measured is not."""
        value = figures.get(self.name)
        return value is not None and OPERATORS[self.relation](value, self.bound)

    def __str__(self) -> str:
        return f"{self.name}{self.relation}{self.bound:g}"


def parse(text: str, known: Mapping[str, object] | None = None) -> list[Requirement]:
    """The requirements of a comma-separated list; with `known`, a name that is not in it is refused."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"([\w. ]*\w)\s*(>=|<=|>|<)\s*([-+]?(?:\d+\.?\d*|\.\d+))", part)
        if match is None:
            raise InputError(f"{part!r} is not a requirement such as R_Y>=.95")
        if known is not None and match[1] not in known:
            raise InputError(f"there is no figure {match[1]!r}; there are {', '.join(known)}")
        found.append(Requirement(match[1], match[2], float(match[3])))
    return found
