"""Measures of Full-Duplex-Bench v1 and v1.5, from segments and words in seconds.

Definitions of DanielLin94144/Full-Duplex-Bench (arXiv 2503.04721 and 2507.23159). A *turn-over* is a reply of at least
a second or of more than three words; what is shorter counts as a backchannel.
"""

from collections.abc import Sequence

Segment = tuple[float, float]
"""Start and end in seconds."""

USER_GAP = 0.6
AGENT_GAP = 0.5
"""Pauses up to this long do not end a segment."""
TURN_SECONDS, TURN_WORDS = 1.0, 3
SPEECH_SECONDS = 3.0
"""Longer speech during the user's turn is a turn-over, whatever its words."""
BACKCHANNEL_WORDS = 2


def joined(segments: Sequence[Segment], gap: float) -> list[Segment]:
    """The segments in order, those with at most `gap` seconds between them as one."""
    found: list[Segment] = []
    for start, end in sorted(segments):
        if found and start - found[-1][1] <= gap:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def takes_turn(words: Sequence[Segment]) -> bool:
    """Whether these words, by their times, are a turn-over."""
    if not words:
        return False
    return words[-1][1] - words[0][0] >= TURN_SECONDS or len(words) > TURN_WORDS


def turn_latency(words: Sequence[Segment], user_end: float) -> float | None:
    """Seconds from the end of the user's turn to a turn-over, 0 if it came before; None without one."""
    return max(0.0, words[0][0] - user_end) if takes_turn(words) else None


def backchannel_turn(segments: Sequence[Segment], words: Sequence[Segment]) -> tuple[bool, int]:
    """Speech during the user's turn: whether it takes the turn, and the number of backchannels before it does.

    As published, the last segment decides unless one is longer than three seconds.
    """
    takes, backchannels = False, 0
    for start, end in segments:
        if end - start > SPEECH_SECONDS:
            return True, backchannels
        spoken = sum(_is_in(word, start, end) for word in words)
        takes = spoken > BACKCHANNEL_WORDS or end - start >= TURN_SECONDS
        backchannels += 1
    return takes, backchannels


def _is_in(word: Segment, start: float, end: float) -> bool:
    """A word counts if it overlaps the segment; one that touches only the end counts too, as published."""
    if word[1] <= end:
        return word[0] >= start or word[1] > start
    return word[0] <= end


def stop_intervals(user: Sequence[Segment], agent: Sequence[Segment]) -> list[Segment]:
    """Where both speak, from the later start to the earlier end: the stop latency of each overlap."""
    pairs = [(max(one[0], two[0]), min(one[1], two[1])) for one in user for two in agent]
    by_end: dict[int, Segment] = {}
    for start, end in pairs:
        if start >= end:
            continue
        key = round(end * 1000)
        if key not in by_end or end - start < by_end[key][1] - by_end[key][0]:
            by_end[key] = (start, end)
    return [_rounded(each) for each in sorted(by_end.values(), key=lambda each: each[1])]


def response_intervals(user: Sequence[Segment], agent: Sequence[Segment]) -> list[Segment]:
    """From the end of a user segment to the agent's next start, the least for each start."""
    latest: dict[float, float] = {}
    for _, end in user:
        start = next((each[0] for each in agent if each[0] > end), None)
        if start is not None:
            latest[start] = max(end, latest.get(start, end))
    return [_rounded((end, start)) for start, end in sorted(latest.items())]


def _rounded(segment: Segment) -> Segment:
    return round(segment[0], 3), round(segment[1], 3)
