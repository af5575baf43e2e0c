"""The conversation of `viva demo`: a question at the pace of a microphone, and the events of its answer."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vivavoce.audio.io import Sound
from vivavoce.audio.player import PlaybackClock
from vivavoce.cascade.parts import LoadedCascade
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
from vivavoce.models.moss_speech.codec import DECODER_RATE, ENCODER_RATE
from vivavoce.nn.process_settings import frozen_heap
from vivavoce.s2s.moss_speech import MossSpeechBackend

PACKET_SECONDS = 0.02
MAX_WAIT_SECONDS = 20.0  # after the question
QUIET = 10 ** (-40 / 20)  # of the peak; lower samples are not voiced
TURN_SILENCE_MS = 200


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


async def ask(subject: DemoSubject, question: Sound) -> tuple[DemoResult, float]:
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
