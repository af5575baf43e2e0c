"""On a GPU: graphs, kernels and eager steps write what the plain CPU path writes."""

import pytest
import torch

from tests.models.test_moss_speech import CONVERSATIONS, PROMPT
from tests.models.tiny import CONFIG
from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.models.moss_speech.model import MossSpeech, MossSpeechConfig

pytestmark = pytest.mark.gpu
LIMITS = EngineLimits(cache_rows=4096, rows_per_step=64, sequences_per_step=16)
LIMITED = Sampling(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.1)
UNLIMITED = Sampling(temperature=0.8, top_k=0, top_p=0.9)


def engine_on(
    device: str, use_graphs: bool = True, limits: EngineLimits = LIMITS, config: MossSpeechConfig = CONFIG
) -> Engine:
    picked = pick(device)
    model = MossSpeech.random(config, "cpu", torch.float32, seed=4, deviation=0.3).to(picked.torch_device)
    return Engine(model, picked, torch.float32, limits, use_graphs)


def replies(engine: Engine, sampling: Sampling) -> list[list[tuple[int, ...]]]:
    """Replies to all conversations in the same steps, each with its own seed."""
    sequences = [engine.open(PROMPT.rows(*conversation)) for conversation in CONVERSATIONS.values()]
    for seed, sequence in enumerate(sequences):
        engine.generate(sequence, Generation(sampling, max_new_rows=30, min_new_rows=30, seed=seed))
    generated: dict[int, list[tuple[int, ...]]] = {sequence.id: [] for sequence in sequences}
    while engine.has_work:
        for emission in engine.step():
            generated[emission.sequence.id].append(emission.row)
    return list(generated.values())


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), LIMITED, UNLIMITED], ids=["greedy", "top-k", "all"])
@pytest.mark.parametrize("use_graphs", [True, False], ids=["graphs", "eager"])
def test_the_gpu_writes_what_the_cpu_writes(sampling, use_graphs):
    torch.backends.cuda.matmul.allow_tf32 = False
    assert replies(engine_on("cuda", use_graphs), sampling) == replies(engine_on("cpu"), sampling)


def test_graphs_are_really_used():
    engine = engine_on("cuda")
    replies(engine, LIMITED)
    assert engine.runner._graphs


def test_a_cache_larger_than_the_gpu_is_refused_in_one_line():
    from vivavoce.errors import CapacityError

    picked = pick("cuda")
    model = MossSpeech.random(CONFIG, picked.torch_device, torch.bfloat16)
    with pytest.raises(CapacityError, match="does not fit"):
        Engine(model, picked, torch.bfloat16, EngineLimits(cache_rows=2**34))
