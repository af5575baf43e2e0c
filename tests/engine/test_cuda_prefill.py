"""On a GPU: a turn that is heard, and a reply to it, find their graphs captured."""

import pytest

from tests.engine.test_cuda import engine_on
from tests.models.test_moss_speech import CONVERSATIONS, PROMPT
from vivavoce.engine.sampling import Generation, Sampling

pytestmark = pytest.mark.gpu


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
