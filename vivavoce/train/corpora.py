"""The spoken corpora of all trainings, made at once: `viva train corpora --out DIR [--synthesizers BUNDLE]`.

`mixed` is for ear and recogniser (training voices and the teacher), `held_out` for judging them, `teacher` for flow and
vocoder, `tts` for the speaker (teacher, a second voice, and a few of every other).
"""

import argparse
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vivavoce.train.corpus import Corpus, build, held_out_plan, teacher_plan, training_plan
from vivavoce.train.voices import HELD_OUT, OPTIONAL, TEACHER, VOICES, guests, programs

SECOND_VOICE = next(voice for voice in VOICES if voice.name == "flite-slt-1.0")
ONE_OF_OTHERS = 20  # utterances of other voices that the speaker's corpus takes one of


@dataclass(frozen=True)
class Counts:
    """Utterances of each kind."""

    training: int = 40_000
    teacher: int = 9_000
    second_voice: int = 1_500
    held_out: int = 1_000

    def scaled(self, share: float) -> "Counts":
        """The same mixture, smaller or larger."""
        scaled = (max(1, round(share * count)) for count in vars(self).values())
        return Counts(*scaled)


def write_corpora(
    out: Path, counts: Counts, workers: int, seed: int = 0, root: Path | None = None
) -> dict[str, Corpus]:
    """Speak everything once and write each corpus; by name."""
    replies = teacher_plan(counts.teacher, seed)
    second = [(text, SECOND_VOICE) for text, _ in teacher_plan(counts.second_voice, seed + 1)]
    spoken = training_plan(seed, counts.training, voices=guests(programs(root)))
    plan = [*spoken, *replies, *second, *held_out_plan(seed, counts.held_out)]
    everything = build(plan, workers, seed, None, root)
    said = {text for text, _ in (*replies, *second)}
    unheard = {voice.name for voice in HELD_OUT}
    own = {TEACHER.name, SECOND_VOICE.name}
    parts: dict[str, Callable[[str, str], bool]] = {
        "mixed": lambda voice, text: voice not in unheard and not (voice == SECOND_VOICE.name and text in said),
        "held_out": lambda voice, text: voice in unheard,
        "teacher": lambda voice, text: voice == TEACHER.name and text in said,
        "tts": lambda voice, text: (
            (voice in own and text in said) or (voice not in unheard and _is_chosen(voice + text))
        ),
    }
    out.mkdir(parents=True, exist_ok=True)
    corpora = {name: _part(everything, takes) for name, takes in parts.items()}
    for name, corpus in corpora.items():
        corpus.save(out / name)
    return corpora


def _part(corpus: Corpus, takes: Callable[[str, str], bool]) -> Corpus:
    chosen = [i for i in range(len(corpus)) if takes(corpus.voices[i], corpus.texts[i])]
    return Corpus.of(
        [(corpus.samples[corpus.starts[i] : corpus.starts[i + 1]], corpus.texts[i], corpus.voices[i]) for i in chosen]
    )


def _is_chosen(name: str) -> bool:
    return zlib.crc32(name.encode()) % ONE_OF_OTHERS == 0


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--synthesizers", type=Path, help="folder that voices.bundle wrote; default: this machine's")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual number of utterances")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    counts = Counts().scaled(given.scale)
    if missing := sorted({voice.part for voice in OPTIONAL} - programs(given.synthesizers).parts):
        print(f"goes without the optional voices {', '.join(missing)}")
    for name, corpus in write_corpora(given.out, counts, given.workers, given.seed, given.synthesizers).items():
        print(f"{name}: {len(corpus)} utterances, {corpus.seconds / 3600:.2f} h, {len(set(corpus.voices))} voices")


if __name__ == "__main__":
    main()
