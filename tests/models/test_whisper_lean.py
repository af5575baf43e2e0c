"""The lean decoder and heads guess what the whole ones do, however a text is cut, and go back without a trace."""

import copy

import pytest
import torch

from tests.models.test_whisper_engine import CONFIG, model, windows_of  # noqa: F401 - a fixture
from vivavoce.models.whisper.cpu import scripted
from vivavoce.models.whisper.drafts import CpuDraftDecoder, CpuDraftHeads, DraftLimits, WhisperHeads
from vivavoce.models.whisper.model import WindowMemory

END, TIMES = 7, CONFIG.vocab_size
BARRED_FIRST, BARRED = torch.zeros(2, CONFIG.vocab_size)
BARRED_FIRST[3::2] = BARRED[::3] = -1e9


def guessed_by(decoder, memory, tokens: list[int], how: DraftLimits) -> tuple[list[int], torch.Tensor | None]:
    """By reading all of the text anew for every token."""
    chain, sureness = [], 1.0
    while len(chain) < how.max_tokens:
        hidden = decoder(torch.tensor([tokens + chain]), memory)[0, -1]
        chances = (decoder.logits(hidden) + (BARRED if chain else BARRED_FIRST)).softmax(-1)
        sureness *= float(chances.max())
        if sureness < how.min_chance or int(chances.argmax()) == how.end:
            return chain, chances
        chain.append(int(chances.argmax()))
    return chain, None


@pytest.mark.parametrize(("most", "sureness"), [(6, 0.0), (6, 0.02), (1, 0.0)])
def test_guesses_are_those_of_the_decoder_in_any_pieces(model, most, sureness):  # noqa: F811
    memory = windows_of(model, 1)
    tokens = torch.randint(CONFIG.vocab_size, (17,), generator=torch.Generator().manual_seed(0)).tolist()
    how = DraftLimits(most, sureness, 3, 0.01, TIMES, END)
    lean = CpuDraftDecoder(model.decoder)
    text = lean.begin(memory)
    for begin, end in ((0, 4), (4, 5), (5, 6), (6, 13), (13, 17), (2, 9)):
        text.length = begin  # of what was read behind it, guesses that turned out wrong, nothing is left
        chain, unsure, begins = lean.draft(text, tokens[begin:end], BARRED_FIRST, BARRED, how)
        wanted, chances = guessed_by(model.decoder, memory, tokens[:end], how)
        assert chain == wanted and len(begins) == 0
        assert text.length == end + len(chain) - (chances is None)
        assert (len(unsure) == 0) == (chances is None)
        if chances is not None:
            assert (unsure - chances).abs().max() < 1e-3  # another form of GELU


@pytest.mark.parametrize("spelt", [CONFIG.vocab_size, 21])
def test_rounded_guesses_are_nearly_those_of_the_decoder(model, spelt):  # noqa: F811
    memory, tokens, how = windows_of(model, 1), [1, 5, 2, 8], DraftLimits(1, 2.0, 3, 0.01, TIMES, END)
    narrow = copy.deepcopy(model.decoder).float()
    lean = CpuDraftDecoder(narrow, rounded=True)
    text = lean.begin(WindowMemory(memory.keys.float(), memory.values.float()))
    chain, unsure, _ = lean.draft(text, tokens, BARRED_FIRST[:spelt].float(), BARRED[:spelt].float(), how)
    logits = model.decoder.logits(model.decoder(torch.tensor([tokens]), memory)[0, -1])
    chances = (logits[:spelt] + BARRED_FIRST[:spelt]).softmax(-1)
    assert chain == [] and unsure.shape == chances.shape
    assert 0 < (unsure - chances).abs().max() < 0.02


def test_first_guess_of_a_time_is_as_sure_as_all_likely_times(model):  # noqa: F811
    memory = windows_of(model, 1)
    how = DraftLimits(2, 0.0, 3, 0.0, 0, END)
    lean = CpuDraftDecoder(model.decoder)
    chain, _, begins = lean.draft(lean.begin(memory), [1, 2], BARRED_FIRST, BARRED, how)
    best = float(begins.topk(3)[0].sum())
    assert len(chain) == 2 and int(begins.argmax()) == chain[0]
    for sureness, length in ((best * 0.99, 1), (min(1.0, best * 1.01), 0)):
        how = DraftLimits(1, sureness, 3, 0.0, 0, END)
        assert len(lean.draft(lean.begin(memory), [1, 2], BARRED_FIRST, BARRED, how)[0]) == length


@pytest.mark.parametrize("begun", [True, False])
def test_heads_guess_what_they_are_trained_to(model, begun):  # noqa: F811
    torch.manual_seed(3)
    heads = WhisperHeads.beside(model.decoder, places=4).to(model.decoder.embed_tokens.weight.dtype)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    memory = windows_of(model, 1)
    keys, values = memory.keys[-1], memory.values[-1]
    hidden = torch.randn(CONFIG.d_model, dtype=keys.dtype)

    def look(query: torch.Tensor) -> torch.Tensor:
        mixed = torch.nn.functional.scaled_dot_product_attention(query.transpose(0, 1)[None], keys, values)
        return mixed[0].transpose(0, 1)

    with torch.inference_mode():
        states = heads(hidden if begun else heads.start, model.decoder.embed_tokens.weight[5], look)
        wanted = (model.decoder.logits(states) + BARRED).softmax(-1).topk(3)
        ids, chances = scripted(CpuDraftHeads(heads, model.decoder))(
            hidden if begun else None, 5, keys, values, BARRED, 3
        )
    assert ids.tolist() == wanted.indices.tolist() and (chances - wanted.values).abs().max() < 1e-5
