"""`viva train questions`: spoken questions with held-out phrasings in held-out voices, as Opus files with a JSON list.

The voices are those of the installed synthesis programs, or with `--kokoro` those of Kokoro-82M, which also speaks
Mandarin.
"""

import argparse
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path

from vivavoce.audio.io import Sound, write
from vivavoce.errors import InputError
from vivavoce.evaluation.held_out_voices import HELD_OUT_VOICES
from vivavoce.evaluation.questions import INDEX, QuestionRecording
from vivavoce.train.front_desk import ENGLISH_ALONE, LANGUAGES, Exchange, SpokenLanguage, dialogues, languages
from vivavoce.train.voices import HELD_OUT, programs, speak
from vivavoce.tts.interface import SpeakingStyle
from vivavoce.tts.kokoro import KokoroTTS

RATE = 16_000
BATCH = 8
EDITION = 2  # of the phrasings in other languages than English
KOKORO = "kokoro-82m"


def write_questions(
    out: Path, count: int, seed: int, kokoro: bool = False, code: str = "en", device: str = "auto"
) -> list[QuestionRecording]:
    """Write questions of different intents, spoken by the synthesis programs or by Kokoro."""
    exchanges = questions_of_each_intent(count, seed, code)
    texts = [exchange.user for exchange in exchanges]
    if code != "en" and not kokoro:
        raise InputError("only Kokoro speaks other languages than English: add --kokoro")
    if kokoro:
        spoken = [(f"kokoro-{voice}", sound) for voice, sound in spoken_by_kokoro(texts, seed, device, code)]
    else:
        spoken = _spoken_by_programs(texts, seed)
    out.mkdir(parents=True, exist_ok=True)
    questions = []
    for number, (exchange, (voice, sound)) in enumerate(zip(exchanges, spoken, strict=True)):
        file = f"{number:02d}-{exchange.intent.replace('_', '-')}.opus"
        write(out / file, sound.resampled(RATE))
        questions.append(QuestionRecording(file, exchange.user, exchange.reply, exchange.intent, voice, exchange.slots))
    content = [dataclasses.asdict(question) for question in questions]
    (out / INDEX).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf8")
    return questions


def questions_of_each_intent(count: int, seed: int, code: str = "en") -> list[Exchange]:
    """So many held-out first turns, no two of the same intent."""
    chosen: dict[str, Exchange] = {}
    for (exchange,) in dialogues("held_out", 40 * count, seed, (1, 1), held_out_language(code)):
        if len(chosen) == count:
            break
        chosen.setdefault(exchange.intent, exchange)
    return list(chosen.values())


def held_out_language(code: str) -> tuple[SpokenLanguage, ...]:
    """The language whose held-out phrasings are asked; English as of edition 1."""
    return ENGLISH_ALONE if code == "en" else languages((code,), EDITION)


def spoken_by_kokoro(texts: Sequence[str], seed: int, device: str, code: str = "en") -> list[tuple[str, Sound]]:
    """Each text in one of the held-out voices of a language, with the voice's name."""
    source = random.Random(f"kokoro {seed}")
    voices = [source.choice(HELD_OUT_VOICES[code]) for _ in texts]
    style = SpeakingStyle(clean=False)
    requests = [(text, voice, style) for text, voice in zip(texts, voices, strict=True)]
    tts = KokoroTTS.load(KOKORO, device)
    try:
        sounds = [
            sound for begin in range(0, len(requests), BATCH) for sound in tts.say_each(requests[begin : begin + BATCH])
        ]
    finally:
        tts.close()
    return list(zip(voices, sounds, strict=True))


def _spoken_by_programs(texts: Sequence[str], seed: int) -> list[tuple[str, Sound]]:
    source, installed = random.Random(f"questions {seed}"), programs()
    voices = [source.choice(HELD_OUT) for _ in texts]
    return [(voice.name, Sound(speak(voice, text, installed), RATE)) for voice, text in zip(voices, texts, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kokoro", action="store_true", help="in held-out voices of Kokoro-82M, not the programs'")
    parser.add_argument("--language", choices=sorted(LANGUAGES), default="en", help="other than en: with --kokoro")
    parser.add_argument("--device", default="auto", help="of Kokoro")
    options = parser.parse_args(arguments)
    questions = write_questions(
        options.out, options.count, options.seed, options.kokoro, options.language, options.device
    )
    print(f"{len(questions)} questions in {options.out}")


if __name__ == "__main__":
    main()
