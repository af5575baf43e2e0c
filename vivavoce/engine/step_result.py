"""What a step of the engine gives: new rows, and the sequences whose part of it failed."""

from dataclasses import dataclass, field

from vivavoce.engine.sequence import FinishReason, Sequence
from vivavoce.models.interface import Row


@dataclass(frozen=True)
class Emission:
    """A row a sequence has just made, and why the reply ended, if it did."""

    sequence: Sequence
    row: Row
    finish: FinishReason | None


@dataclass(frozen=True)
class Failure:
    """A sequence whose part of a step failed. Its reply has ended and its pages are free; its rows are as before."""

    sequence: Sequence
    error: Exception


@dataclass
class StepResult:
    """The outcome of one step."""

    emissions: list[Emission] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
