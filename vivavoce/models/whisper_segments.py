"""What one window said, cut at its timestamps, and how far the next window starts after it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from vivavoce.models.whisper_config import CONV_STRIDE, MEL_FRAMES_PER_SECOND
from vivavoce.models.whisper_tokens import WhisperTokens


@dataclass(frozen=True)
class SegmentPart:
    """Tokens between two times of a window, in seconds from its beginning."""

    tokens: tuple[int, ...]
    start: float
    end: float


@dataclass(frozen=True)
class Cut:
    """The parts of a window, and how many mel frames of it are done with."""

    segments: tuple[SegmentPart, ...]
    frames: int


def cut_segments(tokens: Sequence[int], ids: WhisperTokens, frames: int, timestamps: bool | None) -> Cut:
    """Cut where one time follows another; what comes after the last pair is heard again in the next window.

    A text that ends in a single time says that nothing follows in its window; so does one without pairs, which begins
    where the window does. Times after the end of the sound are kept as written (all of this as openai-whisper does).
    """
    seconds = frames / MEL_FRAMES_PER_SECOND
    is_time = [ids.is_timestamp(token) for token in tokens] if timestamps else [False] * len(tokens)
    ends_alone = is_time[-2:] == [False, True]
    pairs = [place for place in range(1, len(tokens)) if is_time[place - 1] and is_time[place]]
    if not pairs:
        times = [ids.seconds(token) for token, time in zip(tokens, is_time, strict=True) if time]
        end = times[-1] if times and times[-1] > 0 else seconds
        return Cut((SegmentPart(tuple(tokens), 0.0, end),), frames)
    bounds = [0, *pairs, len(tokens)] if ends_alone else [0, *pairs]
    parts = []
    for first, last in pairwise(bounds):
        piece = tokens[first:last]
        begin = ids.seconds(piece[0]) if ids.is_timestamp(piece[0]) else 0.0
        parts.append(SegmentPart(tuple(piece), begin, ids.seconds(piece[-1])))
    if ends_alone:
        return Cut(tuple(parts), frames)
    done = round(ids.seconds(tokens[bounds[-1] - 1]) / 0.02) * CONV_STRIDE
    return Cut(tuple(parts), min(frames, done) if done else frames)
