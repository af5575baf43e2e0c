"""Drafts by a smaller model of the same vocabulary, which follows each sequence in an engine of its own."""

from collections.abc import Sequence as Many
from dataclasses import replace

from vivavoce.engine.engine import Engine
from vivavoce.engine.sequence import Sequence, rows_in_common
from vivavoce.errors import InputError
from vivavoce.models.interface import Row


class DraftModel:
    """Lets the small model go on from where each sequence is, with the sequence's own settings, seed and place.

    So it draws with the noise the large model draws with, and two models that nearly agree draw the same row nearly
    always. One source serves any number of sequences; their drafts are made in the same steps.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._twins: dict[int, tuple[Sequence, Sequence]] = {}

    @classmethod
    def of(cls, engine: Engine, target: Engine) -> "DraftModel":
        """A source for this target's sequences, refused if the two models do not share their ids."""
        if engine.model.vocabularies != target.model.vocabularies:
            raise InputError(
                f"the draft's vocabularies {engine.model.vocabularies} are not the model's {target.model.vocabularies}"
            )
        return cls(engine)

    def propose(self, sequence: Sequence, most: int) -> Many[Row]:
        """What the small model would say next."""
        return self.propose_together([(sequence, most)])[0]

    def propose_together(self, wants: Many[tuple[Sequence, int]]) -> list[Many[Row]]:
        """What the small model would say next in each of these, made side by side."""
        self._forget_closed()
        twins = [self._start(sequence, most) for sequence, most in wants]
        try:
            while any(twin.is_generating for twin in twins):
                self.engine.step()
        finally:
            for twin in twins:
                self.engine.stop(twin)
        return [twin.rows[len(sequence) :] for twin, (sequence, _) in zip(twins, wants, strict=True)]

    def close(self) -> None:
        """Forget all sequences that were followed."""
        for _, twin in self._twins.values():
            self.engine.close(twin)
        self._twins.clear()

    def _start(self, sequence: Sequence, most: int) -> Sequence:
        """The sequence's twin, brought to the same rows and set to go on from them."""
        assert sequence.generation is not None
        if sequence.id not in self._twins:
            self._twins[sequence.id] = (sequence, self.engine.open())
        _, twin = self._twins[sequence.id]
        same = rows_in_common(twin.rows, sequence.rows)
        if same < len(twin):
            self.engine.rewind(twin, same)
        most = min(most, self.engine.capacity - len(sequence))
        if most > 0:
            self.engine.append(twin, sequence.rows[same:])
            self.engine.generate(twin, replace(sequence.generation, max_new_rows=sequence.generated + most))
            twin.mode, twin.generated = sequence.mode, sequence.generated
        return twin

    def _forget_closed(self) -> None:
        for key in [key for key, (sequence, _) in self._twins.items() if not sequence.is_open]:
            self.engine.close(self._twins.pop(key)[1])
