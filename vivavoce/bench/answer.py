"""`viva bench answer`: spoken held-out questions to a speech-to-speech model, replies scored.

Replies are transcribed by an independent recogniser (Moonshine, Whisper) and compared with the expected answer. Their
quality is estimated by DNSMOS, beside that of the voice used as training target. Questions are the bundled recordings,
or are synthesised during the run.
"""

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vivavoce import hub
from vivavoce.audio.denoise import denoised
from vivavoce.audio.io import Sound, read
from vivavoce.bench.judging import JudgeRecogniser
from vivavoce.bench.noisy_speech import NoiseBeds, noise_beds
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.errors import MissingDependencyError
from vivavoce.evaluation.machine import stage
from vivavoce.evaluation.questions import bundled_questions, question_folder
from vivavoce.evaluation.scoring import DNSMOS
from vivavoce.models.moss_speech.codec import DECODER_RATE, ENCODER_RATE
from vivavoce.models.moss_speech.prompt import DEFAULT_SYSTEM, Turn
from vivavoce.s2s.captions import WRITE_DOWN
from vivavoce.s2s.moss_speech import MossSpeechBackend, load_moss_speech
from vivavoce.train.front_desk import Exchange, dialogues, judge, language_of, normalise
from vivavoce.train.lm.evaluate import word_error_rate
from vivavoce.train.voices import HELD_OUT, TEACHER, programs, speak

LEAD, TAIL = 0.2, 0.15  # seconds of silence around a question, as the VAD leaves them
MAX_REPLY_CODES = 250  # codes
MAX_SCORED_SOUNDS = 40
SHARES = (  # printed as percentages
    *("right", "right_inside", "declined_outside", "right_of_teacher"),
    *("word_error_rate", "word_error_rate_of_right_replies", "word_error_rate_of_teacher"),
)
TeacherSounds = list[tuple[Exchange, Sound]]  # expected replies synthesised in the training voice


@dataclass(frozen=True)
class AskedQuestion:
    """A spoken question with its expected answer."""

    exchange: Exchange
    voice: str
    sound: Sound
    earlier: tuple[Exchange, ...] = ()
    """What was said before, as text."""


@dataclass(frozen=True)
class ScoredAnswer:
    """A reply, its transcript, and whether it is right."""

    asked: AskedQuestion
    model_text: str  # the model's own transcript of its codes
    heard_text: str
    sound: Sound
    is_right: bool
    seconds: float


def run(
    model: str = "mini-speech",
    judge_model: str | None = None,
    count: int | None = None,
    snr: float | None = None,
    device: str = "auto",
    seed: int = 0,
    out: Path | None = None,
    questions: list[AskedQuestion] | None = None,
    noise: Path | None = None,
    denoise: bool = False,
    language: str = "en",
) -> dict[str, Any]:
    """Ask, score and print; write `answer.json` and `answer.png` to `out`. `questions` are asked in place of others.

    `count` None asks the bundled questions in `language`; a number synthesises that many in English. Without
    `judge_model`, the name or folder of an independent recogniser, the model's own transcript of its reply is scored
    without a word error rate.
    """
    recogniser = None if judge_model is None else JudgeRecogniser.load(judge_model, language)
    if questions is None:
        questions = recorded_questions(language) if count is None else _synthesised_questions(count, seed)
    if (beds := noise_beds(snr, noise)) is not None:
        questions = [_with_noise(asked, beds, number) for number, asked in enumerate(questions)]
    if denoise:
        questions = [_denoised(asked) for asked in questions]
    pipeline = load_moss_speech(hub.resolve(model), device=device)
    with stage(f"{len(questions)} questions"):
        answers = [_answer(pipeline, asked, recogniser) for asked in questions]
    judge_name = "the model's own reading" if recogniser is None else recogniser.name
    conditions = {"snr_db": snr, "noise": None if noise is None else noise.name, "denoised": denoise}
    result = _figures(answers) | conditions | {"model": model, "judge": judge_name}
    with stage("quality of the replies"):
        teacher_sounds = _teacher_sounds(answers)
        result |= _mos_scores(answers, teacher_sounds)
        if recogniser is not None:
            result |= _word_error_rates(answers) | _teacher_figures(teacher_sounds, recogniser)
    _print(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "answer.json").write_text(json.dumps(result, indent=2, ensure_ascii=False), encoding="utf8")
        _plot(result, out / "answer.png")
    return result


def recorded_questions(language: str = "en") -> list[AskedQuestion]:
    """The bundled questions in a language."""
    folder = question_folder(language)
    return [
        AskedQuestion(
            Exchange(question.intent, question.text, question.reply, question.slots),
            question.voice,
            padded_with_silence(read(folder / question.file, rate=ENCODER_RATE)),
        )
        for question in bundled_questions(language)
    ]


def _synthesised_questions(count: int, seed: int) -> list[AskedQuestion]:
    source, installed = random.Random(f"answers {seed}"), programs()
    asked = []
    for (exchange,) in dialogues("held_out", count, 1000 + seed, (1, 1)):
        voice = source.choice(HELD_OUT)
        asked.append(
            AskedQuestion(
                exchange, voice.name, padded_with_silence(Sound(speak(voice, exchange.user, installed), ENCODER_RATE))
            )
        )
    return asked


def padded_with_silence(sound: Sound) -> Sound:
    """A question with the silence around it that turn detection leaves."""
    lead, tail = (np.zeros(int(seconds * ENCODER_RATE), np.float32) for seconds in (LEAD, TAIL))
    return Sound(np.concatenate([lead, sound.samples[0], tail]), ENCODER_RATE)


def _with_noise(asked: AskedQuestion, beds: NoiseBeds, number: int) -> AskedQuestion:
    """The question with background noise over its whole length; noise types alternate by number."""
    return replace(asked, sound=Sound(beds.added(asked.sound.samples[0], number), ENCODER_RATE))


def _denoised(asked: AskedQuestion) -> AskedQuestion:
    """The question as a conversation with noise suppression hears it."""
    return replace(asked, sound=Sound(denoised(asked.sound.samples[0]).mixed, ENCODER_RATE))


@torch.no_grad()
def _answer(pipeline: MossSpeechBackend, asked: AskedQuestion, recogniser: JudgeRecogniser | None) -> ScoredAnswer:
    codec, core, prompt = pipeline.codec, pipeline.core, pipeline.prompt
    codes = codec.encode(asked.sound)
    started = time.perf_counter()
    turns = [Turn("system", DEFAULT_SYSTEM["speech"])]
    for exchange in asked.earlier:
        turns += [Turn("user", exchange.user), Turn("assistant", exchange.reply)]
    turns.append(Turn("user", codes.tolist()))
    sequence = core.open(prompt.rows(turns, "speech"))
    rows = core.complete(sequence, Generation(pipeline.options.sampling, max_new_rows=MAX_REPLY_CODES))
    core.close(sequence)
    spoken = pipeline.model.spoken_codes(rows)
    if not spoken:
        return ScoredAnswer(asked, "", "", Sound(np.zeros(1, np.float32), DECODER_RATE), False, 0.0)
    audio = codec.speak(torch.tensor(spoken), pipeline.voice_of(None), pipeline.options.left_chunks)
    seconds = time.perf_counter() - started
    sound = Sound(audio.float().cpu().numpy(), DECODER_RATE)
    model_text = _transcribe_codes(pipeline, spoken)
    heard_text = model_text if recogniser is None else recogniser.transcribe(sound)
    return ScoredAnswer(asked, model_text, heard_text, sound, judge(heard_text, asked.exchange), seconds)


def _transcribe_codes(pipeline: MossSpeechBackend, codes: Sequence[int]) -> str:
    core, model = pipeline.core, pipeline.model
    turns = [Turn("system", WRITE_DOWN), Turn("user", codes)]
    sequence = core.open(pipeline.prompt.rows(turns, "text"))
    rows = core.complete(sequence, Generation(GREEDY, max_new_rows=16 + 2 * len(codes)))
    core.close(sequence)
    return pipeline.tokenizer.decode(model.written_ids(row for row in rows if not model.ends(row)))


def _shown(text: str) -> str:
    """The beginning of a transcript; English numbers in words, so that equal ones are counted together."""
    return (normalise(text) if language_of(text).code == "en" else text)[:60]


def _figures(answers: Sequence[ScoredAnswer]) -> dict[str, Any]:
    by_intent: dict[str, list[bool]] = defaultdict(list)
    by_speaker: dict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        by_intent[answer.asked.exchange.intent].append(answer.is_right)
        by_speaker[_speaker(answer.asked.voice)].append(answer.is_right)
    inside = [answer.is_right for answer in answers if answer.asked.exchange.intent != "decline"]
    wrong = Counter(
        (answer.asked.exchange.intent, _shown(answer.heard_text)) for answer in answers if not answer.is_right
    )
    seconds = sum(answer.sound.seconds for answer in answers)
    return {
        "questions": len(answers),
        "right": float(np.mean([answer.is_right for answer in answers])),
        "right_inside": float(np.mean(inside)) if inside else None,
        "declined_outside": float(np.mean(by_intent["decline"])) if by_intent["decline"] else None,
        "rtf": sum(answer.seconds for answer in answers) / seconds,
        "by_intent": _counts(by_intent),
        "by_speaker": _counts(by_speaker),
        "answers": [_answer_entry(answer) for answer in answers],
        "wrong": [
            {"intent": intent, "said": heard_text, "times": times}
            for (intent, heard_text), times in wrong.most_common()
        ],
    }


def _answer_entry(answer: ScoredAnswer) -> dict[str, Any]:
    """One question and its reply as an entry of `answer.json`."""
    exchange = answer.asked.exchange
    asked = {"intent": exchange.intent, "voice": answer.asked.voice, "asked": exchange.user, "right": exchange.reply}
    return asked | {"meant": answer.model_text, "said": answer.heard_text, "is_right": answer.is_right}


def _speaker(voice: str) -> str:
    """The speaker part of a voice name such as `flite-awb-1.0`."""
    return voice.rpartition("-")[0]


def _counts(results: dict[str, list[bool]]) -> dict[str, dict[str, int]]:
    return {name: {"questions": len(found), "right": sum(found)} for name, found in sorted(results.items())}


def _word_error_rates(answers: Sequence[ScoredAnswer]) -> dict[str, float]:
    """WER of the transcript against the model's own text, and of right replies against the expected answer."""
    right = [answer for answer in answers if answer.is_right]
    return {
        "word_error_rate": word_error_rate([a.model_text for a in answers], [a.heard_text for a in answers]),
        "word_error_rate_of_right_replies": word_error_rate(
            [a.asked.exchange.reply for a in right], [a.heard_text for a in right]
        ),
    }


def _teacher_figures(teacher_sounds: TeacherSounds, recogniser: JudgeRecogniser) -> dict[str, float | None]:
    """The recogniser's own error on the training voice, as a reference."""
    if not teacher_sounds:
        return {"word_error_rate_of_teacher": None, "right_of_teacher": None}
    heard = [recogniser.transcribe(sound) for _, sound in teacher_sounds]
    return {
        "word_error_rate_of_teacher": word_error_rate([exchange.reply for exchange, _ in teacher_sounds], heard),
        "right_of_teacher": float(
            np.mean([judge(heard_text, right) for heard_text, (right, _) in zip(heard, teacher_sounds, strict=True)])
        ),
    }


def _teacher_sounds(answers: Sequence[ScoredAnswer]) -> TeacherSounds:
    """Each expected English reply once in the training voice; empty where its synthesizer is not installed."""
    exchanges = [answer.asked.exchange for answer in answers]
    replies = {exchange.reply: exchange for exchange in exchanges if language_of(exchange.reply).code == "en"}
    try:
        installed = programs()
        return [(replies[text], Sound(speak(TEACHER, text, installed), ENCODER_RATE)) for text in replies]
    except MissingDependencyError:
        return []


def _mos_scores(answers: Sequence[ScoredAnswer], teacher_sounds: TeacherSounds) -> dict[str, float | None]:
    """Mean DNSMOS of the replies and of the training voice; None where DNSMOS is not installed."""
    try:
        dnsmos = DNSMOS()
    except MissingDependencyError:
        return {"opinion": None, "opinion_of_teacher": None}
    audio = [answer.sound for answer in answers if answer.sound.seconds > 0.5]
    return {
        name: float(np.mean([dnsmos.overall(sound) for sound in sounds[:MAX_SCORED_SOUNDS]])) if sounds else None
        for name, sounds in (("opinion", audio), ("opinion_of_teacher", [sound for _, sound in teacher_sounds]))
    }


def _print(result: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        title=f"{result['model']}: {result['questions']} questions, judged by {result['judge']}", box=SIMPLE_HEAD
    )
    for column in ("intent", "right", "of"):
        table.add_column(column)
    for name, counts in result["by_intent"].items():
        table.add_row(name, str(counts["right"]), str(counts["questions"]))
    console.print(table)
    by_speaker = (f"{name} {counts['right']} of {counts['questions']}" for name, counts in result["by_speaker"].items())
    console.print(f"right by speaker: {', '.join(by_speaker)}", highlight=False)
    for name in SHARES:
        if result.get(name) is not None:
            console.print(f"{name.replace('_', ' ')}: {100 * result[name]:.1f} %", highlight=False)
    if result["opinion"] is not None:
        console.print(
            f"DNSMOS: {result['opinion']:.2f}, teacher {result['opinion_of_teacher'] or 0:.2f}", highlight=False
        )
    console.print(f"language model and voice: RTF {result['rtf']:.2f}", highlight=False)


def _plot(result: dict[str, Any], file: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    intents = result["by_intent"]
    figure = Figure(figsize=(8, 0.24 * len(intents) + 1.2), layout="constrained")
    axes = figure.subplots()
    names = list(intents)
    axes.barh(names, [intents[name]["questions"] for name in names], color="#d8d8d8", label="asked")
    axes.barh(names, [intents[name]["right"] for name in names], color="#3b7dd8", label="right")
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7)
    axes.set_title(f"{result['model']}: {100 * result['right']:.0f} % right", fontsize=9)
    figure.savefig(file, dpi=120)
