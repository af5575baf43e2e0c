"""The direction of telephone speech among speaker embeddings, which `models/campplus_telephone.npy` holds.

Embeddings of narrow-band speech share a large component, whoever speaks; it is the mean over voices. Run as
`python -m vivavoce.bench.telephone_direction OUT.npy`: Kokoro speaks some sentences in its training voices.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vivavoce import hub
from vivavoce.audio.io import Sound
from vivavoce.audio.vad import RATE, voice_activity
from vivavoce.audio.voiced import voiced_samples
from vivavoce.bench.duplex.rooms import by_telephone
from vivavoce.bench.duplex.speech import MODEL, SpokenTexts
from vivavoce.bench.turn_sounds import RATE as WIRE_RATE
from vivavoce.errors import InputError

Array = NDArray[np.float32]
SECONDS = 2.048
VOICES = {
    "en": (
        *("af_bella", "am_puck", "bf_emma", "bm_george", "af_heart", "am_michael", "af_sarah", "am_fenrir"),
        *("bf_alice", "bm_daniel"),
    ),
    "zh": ("zf_xiaobei", "zm_yunjian", "zf_xiaoxiao", "zm_yunxi"),
}
TEXTS = {
    "en": (
        "The delivery came an hour late, and nobody had asked for it.",
        "I would like to know when the next bus leaves for the harbour.",
        "Did you bring the red umbrella from upstairs?",
        "My sister lives near the station with her two dogs.",
    ),
    "zh": (
        "昨天的快递晚到了一个小时，也没有人来问。",
        "请问下一班去港口的公共汽车几点开？",
        "你把红色的雨伞从楼上拿下来了吗？",
    ),
}


def direction(sounds: Iterable[Array], embed: Callable[[Array], Array]) -> Array:
    """The unit vector of the mean embedding of sounds, at 16 kHz, with enough speech in them."""
    detector = voice_activity()
    speech = [voiced_samples(sound, detector) for sound in sounds]
    vectors = [embed(each[: round(SECONDS * RATE)]) for each in speech if len(each) >= 0.9 * SECONDS * RATE]
    if not vectors:
        raise InputError(f"no sound has {SECONDS:.1f} s of speech")
    mean = np.mean(vectors, axis=0)
    unit: Array = (mean / np.linalg.norm(mean)).astype(np.float32)
    return unit


def _telephone_sounds(speak: SpokenTexts) -> Iterable[Array]:
    for language, voices in VOICES.items():
        for text in TEXTS[language]:
            for voice in voices:
                narrow = by_telephone(speak(text, voice).sound)
                yield Sound(narrow[None], WIRE_RATE).resampled(RATE).samples[0]


def main(out: Path) -> None:
    """Write the direction to a file."""
    from vivavoce.models.campplus import SpeakerEncoder

    encoder = SpeakerEncoder.load(hub.resolve("campplus"), removes_telephone=False)
    speak = SpokenTexts(hub.cache_folder() / "vivavoce" / "duplex" / MODEL)
    np.save(out, direction(_telephone_sounds(speak), encoder.embed))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
