"""Pacing on a clock that only tests move: when sound leaves, what is heard, what an interruption leaves."""

import asyncio
import math
import selectors

import numpy as np
import pytest

from tests.server.scripted import ScriptedHost, tone
from vivavoce.server.metrics import Metrics
from vivavoce.server.realtime.output import Arrivals, Lead, OutputPiece, PacedOutput, Schedule, Volume

RATE = 1000
NEVER = 1e9


class TimelessSelector(selectors.DefaultSelector):
    """Does not wait: time goes on to the next timer instead."""

    now = 0.0

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready:
            self.now += timeout or 0.0
        return ready


class TimelessLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = TimelessSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


def timeless(test):
    """Run a test in time of its own."""

    def run():
        loop = TimelessLoop()
        try:
            loop.run_until_complete(test())
        finally:
            loop.close()

    run.__name__ = test.__name__
    return run


class RecordingPlayer:
    """Records what leaves an output, and when."""

    def __init__(self) -> None:
        self.sent: list[tuple[float, OutputPiece]] = []
        self.played_ms: list[int] = []
        self.over: list[str] = []

    def play(self, piece: OutputPiece) -> None:
        self.sent.append((asyncio.get_running_loop().time(), piece))

    def playback_position(self, reply: str, milliseconds: int) -> None:
        self.played_ms.append(milliseconds)

    def playback_finished(self, reply: str, schedule: Schedule) -> None:
        self.over.append(reply)
        self.schedule = schedule

    @property
    def seconds(self) -> float:
        return sum(len(piece.samples) for _, piece in self.sent) / RATE


def sound(seconds: float) -> OutputPiece:
    return OutputPiece("reply", "item", np.ones(round(seconds * RATE), np.float32))


@timeless
async def test_sound_leaves_at_its_deadline_and_never_sooner():
    player = RecordingPlayer()
    output = PacedOutput(player, RATE, lead=lambda now: 0.3, piece_seconds=0.1)
    task = asyncio.create_task(output.run())
    output.add(sound(2.0))
    output.send_in_order(lambda: output.end("reply"))
    await asyncio.sleep(5)
    task.cancel()
    times = [at for at, _ in player.sent]
    places = [position / 10 - 0.3 for position in range(20)]
    assert times == pytest.approx([max(place, 0.0) for place in places])  # at once what the lead allows
    assert player.seconds == pytest.approx(2.0)
    assert player.played_ms == sorted(player.played_ms) and player.played_ms[-1] == 2000
    assert player.over == ["reply"] and player.schedule.underruns == 0 and player.schedule.missed == 0


@timeless
async def test_what_comes_late_is_counted_and_does_not_burst():
    player = RecordingPlayer()
    output = PacedOutput(player, RATE, lead=lambda now: 0.1, piece_seconds=0.1)
    task = asyncio.create_task(output.run())
    output.add(sound(0.2))
    await asyncio.sleep(1.0)  # the listener ran dry after 0.2 s
    output.add(sound(0.5))
    output.send_in_order(lambda: output.end("reply"))
    await asyncio.sleep(3)
    task.cancel()
    assert player.schedule.underruns == 1
    assert [at for at, _ in player.sent[2:]] == pytest.approx([1.0, 1.0, 1.1, 1.2, 1.3])
    assert player.played_ms[-1] == 700


@timeless
async def test_words_leave_with_the_sound_that_says_them():
    player, sent = RecordingPlayer(), []
    output = PacedOutput(player, RATE, lead=lambda now: 0.1, piece_seconds=0.1)
    task = asyncio.create_task(output.run())

    def word(text: str, at: float) -> None:
        output.send_with_audio("reply", "item", at, lambda: sent.append((text, player.seconds)))

    word("early", 0.0)
    output.add(sound(1.0))
    word("inside", 0.45)
    word("after", 0.9)
    output.end_item("reply", "item")
    output.send_in_order(lambda: sent.append(("done", player.seconds)))
    await asyncio.sleep(0.6)
    word("late", 0.2)
    word("beyond", 1.5)
    await asyncio.sleep(3)
    task.cancel()
    words = [("early", 0.0), ("inside", 0.45), ("late", 0.7), ("after", 0.9), ("beyond", 1.0), ("done", 1.0)]
    assert [text for text, _ in sent] == [text for text, _ in words]
    assert [at for _, at in sent] == pytest.approx([at for _, at in words], abs=0.051)
    assert player.seconds == pytest.approx(1.0)


@timeless
async def test_events_keep_their_place_among_the_sound():
    player, sent = RecordingPlayer(), []
    output = PacedOutput(player, RATE, lead=lambda now: 0.1, piece_seconds=0.1)
    output.send_in_order(lambda: sent.append(("before", player.seconds)))
    assert sent == [("before", 0.0)]  # nothing was waiting
    task = asyncio.create_task(output.run())
    output.add(sound(1.0))
    output.send_in_order(lambda: sent.append(("after", player.seconds)))
    await asyncio.sleep(0.5)
    assert len(sent) == 1
    await asyncio.sleep(1)
    task.cancel()
    assert sent[1] == ("after", pytest.approx(1.0))


@timeless
async def test_clearing_drops_the_sound_and_lets_the_events_go():
    player, sent = RecordingPlayer(), []
    output = PacedOutput(player, RATE, lead=lambda now: 0.2, piece_seconds=0.1)
    task = asyncio.create_task(output.run())
    output.add(sound(10.0))
    output.send_in_order(lambda: sent.append("done"))
    output.send_in_order(lambda: output.end("reply"))
    await asyncio.sleep(1.05)
    assert output.played_ms("reply") == 1050
    assert output.clear("reply")
    assert sent == ["done"]
    before = player.seconds
    output.add(sound(1.0))  # stale: made before the generator heard of it
    await asyncio.sleep(5)
    task.cancel()
    assert player.seconds == before < 1.5
    assert player.played_ms[-1] == 1050 and player.over == ["reply"]
    assert not output.clear("reply")


@timeless
async def test_without_a_listener_sound_waits_and_the_gap_is_no_underrun():
    player = RecordingPlayer()
    output = PacedOutput(player, RATE, lead=lambda now: 0.2, piece_seconds=0.1)
    task = asyncio.create_task(output.run())
    output.add(sound(2.0))
    output.send_in_order(lambda: output.end("reply"))
    await asyncio.sleep(0.5)
    output.pause()
    sent = player.seconds
    await asyncio.sleep(10)
    assert player.seconds == sent
    output.resume()
    await asyncio.sleep(5)
    task.cancel()
    assert player.seconds == pytest.approx(2.0)
    assert player.schedule.underruns == 0


@timeless
async def test_a_new_gain_holds_for_what_waits_already():
    player = RecordingPlayer()
    output = PacedOutput(player, RATE, lead=lambda now: 0.1, piece_seconds=0.1)
    task = asyncio.create_task(output.run())
    output.add(sound(1.0))
    await asyncio.sleep(0.45)
    output.add(OutputPiece("reply", "item", np.zeros(0, np.float32)), gain=0.25)
    await asyncio.sleep(2)
    task.cancel()
    levels = [float(piece.samples[-1]) for _, piece in player.sent]
    assert levels == [1.0] * 6 + [0.25] * 4


def test_the_volume_goes_down_and_up_without_a_step():
    volume = Volume(16_000)
    steady = tone(440, 0.2)
    pieces = [volume.apply(steady[:1600])]
    volume.gain = 0.2
    pieces.append(volume.apply(steady[1600:2400]))
    volume.gain = 1.0
    pieces.append(volume.apply(steady[2400:]))
    joined = np.concatenate(pieces)
    largest_step = np.abs(np.diff(steady)).max()
    assert np.abs(np.diff(joined)).max() < 1.1 * largest_step
    assert np.allclose(pieces[0], steady[:1600])
    assert np.allclose(pieces[1][200:], 0.2 * steady[1800:2400])
    assert np.allclose(pieces[2][200:], steady[2600:])


def test_a_deadline_missed_by_a_stalled_loop_is_counted():
    schedule = Schedule(lead=0.1)
    schedule.send(0.0, 0.2, was_waiting=False)
    assert schedule.due(0.0) == pytest.approx(0.1)
    schedule.send(0.15, 0.2, was_waiting=True)
    assert schedule.missed == 1 and schedule.underruns == 0
    schedule.send(schedule.due(0.0), 0.2, was_waiting=True)
    assert schedule.missed == 1


def test_slack_is_the_minimum_time_before_an_underrun():
    schedule = Schedule(lead=0.3)
    assert schedule.slack == math.inf
    schedule.send(0.0, 1.0, was_waiting=False)  # the first piece has nothing to be late for
    assert schedule.slack == math.inf
    schedule.send(0.7, 1.0, was_waiting=True)
    assert schedule.slack == pytest.approx(0.3)
    schedule.send(1.95, 1.0, was_waiting=False)
    assert schedule.slack == pytest.approx(0.05) and schedule.underruns == 0
    schedule.send(3.2, 1.0, was_waiting=False)
    assert schedule.slack == pytest.approx(-0.2) and schedule.underruns == 1


def test_the_servers_slack_is_that_of_its_last_replies():
    metrics = Metrics(ScriptedHost())
    assert math.isnan(read_slack(metrics))
    for late in (0.8, 0.95):
        schedule = Schedule(lead=0.3)
        schedule.send(0.0, 1.0, was_waiting=False)
        schedule.send(late, 1.0, was_waiting=False)
        metrics.count_sent_audio(schedule)
    assert read_slack(metrics) == pytest.approx(0.05)


def read_slack(metrics: Metrics) -> float:
    (line,) = [line for line in metrics.page()[0].decode().splitlines() if line.startswith("viva_slack_seconds ")]
    return float(line.split()[1])


def test_sound_is_sent_no_further_ahead_than_the_client_s_own_comes_unevenly():
    arrivals = Arrivals()
    lead = Lead(0.06, 0.3, arrivals)
    assert lead(0.0) == 0.3, "nothing is known of the way"
    for number in range(100):
        arrivals.note(number * 0.02, number * 0.02)
    assert lead(1.98) == pytest.approx(0.06)
    arrivals.note(2.0 + 0.05, 2.0)
    assert lead(2.05) == pytest.approx(0.11)
    arrivals.note(3.0, 2.1)
    assert lead(3.0) == 0.3, "but for the most"
    for number in range(500):
        arrivals.note(3.0 + number * 0.02, 3.0 + number * 0.02)
    assert lead(13.0) == pytest.approx(0.06), "what is long past is forgotten"
