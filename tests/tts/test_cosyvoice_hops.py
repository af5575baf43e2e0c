"""Which texts share a hop: several where that is sooner, and no text waits long for others."""

import pytest
import torch

from tests.models.test_cosyvoice_graphs import a_prompt, tiny_speech
from tests.models.tiny_cosyvoice import sizes
from vivavoce.audio.chunking import ChunkUnit
from vivavoce.device import pick
from vivavoce.engine.sampling import Generation
from vivavoce.models.cosyvoice.lm import CosyVoiceLM
from vivavoce.models.flow.model import FlowSpeech
from vivavoce.runtime.executor import DeadlineExecutor
from vivavoce.tts.cosyvoice import PUBLISHED
from vivavoce.tts.cosyvoice_engine import CosyVoiceSynthesizer
from vivavoce.tts.cosyvoice_hops import MAX_WAIT_STEPS, HopPolicy, SynthesizedText

LEFT, FIRST, LOOKAHEAD, CHUNK = 1, 15, 3, 25


class Noted(FlowSpeech):
    """Remembers how many codes each text of a hop decoded."""

    def __init__(self, speech):
        super().__init__(speech.flow, speech.vocoder)
        self.hops = []

    def step_batch(self, states, codes, final):
        self.hops.append([len(each) for each in codes])
        return super().step_batch(states, codes, final)


@pytest.fixture
def synthesizer():
    lm = CosyVoiceLM.random(sizes(3).lm, seed=1)
    stands = DeadlineExecutor("viva-test", threads=0)  # the tests run its tasks
    stands.start()
    return CosyVoiceSynthesizer(lm, Noted(tiny_speech()), pick("cpu"), LEFT, executor=stands)


@pytest.fixture
def voice(synthesizer):
    return synthesizer.speech.flow.voice(a_prompt(35))


def start_text(synthesizer, voice, seed, lead=0.0):
    """A text that is to be said, whose listener is so many seconds behind."""
    policy = HopPolicy(ChunkUnit(CHUNK, LOOKAHEAD, 0.04), synthesizer.speech.flow.first_hop(voice))
    text = SynthesizedText(policy, synthesizer.speech.start(voice, LEFT, seed), lambda: lead)
    rows = synthesizer.lm.prompt([3, 4, 5], [synthesizer.lm.config.end_of_prompt], [seed] * 20)
    generation = Generation(PUBLISHED, max_new_rows=400, min_new_rows=400, seed=seed)
    synthesizer._start(text, lambda text: synthesizer.driver.deliver_to(synthesizer._open(text, rows), generation))
    return text


def advance_until(synthesizer, is_so):
    """A hop where one is due, else a step of the language model, until something is so."""
    for _ in range(400):
        if is_so():
            return
        (synthesizer if synthesizer.due() is not None else synthesizer.driver).do_next()
    raise AssertionError("it never was so")


def written(text):
    return text.sequence.generated


def sounds(text):
    return [text.messages.get() for _ in range(text.messages.qsize())]


@pytest.mark.parametrize(("apart", "hops"), [(2, [5]), (MAX_WAIT_STEPS + 4, [1, 1, 1, 1, 1])])
def test_texts_that_start_nearly_together_share_their_first_hop(synthesizer, voice, apart, hops):
    texts = []
    for seed in range(5):
        texts.append(start_text(synthesizer, voice, seed))
        advance_until(synthesizer, lambda: written(texts[-1]) >= apart)
    advance_until(synthesizer, lambda: all(text.hops for text in texts))
    firsts = [len(hop) for hop in synthesizer.speech.hops if FIRST + LOOKAHEAD in hop]
    assert firsts == hops
    assert torch.isfinite(torch.cat([sound for text in texts for sound in sounds(text)])).all()


def test_the_wait_for_further_texts_is_bounded(synthesizer, voice):
    first = start_text(synthesizer, voice, 0)
    texts = [first]
    while not first.hops:
        advance_until(synthesizer, lambda: first.hops or written(texts[-1]) >= 6)
        texts.append(start_text(synthesizer, voice, len(texts)))
    assert written(first) <= FIRST + LOOKAHEAD + MAX_WAIT_STEPS + len(texts)


def test_a_text_with_little_lead_does_not_wait(synthesizer, voice):
    spoken = start_text(synthesizer, voice, 0, lead=0.1)
    advance_until(synthesizer, lambda: spoken.hops == 1 and len(spoken.codes) == CHUNK)
    start_text(synthesizer, voice, 1)
    advance_until(synthesizer, lambda: spoken.hops == 2)
    assert synthesizer.speech.hops == [[FIRST + LOOKAHEAD], [CHUNK]]


def test_texts_with_a_full_chunk_join_a_hop(synthesizer, voice):
    late, other = start_text(synthesizer, voice, 0, lead=0.3), start_text(synthesizer, voice, 1, lead=9.0)
    advance_until(synthesizer, lambda: late.hops == other.hops == 4)
    assert synthesizer.speech.hops == [[FIRST + LOOKAHEAD] * 2, [CHUNK] * 2, [CHUNK] * 2, [CHUNK] * 2]


def test_a_single_text_takes_longer_hops_as_its_lead_grows(synthesizer, voice):
    text = start_text(synthesizer, voice, 0, lead=9.0)
    advance_until(synthesizer, lambda: text.hops == 3)
    assert synthesizer.speech.hops == [[FIRST + LOOKAHEAD], [2 * CHUNK], [2 * CHUNK]]
