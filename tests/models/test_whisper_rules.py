"""The logit rules against transformers' processors, on logits made to provoke them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from vivavoce.models.whisper.config import WhisperTokens
from vivavoce.models.whisper.decoding import Hotwords, Suppress, SuppressAtStart, TimestampRules, apply

TOKENS = WhisperTokens.in_order(20, ["en"])  # text 0…19, then nine special tokens, then times
TIMES = 12
SIZE = TOKENS.timestamps + TIMES


@st.composite
def situations(draw):
    """Rows of tokens that may break every rule, and logits that favour anything."""
    rows, count = draw(st.integers(1, 4)), draw(st.integers(0, 6))
    kinds = st.one_of(st.integers(0, 19), st.integers(TOKENS.timestamps, SIZE - 1))
    sampled = [[draw(kinds) for _ in range(count)] for _ in range(rows)]
    seed, scale = draw(st.integers(0, 2**31)), draw(st.sampled_from([0.1, 1.0, 10.0]))
    logits = scale * torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed))
    favoured = draw(st.integers(0, SIZE - 1))
    logits[:, favoured] += draw(st.sampled_from([0.0, 5.0]))
    return torch.tensor(sampled, dtype=torch.long).reshape(rows, count), logits


@settings(deadline=None, max_examples=300)
@given(situations(), st.sampled_from([None, 3]))
def test_timestamp_rules_are_those_of_transformers(situation, latest):
    sampled, logits = situation
    config = GenerationConfig(eos_token_id=TOKENS.endoftext)
    config.no_timestamps_token_id, config.max_initial_timestamp_index = TOKENS.notimestamps, latest
    theirs = WhisperTimeStampLogitsProcessor(config, begin_index=3)
    prompt = torch.tensor([TOKENS.prompt("en", timestamps=True)] * len(sampled))
    expected = theirs(torch.cat([prompt, sampled], dim=1), logits)
    mine = TimestampRules(TOKENS, None if latest is None else latest * 0.02)(logits, sampled)
    assert torch.equal(mine, expected)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_suppression_is_that_of_transformers(count):
    logits = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(count))
    sampled = torch.zeros(2, count, dtype=torch.long)
    given_ids = torch.zeros(2, 4 + count, dtype=torch.long)
    always = SuppressTokensLogitsProcessor([1, 5], device="cpu")(given_ids, logits)
    expected = SuppressTokensAtBeginLogitsProcessor([2, 20], 4, device="cpu")(given_ids, always)
    assert torch.equal(apply([Suppress([5, 1]), SuppressAtStart([20, 2])], logits, sampled), expected)


def test_hotwords_raise_the_next_token_of_every_word_that_fits():
    rule = Hotwords([[4, 5, 6], [5, 9]], bonus=3.0)
    raised = rule(torch.zeros(3, SIZE), torch.tensor([[1, 2], [2, 4], [4, 5]])).nonzero().tolist()
    assert raised == [[0, 4], [0, 5], [1, 5], [2, 6], [2, 9]]


def test_rules_do_not_touch_the_logits_they_are_given():
    logits, sampled = torch.zeros(1, SIZE), torch.tensor([[1]])
    rules = [Suppress([0]), TimestampRules(TOKENS), Hotwords([[3]])]
    apply(rules, logits, sampled)
    assert not logits.any()
