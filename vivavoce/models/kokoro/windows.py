"""Sound of a long sentence in windows, so that its start is heard before its end is computed.

The norms of the generator take statistics over the whole sentence: with exact ones, nothing could be heard before nine
tenths of the work are done. A window therefore uses the statistics of the voice, taken from a fixed text, merged with
those of the sentence's own windows so far. A cut is made by the sentence's own pauses, never by the clock, so a text
always sounds the same. Windows overlap by the generator's receptive field and are joined by a short crossfade.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vivavoce.models.kokoro.config import RATE
from vivavoce.models.kokoro.layers import NormStatistics
from vivavoce.models.kokoro.model import GeneratedSound, PreparedSpeech

MARGIN = 8  # features on either side of a window; what lies further away changes a sample by less than a rounding error
FADE = 240  # samples of the crossfade of two windows
FEATURES_A_SECOND = 80
VOICE_SECONDS = 6.0  # of a sentence that the statistics of its voice count for


@dataclass(frozen=True)
class WindowLengths:
    """Seconds of the windows of a sentence."""

    first: float = 0.8
    """The shortest window."""
    first_limit: float = 1.6
    """The longest first window."""
    limit: float = 4.0
    """The longest of the others."""
    speed: float = 2.0
    """How many times as fast as it is played sound is computed: a window is no longer than what is still to be played
    allows."""


WHOLE_SENTENCES = WindowLengths(first_limit=60.0)  # for sound that is not played while it is computed


@dataclass(frozen=True)
class Break:
    """A place where a sentence may be cut."""

    feature: int
    is_pause: bool
    """Whether it is a pause; else it is a gap between words."""


def cuts(breaks: list[Break], length: int, lengths: WindowLengths, start: int = 0) -> list[int]:
    """The ends of the windows of a sentence from a feature on, the last one its length.

    The first window ends at the first pause that fits, the others at the last one; without a pause they end at the last
    gap between words that fits.
    """
    ends, min_length = list[int](), lengths.first * FEATURES_A_SECOND
    limit, lead = lengths.first_limit * FEATURES_A_SECOND, 0.0  # in features
    while length - start > limit:
        last = min(start + limit, length - min_length)
        fitting = [each for each in breaks if start + min_length <= each.feature <= last]
        pauses = [each for each in fitting if each.is_pause]
        if not fitting:  # a long word or pause: the next place to cut, if any
            fitting = [each for each in breaks if last < each.feature <= length - min_length][:1]
        if not fitting:
            break
        chosen = (pauses[-1] if ends else pauses[0]) if pauses else fitting[-1]
        size, start = chosen.feature - start, chosen.feature
        lead += size if not ends else size - (size + 2 * MARGIN) / lengths.speed
        limit = max(min_length, min(lengths.limit * FEATURES_A_SECOND, lengths.speed * lead - 2 * MARGIN))
        ends.append(start)
    return [*ends, length]


def window(prepared: PreparedSpeech, start: int, stop: int, earlier: NormStatistics) -> PreparedSpeech:
    """Some features of one text with the excitation's spectrum for them."""
    rate = (prepared.spectrum.shape[-1] - 1) // prepared.features.shape[-1]
    return replace(
        prepared,
        features=prepared.features[..., start:stop],
        spectrum=prepared.spectrum[..., start * rate : stop * rate + 1],
        earlier=earlier,
    )


def sound_in_windows(
    generate: Callable[[PreparedSpeech], GeneratedSound],
    prepared: PreparedSpeech,
    ends: list[int],
    voice: NormStatistics,
    start: int = 0,
) -> Iterator[Tensor]:
    """The sound of one text from a feature on, window by window, in a voice of known statistics.  # [sample]"""
    length, hop, half = prepared.features.shape[-1], RATE // FEATURES_A_SECOND, FADE // 2
    rising = (torch.arange(FADE) + 0.5) / FADE
    earlier = replace(voice, features=torch.full_like(voice.features, VOICE_SECONDS * FEATURES_A_SECOND))
    tail: Tensor | None = None
    for end in ends:
        first, last = max(0, start - MARGIN), min(length, end + MARGIN)
        generated = generate(window(prepared, first, last, earlier))
        sound, earlier = generated.samples[0].float().cpu(), generated.statistics
        begin = (start - first) * hop - (0 if tail is None else half)
        stop = (end - first) * hop + (half if end < length else 0)
        piece = sound[begin:stop]
        if tail is not None:
            joined = tail * (1 - rising) + piece[:FADE] * rising
            piece = torch.cat([joined, piece[FADE:]])
        if end < length:
            piece, tail = piece[:-FADE], piece[-FADE:]
        yield piece
        start = end
