"""`viva train turn-end-data --out DIR`: sentences that are finished or left unfinished, spoken with the ends of words.

Kokoro speaks them in large batches with its training voices and mixtures of them, flite, festival and espeak-ng others
in English (`--programs`; with `--count 0` they alone, without Kokoro); held-out voices speak what only evaluates. A
plan with phonemes can be written first (`--plan-only`) and spoken on a machine without a phonemiser (`--plan`), such as
one with a GPU. Some words are drawn out, as speakers do who think of the next one.
"""

import argparse
import json
import lzma
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vivavoce import hub
from vivavoce.cores import usable_cores
from vivavoce.errors import InputError, VivaError
from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES
from vivavoce.models.kokoro.config import read_vocabulary
from vivavoce.models.kokoro.model import Kokoro
from vivavoce.train.batch_synthesis import BatchSynthesizer, with_phonemes
from vivavoce.train.front_desk import language, user_sentences
from vivavoce.train.spoken_shards import described, read_utterances, restored, speak_program, write_shard
from vivavoce.train.synthesizers import Programs
from vivavoce.train.turn_end.beginnings import beginning
from vivavoce.train.turn_end.texts import TurnText, turn_texts
from vivavoce.train.utterances import mixture
from vivavoce.train.voices import HELD_OUT as HELD_OUT_PROGRAMS
from vivavoce.train.voices import SyntheticVoice, draw, programs, training_voices

Samples = NDArray[np.int16]
SHARD = 400  # utterances of a shard
LANGUAGES = ("en", "zh")
HELD_OUT = 0.04  # share of utterances in held-out voices
PROGRAMS_HELD_OUT = 0.1  # of those of programs
LISTED, RECEPTION = 0.35, 0.3  # shares of texts made of lists, and said to the front desk; the rest is from `--texts`
UNFINISHED = 0.4  # share of the front desk's and the given sentences that are left unfinished
PROGRAM_VOICES = tuple(f"{name}-" for name in ("flite", "festival", "espeak", "mbrola", "pico"))
SPEEDS = (0.8, 1.25)
DRAWN_OUT = 0.35  # share of utterances with a drawn-out word
LENGTHENINGS = (1.3, 2.6)  # of the last phonemes of such a word
LENGTHENED_PHONEMES = 3


@dataclass(frozen=True)
class TurnUtterance:
    """A spoken text, or one to be spoken. `word_ends` are seconds."""

    part: str
    language: str
    text: str
    voice: str
    is_finished: bool
    speed: float = 1.0
    phonemes: str = ""
    drawn_out: int | None = None
    """The word whose end is lengthened, if one is."""
    lengthening: float = 1.0
    word_ends: tuple[float, ...] = ()
    samples: Samples = field(default_factory=lambda: np.zeros(0, np.int16), repr=False, compare=False)

    def lengthenings(self) -> list[float]:
        """The factor on the duration of each phoneme."""
        factors = [1.0] * len(self.phonemes)
        if self.drawn_out is not None:
            ends = [*(place for place, phoneme in enumerate(self.phonemes) if phoneme == " "), len(self.phonemes)]
            end = ends[min(self.drawn_out, len(ends) - 1)]
            for place in range(max(0, end - LENGTHENED_PHONEMES), end):
                factors[place] = self.lengthening
        return factors


def turn_plan(count: int, sentences: Sequence[str] = (), seed: int = 0) -> list[TurnUtterance]:
    """Utterances of both languages, without phonemes; `sentences`: English ones beside the lists and the desk's."""
    source = random.Random(f"turn ends {seed}")
    held = round(count * HELD_OUT / len(LANGUAGES))
    parts = {"train": count // len(LANGUAGES) - held, "held_out": held}
    plan = []
    for code in LANGUAGES:
        for part, size in parts.items():
            chosen = _sentences_of(part, sentences) if code == "en" else []
            for text in _texts(code, part, size, chosen, source, seed):
                voice = source.choice(HELD_OUT_VOICES[code]) if part == "held_out" else mixture(code, source)
                speed = round(source.uniform(*SPEEDS), 2)
                planned = TurnUtterance(part, code, text.text, voice, text.is_finished, speed)
                plan.append(_drawn_out(planned, source) if source.random() < DRAWN_OUT else planned)
    source.shuffle(plan)
    return plan


def _sentences_of(part: str, sentences: Sequence[str]) -> list[str]:
    """The given sentences of a part: every 25th is held out."""
    return [text for place, text in enumerate(sentences) if (place % 25 == 0) == (part == "held_out")]


def _texts(
    code: str, part: str, count: int, sentences: Sequence[str], source: random.Random, seed: int
) -> Iterator[TurnText]:
    """Texts made of lists, sentences said to the front desk, and given ones; some of them left unfinished."""
    listed = iter(turn_texts(code, part, count, seed))
    asked = iter(user_sentences(part, count, seed, language(code, 2)))
    given = iter(sentences)
    for _ in range(count):
        kind = source.random()
        sentence = None if kind < LISTED else next(asked if kind < LISTED + RECEPTION else given, None)
        begun = beginning(sentence, code, source) if sentence and source.random() < UNFINISHED else None
        if begun:
            yield TurnText(code, begun, False)
        else:
            yield TurnText(code, sentence, True) if sentence else next(listed)


def _drawn_out(planned: TurnUtterance, source: random.Random) -> TurnUtterance:
    """The utterance with a lengthened word: mostly one within it, where a speaker would pause to think."""
    place = source.randrange(max(1, len(planned.text) // (6 if planned.language == "en" else 2)))
    return replace(planned, drawn_out=place, lengthening=round(source.uniform(*LENGTHENINGS), 2))


def speak_plan(
    plan: Sequence[TurnUtterance], synthesizer: BatchSynthesizer, seconds: float | None = None
) -> Iterator[TurnUtterance]:
    """The utterances with sound and ends of words, by length; held-out ones first. None begin after `seconds`."""
    started = time.monotonic()
    for part in ("held_out", "train"):
        chosen = [each for each in plan if each.part == part]
        batches = synthesizer.batches(chosen) if chosen else []
        random.Random(part).shuffle(batches)
        for batch in batches:
            if seconds is not None and time.monotonic() - started > seconds:
                return
            rows = [chosen[index] for index in batch]
            for planned, spoken in zip(
                rows, synthesizer.speak_words(rows, [each.lengthenings() for each in rows]), strict=True
            ):
                if spoken is not None:
                    yield replace(planned, samples=spoken.samples, word_ends=spoken.word_ends)


def read_shards(folder: Path, part: str = "") -> list[TurnUtterance]:
    """All turns of a folder, or those of a part."""
    return read_utterances(folder, TurnUtterance, "turn-end-data", part)


def is_program(utterance: TurnUtterance) -> bool:
    """Whether a program (flite, festival, espeak-ng, …) spoke it."""
    return utterance.voice.startswith(PROGRAM_VOICES)


def program_turns(
    count: int, installed: Programs, sentences: Sequence[str] = (), seed: int = 0
) -> Iterator[TurnUtterance]:
    """English utterances of synthesis programs, on all cores; they do not tell when their words end."""
    source = random.Random(f"turn ends programs {seed}")
    held = round(count * PROGRAMS_HELD_OUT)
    planned = []
    for part, size in (("held_out", held), ("train", count - held)):
        for text in _texts(
            "en", part, size, _sentences_of("train", sentences) if part == "train" else (), source, seed + 1
        ):
            voice = (
                source.choice(HELD_OUT_PROGRAMS)
                if part == "held_out"
                else draw(source, 1, training_voices(installed))[0]
            )
            planned.append((TurnUtterance(part, "en", text.text, voice.name, text.is_finished), voice))

    def spoken(each: tuple[TurnUtterance, SyntheticVoice]) -> TurnUtterance | None:
        try:
            return speak_program(*each, installed)
        except VivaError as error:  # a voice that says nothing costs one utterance
            print(json.dumps({"left out": each[0].text, "error": str(error)}), flush=True)
            return None

    with ThreadPoolExecutor(usable_cores()) as pool:
        yield from (each for each in pool.map(spoken, planned) if each is not None)


def write_plan(path: Path, plan: Sequence[TurnUtterance]) -> None:
    """Write a plan as compressed JSON lines."""
    lines = "".join(json.dumps(described(each), ensure_ascii=False) + "\n" for each in plan)
    path.write_bytes(lzma.compress(lines.encode()))


def read_plan(path: Path) -> list[TurnUtterance]:
    """Read what `write_plan` wrote."""
    try:
        lines = lzma.decompress(path.read_bytes()).decode("utf8").splitlines()
        return [restored(TurnUtterance, json.loads(line)) for line in lines]
    except (OSError, lzma.LZMAError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path} is no plan of turns ({error}); write one with `--plan-only`") from error


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder, or with --plan-only the plan's file")
    parser.add_argument("--count", type=int, default=2000, help="utterances, half of them Mandarin")
    parser.add_argument("--texts", type=Path, help="English sentences, one a line, beside the built-in ones")
    parser.add_argument("--plan-only", action="store_true", help="write a plan to --out and stop")
    parser.add_argument("--plan", type=Path, help="speak this plan")
    parser.add_argument("--kokoro", help="folder or name of the model", default="kokoro-82m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, help="begin no batch after this time")
    parser.add_argument("--programs", type=int, default=0, help="utterances of flite, festival and espeak-ng")
    parser.add_argument("--synthesizers", type=Path, help="written by voices.bundle; default: the installed ones")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    spoken: Iterator[TurnUtterance] = iter(())
    if options.plan or options.count:
        folder = Path(hub.resolve(options.kokoro))
        plan = read_plan(options.plan) if options.plan else _phonemised(options, folder)
        if options.plan_only:
            write_plan(options.out, plan)
            return
        spoken = speak_plan(plan, BatchSynthesizer(Kokoro.load(folder, options.device), folder), options.seconds)
    if options.programs:
        installed = programs(options.synthesizers)
        spoken = chain(program_turns(options.programs, installed, _sentences(options), options.seed), spoken)
    options.out.mkdir(parents=True, exist_ok=True)
    _write(options.out, spoken)


def _sentences(options: argparse.Namespace) -> list[str]:
    given = options.texts.read_text(encoding="utf8").splitlines() if options.texts else []
    return [line.strip() for line in given if line.strip()]


def _phonemised(options: argparse.Namespace, folder: Path) -> list[TurnUtterance]:
    planned = turn_plan(options.count, _sentences(options), options.seed)
    return list(with_phonemes(planned, read_vocabulary(folder).__contains__))


def _write(out: Path, spoken: Iterator[TurnUtterance]) -> None:
    """Write shards of one part each as they fill."""
    waiting: dict[str, list[TurnUtterance]] = {"held_out": [], "train": []}
    written, seconds, started = {"held_out": 0, "train": 0}, 0.0, time.monotonic()
    for utterance in spoken:
        rows = waiting[utterance.part]
        rows.append(utterance)
        seconds += len(utterance.samples) / 16_000
        if len(rows) == SHARD:
            _flush(out, utterance.part, rows, written)
            elapsed = round(time.monotonic() - started)
            print(json.dumps({"hours": round(seconds / 3600, 2), "elapsed": elapsed}), flush=True)
    for part, rows in waiting.items():
        _flush(out, part, rows, written)


def _flush(out: Path, part: str, rows: list[TurnUtterance], written: dict[str, int]) -> None:
    if rows:
        write_shard(out / f"{part}-{written[part]:04d}", rows)
        written[part] += 1
        rows.clear()
