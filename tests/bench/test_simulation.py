"""Calls at once to a server in this process, on mini-speech, in the processor's time."""

from vivavoce.bench import simulation

FAST = 0.02  # of this processor's time: what is tested is who waits for whom, not how fast it is


def test_calls_at_once_get_their_own_answers_and_no_player_runs_dry(tmp_path):
    result = simulation.run(turns=1, sessions=3, slowdown=FAST, out=tmp_path)
    together = result["together"]
    assert together["failures"] == [] and together["response_rate"] == 1.0
    assert together["underruns"] == 0
    assert (together["other"], together["shared_reply_ids"]) == (0, [])
    # Turn silence, a packet and the player are all that is left to wait for.
    assert together["response_ms"]["p95"] < 400
    assert result["budget"]["workers_ms_a_second"] > 0
    assert (tmp_path / "rehearsal.json").is_file()
