"""Concurrent simulated calls to a server in this process, with mini-speech, on a CPU-time clock."""

from vivavoce.bench import simulation

FAST = 0.02  # share of the CPU time: the order of work is tested, not its speed


def test_concurrent_calls_get_their_own_answers_without_underruns(tmp_path):
    result = simulation.run(turns=1, sessions=3, slowdown=FAST, out=tmp_path)
    together = result["together"]
    assert together["failures"] == [] and together["response_rate"] == 1.0
    assert together["underruns"] == 0
    assert (together["other"], together["shared_reply_ids"]) == (0, [])
    # Turn silence, a packet and the player are all that is left to wait for.
    assert together["response_ms"]["p95"] < 400
    assert result["budget"]["workers_ms_a_second"] > 0
    assert (tmp_path / "rehearsal.json").is_file()
