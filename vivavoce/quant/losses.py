"""`python -m vivavoce.quant.losses --moonshine DIR`: quality loss of each method in one table.

Wrong answers of a conversation model, word errors of a recogniser or TTS model, and audio similarity to float at the
same positions of the same replies. TTS models are evaluated both aligned with float's readings and free-running, with
confidence intervals (see `voices.py`). Models run in parallel processes.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vivavoce import hub
from vivavoce.asr.backends import Moonshine
from vivavoce.audio.io import Sound
from vivavoce.cores import usable_cores
from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.errors import InputError
from vivavoce.models.moss_speech.prompt import Turn
from vivavoce.nn.process_settings import torch_threads
from vivavoce.quant.manifest import Manifest
from vivavoce.quant.measure import AudioMetrics, Closeness, closeness, log_probabilities
from vivavoce.quant.policy import METHODS, policy_for
from vivavoce.quant.run import QuantizeOptions, quantize, row
from vivavoce.quant.speech_sets import project_set, scene_set
from vivavoce.quant.subjects import SUBJECTS, CalibrationBatch
from vivavoce.quant.voices import (
    KIND,
    ComparedVoice,
    Misses,
    MossSpeechVoice,
    NanoVoice,
    Readers,
    TextSpan,
    difference,
    misheard,
    texts_to_read,
)
from vivavoce.train.front_desk import Exchange, dialogues, judge

MODELS = ("mini-tts", "mini-speech", "mini-asr")  # the slowest first
FREE = tuple(name for name, method in METHODS.items() if not method.trains)
MAX_POINTS_LOST, MIN_VISQOL = 2.0, 0.95  # goals for int8: percentage points lost, share of ViSQOL kept
MAX_ITEMS, PAIRS, TEXTS = 300, 8, 64  # text questions; audio pairs; texts to read
READ_ALONE = tuple(name for name, method in METHODS.items() if method.scheme in ("int8", "int4"))
METHODS_A_TASK = 4  # per process
QUESTION_SEED = 4711
MAX_ANSWER_ROWS = 80  # rows
AGAIN = "float, drawn again"
HEAD = (
    "model", "method", "wrong, float → quantised", "points lost (95 %)", "left alone (95 %)", "ViSQOL of float's",
    "divergence", "same id", "within goals",
)  # fmt: skip


@dataclass(frozen=True)
class Effort:
    """Evaluation size: questions and recordings, texts to read, and readings of each text."""

    items: int = MAX_ITEMS
    texts: int = TEXTS
    draws: int = 1


@dataclass(frozen=True)
class Trial:
    """Evaluation of one version: errors aligned with float and free-running, and audio."""

    misses: Misses
    alone: Misses | None = None
    sounds: tuple[Sound, ...] = ()
    again: Callable[[], Misses] | None = None
    """Another sampled reading by float, computed on demand."""


@dataclass(frozen=True)
class Loss:
    """A method compared with float; None where there is nothing to compare."""

    model: str
    method: str
    before: float
    of: int
    lost: TextSpan | None = None
    alone: TextSpan | None = None
    visqol: float | None = None
    near: Closeness | None = None

    @property
    def verdict(self) -> str:
        """Whether the loss is within the goals for int8, if it can be told from chance."""
        known = [span for span in (self.lost, self.alone) if span is not None]
        if (self.visqol is not None and self.visqol < MIN_VISQOL) or any(span.low >= MAX_POINTS_LOST for span in known):
            return "no"
        is_less = self.lost is not None and self.lost.points < MAX_POINTS_LOST
        return "yes" if is_less else "not told from chance"

    def cells(self) -> list[str]:
        lost, near = self.lost, self.near
        return [
            self.model,
            self.method,
            f"{self.before:.1f}{'' if lost is None else f' → {self.before + lost.points:.1f}'} % of {self.of}",
            _span_text(lost),
            _span_text(self.alone),
            "–" if self.visqol is None else f"{self.visqol:.3f}",
            "–" if near is None else f"{near.divergence:.5f}",
            "–" if near is None else f"{near.agreement:.4f}",
            "–" if near is None else self.verdict,
        ]


def _span_text(span: TextSpan | None) -> str:
    return "–" if span is None else f"{span.points:+.1f} ({span.low:+.1f} … {span.high:+.1f})"


def run(
    models: Sequence[str],
    methods: Sequence[str],
    moonshine: Path | None = None,
    out: Path | None = None,
    effort: Effort | None = None,
) -> list[Loss]:
    """Evaluate every method on every model, print rows, write `losses.md` and `losses.json`."""
    lines = [row(HEAD), row(["---"] * len(HEAD))]
    print("\n".join(lines), flush=True)
    found: list[Loss] = []
    tasks = [(model, some) for model in models for some in _parts(model, methods)]
    with ProcessPoolExecutor(min(len(tasks), usable_cores()), get_context("spawn")) as pool:
        for done in as_completed([pool.submit(losses, *task, moonshine, effort or Effort()) for task in tasks]):
            found += done.result()
            lines += [row(loss.cells()) for loss in done.result()]
            print("\n".join(lines[-len(done.result()) :]), flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "losses.md").write_text("\n".join(lines) + "\n", encoding="utf8")
        (out / "losses.json").write_text(json.dumps([asdict(loss) for loss in found], indent=2), encoding="utf8")
    return found


def _parts(model: str, methods: Sequence[str]) -> list[Sequence[str]]:
    """TTS models take longest, so their methods are split over processes."""
    if policy_for(hub.resolve(model)).kind != KIND:
        return [methods]
    todo = [AGAIN, *methods]
    return [todo[first : first + METHODS_A_TASK] for first in range(0, len(todo), METHODS_A_TASK)]


@torch_threads.held(1)
def losses(
    model: str, methods: Sequence[str], moonshine: Path | None = None, effort: Effort | None = None
) -> list[Loss]:
    """Loss of each method on one model."""
    effort, source = effort or Effort(), hub.resolve(model)
    kind = policy_for(source).kind
    if kind not in TRIALS:
        raise InputError(f"{model} is a {kind} model; losses can be measured for {', '.join(TRIALS)}")
    subject, items = SUBJECTS[kind], (scene_set() if kind == KIND else project_set()).items
    examples, metrics = subject.examples(source, items[: min(effort.items, PAIRS)]), AudioMetrics(["visqol"])
    judged = TRIALS[kind](source, examples, moonshine, effort)
    exact, truth = judged(source), log_probabilities(subject, subject.load(source), examples)
    before, found = exact.misses, []
    for method in methods:
        if method == AGAIN:
            if exact.alone is not None and exact.again is not None:
                spread = difference(exact.alone, exact.again())
                found.append(Loss(model, method, before.share, sum(before.of), alone=spread))
            continue
        with tempfile.TemporaryDirectory() as folder:
            quantised = Path(folder) / method
            quantize(model, method, quantised, QuantizeOptions())
            near = closeness(truth, log_probabilities(subject, subject.load(quantised), examples))
            trial = judged(quantised)
        visqol, lost = _visqol(metrics, exact.sounds, trial.sounds), difference(before, trial.misses)
        alone = None if exact.alone is None or trial.alone is None else difference(exact.alone, trial.alone)
        found.append(Loss(model, method, before.share, sum(before.of), lost, alone, visqol, near))
    return found


def _visqol(metrics: AudioMetrics, exact: Sequence[Sound], other: Sequence[Sound]) -> float | None:
    """Mean ViSQOL as a share of that of identical sounds."""
    pairs = [
        (metrics.compare(one, two).visqol, metrics.compare(one, one).visqol)
        for one, two in zip(exact, other, strict=True)
    ]
    known = [score / best for score, best in pairs if score is not None and best]
    return float(np.mean(known)) if known else None


Judge = Callable[[Path], Trial]


def answers(source: Path, examples: Sequence[CalibrationBatch], moonshine: Path | None, effort: Effort) -> Judge:
    """Wrong answers to the bundled spoken questions and held-out text questions, all answered as text."""
    asked = [(item.exchange, item.sound) for item in project_set().items[: effort.items] if item.exchange is not None]
    heard: list[tuple[Exchange, str | list[int]]] = []
    codec = MossSpeechVoice(source).pipeline.codec
    for exchange, sound in asked:
        assert sound is not None
        heard.append((exchange, codec.encode(sound).tolist()))
    written = dialogues("held_out", effort.items, QUESTION_SEED, (1, 1))
    questions = heard + [(exchange, exchange.user) for (exchange,) in written]

    def judged(folder: Path) -> Trial:
        voice = MossSpeechVoice(folder)
        texts = _written(voice, [content for _, content in questions])
        wrong = (int(not judge(text, exchange)) for text, (exchange, _) in zip(texts, questions, strict=True))
        misses = Misses(tuple(wrong), (1,) * len(questions))
        return Trial(misses, sounds=_aligned("moss_speech", folder, voice, examples))

    return judged


def _written(voice: MossSpeechVoice, questions: Sequence[str | list[int]]) -> list[str]:
    """A text reply to each question, batched."""
    pipeline = voice.pipeline
    engine = Engine(pipeline.model, pick("cpu"), torch.float32, EngineLimits(cache_rows=32_768))
    prompts = [pipeline.prompt.rows([Turn("user", content)], "text") for content in questions]
    sequences = [engine.open(rows) for rows in prompts]
    for sequence in sequences:
        engine.generate(sequence, Generation(GREEDY, max_new_rows=MAX_ANSWER_ROWS))
    while engine.has_work:
        engine.step()
    replies = [sequence.rows[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]
    model = pipeline.model
    return [
        pipeline.tokenizer.decode(model.written_ids(row for row in rows if not model.ends(row))) for rows in replies
    ]


def transcripts(source: Path, examples: Sequence[CalibrationBatch], moonshine: Path | None, effort: Effort) -> Judge:
    """Word errors on the bundled questions."""
    items = project_set().items[: effort.items]

    def judged(folder: Path) -> Trial:
        each = misheard(folder, items)
        return Trial(Misses(tuple(wrong for wrong, _ in each), tuple(of for _, of in each)))

    return judged


def readings(source: Path, examples: Sequence[CalibrationBatch], moonshine: Path | None, effort: Effort) -> Judge:
    """Word errors of an independent recogniser on texts read aloud; without one, only the audio is compared.

    16-bit methods are not evaluated free-running, because they hardly differ from float.
    """
    texts = texts_to_read(min(effort.items, effort.texts))
    readers = None if moonshine is None else Readers(source, texts, Moonshine(moonshine, threads=1), effort.draws)

    def judged(folder: Path) -> Trial:
        sounds = _aligned(KIND, folder, NanoVoice(folder), examples)
        if readers is None:
            return Trial(Misses((), ()), sounds=sounds)
        if folder == source:
            return Trial(readers.own(), readers.own(effort.draws), sounds, partial(readers.alone, source, skipped=1))
        alone = readers.alone(folder) if Manifest.read(folder).method in READ_ALONE else None
        return Trial(readers.beside(SUBJECTS[KIND].load(folder)), alone, sounds)

    return judged


TRIALS: dict[str, Callable[[Path, Sequence[CalibrationBatch], Path | None, Effort], Judge]] = {
    "moss_speech": answers,
    "whisper": transcripts,
    KIND: readings,
}


def _aligned(kind: str, folder: Path, voice: ComparedVoice, examples: Sequence[CalibrationBatch]) -> tuple[Sound, ...]:
    subject = SUBJECTS[kind]
    model = subject.load(folder)
    sounds = [voice.aligned(subject, model, example) for example in examples]
    return tuple(sound for sound in sounds if sound is not None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m vivavoce.quant.losses", description=__doc__)
    bundled: Any = [name for name in MODELS if name in hub.bundled()]
    parser.add_argument("models", nargs="*", default=bundled, help="bundled names or folders")
    parser.add_argument("--methods", nargs="+", default=list(FREE), choices=list(METHODS))
    parser.add_argument("--moonshine", type=Path, default=None, help="unpacked npm package, to transcribe audio with")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--items", type=int, default=MAX_ITEMS, help="maximum number of questions")
    parser.add_argument("--texts", type=int, default=TEXTS, help="number of texts to read aloud")
    parser.add_argument("--draws", type=int, default=1, help="free-running readings per text")
    options = parser.parse_args(arguments)
    effort = Effort(options.items, options.texts, options.draws)
    run(options.models, options.methods, options.moonshine, options.out, effort)


if __name__ == "__main__":
    main()
