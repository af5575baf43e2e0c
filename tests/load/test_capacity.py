"""What conversations cost and leave behind, by the benchmarks that say so, on the untrained miniature."""

import asyncio

import pytest
import torch

from tests.dialogue.voices import talk
from vivavoce.audio.buzz import buzz
from vivavoce.audio.sound import Sound
from vivavoce.bench import budget, sessions
from vivavoce.minis.untrained import untrained_codec, write_untrained
from vivavoce.models.flow_state import VoicePrompt

WARM, COUNT = 8, 10
GROWTH = COUNT * 2**20  # what one reply keeps of its sound alone is more than a megabyte


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A folder that can be served: language model, codec, and a voice by name."""
    folder = tmp_path_factory.mktemp("untrained")
    write_untrained(folder)
    codec = untrained_codec()
    with torch.no_grad():
        sound = buzz(2.0, 24_000, seed=1)
        codes = codec.encode(sound)
        mel = codec.mel(torch.from_numpy(sound.samples))[0].T
        codec.save_voice("buzz", VoicePrompt(codes[:20], mel[:80], torch.linspace(-1, 1, 192)))
        codec.save(folder / "codec")
    return str(folder)


def test_sessions_that_end_leave_no_memory_behind(model, monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")  # threads that each keep a little for themselves would look like growth
    questions = [Sound(talk(0.6, seed), 16_000).resampled(24_000).samples[0] for seed in range(4)]
    result = asyncio.run(sessions.measure(model, questions, COUNT, WARM, most_tokens=15, between=0.0))
    sizes = result["sizes"]
    assert len(sizes) == WARM + COUNT
    assert max(sizes[WARM:]) - max(sizes[:WARM]) < GROWTH  # spare windows come and go: the most is what tells


def test_a_server_that_cannot_start_says_why(tmp_path):
    with pytest.raises(sessions.VivaError, match="ended before it was ready"):
        asyncio.run(sessions.measure(str(tmp_path), [], 2, 1, 5, 0.0))


def test_a_budget_counts_every_stage_once(model, tmp_path):
    result = budget.run(model, sessions=2, out=tmp_path)
    costs = {cost["stage"]: cost for cost in result["costs"]}
    assert len(costs) == len(result["costs"]) == 8
    assert all(cost["alone_ms"] > 0 and cost["shared_ms"] > 0 for cost in costs.values())
    spoken = [cost["shared_ms"] for cost in costs.values() if cost["when"] in ("speaks", "always")]
    assert result["cores_for_all_speaking"] == pytest.approx(2 * sum(spoken) / 1e3)
    assert (tmp_path / "budget.json").is_file()
