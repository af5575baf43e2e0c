"""`viva demo`: ask a bundled model a spoken question in real time, offline, and report latency and cost.

The question is streamed to a live conversation at the pace of a microphone: voice activity detection, speech encoder
and prefill run during the question; the reply is started at its likely end and released once the end is confirmed.
With --cascade or a stack that is one, the same question goes to a recogniser, a chat model and a TTS model.
--language chooses the bundled question, and a cascade's instructions.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from vivavoce.audio.io import Sound, read, write
from vivavoce.cascade.local_recogniser import LocalRecogniser
from vivavoce.cascade.local_synthesiser import TTSSynthesiser
from vivavoce.cascade.parts import CascadeParts, load_cascade
from vivavoce.cli.demo_conversation import DemoResult, DemoSubject, ask
from vivavoce.cli.demo_costs import (
    cascade_cost_line,
    cascade_costs,
    recogniser_ms,
    speech_cost_line,
    speech_costs,
    written_cost_line,
)
from vivavoce.cli.demo_languages import hotel_instructions, require_language
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.evaluation.questions import QuestionRecording, bundled_questions, question_folder
from vivavoce.models.moss_speech.codec import ENCODER_RATE
from vivavoce.s2s.moss_speech import load_speech
from vivavoce.s2s.options import MossSpeechOptions
from vivavoce.stacks import Stack
from vivavoce.tts.text import numbers_as_words

INTENT = "breakfast"  # of the bundled question; `viva bench answer` asks them all
FOR_ONE = MossSpeechOptions(captioner="model", voices_together=2, warm_batches=(1, 2))


def run_stack(
    stack: Stack,
    device: str = "auto",
    wav: Path | None = None,
    microphone: float | None = None,
    out: Path | None = None,
    language: str = "en",
) -> dict[str, Any]:
    """Ask a stack. The bundled question is one for the front desk, and the instructions of a cascade are for it."""
    if stack.chat is not None and stack.asr is not None and stack.tts is not None:
        is_own = wav is not None or microphone is not None
        instructions = stack.instructions if is_own else None
        parts = CascadeParts(stack.asr, stack.chat, stack.tts)
        return run_cascade(device, parts, wav, microphone, out, instructions, language)
    assert stack.model is not None
    if stack.asr is None:
        return run(device, stack.model, wav, microphone, out, language)
    return run_written(device, stack.asr, stack.model, wav, microphone, out, language)


def run_written(
    device: str,
    asr: str,
    model: str,
    wav: Path | None = None,
    microphone: float | None = None,
    out: Path | None = None,
    language: str = "en",
) -> dict[str, Any]:
    """Ask a speech-to-speech model that reads what a recogniser writes down of the question."""
    require_language(language, asr, model)

    def load() -> DemoSubject:
        recogniser = LocalRecogniser.load(asr, device=device)
        options = replace(FOR_ONE, recogniser=recogniser, normalise=numbers_as_words)
        pipeline = load_speech(model, device, options=options)

        def costs(question: Sound, _: DemoResult) -> dict[str, float]:
            return {"recogniser_ms": recogniser_ms(recogniser, question), **speech_costs(pipeline, question)}

        return DemoSubject(f"{asr} → {model}", pipeline, costs, written_cost_line, parts=(recogniser,))

    return demonstrate(load, wav, microphone, out, language)


def run(
    device: str = "auto",
    model: str = "mini-speech",
    wav: Path | None = None,
    microphone: float | None = None,
    out: Path | None = None,
    language: str = "en",
) -> dict[str, Any]:
    """Ask, print what was heard and said and how long each stage took, and return it; with `out`, write the reply."""
    require_language(language, model)

    def load() -> DemoSubject:
        pipeline = load_speech(model, device, options=FOR_ONE)
        return DemoSubject(model, pipeline, lambda question, _: speech_costs(pipeline, question), speech_cost_line)

    return demonstrate(load, wav, microphone, out, language)


def run_cascade(
    device: str = "auto",
    parts: CascadeParts | None = None,
    wav: Path | None = None,
    microphone: float | None = None,
    out: Path | None = None,
    instructions: str | None = None,
    language: str = "en",
) -> dict[str, Any]:
    """Ask, print what was heard and said and how long each stage took, and return it; with `out`, write the reply.

    `instructions` None: to be the front desk, in `language`.
    """
    chosen = parts or CascadeParts()
    require_language(language, chosen.asr, chosen.chat, chosen.tts)
    settings = ConversationSettings(instructions=hotel_instructions(language) if instructions is None else instructions)

    def load() -> DemoSubject:
        cascade = load_cascade(chosen, device)
        if not (isinstance(cascade.asr, LocalRecogniser) and isinstance(cascade.voice, TTSSynthesiser)):
            raise InputError("the demo measures each part in this process: use models for recogniser and TTS, not URLs")
        name = f"{chosen.asr} → {chosen.chat} → {chosen.tts}"

        def costs(question: Sound, answer: DemoResult) -> dict[str, float]:
            return cascade_costs(cascade, question, answer, settings)

        return DemoSubject(name, cascade, costs, cascade_cost_line, settings)

    return demonstrate(load, wav, microphone, out, language)


def demonstrate(
    load: Callable[[], DemoSubject],
    wav: Path | None,
    microphone: float | None,
    out: Path | None,
    language: str = "en",
) -> dict[str, Any]:
    """Ask any subject, print and return the figures; with `out`, write the reply."""
    question, expected = _question(wav, microphone, language)
    if not question.samples.any():
        raise InputError("the question is silent; check the microphone or the file")
    started = time.perf_counter()
    subject = load()
    _print_line(
        f"{subject.name} loaded in {time.perf_counter() - started:.1f} s; asking {question.seconds:.1f} s of speech …"
    )
    answer, voiced_end = asyncio.run(ask(subject, question))
    if answer.error is not None:
        raise InputError(f"there was no answer: {answer.error}")
    if answer.reason not in ("completed", "max_output_tokens") or "first_sound" not in answer.times:
        raise InputError(f"there was no answer ({answer.reason or 'no speech was detected'}); check the recording")
    result = _report(answer, voiced_end, subject.costs(question, answer), expected)
    _show(result, subject.cost_line(result), question, answer.sound, voiced_end + result["v2v_ms"] / 1e3)
    if out is not None:
        _write(out, question, answer.sound, result)
    return result


def _question(wav: Path | None, microphone: float | None, language: str) -> tuple[Sound, QuestionRecording | None]:
    if microphone is not None:
        return _record(microphone), None
    if wav is not None:
        return read(wav, rate=ENCODER_RATE), None
    about = next(question for question in bundled_questions(language) if question.intent == INTENT)
    return read(question_folder(language) / about.file, rate=ENCODER_RATE), about


def _record(seconds: float) -> Sound:
    try:
        import sounddevice
    except (ImportError, OSError) as error:
        raise MissingDependencyError("the microphone needs sounddevice: pip install 'vivavoce[microphone]'") from error
    _print_line(f"speak now, {seconds:.0f} s …")
    recorded = sounddevice.rec(int(seconds * ENCODER_RATE), ENCODER_RATE, channels=1, dtype="float32", blocking=True)
    return Sound(np.ascontiguousarray(recorded[:, 0]), ENCODER_RATE)


def _report(
    answer: DemoResult, voiced_end: float, costs: dict[str, float], about: QuestionRecording | None
) -> dict[str, Any]:
    after = {name: (moment - voiced_end) * 1e3 for name, moment in answer.times.items()}
    return {
        "heard": answer.heard,
        "said": answer.said.strip(),
        "expected": None if about is None else {"heard": about.text, "said": about.reply},
        "turn_end_ms": after.get("turn_end", 0.0),
        "first_sound_ms": after["first_sound"],
        "v2v_ms": after.get("first_voice", after["first_sound"]),
        "seconds_of_speech": answer.sound.seconds,
        "underruns": answer.player.underruns,
        **costs,
    }


def _show(result: dict[str, Any], cost_line: str, question: Sound, reply: Sound, reply_begins: float) -> None:
    expected = result["expected"]
    asked = "" if expected is None else f"  [dim](asked: {expected['heard']})[/dim]"
    right = "" if expected is None else f"  [dim](right: {expected['said']})[/dim]"
    _print_line(f"heard: {result['heard']}{asked}")
    _print_line(f"said:  {result['said']}{right}")
    _print_line(
        f"after the last voiced sample: end of turn {result['turn_end_ms']:.0f} ms, first sound "
        f"{result['first_sound_ms']:.0f} ms, V2V {result['v2v_ms']:.0f} ms; {result['underruns']} underruns"
    )
    _print_line(cost_line)
    columns = 72
    seconds = max(question.seconds, reply_begins + reply.seconds)
    _print_line("you    " + _bars(question, 0.0, seconds, columns), markup=False)
    _print_line("reply  " + _bars(reply, reply_begins, seconds, columns), markup=False)
    _print_line(f"       0 s{f'{seconds:.1f} s':>{columns - 3}}", markup=False)


def _bars(sound: Sound, begins: float, seconds: float, columns: int) -> str:
    """Loudness over time, one character a step."""
    samples = sound.mono().samples[0]
    edges = (np.linspace(0, seconds, columns + 1) - begins) * sound.rate
    levels = []
    for left, right in zip(edges[:-1].astype(int), edges[1:].astype(int), strict=True):
        piece = samples[max(0, left) : max(0, right)]
        levels.append(float(np.sqrt(np.mean(piece**2))) if len(piece) else 0.0)
    top = max(levels) or 1.0
    return "".join(" ▁▂▃▄▅▆▇█"[min(8, round(8 * (level / top) ** 0.5))] for level in levels)


def _write(out: Path, question: Sound, reply: Sound, result: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write(out / "question.wav", question)
    write(out / "reply.wav", reply)
    (out / "demo.json").write_text(json.dumps(result, indent=2, ensure_ascii=False), encoding="utf8")
    _print_line(f"question, reply and figures are in {out}")


def _print_line(line: str, markup: bool = True) -> None:
    Console(soft_wrap=True).print(f"• {line}" if markup else line, highlight=False, markup=markup)
