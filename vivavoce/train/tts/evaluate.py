"""How well a voice is understood: `viva train judge-tts --model DIR --moonshine DIR`.

Sentences of the front desk and sentences about anything are spoken, heard by a recogniser that nobody trained here, and
given to a model of listeners.
"""

import argparse
import copy
import json
import time
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from vivavoce.asr.backends.moonshine import Moonshine
from vivavoce.evaluation.scoring import Listeners, word_errors
from vivavoce.models.checkpoint import save_weights
from vivavoce.train.front_desk import general_sentences, normalise, reply_sentences
from vivavoce.tts.interface import SpeakingStyle, SpeechModel, open_speech_model

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


PAUSE = 0.4  # seconds between two samples


def save_half(module: nn.Module, folder: Path) -> None:
    """`model.safetensors` under the published names."""
    save_weights(copy.deepcopy(module).half(), folder)


def write_samples(folder: Path, samples: Sequence[tuple[str, NDArray[np.float32]]], rate: int) -> None:
    """`samples.wav`, and in `samples.json` the name, first and last sample of each."""
    pieces: list[NDArray[np.int16]] = []
    entries = []
    place = 0
    for name, sound in samples:
        pcm = (np.clip(sound, -1, 1) * 32767).astype(np.int16)
        entries.append({"name": name, "start": place, "end": place + len(pcm)})
        pieces += [pcm, np.zeros(int(PAUSE * rate), np.int16)]
        place += len(pieces[-2]) + len(pieces[-1])
    with wave.open(str(folder / "samples.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.concatenate(pieces).astype("<i2").tobytes() if pieces else b"")
    (folder / "samples.json").write_text(json.dumps({"rate": rate, "samples": entries}, indent=1), encoding="utf8")
