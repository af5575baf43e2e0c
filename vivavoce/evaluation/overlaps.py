"""Sound over a reply, judged on the sound's own time: the real front end and barge-in decision, without a server."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.echo import EchoGuard
from vivavoce.audio.vad import RATE, VoiceActivity, voice_activity
from vivavoce.dialogue.barge_in import OverlapJudge, OverlapVerdict, UserLevel, WatchedOverlap
from vivavoce.dialogue.front_end import AudioWindow
from vivavoce.dialogue.front_end_batch import BatchedStream, FrontEndBatch, InputChunk, Operation
from vivavoce.dialogue.output_timeline import OutputTimeline
from vivavoce.dialogue.settings import TurnSettings
from vivavoce.dialogue.turn_taker import TurnState, TurnTaker

Samples = NDArray[np.float32]


@dataclass(frozen=True)
class Stop:
    """How a sound over a reply was judged."""

    seconds: float | None
    """From its first sample to the end of the window that stopped the reply; None: the reply goes on."""
    verdicts: tuple[OverlapVerdict, ...] = ()
    """Of its parts: a sound with pauses has more than one."""


def heard_each(
    calls: Sequence[tuple[Samples, Samples]], activity: VoiceActivity | None = None, echo_guard: bool = True
) -> list[list[AudioWindow]]:
    """The windows of calls, each its microphone and its output at 16 kHz and from the same moment on."""
    batch = FrontEndBatch(activity or voice_activity(), EchoGuard() if echo_guard else None)
    work: list[tuple[BatchedStream, list[Operation]]] = []
    for microphone, output in calls:
        played: list[Operation] = [_play(output)] if len(output) else []
        work.append((batch.join(RATE, RATE), [*played, InputChunk(microphone, len(microphone) / RATE)]))
    return [chunks[0].windows for chunks in batch.process(work)]


def _play(output: Samples) -> Callable[[OutputTimeline], None]:
    return lambda timeline: timeline.play(0.0, output, 0.0)


def speech_flags(windows: Sequence[AudioWindow]) -> Iterator[bool]:
    """Whether each window is speech, with the hysteresis of turn detection."""
    taker, state = TurnTaker(TurnSettings()), TurnState()
    for window in windows:
        _, state = taker.step(state, window.probability, None, window.quiet_ms)
        yield state.is_speech


def judge(
    windows: Sequence[AudioWindow], judge: OverlapJudge, levels: UserLevel, begin: float, until: float | None = None
) -> Stop:
    """Judge what is heard from `begin` on, in seconds, until the reply stops or the sounds end."""
    watch: WatchedOverlap | None = None
    verdicts: list[OverlapVerdict] = []
    for index, (window, is_speech) in enumerate(zip(windows, speech_flags(windows), strict=True)):
        if watch is None:
            if not is_speech or window.ended_at <= begin or (until is not None and window.ended_at > until):
                continue
            watch = judge.watch(windows[max(0, index - 16) : index], levels)
        watch.step(window.samples, window.probability, window.echo, is_speech, levels)
        if watch.verdict is OverlapVerdict.INTERRUPTION:
            return Stop(window.ended_at - begin, (*verdicts, watch.verdict))
        if watch.is_over:
            verdicts.append(watch.verdict or OverlapVerdict.NOISE)
            watch = None
    return Stop(None, tuple(verdicts))


def user_level(windows: Sequence[AudioWindow]) -> UserLevel:
    """The usual level of the user who spoke these windows."""
    levels = UserLevel()
    for window, is_speech in zip(windows, speech_flags(windows), strict=True):
        if is_speech:
            levels.update(window.level_db, window.samples)
    return levels
