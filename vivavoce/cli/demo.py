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
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from vivavoce.audio.io import Sound, read, write
from vivavoce.audio.player import PlaybackClock
from vivavoce.cascade.interfaces import ChatModel, ChatText
from vivavoce.cascade.local_chat import LocalChat
from vivavoce.cascade.local_recogniser import LocalRecogniser
from vivavoce.cascade.local_synthesiser import TTSSynthesiser
from vivavoce.cascade.parts import CascadeParts, LoadedCascade, load_cascade
from vivavoce.cli.demo_languages import hotel_instructions, require_language
from vivavoce.dialogue.events import (
    Event,
    InputTranscript,
    ReplyAudio,
    ReplyDone,
    ReplyText,
    SpeechStarted,
    SpeechStopped,
)
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.dialogue.settings import ConversationSettings, TurnSettings
from vivavoce.engine.sampling import Generation
from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.evaluation.questions import QuestionRecording, bundled_questions, question_folder
from vivavoce.models.moss_speech.codec import DECODER_RATE, ENCODER_RATE
from vivavoce.models.moss_speech.prompt import DEFAULT_SYSTEM, Turn
from vivavoce.models.whisper.steps import TranscriptionOptions
from vivavoce.nn.process_settings import frozen_heap
from vivavoce.s2s.moss_speech import MossSpeechBackend, load_speech
from vivavoce.s2s.options import MossSpeechOptions
from vivavoce.stacks import Stack
from vivavoce.tts.text import numbers_as_words

INTENT = "breakfast"  # of the bundled question; `viva bench answer` asks them all
PACKET_SECONDS = 0.02
MAX_WAIT_SECONDS = 20.0  # after the question
QUIET = 10 ** (-40 / 20)  # of the peak; lower samples are not voiced
TURN_SILENCE_MS = 200
FOR_ONE = MossSpeechOptions(captioner="model", voices_together=2, warm_batches=(1, 2))


@dataclass
class DemoResult:
    """The events of one conversation, with their times since the start of the question."""

    times: dict[str, float] = field(default_factory=dict)
    heard: str = ""
    said: str = ""
    pieces: list[Samples] = field(default_factory=list)
    player: PlaybackClock = field(default_factory=PlaybackClock)
    reason: str | None = None
    error: str | None = None
    rate: int = DECODER_RATE

    @property
    def sound(self) -> Sound:
        """The audio of the reply."""
        return Sound(np.concatenate(self.pieces) if self.pieces else np.zeros(1, np.float32), self.rate)

    def take(self, event: Event, now: float) -> None:
        """Record an event."""
        match event:
            case SpeechStopped():
                self.times["turn_end"] = now
            case InputTranscript(text=text, is_final=True):
                self.heard = text
            case ReplyText(delta=delta):
                self.said += delta
            case ReplyAudio(samples=samples) if len(samples):
                self.times.setdefault("first_sound", now)
                if "first_voice" not in self.times and np.abs(samples).max() > 0.01:
                    begins = int(np.argmax(np.abs(samples) > 0.01))
                    self.times["first_voice"] = now + begins / self.rate
                self.pieces.append(samples)
                self.player.feed(now, len(samples) / self.rate)
            case ReplyDone(reason="turn_detected"):  # the question went on after a pause: another reply follows
                self._forget()
            case SpeechStarted() if self.reason is not None:  # it went on after the whole reply was made
                self._forget()
            case ReplyDone(reason=reason, error=error):
                self.reason, self.error = reason, error

    def _forget(self) -> None:
        """Forget a reply that was begun too early."""
        self.heard = self.said = ""
        self.reason = None
        self.pieces, self.player = [], PlaybackClock()
        self.times = {name: at for name, at in self.times.items() if not name.startswith("first_")}


@dataclass(frozen=True)
class DemoSubject:
    """The pipeline that is asked, and the measurement of its stages, as figures and as a line of text."""

    name: str
    pipeline: MossSpeechBackend | LoadedCascade
    costs: Callable[[Sound, DemoResult], dict[str, float]]
    cost_line: Callable[[dict[str, Any]], str]
    settings: ConversationSettings = field(default_factory=ConversationSettings)
    parts: tuple[AbstractAsyncContextManager[object], ...] = ()
    """What must be entered besides the pipeline."""


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
            return {"recogniser_ms": _recogniser_ms(recogniser, question), **_stage_costs(pipeline, question)}

        return DemoSubject(f"{asr} → {model}", pipeline, costs, _written_cost_line, parts=(recogniser,))

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
        return DemoSubject(model, pipeline, lambda question, _: _stage_costs(pipeline, question), _cost_line)

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
            return _cascade_costs(cascade, question, answer, settings)

        return DemoSubject(name, cascade, costs, _cascade_cost_line, settings)

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
    answer, voiced_end = asyncio.run(_ask(subject, question))
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


async def _ask(subject: DemoSubject, question: Sound) -> tuple[DemoResult, float]:
    """Stream the question in real time; the answer, and the time of the last voiced sample."""
    samples = question.mono().resampled(ENCODER_RATE).samples[0]
    voiced_end = (np.flatnonzero(np.abs(samples) > QUIET * np.abs(samples).max())[-1] + 1) / ENCODER_RATE
    turn = TurnSettings(silence_duration_ms=TURN_SILENCE_MS)
    settings = replace(subject.settings, transcribe_input=True, turn=turn)
    pipeline = subject.pipeline
    answer = DemoResult(rate=pipeline.output_rate)
    async with AsyncExitStack() as stack:
        for part in (pipeline, *subject.parts):
            await stack.enter_async_context(part)
        await (pipeline.warm_up(settings) if isinstance(pipeline, LoadedCascade) else pipeline.warm_up())
        stack.enter_context(frozen_heap())
        options = DialogueOptions(transcriber=pipeline.words)
        conversation = LiveConversation(pipeline, settings, options, input_rate=ENCODER_RATE)
        started = time.perf_counter()
        over = asyncio.Event()

        async def listen() -> None:
            async for event in conversation.events():
                answer.take(event, time.perf_counter() - started)
                if answer.reason is not None and answer.heard:
                    over.set()
                else:
                    over.clear()

        listening = asyncio.create_task(listen())
        await _play(conversation, samples, started, over)
        await conversation.close()
        await listening
    answer.player.finish(time.perf_counter() - started)
    return answer, float(voiced_end)


async def _play(conversation: LiveConversation, samples: Samples, started: float, over: asyncio.Event) -> None:
    """Send the question, then silence, in packets at the pace of a microphone, until the reply is over."""
    packet = int(PACKET_SECONDS * ENCODER_RATE)
    number, seconds = 0, len(samples) / ENCODER_RATE
    while number * PACKET_SECONDS < (seconds if over.is_set() else seconds + MAX_WAIT_SECONDS):
        piece = samples[number * packet : (number + 1) * packet]
        number += 1
        await asyncio.sleep(max(0.0, started + number * PACKET_SECONDS - time.perf_counter()))
        conversation.hear(np.pad(piece, (0, packet - len(piece))))


@torch.no_grad()
def _stage_costs(pipeline: MossSpeechBackend, question: Sound) -> dict[str, float]:
    """The time of each stage by itself, measured on the same question after the conversation."""
    codec, core, prompt = pipeline.codec, pipeline.core, pipeline.prompt
    started = time.perf_counter()
    codes = codec.encode(question)
    encoder = (time.perf_counter() - started) / max(1, len(codes))
    turns = [Turn("system", DEFAULT_SYSTEM["speech"]), Turn("user", codes.tolist())]
    sequence = core.open(prompt.rows(turns, "speech"))
    core.step()
    started = time.perf_counter()
    rows = core.complete(sequence, Generation(pipeline.options.sampling, max_new_rows=250))
    frame = (time.perf_counter() - started) / len(rows)
    core.close(sequence)
    spoken = torch.tensor(pipeline.model.spoken_codes(rows))
    config = codec.flow.config
    state = codec.start(pipeline.voice_of(None), pipeline.options.left_chunks)
    first = config.chunk + config.lookahead
    started = time.perf_counter()
    sound, state = codec.step(state, spoken[:first])
    chunk = time.perf_counter() - started
    rest, _ = codec.step(state, spoken[first:], final=True)
    seconds = (len(sound) + len(rest)) / DECODER_RATE
    vocoder = time.perf_counter() - started
    return {
        "encoder_ms_per_frame": encoder * 1e3,
        "lm_ms_per_frame": frame * 1e3,
        "first_chunk_ms": chunk * 1e3,
        "rtf": (frame * len(rows) + vocoder) / seconds,
    }


def _cascade_costs(
    cascade: LoadedCascade, question: Sound, answer: DemoResult, settings: ConversationSettings
) -> dict[str, float]:
    """The time of each stage by itself, measured on the same question after the conversation."""
    assert isinstance(cascade.asr, LocalRecogniser)
    assert isinstance(cascade.voice, TTSSynthesiser)
    recogniser = _recogniser_ms(cascade.asr, question)
    first_words, chat = asyncio.run(_chat_times(cascade.chat, settings, answer.heard))
    started = time.perf_counter()
    first_sound, seconds = 0.0, 0.0
    for piece in cascade.voice.speaker.stream(answer.said or "Yes."):
        first_sound = first_sound or time.perf_counter() - started
        seconds += piece.shape[-1] / cascade.output_rate
    tts = time.perf_counter() - started
    return {
        "recogniser_ms": recogniser,
        "first_words_ms": first_words * 1e3,
        "first_piece_ms": first_sound * 1e3,
        "rtf": (chat + tts) / seconds,
    }


def _recogniser_ms(recogniser: LocalRecogniser, question: Sound) -> float:
    samples = torch.from_numpy(question.mono().resampled(recogniser.rate).samples[0])
    started = time.perf_counter()
    list(
        recogniser.listener.segments(
            samples, TranscriptionOptions(padding="trim", timestamps=False, temperatures=(0.0,))
        )
    )
    return (time.perf_counter() - started) * 1e3


async def _chat_times(chat: ChatModel, settings: ConversationSettings, heard: str) -> tuple[float, float]:
    """Seconds to the first text of a reply and to its end, with the instructions prefilled."""
    messages = [{"role": "system", "content": settings.instructions}, {"role": "user", "content": heard}]
    async with AsyncExitStack() as stack:
        if isinstance(chat, LocalChat):  # a new one, since its thread ended with the conversation
            local = await stack.enter_async_context(LocalChat(chat.core, chat.tokenizer, chat.options))
            await local.read(messages[:1])
            chat = local
        started, first = time.perf_counter(), 0.0
        async for piece in chat.reply(messages, ConversationSettings()):
            if isinstance(piece, ChatText):
                first = first or time.perf_counter() - started
        return first, time.perf_counter() - started


def _cascade_cost_line(result: dict[str, Any]) -> str:
    return (
        f"cost: recogniser {result['recogniser_ms']:.0f} ms a turn, first words {result['first_words_ms']:.0f} ms, "
        f"first piece of sound {result['first_piece_ms']:.0f} ms; RTF {result['rtf']:.2f}"
    )


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


def _cost_line(result: dict[str, Any]) -> str:
    return (
        f"cost: encoder {result['encoder_ms_per_frame']:.1f} ms, language model {result['lm_ms_per_frame']:.1f} ms "
        f"a frame of 80 ms, first chunk {result['first_chunk_ms']:.0f} ms; RTF {result['rtf']:.2f}"
    )


def _written_cost_line(result: dict[str, Any]) -> str:
    return (
        f"cost: recogniser {result['recogniser_ms']:.0f} ms a turn, language model {result['lm_ms_per_frame']:.1f} ms "
        f"a frame of 80 ms, first chunk {result['first_chunk_ms']:.0f} ms; RTF {result['rtf']:.2f}"
    )


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
