"""A text that fails in CosyVoice fails in its caller's thread; the others are synthesized completely."""

import threading

import pytest
import torch

from tests.models.test_cosyvoice_graphs import a_prompt, tiny_speech
from tests.models.tiny_cosyvoice import sizes
from vivavoce.device import pick
from vivavoce.engine.engine import EngineLimits
from vivavoce.engine.sampling import Generation
from vivavoce.errors import CapacityError
from vivavoce.models.cosyvoice.lm import CosyVoiceLM, Interleave, PromptPrefix
from vivavoce.models.flow.model import FlowSpeech
from vivavoce.tts.cosyvoice import PUBLISHED
from vivavoce.tts.cosyvoice_engine import CosyVoiceSynthesizer
from vivavoce.tts.cosyvoice_hops import UtteranceOptions

LEFT, CODES = 1, 50
LIMITS = EngineLimits(cache_rows=2048, context=120)


class PlantedError(Exception):
    """The fault of these tests."""


class FaultySpeech(FlowSpeech):
    """Makes hops in full, then fails where one belongs to a text of the seed `poison`, after its first hops."""

    def __init__(self, speech):
        super().__init__(speech.flow, speech.vocoder)
        self.poison, self.failures = None, 0

    def step_batch(self, states, codes, final):
        result = super().step_batch(states, codes, final)
        theirs = [state for state in states if int(state.vocoder.start.seed) == self.poison]
        if any(state.flow.position > 60 for state in theirs):
            self.failures += 1
            raise PlantedError
        return result


class FaultyLM(CosyVoiceLM):
    """Cannot compute one row."""

    poison = None

    def forward(self, rows, batch):
        if self.poison is not None and self.poison in [tuple(row) for row in rows.tolist()]:
            raise PlantedError
        return super().forward(rows, batch)


@pytest.fixture
def synthesizer():
    lm = CosyVoiceLM.random(sizes(3).lm, seed=1)
    lm.__class__ = FaultyLM
    return CosyVoiceSynthesizer(lm, FaultySpeech(tiny_speech()), pick("cpu"), LEFT, LIMITS)


@pytest.fixture
def voice(synthesizer):
    return synthesizer.speech.flow.voice(a_prompt(35))


def rows_of(synthesizer, seed):
    return synthesizer.lm.prompt([3, 4, 5], [synthesizer.lm.config.end_of_prompt], [seed + 1] * 20)


def text(synthesizer, voice, seed, codes=CODES):
    generation = Generation(PUBLISHED, max_new_rows=codes, min_new_rows=codes, seed=seed)
    return synthesizer.text(rows_of(synthesizer, seed), generation, UtteranceOptions(voice, lambda: 0.5, seed))


def heard(streams):
    """What comes of each stream, listened to on a thread of its own: its sound, or its error."""
    found = [None] * len(streams)

    def listen(place):
        try:
            found[place] = torch.cat(list(streams[place]))
        except Exception as error:
            found[place] = error

    threads = [threading.Thread(target=listen, args=(place,), daemon=True) for place in range(len(streams))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it waits for ever"
    return found


def assert_said(sounds, wanted):
    for sound, expected in zip(sounds, wanted, strict=True):
        assert isinstance(sound, torch.Tensor), repr(sound)
        assert sound.shape == expected.shape
        torch.testing.assert_close(sound, expected, rtol=0, atol=1e-4)


def assert_nothing_is_left(synthesizer):
    synthesizer.call(lambda: None)
    synthesizer.driver.call(lambda: None)
    assert not synthesizer._active and not synthesizer.engine.scheduler.sequences
    assert synthesizer.engine.scheduler.pool.free == synthesizer.engine.scheduler.pool.size


def assert_fails_alone(synthesizer, voice, failing, error, plant=None):
    """Read another text while the failing one is not read: all work, and the fault, is in the other thread."""
    (wanted,) = heard([text(synthesizer, voice, 0, 90)])
    next(failing)
    if plant is not None:
        plant()
    assert_said([torch.cat(list(text(synthesizer, voice, 0, 90)))], [wanted])
    with pytest.raises(error):
        list(failing)
    assert_nothing_is_left(synthesizer)


def test_a_hop_that_fails_fails_its_text_alone(synthesizer, voice):
    synthesizer.speech.poison = 1
    assert_fails_alone(synthesizer, voice, text(synthesizer, voice, 1, 90), PlantedError)
    assert synthesizer.speech.failures


def test_a_step_that_fails_fails_its_text_alone(synthesizer, voice):
    made = {}
    for seed in (0, 1):
        sequence = synthesizer.engine.open(rows_of(synthesizer, seed))
        made[seed] = synthesizer.engine.complete(
            sequence, Generation(PUBLISHED, max_new_rows=90, min_new_rows=90, seed=seed)
        )
        synthesizer.engine.close(sequence)

    def plant():
        synthesizer.lm.poison = next(row for row in made[1][60:] if row not in made[0] and row not in made[1][:60])

    assert_fails_alone(synthesizer, voice, text(synthesizer, voice, 1, 90), PlantedError, plant)


def test_a_text_beyond_the_cache_fails_by_itself(synthesizer, voice):
    rounds = Interleave(synthesizer.lm.config, PromptPrefix((synthesizer.lm.config.end_of_prompt,)))
    pieces = iter([[3, 4, 5, 6, 7] * 40])
    growing = synthesizer.streaming_text(
        rounds, pieces, Generation(PUBLISHED, 1, seed=1), UtteranceOptions(voice, lambda: 0.5, 1)
    )
    assert_fails_alone(synthesizer, voice, growing, CapacityError)


def test_texts_on_threads_of_their_own_each_get_their_own_end(synthesizer, voice):
    wanted = heard([text(synthesizer, voice, seed) for seed in range(3)])
    synthesizer.speech.poison = 1
    first, failed, last = heard([text(synthesizer, voice, seed) for seed in range(3)])
    assert isinstance(failed, PlantedError)
    assert_said([first, last], [wanted[0], wanted[2]])
    assert_nothing_is_left(synthesizer)


def test_a_text_that_cannot_be_begun_leaves_nothing(synthesizer, voice):
    generation = Generation(PUBLISHED, max_new_rows=9)
    rows = rows_of(synthesizer, 0) * 30
    (failed,) = heard(
        [synthesizer.text(rows[: synthesizer.engine.capacity], generation, UtteranceOptions(voice, lambda: 0.5))]
    )
    assert isinstance(failed, CapacityError)
    assert_nothing_is_left(synthesizer)
