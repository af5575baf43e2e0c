"""Draft decoder and heads in TorchScript agree with the plain modules, also after tokens are dropped from a text."""

import copy

import pytest
import torch

from tests.models.test_whisper_engine import CONFIG, model, windows_of  # noqa: F401 - a fixture
from vivavoce.models.whisper.cpu import scripted
from vivavoce.models.whisper.cpu_drafts import CpuDraftDecoder, CpuDraftHeads, DraftLimits
from vivavoce.models.whisper.drafts import WhisperHeads
from vivavoce.models.whisper.model import WindowMemory

END, TIMES = 7, CONFIG.vocab_size
BARRED_FIRST, BARRED = torch.zeros(2, CONFIG.vocab_size)
BARRED_FIRST[3::2] = BARRED[::3] = -1e9


def expected_draft(decoder, memory, tokens: list[int], limits: DraftLimits) -> tuple[list[int], torch.Tensor | None]:
    """Greedy drafts by a pass over the whole text for every token."""
    chain, probability = [], 1.0
    while len(chain) < limits.max_tokens:
        hidden = decoder(torch.tensor([tokens + chain]), memory)[0, -1]
        probabilities = (decoder.logits(hidden) + (BARRED if chain else BARRED_FIRST)).softmax(-1)
        probability *= float(probabilities.max())
        if probability < limits.min_probability or int(probabilities.argmax()) == limits.end:
            return chain, probabilities
        chain.append(int(probabilities.argmax()))
    return chain, None


@pytest.mark.parametrize(("max_tokens", "min_probability"), [(6, 0.0), (6, 0.02), (1, 0.0)])
def test_drafts_equal_the_decoders_for_any_split_of_the_text(model, max_tokens, min_probability):  # noqa: F811
    memory = windows_of(model, 1)
    tokens = torch.randint(CONFIG.vocab_size, (17,), generator=torch.Generator().manual_seed(0)).tolist()
    limits = DraftLimits(max_tokens, min_probability, 3, 0.01, TIMES, END)
    drafter = CpuDraftDecoder(model.decoder)
    text = drafter.begin(memory)
    for begin, end in ((0, 4), (4, 5), (5, 6), (6, 13), (13, 17), (2, 9)):
        text.length = begin  # drops later tokens
        chain, unlikely, begins = drafter.draft(text, tokens[begin:end], BARRED_FIRST, BARRED, limits)
        expected, probabilities = expected_draft(model.decoder, memory, tokens[:end], limits)
        assert chain == expected and len(begins) == 0
        assert text.length == end + len(chain) - (probabilities is None)
        assert (len(unlikely) == 0) == (probabilities is None)
        if probabilities is not None:
            assert (unlikely - probabilities).abs().max() < 1e-3  # another form of GELU


@pytest.mark.parametrize("vocabulary", [CONFIG.vocab_size, 21])
def test_int8_drafts_are_close_to_the_decoders(model, vocabulary):  # noqa: F811
    memory, tokens, limits = windows_of(model, 1), [1, 5, 2, 8], DraftLimits(1, 2.0, 3, 0.01, TIMES, END)
    decoder = copy.deepcopy(model.decoder).float()
    drafter = CpuDraftDecoder(decoder, rounded=True)
    text = drafter.begin(WindowMemory(memory.keys.float(), memory.values.float()))
    chain, unlikely, _ = drafter.draft(
        text, tokens, BARRED_FIRST[:vocabulary].float(), BARRED[:vocabulary].float(), limits
    )
    logits = model.decoder.logits(model.decoder(torch.tensor([tokens]), memory)[0, -1])
    probabilities = (logits[:vocabulary] + BARRED_FIRST[:vocabulary]).softmax(-1)
    assert chain == [] and unlikely.shape == probabilities.shape
    assert 0 < (unlikely - probabilities).abs().max() < 0.02


def test_a_first_timestamp_counts_the_probability_of_all_likely_timestamps(model):  # noqa: F811
    memory = windows_of(model, 1)
    limits = DraftLimits(2, 0.0, 3, 0.0, 0, END)
    drafter = CpuDraftDecoder(model.decoder)
    chain, _, begins = drafter.draft(drafter.begin(memory), [1, 2], BARRED_FIRST, BARRED, limits)
    best = float(begins.topk(3)[0].sum())
    assert len(chain) == 2 and int(begins.argmax()) == chain[0]
    for min_probability, length in ((best * 0.99, 1), (min(1.0, best * 1.01), 0)):
        limits = DraftLimits(1, min_probability, 3, 0.0, 0, END)
        assert len(drafter.draft(drafter.begin(memory), [1, 2], BARRED_FIRST, BARRED, limits)[0]) == length


@pytest.mark.parametrize("has_state", [True, False])
def test_scripted_heads_equal_the_plain_heads(model, has_state):  # noqa: F811
    torch.manual_seed(3)
    heads = WhisperHeads.for_decoder(model.decoder, places=4).to(model.decoder.embed_tokens.weight.dtype)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    memory = windows_of(model, 1)
    keys, values = memory.keys[-1], memory.values[-1]
    hidden = torch.randn(CONFIG.d_model, dtype=keys.dtype)

    def cross_attend(query: torch.Tensor) -> torch.Tensor:
        mixed = torch.nn.functional.scaled_dot_product_attention(query.transpose(0, 1)[None], keys, values)
        return mixed[0].transpose(0, 1)

    with torch.inference_mode():
        states = heads(hidden if has_state else heads.start, model.decoder.embed_tokens.weight[5], cross_attend)
        expected = (model.decoder.logits(states) + BARRED).softmax(-1).topk(3)
        ids, probabilities = scripted(CpuDraftHeads(heads, model.decoder))(
            hidden if has_state else None, 5, keys, values, BARRED, 3
        )
    assert ids.tolist() == expected.indices.tolist() and (probabilities - expected.values).abs().max() < 1e-5
