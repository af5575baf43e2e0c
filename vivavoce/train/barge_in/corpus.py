"""`viva train barge-in-data --out DIR`: interruptions, backchannels, fillers and laughs, spoken to train barge-in.

Kokoro speaks them with its training voices and mixtures of them, flite, festival and espeak-ng with theirs, hibari with
its own. Shards are written one after the other, so that a stopped run resumes.
"""

import argparse
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vivavoce.audio.io import float_to_pcm16
from vivavoce.errors import InputError
from vivavoce.train.barge_in.sounds import recorded
from vivavoce.train.barge_in.texts import draw_kind, overlap_text
from vivavoce.train.spoken_shards import (
    ESPEAK_MANDARIN,
    WHOLE_SENTENCES,
    mandarin_voice,
    read_utterances,
    speak_hibari,
    speak_kokoro,
    speak_program,
    write_missing,
)
from vivavoce.train.synthesizers import Programs
from vivavoce.train.turn_end.corpus import SPEEDS, TurnUtterance
from vivavoce.train.utterances import mixture
from vivavoce.train.voices import SyntheticVoice, draw, programs, training_voices
from vivavoce.tts.hibari import HibariTTS
from vivavoce.tts.kokoro import KokoroTTS

CHECKED = 8
"""One of this many utterances only chooses the threshold."""
UTTERANCES_A_VOICE = 8
"""Of Kokoro: a call compares its sounds with what its user said before, in the same voice."""


@dataclass(frozen=True)
class OverlapUtterance(TurnUtterance):
    """A spoken text and what it is when it is said over a reply: one of `texts.KINDS`."""

    kind: str = "interruption"


def kokoro_plan(count: int, seed: int = 0) -> list[OverlapUtterance]:
    """Utterances of Kokoro, every other voice a Mandarin one."""
    source = random.Random(f"overlaps kokoro {seed}")
    plan = []
    for index in range(count):
        if index % UTTERANCES_A_VOICE == 0:
            code = ("en", "zh")[index // UTTERANCES_A_VOICE % 2]
            voice, speed = mixture(code, source), source.uniform(*SPEEDS)
        plan.append(_planned(index // UTTERANCES_A_VOICE, code, voice, source, speed))
    return plan


def program_plan(count: int, installed: Programs, seed: int = 0) -> list[tuple[OverlapUtterance, SyntheticVoice]]:
    """Utterances of synthesis programs, every fourth one in Mandarin."""
    source = random.Random(f"overlaps programs {seed}")
    plan = []
    for index in range(count):
        code = "zh" if index % 4 == 3 else "en"
        voice = mandarin_voice(source.choice(ESPEAK_MANDARIN)) if code == "zh" else None
        voice = voice or draw(source, 1, training_voices(installed))[0]
        plan.append((_planned(index, code, voice.name, source), voice))
    return plan


def hibari_plan(count: int, seed: int = 0) -> list[OverlapUtterance]:
    """English utterances of one quick voice."""
    source = random.Random(f"overlaps hibari {seed}")
    return [_planned(index, "en", "hibari", source, source.uniform(*SPEEDS)) for index in range(count)]


def part_at(index: int) -> str:
    """The part of the index-th sound, `train` or `check`."""
    return "check" if index % CHECKED == 0 else "train"


def people_utterances(folder: Path, a_voice: int) -> list[OverlapUtterance]:
    """What people say: a folder of recordings for each voice, up to `a_voice` of each."""
    found = []
    for voice in sorted(each for each in folder.iterdir() if each.is_dir()):
        for index, sound in enumerate(recorded(voice, a_voice)):
            found.append(OverlapUtterance(part_at(index), "", "", voice.name, True, samples=float_to_pcm16(sound)))
    if not found:
        raise InputError(f"{folder} holds no folders of recordings, one for each voice")
    return found


def _planned(index: int, code: str, voice: str, source: random.Random, speed: float = 1.0) -> OverlapUtterance:
    kind = draw_kind(source)
    text = overlap_text(kind, code, source)
    return OverlapUtterance(part_at(index // 2), code, text, voice, True, round(speed, 2), kind=kind)


def read_overlaps(folder: Path) -> list[OverlapUtterance]:
    """All utterances of a folder."""
    return read_utterances(folder, OverlapUtterance, "barge-in-data")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kokoro", type=int, default=960, help="utterances of Kokoro")
    parser.add_argument("--programs", type=int, default=800, help="utterances of flite, festival and espeak-ng")
    parser.add_argument("--hibari", type=int, default=240, help="utterances of hibari")
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
