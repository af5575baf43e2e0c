"""`viva train turn-end-data --out DIR`: sentences that are finished or left unfinished, spoken with the ends of words.

Kokoro speaks them with its training voices and mixtures of them; flite, festival and espeak-ng a second part for
variety; hibari, which is quick, a third one in English. Held-out voices speak what only evaluates. Shards are written
one after the other, so that a stopped run resumes and training can begin with what is there.
"""

import argparse
import json
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from vivavoce.audio.io import Sound, float_to_pcm16
from vivavoce.errors import InputError, VivaError
from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES
from vivavoce.models.kokoro.windows import WindowLengths
from vivavoce.train.front_desk import language, user_sentences
from vivavoce.train.synthesizers import Programs
from vivavoce.train.turn_end.texts import TurnText, turn_texts
from vivavoce.train.utterances import mixture
from vivavoce.train.voices import HELD_OUT, RATE, SyntheticVoice, draw, programs, speak, training_voices
from vivavoce.tts.hibari import HibariTTS
from vivavoce.tts.interface import SpeakingStyle
from vivavoce.tts.kokoro import KokoroTTS

Samples = NDArray[np.int16]
Planned = TypeVar("Planned")
Read = TypeVar("Read", bound="TurnUtterance")
SHARD = 12  # utterances of a shard
ROUND = (("zh", "train"), ("en", "held_out"), ("zh", "train"), ("en", "train"), ("zh", "held_out"), ("zh", "train"))
"""What Kokoro speaks, again and again: mostly Mandarin, as there are quicker voices for English."""
RECEPTION = 0.25  # share of sentences said to the front desk
SPEEDS = (0.85, 1.2)
WHOLE_SENTENCES = WindowLengths(60.0, 60.0, 60.0)
ESPEAK_MANDARIN = ("cmn+m1", "cmn+f2", "cmn+m7", "cmn+f5", "cmn+klatt2", "cmn+Annie", "cmn+benjamin", "cmn+max")
ESPEAK_MANDARIN_HELD_OUT = ("cmn+m3", "cmn+f4")


@dataclass(frozen=True)
class TurnUtterance:
    """A spoken text. `word_ends` are seconds, known for voices that tell them."""

    part: str
    language: str
    text: str
    voice: str
    is_finished: bool
    speed: float = 1.0
    word_ends: tuple[float, ...] = ()
    samples: Samples = field(default_factory=lambda: np.zeros(0, np.int16), repr=False, compare=False)


def kokoro_plan(count: int, seed: int = 0) -> list[TurnUtterance]:
    """Utterances in the order of `ROUND`."""
    source = random.Random(f"turn ends kokoro {seed}")
    texts = {(code, part): _texts(code, part, count, seed) for code in ("en", "zh") for part in ("train", "held_out")}
    plan = []
    for index in range(count):
        code, part = ROUND[index % len(ROUND)]
        text = next(texts[code, part])
        voice = source.choice(HELD_OUT_VOICES[code]) if part == "held_out" else mixture(code, source)
        speed = 1.0 if part == "held_out" else round(source.uniform(*SPEEDS), 2)
        plan.append(TurnUtterance(part, code, text.text, voice, text.is_finished, speed))
    return plan


def program_plan(count: int, installed: Programs, seed: int = 0) -> list[tuple[TurnUtterance, SyntheticVoice]]:
    """Utterances of synthesis programs, every other one in Mandarin, one of eight held out."""
    source = random.Random(f"turn ends programs {seed}")
    texts = {
        (code, part): _texts(code, part, count, seed + 1) for code in ("en", "zh") for part in ("train", "held_out")
    }
    plan = []
    for index in range(count):
        code, part = ("en", "zh")[index % 2], "held_out" if index // 2 % 8 == 0 else "train"
        text = next(texts[code, part])
        if code == "zh":
            voice = mandarin_voice(source.choice(ESPEAK_MANDARIN_HELD_OUT if part == "held_out" else ESPEAK_MANDARIN))
        elif part == "held_out":
            voice = source.choice(HELD_OUT)
        else:
            (voice,) = draw(source, 1, training_voices(installed))
        plan.append((TurnUtterance(part, code, text.text, voice.name, text.is_finished), voice))
    return plan


def hibari_plan(count: int, seed: int = 0) -> list[TurnUtterance]:
    """English utterances of one quick voice, all to learn from."""
    source = random.Random(f"turn ends hibari {seed}")
    return [
        TurnUtterance("train", "en", text.text, "hibari", text.is_finished, round(source.uniform(*SPEEDS), 2))
        for text in _texts("en", "train", count, seed + 2)
    ]


def mandarin_voice(name: str) -> SyntheticVoice:
    """A Mandarin voice of espeak-ng."""
    return SyntheticVoice(f"espeak-{name}", "espeak-ng", ("-v", name, "-s", "165", "-a", "30"))


def _texts(code: str, part: str, count: int, seed: int) -> Iterator[TurnText]:
    """Texts made of lists, and finished ones said to the front desk."""
    source = random.Random(f"turn ends {code} {part} {seed}")
    spoken = iter(user_sentences(part, max(1, count), seed, language(code, 2)))
    for text in turn_texts(code, part, count, seed):
        sentence = next(spoken, None) if text.is_finished and source.random() < RECEPTION else None
        yield text if sentence is None else TurnText(code, sentence, True)


def speak_kokoro(model: KokoroTTS, utterance: TurnUtterance) -> TurnUtterance:
    """The utterance with its sound at 16 kHz, and the ends of its words."""
    style = SpeakingStyle(speed=utterance.speed, clean=False, pause=0.0)
    pieces = list(model.speak(utterance.text, utterance.voice, style))
    samples = Sound(np.concatenate([piece.samples for piece in pieces], axis=1), model.rate).resampled(RATE).samples[0]
    ends = [word.end for piece in pieces for word in piece.words if re.search(r"\w", word.word)]
    return _with_sound(utterance, samples, ends)


def speak_hibari(model: HibariTTS, utterance: TurnUtterance) -> TurnUtterance:
    """The utterance with its sound."""
    style = SpeakingStyle(speed=utterance.speed, clean=False, pause=0.0)
    return _with_sound(utterance, model.say(utterance.text, style=style).resampled(RATE).samples[0], [])


def speak_program(utterance: TurnUtterance, voice: SyntheticVoice, installed: Programs) -> TurnUtterance:
    """The utterance with its sound, by a program that does not tell when its words end."""
    return _with_sound(utterance, speak(voice, utterance.text, installed), [])


def _with_sound(utterance: TurnUtterance, samples: NDArray[np.float32], ends: Sequence[float]) -> TurnUtterance:
    word_ends = tuple(round(end, 3) for end in ends)
    return replace(utterance, samples=float_to_pcm16(samples), word_ends=word_ends)


def write_shard(path: Path, utterances: Sequence[TurnUtterance]) -> None:
    """Write a shard beside its place and move it there, its JSON last, which makes it whole."""
    unfinished = path.with_name(f"partial-{path.name}")
    np.savez(unfinished.with_suffix(".npz"), *[each.samples for each in utterances])
    about = [{key: value for key, value in vars(each).items() if key != "samples"} for each in utterances]
    unfinished.with_suffix(".json").write_text(json.dumps(about, ensure_ascii=False), encoding="utf8")
    for suffix in (".npz", ".json"):
        os.replace(unfinished.with_suffix(suffix), path.with_suffix(suffix))


def read_shards(folder: Path, source: str = "") -> list[TurnUtterance]:
    """All turns of a folder, or those of a source: `kokoro`, `hibari` or `programs`."""
    return read_utterances(folder, TurnUtterance, "turn-end-data", source)


def read_utterances(folder: Path, kind: type[Read], made_by: str, source: str = "") -> list[Read]:
    """The utterances of the shards of a folder, or of those of a source, written by `viva train MADE_BY`."""
    found = []
    for path in sorted(folder.glob(f"{source}*-[0-9]*.json")):
        if path.name.startswith("partial-"):
            continue
        with np.load(path.with_suffix(".npz")) as sounds:
            for index, about in enumerate(json.loads(path.read_text(encoding="utf8"))):
                about["word_ends"] = tuple(about["word_ends"])
                found.append(kind(**about, samples=sounds[f"arr_{index}"]))
    if not found:
        raise InputError(f"{folder} holds no speech; make it with `viva train {made_by} --out {folder}`")
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kokoro", type=int, default=1200, help="utterances of Kokoro")
    parser.add_argument("--programs", type=int, default=1600, help="utterances of flite, festival and espeak-ng")
    parser.add_argument("--hibari", type=int, default=600, help="utterances of hibari")
    parser.add_argument("--model", default="kokoro-82m")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.hibari:
        hibari = HibariTTS.load()
        write_missing(options.out, "hibari", hibari_plan(options.hibari, options.seed), partial(speak_hibari, hibari))
    if options.programs:
        installed = programs()
        plan = program_plan(options.programs, installed, options.seed)
        write_missing(options.out, "programs", plan, lambda planned: speak_program(*planned, installed))
    if options.kokoro:
        kokoro = KokoroTTS.load(options.model)
        kokoro.windows = WHOLE_SENTENCES
        write_missing(options.out, "kokoro", kokoro_plan(options.kokoro, options.seed), partial(speak_kokoro, kokoro))
        kokoro.close()


def write_missing(out: Path, name: str, plan: Sequence[Planned], speak_one: Callable[[Planned], TurnUtterance]) -> None:
    """Speak the shards of a plan that are not there."""
    for number, begin in enumerate(range(0, len(plan), SHARD)):
        path = out / f"{name}-{number:04d}"
        if path.with_suffix(".json").is_file():
            continue
        spoken = []
        for planned in plan[begin : begin + SHARD]:
            try:
                spoken.append(speak_one(planned))
            except VivaError as error:
                print(json.dumps({"left out": str(planned), "error": str(error)}), flush=True)
        write_shard(path, spoken)
        print(json.dumps({"shard": path.name, "seconds": sum(len(each.samples) for each in spoken) / RATE}), flush=True)
