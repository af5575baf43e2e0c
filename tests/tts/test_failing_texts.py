"""A text or a voice that cannot be computed fails by itself: others are said whole, and nothing stays behind."""

import threading

import pytest
import torch

from tests.models.tiny_nano import tiny_nano
from tests.tts.test_mouths import PROMPT, REFERENCE, SAMPLINGS
from vivavoce.device import pick
from vivavoce.engine.sampling import Generation
from vivavoce.models.moss_tts_nano.model import MossTTSNano
from vivavoce.tts.nano_engine import EngineFrameGenerator, before_text

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
def mouth() -> EngineFrameGenerator:
    model = tiny_nano(dtype=torch.float32)
    model.__class__ = Faulty
    return EngineFrameGenerator(model, PROMPT, pick("cpu"))


def together(mouth: EngineFrameGenerator, texts) -> list[list | Exception]:
    """What is made of texts that are begun before any goes on."""
    list(mouth.frames(REFERENCE, texts[0], Generation(max_new_rows=1)))  # the voice is computed
    streams = mouth.driver.call(lambda: [mouth.frames(REFERENCE, text, GENERATION) for text in texts])
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


def rows_of(mouth: EngineFrameGenerator, text: str) -> set[tuple[int, ...]]:
    return {tuple(row) for row in PROMPT.speech(text)}


def test_a_text_that_fails_fails_alone(mouth):
    wanted = together(mouth, TEXTS)
    only_here = rows_of(mouth, TEXTS[1]) - rows_of(mouth, TEXTS[0]) - rows_of(mouth, TEXTS[2])
    mouth.model.poison = sorted(only_here - set(before_text(PROMPT, REFERENCE)))[0]
    first, failed, last = together(mouth, TEXTS)
    assert isinstance(failed, PlantedError)
    assert [first, last] == [wanted[0], wanted[2]] and len(first) == 24
    mouth.model.poison = None
    assert together(mouth, TEXTS) == wanted
    mouth.driver.call(lambda: None)
    assert len(mouth.engine.scheduler.sequences) == 1 and not mouth.driver._replies  # the voice


def test_a_voice_that_fails_is_closed_and_tried_again_when_asked_for(mouth):
    wanted = list(mouth.frames(OTHER, TEXTS[0], GENERATION))
    fresh = EngineFrameGenerator(mouth.model, PROMPT, pick("cpu"))
    under_way = fresh.frames(REFERENCE, TEXTS[0], GENERATION)
    expected = list(mouth.frames(REFERENCE, TEXTS[0], GENERATION))
    known = {tuple(row) for row in before_text(PROMPT, REFERENCE)}
    only_here = {tuple(row) for row in before_text(PROMPT, OTHER)} - known - rows_of(mouth, TEXTS[0])
    mouth.model.poison = sorted(only_here)[0]
    with pytest.raises(PlantedError):
        fresh.frames(OTHER, TEXTS[0], GENERATION)
    assert list(under_way) == expected
    fresh.driver.call(lambda: None)
    assert len(fresh.engine.scheduler.sequences) == 1
    assert not fresh.engine.has_work
    before = mouth.model.passes
    fresh.driver.call(lambda: None)
    assert mouth.model.passes == before, "it goes on trying"
    mouth.model.poison = None
    assert list(fresh.frames(OTHER, TEXTS[0], GENERATION)) == wanted
