"""On a GPU: a turn that is heard, and a reply to it, find their graphs captured; prefills by graphs are exact."""

from dataclasses import replace

import pytest

from tests.engine.test_cuda import LIMITS, engine_on
from tests.models.test_moss_speech import CONVERSATIONS, PROMPT
from tests.models.tiny import CONFIG
from vivavoce.engine.sampling import Generation, Sampling

pytestmark = pytest.mark.gpu
LONG = replace(CONFIG, max_position_embeddings=1024)


def test_after_warming_up_neither_a_turn_nor_a_reply_is_captured():
    engine = engine_on("cuda")
    engine.warm_up()
    captured = len(engine.runner._graphs)
    rows = PROMPT.rows(*CONVERSATIONS["many turns"])
    sequence = engine.open(rows[:-5])
    engine.step()
    engine.append(sequence, rows[-5:])
    engine.step()
    assert captured and len(engine.runner._graphs) == captured
    engine.complete(sequence, Generation(Sampling(temperature=0.6, top_k=20), max_new_rows=4))
    assert len(engine.runner._graphs) == captured


def test_prompts_prefilled_by_a_graph_are_continued_as_without():
    """Two long prompts, one of them in a step beside a reply, and a longer one in several steps."""
    rows = PROMPT.rows(*CONVERSATIONS["many turns"])
    greedy = Generation(Sampling(temperature=0.0), max_new_rows=12)
    replies = []
    for use_graphs in (False, True):
        engine = engine_on("cuda", use_graphs, replace(LIMITS, rows_per_step=512), LONG)
        first = engine.open(long_prompt(rows, 400))
        engine.generate(first, greedy)
        engine.step()
        others = [engine.open(long_prompt(rows, count)) for count in (420, 700)]
        for sequence in others:
            engine.generate(sequence, greedy)
        while any(sequence.is_generating for sequence in (first, *others)):
            engine.step()
        assert bool(engine.runner._graphs._prefills) == use_graphs
        replies.append([sequence.rows for sequence in (first, *others)])
    assert replies[0] == replies[1]


def long_prompt(rows, count):
    """These rows, repeated up to this many."""
    return (rows * (count // len(rows) + 1))[:count]
