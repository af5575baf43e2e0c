"""What was served against what the engine says by itself."""

import numpy as np

from vivavoce.audio.io import Sound


def likeness(served: Sound, offline: Sound) -> float:
    """How alike two sounds are, 1 at most: sound that is resampled as it comes differs a little at its edges."""
    expected = offline.resampled(served.rate).samples[0]
    assert len(served.samples[0]) == len(expected)
    return float(np.corrcoef(served.samples[0], expected)[0, 1])
