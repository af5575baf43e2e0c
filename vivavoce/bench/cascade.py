"""`viva bench cascade`: spoken general questions to a recogniser, a chat model and a synthesiser, answers judged.

Questions are spoken by a Kokoro voice and streamed to a live conversation at the pace of a microphone. Each answer is
timed stage by stage (wall and CPU seconds), compared with the words it should contain, and transcribed by an
independent recogniser, so that word errors of the spoken replies are known.
"""

import asyncio
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vivavoce.audio.io import Sound, read, write
from vivavoce.bench.judging import JudgeRecogniser
from vivavoce.bench.spoken_texts import simplified, spoken_characters, spoken_words
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.interfaces import ChatEnd, ChatModel, ChatPiece, ChatPrompt, ReadingChatModel
from vivavoce.cascade.live_turns import LiveTurns
from vivavoce.cascade.local_recogniser import LocalRecogniser
from vivavoce.cascade.local_synthesiser import TTSSynthesiser
from vivavoce.cascade.parts import CascadeParts, LoadedCascade, load_cascade
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.cores import usable_cores
from vivavoce.dialogue.backend import TurnTranscript
from vivavoce.dialogue.events import Event, InputTranscript, ReplyAudio, ReplyDone, ReplyText
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.session import LiveConversation
from vivavoce.dialogue.settings import ConversationSettings, RecognitionSettings, TurnSettings
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import stage
from vivavoce.evaluation.scoring import error_rate
from vivavoce.models.kokoro.windows import WHOLE_SENTENCES
from vivavoce.models.moss_tts_nano.prompt import has_cjk
from vivavoce.nn.process_settings import frozen_heap
from vivavoce.tts.kokoro import KokoroTTS

QUESTIONS = Path(__file__).with_name("general_questions.json")
RATE = 16_000
PACKET_SECONDS = 0.02
TURN_SILENCE_MS = 500  # the default of sessions
MAX_WAIT_SECONDS = 180.0  # after the question
QUIET = 10 ** (-40 / 20)  # of the peak; lower samples are not voiced
VOICED = 0.01  # of a reply's samples
ASKER = "kokoro-82m"
CHAT = "qwen2.5-coder-0.5b-instruct"
JUDGE = "whisper-base"
Transcript = TypeVar("Transcript")
STAGES = ("turn", "recognise", "first_clause", "first_sound")


@dataclass(frozen=True)
class Language:
    """What questions of a language are asked and judged with."""

    asr: str
    tts: str
    asker: str
    instructions: str


LANGUAGES = {
    "en": Language(
        "moonshine-base-en",
        "hibari",
        "am_michael",
        "You are a friendly voice assistant. Answer in one short sentence.",
    ),
    "zh": Language(
        "whisper-base",
        "kokoro-82m",
        "zm_yunxi",
        "你是一个友好的语音助手。请用一句简短的中文回答。",
    ),
}


@dataclass(frozen=True)
class GeneralQuestion:
    """A question and words of which a right answer has at least one."""

    text: str
    expected: tuple[str, ...]
    sound: Sound

    def is_right(self, answer: str) -> bool:
        """Whether an answer has one of the expected words."""
        heard = simplified(answer) if has_cjk(answer) else answer.lower()
        return any(each.lower() in heard for each in self.expected)


@dataclass
class Moment:
    """A time of the wall and of this process's CPU."""

    wall: float = field(default_factory=time.perf_counter)
    processor: float = field(default_factory=time.process_time)


@dataclass
class TimedAnswer:
    """What was heard and said, and the moments of its stages; the first of each counts for a released reply."""

    heard: str = ""
    said: str = ""
    pieces: list[Samples] = field(default_factory=list)
    moments: dict[str, Moment] = field(default_factory=dict)
    drafts: int = 0
    unread_tokens: int | None = None
    """Tokens of the prompt that were read when the turn was over."""
    reason: str | None = None
    first_voice: float | None = None

    def mark(self, name: str) -> None:
        """Note that a stage has just ended."""
        self.moments[name] = Moment()

    def take(self, event: Event, rate: int) -> None:
        """Note an event of the conversation."""
        match event:
            case InputTranscript(text=text, is_final=True):
                self.heard = text
            case ReplyText(delta=delta):
                self.said += delta
            case ReplyAudio(samples=samples) if len(samples):
                loud = np.flatnonzero(np.abs(samples) > VOICED)
                if self.first_voice is None and len(loud):
                    self.first_voice = time.perf_counter() + loud[0] / rate
                self.pieces.append(samples)
            case ReplyDone(reason=reason):
                self.reason = reason


class TimedParts:
    """The parts of a cascade, which note in `answer` when they have done their part of the latest reply."""

    def __init__(self, cascade: LoadedCascade, is_early: bool) -> None:
        assert isinstance(cascade.asr, LocalRecogniser)
        self.answer = TimedAnswer()
        self.backend = CascadeBackend(WholeTurns(cascade.asr), cascade.chat, cascade.voice)
        asr, chat = TimedRecogniser(self, cascade.asr), TimedChat(self, cascade.chat)
        if is_early:
            self.backend.recogniser = LiveTurns(asr, lambda: not self.backend.awaited)
            self.backend.chat = TimedReadingChat(self, cascade.chat)
        else:
            self.backend.recogniser, self.backend.chat = WholeTurns(asr), chat
        self.backend.synthesiser = TimedVoice(self, cascade.voice)


class TimedRecogniser:
    """The recogniser of a cascade, timed."""

    def __init__(self, parts: TimedParts, inner: LocalRecogniser) -> None:
        self._parts, self._inner = parts, inner

    async def transcribe(self, samples: Samples, rate: int, language: str | None = None) -> str:
        """The transcript of a turn without drafts."""
        return await self._timed(self._inner.transcribe(samples, rate, language))

    async def _timed(self, recognition: Awaitable[Transcript]) -> Transcript:
        self._parts.answer.mark("turn")
        transcript = await recognition
        self._parts.answer.mark("recognise")
        self._parts.answer.moments.pop("first_clause", None)  # of a reply that was dropped
        self._parts.answer.moments.pop("first_sound", None)
        return transcript

    async def finish(self, samples: Samples, settings: RecognitionSettings, draft: str) -> TurnTranscript:
        """The transcript of a turn with drafts."""
        return await self._timed(self._inner.finish(samples, settings, draft))

    async def draft(self, samples: Samples, settings: RecognitionSettings, is_wanted: Callable[[], bool]) -> str | None:
        """The words so far."""
        self._parts.answer.drafts += 1
        return await self._inner.draft(samples, settings, is_wanted)


class TimedChat:
    """The chat model of a cascade."""

    def __init__(self, parts: TimedParts, inner: ChatModel) -> None:
        self._parts, self._inner = parts, inner

    async def reply(
        self, messages: Sequence[dict[str, Any]], settings: ConversationSettings
    ) -> AsyncIterator[ChatPiece]:
        """The reply; notes how many tokens of its prompt had not been read."""
        stream = self._inner.reply(messages, settings)
        async for piece in stream:
            if isinstance(piece, ChatEnd):
                self._parts.answer.unread_tokens = piece.prompt_tokens - piece.cached_tokens
            yield piece


class TimedReadingChat(TimedChat):
    """The chat model of a cascade, which reads prompts in advance."""

    def open_prompt(self) -> ChatPrompt:
        """The prompt of a new conversation."""
        if not isinstance(self._inner, ReadingChatModel):
            raise InputError("the chat model is remote and reads nothing in advance; measure it with --no-early")
        return self._inner.open_prompt()


class TimedVoice:
    """The synthesiser of a cascade, timed: a first clause is complete when it is given to it."""

    def __init__(self, parts: TimedParts, inner: Any) -> None:
        self._parts, self._inner, self.rate = parts, inner, int(inner.rate)

    async def speak(self, text: str, voice: str | None, speed: float) -> AsyncIterator[Samples]:
        """The speech of a text."""
        answer = self._parts.answer
        if "first_clause" not in answer.moments:
            answer.mark("first_clause")
        async with aclosing(self._inner.speak(text, voice, speed)) as pieces:
            async for samples in pieces:
                if "first_sound" not in answer.moments:
                    answer.mark("first_sound")
                yield samples


def load_questions(language: str, count: int | None = None, sounds: Path | None = None) -> list[GeneralQuestion]:
    """The general questions of a language, spoken; `sounds` is a folder where the recordings are kept."""
    entries = json.loads(QUESTIONS.read_text(encoding="utf8"))[language][:count]
    voice, speaker = LANGUAGES[language].asker, None
    questions = []
    for number, entry in enumerate(entries):
        file = None if sounds is None else sounds / f"{language}{number:02d}.wav"
        if file is not None and file.is_file():
            sound = read(file)
        else:
            speaker = speaker or KokoroTTS.load(ASKER, "cpu", windows=WHOLE_SENTENCES)
            sound = speaker.say(entry["text"], voice)
            if file is not None:
                write(file, sound)
        questions.append(GeneralQuestion(entry["text"], tuple(entry["expected"]), sound))
    return questions


def run(
    language: str = "en",
    asr: str | None = None,
    chat: str = CHAT,
    tts: str | None = None,
    judge: str | None = JUDGE,
    count: int | None = None,
    is_early: bool = True,
    sounds: Path | None = None,
    device: str = "auto",
    out: Path | None = None,
) -> dict[str, Any]:
    """Ask, judge and print; write `cascade_<language>.json` to `out`, and return what was measured."""
    if language not in LANGUAGES:
        raise InputError(f"there are questions in {', '.join(LANGUAGES)}, not in {language!r}")
    given = LANGUAGES[language]
    if language == "zh":
        simplified("")  # fails now rather than after the questions
    parts = CascadeParts(asr or given.asr, chat, tts or given.tts)
    with stage("questions"):
        questions = load_questions(language, count, sounds)
    with stage("loading"):
        cascade = load_cascade(parts, device)
        if not isinstance(cascade.asr, LocalRecogniser) or not isinstance(cascade.voice, TTSSynthesiser):
            raise InputError("the recogniser and the synthesiser are measured in this process: give models, not URLs")
    before = os.getloadavg()[0]
    asked = asyncio.run(_ask_all(cascade, questions, given.instructions, language, is_early))
    result: dict[str, Any] = {
        "what": "cascade",
        "language": language,
        "parts": {"asr": parts.asr, "chat": parts.chat, "tts": parts.tts},
        "early": is_early,
        "cores": usable_cores(),
        "load_average": [round(before, 2), round(os.getloadavg()[0], 2)],
        **_figures(asked),
        "questions": [_entry(question, answer, voiced_end) for question, answer, voiced_end in asked],
    }
    if judge is not None:
        with stage("judging"):
            result |= judged(
                result["questions"], [answer for _, answer, _ in asked], cascade.voice.rate, judge, language
            )
    _print(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(result, indent=1, ensure_ascii=False)
        (out / f"cascade_{language}.json").write_text(text + "\n", encoding="utf8")
    return result


Asked = tuple[GeneralQuestion, TimedAnswer, float]  # with the time of the last voiced sample


async def _ask_all(
    cascade: LoadedCascade, questions: Sequence[GeneralQuestion], instructions: str, language: str, is_early: bool
) -> list[Asked]:
    turn = TurnSettings(silence_duration_ms=TURN_SILENCE_MS)
    settings = ConversationSettings(
        instructions=instructions, transcribe_input=True, turn=turn, recognition=RecognitionSettings((language,))
    )
    parts = TimedParts(cascade, is_early)
    async with cascade:
        with stage("warming up"):
            await cascade.warm_up(settings)
        with frozen_heap(), stage(f"{len(questions)} questions"):
            return [await _ask(parts, question, settings) for question in questions]


async def _ask(parts: TimedParts, question: GeneralQuestion, settings: ConversationSettings) -> Asked:
    """Stream a question in real time, then silence, until the answer is there."""
    samples = question.sound.mono().resampled(RATE).samples[0]
    last = int(np.flatnonzero(np.abs(samples) > QUIET * np.abs(samples).max())[-1]) + 1
    answer = parts.answer = TimedAnswer()
    conversation = LiveConversation(parts.backend, settings, input_rate=RATE)
    rate, over = parts.backend.output_rate, asyncio.Event()

    async def listen() -> None:
        async for event in conversation.events():
            answer.take(event, rate)
            if answer.reason is not None and answer.heard:
                over.set()

    listening = asyncio.create_task(listen())
    packet, number, started = int(PACKET_SECONDS * RATE), 0, time.perf_counter()
    while not over.is_set() and number * PACKET_SECONDS < len(samples) / RATE + MAX_WAIT_SECONDS:
        piece = samples[number * packet : (number + 1) * packet]
        number += 1
        await asyncio.sleep(max(0.0, started + number * PACKET_SECONDS - time.perf_counter()))
        conversation.hear(np.pad(piece, (0, packet - len(piece))))
    await conversation.close()
    await listening
    return question, answer, started + last / RATE


def _entry(question: GeneralQuestion, answer: TimedAnswer, voiced_end: float) -> dict[str, Any]:
    said = answer.said.strip()
    return {
        "question": question.text,
        "heard": answer.heard,
        "said": said,
        "is_right": question.is_right(said),
        "v2v": None if answer.first_voice is None else round(answer.first_voice - voiced_end, 3),
        "drafts": answer.drafts,
        "unread_tokens": answer.unread_tokens,
        "stages": _stages(answer, voiced_end),
    }


def _stages(answer: TimedAnswer, voiced_end: float) -> dict[str, dict[str, float]]:
    """Wall and CPU seconds from one stage to the next, the first since the last voiced sample."""
    found: dict[str, dict[str, float]] = {}
    wall, processor = voiced_end, None
    for name in STAGES:
        moment = answer.moments.get(name)
        if moment is None:
            return found
        used = 0.0 if processor is None else moment.processor - processor
        found[name] = {"wall": round(moment.wall - wall, 3), "cpu": round(used, 3)}
        wall, processor = moment.wall, moment.processor
    return found


def _figures(asked: Sequence[Asked]) -> dict[str, Any]:
    entries = [_entry(*each) for each in asked]
    times = [entry["v2v"] for entry in entries if entry["v2v"] is not None]
    stages = {
        name: {
            clock: round(statistics.median(values), 3)
            for clock in ("wall", "cpu")
            if (values := [entry["stages"][name][clock] for entry in entries if name in entry["stages"]])
        }
        for name in STAGES
    }
    return {
        "asked": len(entries),
        "answered": len(times),
        "right": sum(entry["is_right"] for entry in entries),
        "v2v_p50": round(statistics.median(times), 3) if times else None,
        "v2v_max": max(times, default=None),
        "median_stages": stages,
    }


def judged(
    entries: list[dict[str, Any]], answers: Sequence[TimedAnswer], rate: int, judge: str, language: str
) -> dict[str, Any]:
    """What an independent recogniser writes of the replies, which is added to their entries, and its errors."""
    recogniser = JudgeRecogniser.load(judge, language)
    for entry, answer in zip(entries, answers, strict=True):
        entry["judged"] = recogniser.transcribe(Sound(np.concatenate([np.zeros(1, np.float32), *answer.pieces]), rate))
    comparable = spoken_words if language == "en" else spoken_characters
    pairs = [(comparable(entry["said"]), comparable(entry["judged"])) for entry in entries]
    name = "wer" if language == "en" else "cer"
    return {"judge": judge, name: round(error_rate(*zip(*pairs, strict=True)), 4)}


def _print(result: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console, parts = Console(), result["parts"]
    load = " to ".join(str(each) for each in result["load_average"])
    title = f"{parts['asr']} → {parts['chat']} → {parts['tts']}; {result['cores']} cores, load {load}"
    table = Table("question", "answer", "right", "V2V s", title=title, box=SIMPLE_HEAD)
    for entry in result["questions"]:
        table.add_row(entry["question"], entry["said"], "yes" if entry["is_right"] else "no", str(entry["v2v"]))
    console.print(table)
    stages = (
        f"{name.replace('_', ' ')} {times['wall'] * 1e3:.0f} ms (CPU {times['cpu'] * 1e3:.0f})"
        for name, times in result["median_stages"].items()
        if times
    )
    console.print(f"median of each stage: {', '.join(stages)}", highlight=False)
    errors = next((f"; {name.upper()} {result[name]:.1%}" for name in ("wer", "cer") if name in result), "")
    console.print(
        f"V2V p50 {result['v2v_p50']} s, at most {result['v2v_max']} s; "
        f"{result['right']} of {result['asked']} right{errors}",
        highlight=False,
    )
