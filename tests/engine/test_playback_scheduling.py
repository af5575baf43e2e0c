"""Scheduling by playback: first audio first, then the earliest playback end; large leads rest; no page is lost."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.test_engine import alone, make_engine, speech
from tests.models.test_moss_speech import CONVERSATIONS, PROMPT
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.engine.scheduler import PagePool, Scheduler, StepPlan
from vivavoce.engine.sequence import Admission, PacingPolicy, PlaybackDeadline, Sequence, Slack
from vivavoce.errors import CapacityError

ROW_SECONDS, FIRST_ROWS = 0.08, 8
POLICY = PacingPolicy(max_lead=4.0, calm_lead=2.0, spare_lead=1.0, short_lead=1.0, pace=0.05)
OTHERS_REST = replace(POLICY, others_rest=0.08)
LONG = Generation(GREEDY, max_new_rows=10_000)


@dataclass
class Stage:
    """A scheduler with a simulated clock; every planned reply gets a row."""

    max_sequences: int = 4
    pages: int = 500
    rows_per_step: int = 64
    time: float = 100.0
    scheduler: Scheduler = field(init=False)

    def __post_init__(self):
        pool = PagePool(self.pages)
        self.scheduler = Scheduler(pool, 4, self.rows_per_step, self.max_sequences, POLICY, lambda: self.time)

    def reply(self, since=None, played=None, generated=0, has_playback=True):
        """A reply with `generated` rows, of which `played` seconds were played."""
        sequence = Sequence(len(self.scheduler.sequences), rows=[(0,)])
        sequence.generation, sequence.generated = LONG, generated
        if has_playback:
            listener = PlaybackDeadline(ROW_SECONDS, FIRST_ROWS, self.time if since is None else since)
            sequence.listener = listener if played is None else listener.at(self.time, played)
        self.scheduler.sequences[sequence.id] = sequence
        return sequence

    def prefilling(self, rows):
        sequence = Sequence(len(self.scheduler.sequences), rows=[(0,)] * rows, needs_prefill=True)
        self.scheduler.sequences[sequence.id] = sequence
        return sequence

    def step(self, seconds=0.01) -> StepPlan:
        plan = self.scheduler.plan()
        for work in plan.works:
            sequence = work.sequence
            sequence.cached += work.count
            sequence.needs_prefill = sequence.pending > 0
            if work.samples:
                sequence.rows.append((0,))
                sequence.generated += 1
        self.time += seconds
        return plan


def planned(plan):
    return [work.sequence for work in plan.works]


def rows_of(seconds):
    """Rows of this many seconds."""
    return round(seconds / ROW_SECONDS)


@pytest.mark.parametrize(("has_playback", "rows"), [(True, 15), (False, 63)])
def test_a_long_prompt_is_prefilled_in_small_pieces_beside_a_reply_with_playback(has_playback, rows):
    stage = Stage()
    stage.scheduler.rows_beside_sound = 16
    stage.reply(played=0.0, generated=rows_of(0.8), has_playback=has_playback)
    stage.prefilling(200)
    assert [work.count for work in stage.step().works] == [1, rows]


def test_first_audio_is_served_first_then_the_earliest_playback_end():
    stage = Stage(max_sequences=8)
    late = stage.reply(played=0.0, generated=rows_of(0.8))
    soon = stage.reply(played=0.0, generated=rows_of(0.16))
    newest, newer = stage.reply(since=stage.time), stage.reply(since=stage.time - 0.5)
    prefills = stage.prefilling(3)
    assert planned(stage.step()) == [newer, newest, soon, late, prefills]


def test_a_reply_with_a_large_lead_rests_and_resumes_in_time():
    stage = Stage()
    reply = stage.reply(played=0.0, generated=rows_of(POLICY.max_lead) + 1)
    assert planned(stage.step()) == []
    seconds = stage.scheduler.seconds_to_next_step()
    assert seconds == pytest.approx(ROW_SECONDS - 0.01)
    stage.time += seconds + 1e-6
    assert stage.scheduler.seconds_to_next_step() == 0
    assert planned(stage.step()) == [reply]


def test_with_calm_leads_steps_are_spaced_out_and_shared():
    stage = Stage(max_sequences=8)
    replies = [stage.reply(played=0.0, generated=rows_of(2.5) + number) for number in range(3)]
    prefills = stage.prefilling(2)
    assert set(planned(stage.step())) == {*replies, prefills}
    assert stage.scheduler.seconds_to_next_step() == pytest.approx(POLICY.pace - 0.01)
    stage.time += POLICY.pace
    assert stage.scheduler.seconds_to_next_step() == 0
    stage.step()
    hastens = stage.reply(played=0.0, generated=rows_of(1.9))
    assert stage.scheduler.seconds_to_next_step() == pytest.approx(POLICY.pace * POLICY.hurry - 0.01)
    pressed = stage.reply(played=0.0, generated=rows_of(0.9))
    assert stage.scheduler.seconds_to_next_step() == 0
    assert {hastens, pressed} <= set(planned(stage.step()))


def test_a_reply_rests_while_its_first_audio_is_decoded_unless_a_step_is_due_anyway():
    stage = Stage(max_sequences=8)
    reply = stage.reply(generated=FIRST_ROWS)
    reply.first_audio_ready = stage.time
    assert stage.scheduler.seconds_to_next_step() == pytest.approx(POLICY.first_audio_rest)
    other = stage.reply()
    assert stage.scheduler.seconds_to_next_step() == 0
    assert set(planned(stage.step())) == {reply, other}
    del stage.scheduler.sequences[other.id]
    reply.listener = reply.listener.at(stage.time, 0.0)
    assert stage.scheduler.seconds_to_next_step() == 0


def test_replies_with_audio_to_spare_rest_while_a_first_audio_is_decoded():
    stage = Stage(max_sequences=8)
    stage.scheduler.sound = OTHERS_REST
    stage.reply(played=0.0, generated=rows_of(1.5))
    first = stage.reply(generated=FIRST_ROWS)
    first.first_audio_ready = stage.time
    assert stage.scheduler.seconds_to_next_step() == pytest.approx(OTHERS_REST.others_rest)
    stage.time += OTHERS_REST.others_rest
    assert stage.scheduler.seconds_to_next_step() == 0
    first.first_audio_ready = stage.time
    stage.reply(played=0.0, generated=rows_of(0.9))  # has none to spare
    assert stage.scheduler.seconds_to_next_step() == 0


def replies_with_a_branch(is_stopped=False):
    """A fork that gives way to the reply with playback it was made of, and the rows of both after each step."""
    engine, prompt = make_engine(rows_per_step=512), PROMPT.rows(*CONVERSATIONS["many turns"])
    engine.scheduler.sound = replace(engine.scheduler.sound, first_audio_rest=600.0)  # longer than the test takes
    spoken = engine.open([*prompt, *speech(0)])
    engine.generate(spoken, LONG, listener=PlaybackDeadline(ROW_SECONDS, FIRST_ROWS, engine.scheduler.now()))
    branch = engine.fork(spoken)
    engine.append(branch, prompt)
    engine.generate(branch, Generation(GREEDY, max_new_rows=3), after=spoken)
    counts = []
    while branch.is_generating:
        engine.step()
        counts.append((spoken.generated, branch.generated))
        if is_stopped and len(counts) == 2:
            engine.stop(spoken)
    return branch, counts


def test_a_branch_starts_when_the_reply_it_gives_way_to_has_its_first_audio():
    branch, counts = replies_with_a_branch()
    assert counts[FIRST_ROWS - 1] == (FIRST_ROWS, 0), "the branch takes no row of the first steps"
    assert counts[FIRST_ROWS] == (FIRST_ROWS, 1), "and decides in the very next one, in which the reply rests"
    assert counts[FIRST_ROWS + 1] == (FIRST_ROWS + 1, 2), "then both go on in the same steps"
    assert branch.rows[-3:] == alone(branch.rows[:-3], Generation(GREEDY, max_new_rows=3))


def test_a_branch_starts_when_the_reply_it_gives_way_to_ends():
    branch, counts = replies_with_a_branch(is_stopped=True)
    assert [decided for _, decided in counts[:3]] == [0, 0, 1]
    assert branch.after is None


def test_without_work_no_step_is_due():
    stage = Stage()
    assert stage.scheduler.seconds_to_next_step() is None
    stage.prefilling(1)
    assert stage.scheduler.seconds_to_next_step() == 0


def test_replies_with_audio_to_spare_are_left_out_while_another_waits_for_its_first_audio():
    stage = Stage(max_sequences=8)
    comfortable = stage.reply(played=0.0, generated=rows_of(2.0))
    pressed = stage.reply(played=0.0, generated=rows_of(0.5))
    unplayed = stage.reply(has_playback=False)
    first = stage.reply()
    assert set(planned(stage.step())) == {first, pressed, unplayed}
    while first.awaits_first_audio:
        assert comfortable not in planned(stage.step())
    assert comfortable in planned(stage.step())


def test_a_reply_without_playback_is_not_starved_by_playbacks():
    stage = Stage(max_sequences=2)
    stage.reply(played=0.0), stage.reply(played=0.0), stage.reply(played=0.0)
    silent = stage.reply(has_playback=False)
    silent.last_served = stage.time
    for _ in range(100):
        stage.step(seconds=0.1)
    assert silent.generated > 10


def test_the_end_of_playback_follows_from_its_progress():
    listener = PlaybackDeadline(ROW_SECONDS, FIRST_ROWS, since=0.0)
    assert listener.awaits_first_audio(7)
    assert not listener.awaits_first_audio(8)
    assert listener.at(10.0, 2.0).playback_end(50) == pytest.approx(12.0)
    assert not listener.at(10.0, 0.0).awaits_first_audio(0)


@settings(max_examples=30, deadline=None)
@given(
    sessions=st.integers(1, 12),
    step_ms=st.integers(1, 6),
    starts=st.lists(st.integers(0, 200), min_size=12, max_size=12),
)
def test_with_enough_capacity_no_playback_runs_out_and_no_lead_exceeds_the_limit(sessions, step_ms, starts):
    """A step has four sequences; while rows are generated faster than they are played, all deadlines are met."""
    stage = Stage(max_sequences=4)
    replies, begins = [], [stage.time + starts[number] / 100 for number in range(sessions)]
    for _ in range(1500):
        for begin in [begin for begin in begins if begin <= stage.time]:
            begins.remove(begin)
            replies.append(stage.reply(since=begin))
        if stage.scheduler.seconds_to_next_step() != 0:
            stage.time += 0.005
        stage.step(seconds=step_ms / 1000)
        for reply in replies:
            listener = reply.listener
            if listener.started is None and reply.generated >= FIRST_ROWS:
                reply.listener = listener.at(stage.time, 0.0)
            elif listener.started is not None:
                assert reply.playback_end > stage.time
                assert reply.playback_end - stage.time <= POLICY.max_lead + ROW_SECONDS


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_with_too_few_pages_every_reply_progresses(data):
    """Deadlines do not rank evictions: two sequences could otherwise evict each other in turns."""
    stage = Stage(max_sequences=3, pages=data.draw(st.integers(7, 12)), rows_per_step=16)
    replies = [stage.reply(played=0.0) for _ in range(data.draw(st.integers(2, 4)))]
    for _ in range(400):
        stage.step(seconds=data.draw(st.sampled_from([0.01, 0.1])))
        for reply in replies:
            if len(reply.rows) >= 20 and reply.generation is not None:  # it ends and releases its pages
                reply.generation = None
                stage.scheduler.release(reply)
    assert all(reply.generation is None for reply in replies)


def test_the_engine_measures_the_slack_of_playbacks():
    engine = make_engine()
    times = iter(range(1000))
    engine.scheduler.now = lambda: next(times) / 100
    sequence = engine.open(speech(4))
    engine.generate(
        sequence, Generation(GREEDY, max_new_rows=6, min_new_rows=6), listener=PlaybackDeadline(5.0, 2, since=0.0)
    )
    engine.step()
    assert engine.slack.recent_min_slack(0.0) is None, "no playback has begun"
    engine.report_playback(sequence, 3.0)
    engine.step()
    assert engine.slack.recent_min_slack(0.1) == pytest.approx(5.0 - 3.0, abs=0.1)
    assert engine.slack.max_step_seconds == pytest.approx(0.01)
    engine.stop(sequence)
    assert sequence.listener is None


def test_recent_slack_expires_and_extremes_do_not():
    slack = Slack()
    slack.note(0.0, 0.5)
    slack.note(1.0, 2.0)
    slack.note_step(0.03)
    assert slack.recent_min_slack(1.0) == 0.5
    assert slack.recent_min_slack(5.5) == 2.0
    assert slack.recent_min_slack(60.0) is None
    assert (slack.min_slack, slack.max_step_seconds, slack.busy) == (0.5, 0.03, 0.03)
    slack.reset()
    assert (slack.min_slack, slack.busy) == (None, 0.03)


@pytest.mark.parametrize(
    ("slack", "rows", "memory", "says"),
    [
        (0.05, 4096, 1e9, "50 ms"),
        (-0.2, 4096, 1e9, "-200 ms"),
        (0.5, 100, 1e9, "100 rows"),
        (None, 4096, 1e6, "1 MB are free"),
    ],
)
def test_a_session_is_refused_without_slack_rows_or_memory(slack, rows, memory, says):
    with pytest.raises(CapacityError, match=says):
        Admission().check(slack, rows, memory, voice_bytes=3e8)


def test_a_session_is_admitted_with_slack_rows_and_memory():
    Admission().check(None, 4096, 1e9, voice_bytes=3e8)
    Admission().check(0.3, 1024, 1e9, speech_load=0.85)


def test_a_session_is_refused_where_all_replies_at_the_same_time_would_take_more_than_the_cores():
    with pytest.raises(CapacityError, match="would take 101% of the cores with one more, and the limit is 97%"):
        Admission().check(0.3, 4096, 1e9, speech_load=1.01)
    Admission(max_speech_load=100.0).check(0.3, 4096, 1e9, speech_load=1.01)
