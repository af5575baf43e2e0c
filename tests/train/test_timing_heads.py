"""The heads that tell when words were said are found by how they move through sounds whose text is known."""

import json

import numpy as np
import pytest
import torch

from vivavoce import hub
from vivavoce.bench.asr import spoken_sentences
from vivavoce.models.whisper.model import Whisper
from vivavoce.train.asr import Vocabulary
from vivavoce.train.asr.batches import Recordings
from vivavoce.train.asr.evaluate import steadiness, timing_heads
from vivavoce.train.corpus import Corpus


def test_steadiness_is_high_only_for_attention_that_moves_forward():
    ahead = torch.eye(6).repeat_interleave(3, dim=1)
    still = torch.zeros(6, 18)
    still[:, 4] = 1.0
    looks = torch.stack([ahead, ahead.flip(0), still, torch.full((6, 18), 0.1)])
    assert steadiness(looks).tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-5)


def test_heads_of_the_bundled_recogniser_are_found_and_not_those_of_its_last_layer():
    folder = hub.resolve("mini-asr")
    spoken = [
        ((one.samples.numpy() * 32767).astype(np.int16), one.text, "any") for one in spoken_sentences(max_recordings=4)
    ]
    recordings = Recordings.of_corpus(Corpus.of(spoken))
    found = timing_heads(Whisper.load(folder), Vocabulary.read(folder), recordings)
    named = json.loads((folder / "generation_config.json").read_text(encoding="utf8"))["alignment_heads"]
    assert len(found) == 4 and len({*found} & {tuple(pair) for pair in named}) >= 2
