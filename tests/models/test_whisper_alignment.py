"""Word times against transformers' on the same attention."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import WhisperConfig as TheirConfig
from transformers import WhisperForConditionalGeneration
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

from vivavoce.models.whisper.alignment import (
    TimedWord,
    cross_attention_weights,
    median_filter,
    merge_punctuation,
    split_words,
    time_warp,
    token_times,
    word_times,
)
from vivavoce.models.whisper.config import WhisperTokens
from vivavoce.models.whisper.model import Whisper

HEADS = [(0, 1), (1, 0), (1, 3)]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 14), st.integers(1, 40), st.integers(0, 2**31), st.booleans())
def test_time_warping_is_that_of_transformers(rows, columns, seed, coarse):
    cost = np.random.default_rng(seed).standard_normal((rows, columns))
    cost = cost.round() if coarse else cost  # ties, to be broken alike
    for mine, expected in zip(time_warp(cost), _dynamic_time_warping(cost), strict=True):
        assert np.array_equal(mine, expected)


@pytest.mark.parametrize("size", [1, 3, 4, 50])
def test_the_median_filter_is_that_of_transformers(size):
    values = torch.randn(3, 5, size, generator=torch.Generator().manual_seed(size))
    assert torch.equal(median_filter(values, 7), _median_filter(values[None], 7)[0])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    torch.manual_seed(0)
    config = TheirConfig(
        d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=80, max_target_positions=64, vocab_size=51865,
        attn_implementation="eager", bos_token_id=50257, eos_token_id=50257, pad_token_id=50257,
    )  # fmt: skip
    reference = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if parameter.ndim > 1 and "embed_positions" not in name:
                parameter.mul_(6.0)
    folder = tmp_path_factory.mktemp("whisper")
    reference.save_pretrained(folder)
    return reference, Whisper.load(folder)


@torch.no_grad()
def test_token_times_are_those_of_transformers(pair):
    reference, model = pair
    tokens = WhisperTokens.of_vocabulary(51865)
    mel = torch.randn(1, 80, 160, generator=torch.Generator().manual_seed(1))
    prompt, text = tokens.prompt("en"), [11, 300, 4000, 25000, 17, 9000]
    sequence = torch.tensor([[*prompt, *text, tokens.endoftext]])
    attentions = reference(input_features=mel, decoder_input_ids=sequence[:, :-1], output_attentions=True)
    made = SimpleNamespace(sequences=sequence, cross_attentions=[attentions.cross_attentions])
    skipped = len(prompt) - 1
    expected = reference._extract_token_timestamps(_InPlace(made), HEADS, num_input_ids=skipped)[0, skipped:-1]
    memory = model.decoder.cross_kv(model.encoder(mel))
    attention = cross_attention_weights(model.decoder, sequence, memory, HEADS)[0]
    for (layer, head), mine in zip(HEADS, attention, strict=True):
        assert (mine[:-1] - attentions.cross_attentions[layer][0, head]).abs().max() < 1e-5
    times = token_times(attention[:, skipped:-1])
    assert len(set(times)) > 3
    assert np.abs(times - expected.numpy()).max() <= 0.02 + 1e-6


class _InPlace(dict):
    """What `generate` returns: a dict with attributes."""

    def __init__(self, made):
        super().__init__(vars(made))
        self.__dict__.update(vars(made))


def test_words_are_timed_in_order_within_what_is_sound(pair):
    _, model = pair
    tokens = WhisperTokens.of_vocabulary(51865)
    memory = model.decoder.cross_kv(model.encoder(torch.randn(1, 80, 160)))
    letters = {11: " a", 12: "b", 13: " c", 14: "."}
    texts = [[tokens.timestamps, 11, 12], [13, 14, tokens.timestamps + 9], [tokens.timestamps]]
    by_text = word_times(
        model, tokens, memory, texts, HEADS, lambda ids: "".join(letters[id_] for id_ in ids), "en", positions=40
    )
    assert [[word.text for word in words] for words in by_text] == [[" ab"], [" c."], []]
    times = [time for words in by_text for word in words for time in (word.start, word.end)]
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= 0.8
    assert all(0 <= word.probability <= 1 for words in by_text for word in words)
    assert word_times(model, tokens, memory, [[tokens.timestamps]], HEADS, str, "en") == [[]]


def spell_bytes(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def test_words_are_split_at_spaces_and_characters_stay_whole():
    ids = list(" it's déjà vu!".encode())
    assert [spell_bytes(word) for word in split_words(ids, spell_bytes, "en")] == [" it", "'s", " déjà", " vu", "!"]
    chinese = list("今天 ok".encode())
    assert [spell_bytes(word) for word in split_words(chinese, spell_bytes, "zh")] == ["今", "天", " ", "o", "k"]
    broken = list("今".encode())[:2]
    assert split_words(broken, spell_bytes, "zh") == [broken]


def test_punctuation_goes_to_its_word():
    words = [TimedWord(text, index, index + 1, 1.0) for index, text in enumerate([" “", "Yes", ",", " no", "!", "”"])]
    assert [word.text for word in merge_punctuation(words)] == [" “Yes,", " no!”"]
