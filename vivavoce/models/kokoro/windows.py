"""Sound of a long sentence in windows, so that its start is heard before its end is computed.

The norms of the generator take statistics over the time they are given, so the sound of a part depends on how the
sentence was cut: a cut is made by the sentence's own pauses, never by the clock, and a text always sounds the same.
Windows overlap by the generator's receptive field and are joined
by a short crossfade in the pause.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vivavoce.models.kokoro.config import RATE
from vivavoce.models.kokoro.model import PreparedSpeech

MARGIN = 16  # features on either side of a window; the receptive field is 13
FADE = 240  # samples of the crossfade of two windows
FEATURES_A_SECOND = 80


@dataclass(frozen=True)
class WindowLengths:
    """Seconds of the windows of a sentence."""

    first: float = 1.2
    """The shortest first window."""
    later: float = 2.0
    """The shortest of the others."""
    limit: float = 4.0
    """From here on a window ends at a gap between words if there is no pause."""


@dataclass(frozen=True)
class Break:
    """A place where a sentence may be cut."""

    feature: int
    is_pause: bool
    """Whether it is a pause; else it is a gap between words."""


def cuts(breaks: list[Break], length: int, lengths: WindowLengths) -> list[int]:
    """The ends of the windows of a sentence, the last one its length."""
    ends, start = list[int](), 0
    while True:
        min_length = (lengths.later if ends else lengths.first) * FEATURES_A_SECOND
        after = [each for each in breaks if each.feature - start >= min_length]
        fitting = [each for each in after if length - each.feature >= lengths.first * FEATURES_A_SECOND]
        pauses = [each for each in fitting if each.is_pause]
        limit = start + lengths.limit * FEATURES_A_SECOND
        chosen = pauses[0] if pauses and pauses[0].feature <= limit else None
        if chosen is None and length > limit:
            gaps = [each for each in fitting if each.feature <= limit]
            chosen = gaps[-1] if gaps else None
        if chosen is None:
            return [*ends, length]
        ends.append(chosen.feature)
        start = chosen.feature


def window(prepared: PreparedSpeech, start: int, stop: int) -> PreparedSpeech:
    """Some features of one text with the excitation's spectrum for them."""
    rate = (prepared.spectrum.shape[-1] - 1) // prepared.features.shape[-1]
    return replace(
        prepared,
        features=prepared.features[..., start:stop],
        spectrum=prepared.spectrum[..., start * rate : stop * rate + 1],
    )


def sound_in_windows(
    generate: Callable[[PreparedSpeech], Tensor], prepared: PreparedSpeech, ends: list[int]
) -> Iterator[Tensor]:
    """The sound of one text, window by window.  # [sample]"""
    length, hop, half = prepared.features.shape[-1], RATE // FEATURES_A_SECOND, FADE // 2
    rising = (torch.arange(FADE) + 0.5) / FADE
    tail: Tensor | None = None
    start = 0
    for end in ends:
        first, last = max(0, start - MARGIN), min(length, end + MARGIN)
        sound = generate(window(prepared, first, last))[0].float().cpu()
        begin = (start - first) * hop - (half if start else 0)
        stop = (end - first) * hop + (half if end < length else 0)
        piece = sound[begin:stop]
        if tail is not None:
            joined = tail * (1 - rising) + piece[:FADE] * rising
            piece = torch.cat([joined, piece[FADE:]])
        if end < length:
            piece, tail = piece[:-FADE], piece[-FADE:]
        yield piece
        start = end
