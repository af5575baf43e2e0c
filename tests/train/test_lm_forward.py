"""The training forward is the engine's model: the same states on packed sequences, the same greedy replies."""

import torch

from tests.models.tiny import CONFIG, ByteTokenizer, tiny_model
from vivavoce.device import pick
from vivavoce.engine.engine import Engine
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.models.moss_speech.prompt import MossSpeechPrompt, Turn
from vivavoce.nn.paged_kv import CachePiece, PagedCache, RowBatch
from vivavoce.train.lm import hidden_states, within_segments
from vivavoce.train.lm.evaluate import greedy_replies

PROMPT = MossSpeechPrompt(CONFIG, ByteTokenizer())


def _prompts():
    spoken = PROMPT.rows(
        [Turn("system", "Be kind."), Turn("user", [3, 1, 4, 1, 5, 9]), Turn("assistant", [2, 6])], "text"
    )
    written = PROMPT.rows([Turn("user", "Hello"), Turn("assistant", [7, 7, 8]), Turn("user", "again")], "speech")
    return [spoken, written, PROMPT.rows([Turn("user", [60])], "speech")]


def _paged_states(model, rows):
    """The engine's path: one prefill piece over pages."""
    pages = -(-len(rows) // 16) + 1
    cache = PagedCache.allocate(model.kv_shape, pages, 16, torch.float64, torch.device("cpu"))
    table = torch.arange(1, pages, dtype=torch.int32)[None]
    slots, positions = torch.zeros(len(rows), dtype=torch.int32), torch.arange(len(rows), dtype=torch.int32)
    batch = RowBatch(cache, table, slots, positions, 0, (CachePiece(slice(0, len(rows)), 0, 0),))
    return model.forward(torch.tensor(rows), batch)


def _packed(prompts):
    rows = torch.tensor([row for prompt in prompts for row in prompt])[None]
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])[None]
    segments = torch.cat([torch.full((len(prompt),), number) for number, prompt in enumerate(prompts)])[None]
    return rows, positions, within_segments(segments)


def test_packed_conversations_have_the_states_that_the_engine_gives_each_alone():
    model, prompts = tiny_model(), _prompts()
    text, audio = hidden_states(model, *_packed(prompts))
    alone = torch.cat([_paged_states(model, prompt) for prompt in prompts])
    torch.testing.assert_close(text[0], alone[:, 0], atol=1e-10, rtol=1e-8)
    torch.testing.assert_close(audio[0], alone[:, 1], atol=1e-10, rtol=1e-8)


def test_every_weight_of_the_model_gets_a_gradient():
    model = tiny_model().requires_grad_(True)
    text, audio = hidden_states(model, *_packed(_prompts()))
    total = model.text_lm_head(text).logsumexp(-1).sum() + model.audio_lm_head(audio).logsumexp(-1).sum()
    gradients = torch.autograd.grad(total, list(model.parameters()))
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_greedy_replies_are_those_of_the_engine():
    model, prompts = tiny_model(seed=4), _prompts()
    made = greedy_replies(model, prompts, max_rows=24, batch_size=2)
    engine = Engine(model, pick("cpu"), dtype=torch.float64)
    for prompt, reply in zip(prompts, made, strict=True):
        expected = engine.complete(engine.open(prompt), Generation(GREEDY, max_new_rows=24))
        assert reply == expected
    assert {model.start_mode(prompt[-1]) for prompt in prompts} == {0, 1}
