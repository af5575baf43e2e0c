"""Sound over a reply, judged on the sound's own time: the real front end and barge-in decision, without a server."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.echo import EchoGuard
from vivavoce.audio.vad import RATE, VoiceActivity, voice_activity
from vivavoce.dialogue.barge_in import OverlapJudge, OverlapVerdict, UserLevel
from vivavoce.dialogue.front_end import AudioFrontEnd, AudioWindow
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


def heard(
    microphone: Samples, output: Samples, activity: VoiceActivity | None = None, echo_guard: bool = True
) -> list[AudioWindow]:
    """The windows of a call: both sounds at 16 kHz and from the same moment on; the output may be shorter."""
    played = np.concatenate([output, np.zeros(max(0, len(microphone) - len(output)) + RATE, np.float32)])

    def reference(moment: float, size: int) -> Samples:
        begin = round(moment * RATE)
        return played[begin : begin + size]

    guard = EchoGuard() if echo_guard else None
    front_end = AudioFrontEnd(RATE, activity or voice_activity(), guard, reference)
    return front_end.hear(microphone, len(microphone) / RATE)


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
    watch, verdicts = None, []
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
            levels.update(window.level_db)
    return levels
