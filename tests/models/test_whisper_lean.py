"""The lean decoder has the states of the whole one, however a text is cut, and goes back without a trace."""

import torch

from tests.models.test_whisper_engine import CONFIG, model, windows_of  # noqa: F401 - a fixture
from vivavoce.models.whisper_lean import LeanDecoder


def test_states_are_those_of_the_decoder_in_any_pieces(model):  # noqa: F811
    memory = windows_of(model, 1)
    tokens = torch.randint(CONFIG.vocab_size, (1, 17), generator=torch.Generator().manual_seed(0))
    wanted = model.decoder(tokens, memory)[0]
    lean = LeanDecoder(model.decoder)
    text = lean.begin(memory)
    for begin, end in ((0, 4), (4, 5), (5, 6), (6, 13), (13, 17)):
        state = lean.read(text, tokens[0, begin:end].tolist())
        assert (state - wanted[end - 1]).abs().max() < 1e-9
    text.length = 5
    lean.read(text, [1, 2, 3])  # guesses that turn out wrong
    text.length = 5
    assert (lean.read(text, tokens[0, 5:].tolist()) - wanted[-1]).abs().max() < 1e-9
