"""Spoken utterances in shards on disk, and voices that speak them one after the other.

Shards are written beside their place and moved there, so that a stopped run resumes and training can begin with what is
there.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.io import Sound, float_to_pcm16
from vivavoce.errors import InputError, VivaError
from vivavoce.models.kokoro.windows import WindowLengths
from vivavoce.train.synthesizers import Programs
from vivavoce.train.voices import RATE, SyntheticVoice, speak
from vivavoce.tts.hibari import HibariTTS
from vivavoce.tts.interface import SpeakingStyle
from vivavoce.tts.kokoro import KokoroTTS

Spoken = TypeVar("Spoken", bound=Any)
"""A dataclass with text, voice, speed, word_ends and samples."""
Planned = TypeVar("Planned")
SHARD = 12  # utterances of a shard that is spoken one by one
WHOLE_SENTENCES = WindowLengths(60.0, 60.0, 60.0)
ESPEAK_MANDARIN = ("cmn+m1", "cmn+f2", "cmn+m7", "cmn+f5", "cmn+klatt2", "cmn+Annie", "cmn+benjamin", "cmn+max")


def write_shard(path: Path, utterances: Sequence[Any]) -> None:
    """Write a shard beside its place and move it there, its JSON last, which makes it whole."""
    unfinished = path.with_name(f"partial-{path.name}")
    np.savez(unfinished.with_suffix(".npz"), *[each.samples for each in utterances])
    about = [described(each) for each in utterances]
    unfinished.with_suffix(".json").write_text(json.dumps(about, ensure_ascii=False), encoding="utf8")
    for suffix in (".npz", ".json"):
        os.replace(unfinished.with_suffix(suffix), path.with_suffix(suffix))


def read_utterances(folder: Path, kind: type[Spoken], made_by: str, name: str = "") -> list[Spoken]:
    """The utterances of the shards of a folder, or of those whose name begins so, written by `viva train MADE_BY`."""
    found = []
    for path in sorted(folder.glob(f"{name}*-[0-9]*.json")):
        if path.name.startswith("partial-"):
            continue
        with np.load(path.with_suffix(".npz")) as sounds:
            for index, about in enumerate(json.loads(path.read_text(encoding="utf8"))):
                found.append(replace(restored(kind, about), samples=sounds[f"arr_{index}"]))
    if not found:
        raise InputError(f"{folder} holds no speech; make it with `viva train {made_by} --out {folder}`")
    return found


def described(utterance: Any) -> dict[str, Any]:
    """All of an utterance but its sound."""
    return {key: value for key, value in vars(utterance).items() if key != "samples"}


def restored(kind: type[Spoken], about: dict[str, Any]) -> Spoken:
    """The utterance that `described` describes."""
    made: Spoken = kind(**{**about, "word_ends": tuple(about["word_ends"])})
    return made


def write_missing(out: Path, name: str, plan: Sequence[Planned], speak_one: Callable[[Planned], Any]) -> None:
    """Speak the shards of a plan that are not there."""
    for number, begin in enumerate(range(0, len(plan), SHARD)):
        path = out / f"{name}-{number:04d}"
        if path.with_suffix(".json").is_file():
            continue
        spoken = []
        for planned in plan[begin : begin + SHARD]:
            try:
                spoken.append(speak_one(planned))
            except VivaError as error:  # a voice that says nothing costs one utterance
                print(f"{name} {number}: {error}", flush=True)
        write_shard(path, spoken)
        print(json.dumps({"shard": path.name, "utterances": len(spoken)}), flush=True)


def mandarin_voice(name: str) -> SyntheticVoice:
    """A Mandarin voice of espeak-ng."""
    return SyntheticVoice(f"espeak-{name}", "espeak-ng", ("-v", name, "-s", "165", "-a", "30"))


def speak_kokoro(model: KokoroTTS, utterance: Spoken) -> Spoken:
    """The utterance with its sound at 16 kHz, and the ends of its words."""
    style = SpeakingStyle(speed=utterance.speed, clean=False, pause=0.0)
    pieces = list(model.speak(utterance.text, utterance.voice, style))
    samples = Sound(np.concatenate([piece.samples for piece in pieces], axis=1), model.rate).resampled(RATE).samples[0]
    ends = [word.end for piece in pieces for word in piece.words if re.search(r"\w", word.word)]
    return _with_sound(utterance, samples, ends)


def speak_hibari(model: HibariTTS, utterance: Spoken) -> Spoken:
    """The utterance with its sound."""
    style = SpeakingStyle(speed=utterance.speed, clean=False, pause=0.0)
    return _with_sound(utterance, model.say(utterance.text, style=style).resampled(RATE).samples[0], [])


def speak_program(utterance: Spoken, voice: SyntheticVoice, installed: Programs) -> Spoken:
    """The utterance with its sound, by a program that does not tell when its words end."""
    return _with_sound(utterance, speak(voice, utterance.text, installed), [])


def _with_sound(utterance: Spoken, samples: NDArray[np.float32], ends: Sequence[float]) -> Spoken:
    word_ends = tuple(round(end, 3) for end in ends)
    made: Spoken = replace(utterance, samples=float_to_pcm16(samples), word_ends=word_ends)
    return made
