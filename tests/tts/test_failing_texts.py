"""A text or voice that fails does not affect others, and its sequence is closed."""

import threading

import pytest
import torch

from tests.models.tiny_nano import tiny_nano
from tests.tts.test_frame_generators import PROMPT, REFERENCE, SAMPLINGS
from vivavoce.device import pick
from vivavoce.engine.sampling import Generation
from vivavoce.models.moss_tts_nano.model import MossTTSNano
from vivavoce.tts.nano import EngineFrameGenerator

GENERATION = Generation(SAMPLINGS["published"], 24, min_new_rows=24, penalise_prompt=False)
TEXTS = ("Good evening.", "Who is there?", "Nobody, as it seems.")
OTHER = tuple(tuple((5 * frame + book) % 24 for book in range(5)) for frame in range(7))


class PlantedError(Exception):
    """The fault of these tests."""


class Faulty(MossTTSNano):
    """Cannot compute one row."""

    poison: tuple[int, ...] | None = None
    passes = 0

    def forward(self, rows, batch):
        self.passes += 1
        if self.poison is not None and self.poison in [tuple(row) for row in rows.tolist()]:
            raise PlantedError
        return super().forward(rows, batch)


@pytest.fixture
def synthesizer() -> EngineFrameGenerator:
    model = tiny_nano(dtype=torch.float32)
    model.__class__ = Faulty
    return EngineFrameGenerator(model, PROMPT, pick("cpu"))


def together(synthesizer: EngineFrameGenerator, texts) -> list[list | Exception]:
    """What is made of texts that are begun before any goes on."""
    list(synthesizer.frames(REFERENCE, texts[0], Generation(max_new_rows=1)))  # the voice is computed
    streams = synthesizer.driver.call(lambda: [synthesizer.frames(REFERENCE, text, GENERATION) for text in texts])
    heard: list[list | Exception] = [[] for _ in texts]

    def listen(place: int) -> None:
        try:
            heard[place] = list(streams[place])
        except Exception as error:
            heard[place] = error

    threads = [threading.Thread(target=listen, args=(place,), daemon=True) for place in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return heard


def rows_of(synthesizer: EngineFrameGenerator, text: str) -> set[tuple[int, ...]]:
    return {tuple(row) for row in PROMPT.speech(text)}


def test_a_text_that_fails_fails_alone(synthesizer):
    wanted = together(synthesizer, TEXTS)
    unshared = rows_of(synthesizer, TEXTS[1]) - rows_of(synthesizer, TEXTS[0]) - rows_of(synthesizer, TEXTS[2])
    synthesizer.model.poison = sorted(unshared - set(PROMPT.before_text(REFERENCE)))[0]
    first, failed, last = together(synthesizer, TEXTS)
    assert isinstance(failed, PlantedError)
    assert [first, last] == [wanted[0], wanted[2]] and len(first) == 24
    synthesizer.model.poison = None
    assert together(synthesizer, TEXTS) == wanted
    synthesizer.driver.call(lambda: None)
    assert len(synthesizer.engine.scheduler.sequences) == 1 and not synthesizer.driver._replies  # the voice


def test_a_voice_that_fails_is_closed_and_tried_again_when_asked_for(synthesizer):
    wanted = list(synthesizer.frames(OTHER, TEXTS[0], GENERATION))
    fresh = EngineFrameGenerator(synthesizer.model, PROMPT, pick("cpu"))
    under_way = fresh.frames(REFERENCE, TEXTS[0], GENERATION)
    expected = list(synthesizer.frames(REFERENCE, TEXTS[0], GENERATION))
    known = {tuple(row) for row in PROMPT.before_text(REFERENCE)}
    unshared = {tuple(row) for row in PROMPT.before_text(OTHER)} - known - rows_of(synthesizer, TEXTS[0])
    synthesizer.model.poison = sorted(unshared)[0]
    with pytest.raises(PlantedError):
        fresh.frames(OTHER, TEXTS[0], GENERATION)
    assert list(under_way) == expected
    fresh.driver.call(lambda: None)
    assert len(fresh.engine.scheduler.sequences) == 1
    assert not fresh.engine.has_work
    before = synthesizer.model.passes
    fresh.driver.call(lambda: None)
    assert synthesizer.model.passes == before, "it goes on trying"
    synthesizer.model.poison = None
    assert list(fresh.frames(OTHER, TEXTS[0], GENERATION)) == wanted
