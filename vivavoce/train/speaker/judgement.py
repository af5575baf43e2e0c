"""How well a voice is understood: `viva train judge-tts --model DIR --moonshine DIR`.

Sentences of the front desk and sentences about anything are spoken, heard by a recogniser that nobody trained here, and
given to a model of listeners.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vivavoce.bench.edit_distance import word_errors
from vivavoce.bench.judges import Listeners, Moonshine
from vivavoce.speech.interface import SpeakingStyle, SpeechModel
from vivavoce.speech.loading import open_speech_model
from vivavoce.train.front_desk import general_sentences, normalise, reply_sentences

SEED = 1000  # of sentences about anything that no training drew; the replies of a desk are few, and it drew them all


def judge_voice(
    speaker: SpeechModel, texts: Sequence[str], moonshine: Moonshine, listeners: Listeners, voice: str | None = None
) -> dict[str, float]:
    """Word error rate, DNSMOS and real-time factor of sentences said."""
    errors, words, seconds, scores = 0, 0, 0.0, []
    begun = time.perf_counter()
    sounds = [speaker.say(text, voice, SpeakingStyle(seed=seed)) for seed, text in enumerate(texts)]
    took = time.perf_counter() - begun
    for text, sound in zip(texts, sounds, strict=True):
        meant = normalise(text)
        errors += word_errors(meant, normalise(moonshine.transcribe(sound)))
        words += len(meant.split())
        seconds += sound.seconds
        scores.append(listeners.overall(sound))
    figures = {"word_error_rate": errors / words, "dnsmos": float(np.mean(scores)), "real_time_factor": took / seconds}
    return {name: round(value, 3) for name, value in figures.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini-tts", help="a bundled name or a folder")
    parser.add_argument("--moonshine", type=Path, required=True, help="unpacked npm package of Moonshine")
    parser.add_argument("--voice", help="one of the model's voices; its own if none is given")
    parser.add_argument("--count", type=int, default=20, help="sentences of each kind")
    given = parser.parse_args(arguments)
    speaker, moonshine, listeners = open_speech_model(given.model, "cpu"), Moonshine(given.moonshine), Listeners()
    for kind, texts in (
        ("front desk", reply_sentences(given.count, SEED)[: given.count]),
        ("anything", general_sentences(given.count, SEED)[: given.count]),
    ):
        print(json.dumps({"sentences": kind, **judge_voice(speaker, texts, moonshine, listeners, given.voice)}))


if __name__ == "__main__":
    main()
