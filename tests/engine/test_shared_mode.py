"""A step in which all replies are speech skips the text head, with unchanged results."""

import pytest
import torch

from vivavoce.bench.lm import _speech
from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.models.moss_speech.model import AUDIO, MossSpeech
from vivavoce.quant.linear_bench import SMALL


@pytest.fixture(scope="module")
def model() -> MossSpeech:
    return MossSpeech.random(SMALL, dtype=torch.float64, deviation=0.1)


def replies(model: MossSpeech, lone_modes: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
    """Two spoken replies in the same steps, then a text reply that attends to their keys in the text layers."""
    model.lone_modes = lone_modes
    engine = Engine(model, pick("cpu"), torch.float64, EngineLimits(cache_rows=512))
    sequences = [engine.open(_speech(SMALL, 9 + seed, seed)) for seed in range(2)]
    for seed, sequence in enumerate(sequences):
        engine.generate(sequence, Generation(Sampling(1.0, 20, 0.9), max_new_rows=5, min_new_rows=5, seed=seed))
    while engine.has_work:
        engine.step()
    engine.append(sequences[0], [(7, 1)])
    engine.complete(sequences[0], Generation(Sampling(1.0, 20, 0.9, 1.2), max_new_rows=5, seed=9))
    return [sequence.rows for sequence in sequences]


def test_rows_are_the_same_whether_or_not_the_mode_spares_work(model):
    assert replies(model, (AUDIO,)) == replies(model, ())


def test_the_text_head_is_not_called_while_all_replies_are_speech(model):
    model.lone_modes = (AUDIO,)
    calls = []
    handle = model.text_lm_head.register_forward_hook(lambda *_: calls.append(1))
    engine = Engine(model, pick("cpu"), torch.float64, EngineLimits(cache_rows=128))
    engine.complete(engine.open(_speech(SMALL, 9, 0)), Generation(max_new_rows=3, min_new_rows=3))
    spoken = len(calls)
    engine.complete(engine.open([(7, 1)]), Generation(max_new_rows=3))
    handle.remove()
    assert spoken == 0
    assert calls
