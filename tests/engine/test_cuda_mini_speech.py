"""The bundled miniature on a GPU: greedily it writes what it writes on the CPU."""

import pytest
import torch

from vivavoce import hub
from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.models.interface import Row
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.moss_speech.prompt import DEFAULT_SYSTEM, MossSpeechPrompt, Turn
from vivavoce.models.tokenizers import TextTokenizer

pytestmark = pytest.mark.gpu
TEXTS = ("Breakfast is served from seven until ten in the morning.", "The vegetable curry is eleven euros.")
REPLY = Generation(GREEDY, max_new_rows=60)


def engine_on(device: str, dtype: torch.dtype, kv: str = "float") -> Engine:
    place = pick(device)
    model = MossSpeech.load(hub.resolve("mini-speech", offline=True), place.torch_device, dtype)
    limits = EngineLimits(cache_rows=32768, rows_per_step=512, sequences_per_step=128, kv=kv)  # type: ignore[arg-type]
    return Engine(model, place, dtype, limits)


@pytest.fixture(scope="module")
def prompts() -> list[list[Row]]:
    pytest.importorskip("tokenizers")
    folder = hub.resolve("mini-speech", offline=True)
    prompt = MossSpeechPrompt(MossSpeech.load(folder).config, TextTokenizer.load(folder))
    spoken = [prompt.rows([Turn("system", "Read this aloud."), Turn("user", text)], "speech") for text in TEXTS]
    written = prompt.rows([Turn("system", DEFAULT_SYSTEM["text"]), Turn("user", "When is breakfast?")], "text")
    return [*spoken, written]


@pytest.fixture(scope="module")
def replies(prompts) -> list[list[Row]]:
    """What the CPU writes in float32."""
    engine = engine_on("cpu", torch.float32)
    return [engine.complete(engine.open(prompt), REPLY) for prompt in prompts]


def test_every_row_in_float32_is_the_same(prompts, replies):
    torch.backends.cuda.matmul.allow_tf32 = False
    engine = engine_on("cuda", torch.float32)
    assert [engine.complete(engine.open(prompt), REPLY) for prompt in prompts] == replies


@pytest.mark.parametrize(("kv", "share"), [("float", 0.98), ("fp8", 0.97)])
def test_in_bfloat16_nearly_all_rows_are_the_same(prompts, replies, kv, share):
    """Each row behind what stands before it on the CPU, so that one that differs is counted once."""
    engine = engine_on("cuda", torch.bfloat16, kv)
    expected: dict[int, Row] = {}
    for prompt, reply in zip(prompts, replies, strict=True):
        for place, row in enumerate(reply):
            sequence = engine.open([*prompt, *reply[:place]])
            engine.generate(sequence, Generation(GREEDY, max_new_rows=1))
            expected[sequence.id] = row
    made: dict[int, Row] = {}
    while engine.has_work:
        made |= {emission.sequence.id: emission.row for emission in engine.step()}
    same = sum(made[key] == row for key, row in expected.items())
    assert len(expected) > 80
    assert same >= share * len(expected), f"{same} of {len(expected)}"
