"""Spoken questions that no training heard: `viva train questions --out DIR`.

Phrasings and voices are both held out. They are what a demonstration asks, and what behaviour is tested with.
"""

import argparse
import dataclasses
import json
import random
from pathlib import Path

from vivavoce.audio.io import Sound, write
from vivavoce.train.front_desk import dialogues
from vivavoce.train.voices import HELD_OUT, RATE, SyntheticVoice, programs, speak

LIST = "questions.json"


@dataclasses.dataclass(frozen=True)
class SpokenQuestion:
    """One file: what is said in it, by whom, and the right answer."""

    file: str
    text: str
    reply: str
    intent: str
    voice: str
    slots: tuple[tuple[str, str], ...] = ()


def write_questions(out: Path, count: int, seed: int) -> list[SpokenQuestion]:
    """So many questions of different intents, as Opus files with a list beside them."""
    out.mkdir(parents=True, exist_ok=True)
    source, found, seen = random.Random(f"questions {seed}"), programs(), set[str]()
    questions: list[SpokenQuestion] = []
    for (exchange,) in dialogues("held_out", 40 * count, seed, (1, 1)):
        if len(questions) == count:
            break
        if exchange.intent in seen and len(seen) < count:
            continue
        seen.add(exchange.intent)
        voice: SyntheticVoice = source.choice(HELD_OUT)
        file = f"{len(questions):02d}-{exchange.intent.replace('_', '-')}.opus"
        write(out / file, Sound(speak(voice, exchange.user, found), RATE))
        questions.append(
            SpokenQuestion(file, exchange.user, exchange.reply, exchange.intent, voice.name, exchange.slots)
        )
    content = [dataclasses.asdict(question) for question in questions]
    (out / LIST).write_text(json.dumps(content, indent=1), encoding="utf8")
    return questions


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    questions = write_questions(given.out, given.count, given.seed)
    print(f"{len(questions)} questions in {given.out}")


if __name__ == "__main__":
    main()
