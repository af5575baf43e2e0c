"""Keys and values in float8: what is lost of them, and that the engine treats them as it does floats."""

import json

import pytest
import torch

from tests.models.test_moss_speech import CONVERSATIONS, PROMPT
from tests.models.tiny import tiny_model
from vivavoce import hub
from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.errors import InputError
from vivavoce.models.interface import Row
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.moss_speech.prompt import DEFAULT_SYSTEM, MossSpeechPrompt, Turn
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.nn.paged_kv import FP8, KVShape, to_fp8, widened

MODEL = tiny_model(seed=5)
CPU = pick("cpu")
ROWS = PROMPT.rows(*CONVERSATIONS["many turns"])
REPLY = Generation(GREEDY, max_new_rows=12)


def make_engine(rows_per_step: int = 64, model: MossSpeech = MODEL) -> Engine:
    return Engine(model, CPU, torch.float32, EngineLimits(4, 4096, rows_per_step=rows_per_step, kv="fp8"))


def test_a_head_keeps_three_bits_of_each_number_whatever_its_size():
    heads = torch.randn(50, 4, 64) * 10.0 ** torch.arange(-4, 4).repeat(25, 1).view(50, 4, 1)
    found = widened(*to_fp8(heads), torch.float64)
    assert ((found - heads).abs() <= heads.abs() / 16 + heads.abs().amax(-1, keepdim=True) * 2**-18).all()
    assert (found - heads).norm() / heads.norm() < 0.03
    assert not widened(*to_fp8(torch.zeros(2, 8)), torch.float32).any()


def test_a_row_costs_a_byte_a_number_and_four_a_head():
    assert KVShape(40, 8, 128).bytes_per_row(FP8) == 2 * 40 * 8 * (128 + 4)
    cache = make_engine().runner.cache
    rows = cache.keys.shape[1] * cache.page_size
    assert sum(tensor.nbytes for tensor in cache.tensors()) == rows * MODEL.kv_shape.bytes_per_row(FP8)


def test_prefill_in_pieces_equals_prefill_at_once():
    whole, cut = make_engine(), make_engine(rows_per_step=3)
    assert cut.complete(cut.open(ROWS), REPLY) == whole.complete(whole.open(ROWS), REPLY)


def test_a_fork_that_goes_its_own_way_leaves_the_other_as_it_was():
    engine, beside = make_engine(), make_engine()
    first = engine.open(ROWS[:-3])
    while engine.has_work:
        engine.step()
    second = engine.fork(first)
    engine.append(second, ROWS[:5])
    engine.append(first, ROWS[-3:])
    assert engine.complete(first, REPLY) == beside.complete(beside.open(ROWS), REPLY)
    assert engine.complete(second, REPLY) == beside.complete(beside.open([*ROWS[:-3], *ROWS[:5]]), REPLY)


def test_a_model_that_cannot_have_it_is_refused_in_one_line():
    with pytest.raises(InputError, match="kv must be 'float' or 'fp8', not 'int3'"):
        Engine(MODEL, CPU, torch.float32, EngineLimits(kv="int3"))  # type: ignore[arg-type]
    other = tiny_model(seed=5)
    other.takes_fp8_cache = False
    with pytest.raises(InputError, match="leave kv at 'float'"):
        make_engine(model=other)


def greedy_behind(engine: Engine, prompt: list[Row], reply: list[Row]) -> list[Row]:
    """The likeliest row behind each row of a reply that somebody else made."""
    sequence, made = engine.open(prompt), []
    for place, row in enumerate(reply):
        made += engine.complete(sequence, Generation(GREEDY, max_new_rows=1))
        engine.rewind(sequence, len(prompt) + place)
        engine.append(sequence, [row])
    return made


def test_the_miniature_writes_99_of_100_rows_as_it_does_on_floats():
    pytest.importorskip("tokenizers")
    folder = hub.resolve("mini-speech", offline=True)
    model = MossSpeech.load(folder)
    prompt = MossSpeechPrompt(model.config, TextTokenizer.load(folder))
    listed = json.loads((hub.BUNDLED / "questions" / "questions.json").read_text(encoding="utf8"))
    said = [*(entry["reply"] for entry in listed[:6]), "The swimming pool is on the top floor."]
    spoken = [prompt.rows([Turn("system", "Read this aloud."), Turn("user", text)], "speech") for text in said]
    written = prompt.rows([Turn("system", DEFAULT_SYSTEM["text"]), Turn("user", "When is breakfast?")], "text")
    plain = Engine(model, CPU, torch.float32, EngineLimits(cache_rows=1024))
    same = total = 0
    for rows, live in [*((rows, 1) for rows in spoken), (written, 0)]:  # what stands in the other channel says nothing
        reply = plain.complete(plain.open(rows), Generation(GREEDY, max_new_rows=50))
        found = greedy_behind(make_engine(model=model), rows, reply)
        same += sum(mine[live] == other[live] for mine, other in zip(found, reply, strict=True))
        total += len(reply)
    assert total > 200
    assert same >= 0.99 * total, f"{same} of {total}"
