"""Fillers: a few spoken words while a tool or a slow chat model works, so that a wait is not silent.

A filler is a reply of its own that is not part of the history. It starts when a reply has had no output, or a tool call
no result, for a while; never while the user speaks; and it yields to speech like any reply. The awaited answer is
played after it.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vivavoce.audio.player import Clock
from vivavoce.dialogue.history import History, written
from vivavoce.dialogue.items import Message, Samples, ToolCall, ToolOutput
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.log import log_failure

logger = logging.getLogger(__name__)

FILLER_SECONDS = 0.8
MAX_FILLERS = 3  # of one wait
CACHED_SOUNDS = 64
FILLERS = {
    "en": ("One moment, please.", "I am still on it.", "It takes a little longer."),
    "zh": ("请稍等。", "我还在查。", "还需要一点时间。"),
    "de": ("Einen Moment, bitte.", "Ich bin noch dabei.", "Es dauert noch etwas."),
    "fr": ("Un instant, s'il vous plaît.", "Je cherche encore.", "Cela prend un peu plus de temps."),
    "es": ("Un momento, por favor.", "Sigo en ello.", "Tarda un poco más."),
    "it": ("Un attimo, per favore.", "Ci sto ancora lavorando.", "Ci vuole ancora un po'."),
    "pt": ("Um momento, por favor.", "Ainda estou a ver.", "Demora mais um pouco."),
    "ja": ("少々お待ちください。", "まだ確認しています。", "もう少しかかります。"),
    "ko": ("잠시만 기다려 주세요.", "아직 확인하고 있습니다.", "조금 더 걸립니다."),
    "ru": ("Одну минуту, пожалуйста.", "Я ещё смотрю.", "Это займёт ещё немного времени."),
}
SCRIPTS = (("ja", 0x3040, 0x30FF), ("ko", 0xAC00, 0xD7AF), ("zh", 0x4E00, 0x9FFF), ("ru", 0x0400, 0x04FF))

Speak = Callable[[str, str | None, float], AsyncGenerator[Samples, None]]
"""The sound of a text, in a voice and at a speed."""


@dataclass
class FillerVoice:
    """Makes the sound of fillers, and caches it; shared by all conversations."""

    speak: Speak
    seconds: float = FILLER_SECONDS
    """Of silence before a filler."""
    covers_replies: bool = True
    """Whether a reply without output is covered, not only tool calls without a result."""
    _sounds: OrderedDict[tuple[str, str | None, float], Samples] = field(default_factory=OrderedDict)

    async def warm_up(self, languages: Sequence[str], settings: ConversationSettings) -> None:
        """Make the first filler of each language: a reply that is slow would wait for it besides."""
        for language in languages:
            try:
                await self.sound(FILLERS[language][0], settings.voice, settings.speed)
            except Exception as error:  # it may be spoken later, or be silence
                log_failure(logger, error, "a filler could not be spoken")

    async def sound(self, text: str, voice: str | None, speed: float) -> Samples:
        """The whole sound of a filler."""
        key = (text, voice, speed)
        if key not in self._sounds:
            pieces = [samples async for samples in self.speak(text, voice, speed)]
            self._sounds[key] = np.concatenate([np.zeros(0, np.float32), *pieces])
        self._sounds.move_to_end(key)
        while len(self._sounds) > CACHED_SOUNDS:
            self._sounds.popitem(last=False)
        return self._sounds[key]


@dataclass
class FillerWatch:
    """Watches one conversation, and speaks fillers while it waits."""

    voice: FillerVoice
    clock: Clock
    history: History
    settings: Callable[[], ConversationSettings]
    is_waiting: Callable[[], bool]
    """Whether the user waits for an output of a reply or a tool, and hears nothing."""
    output_ends: Callable[[], float]
    """When the sound of all replies so far ends."""
    start: Callable[[str, Samples], None]
    """Starts the reply that is the filler."""
    rate: int
    """Of the sound."""

    def __post_init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._begin = self.clock.now()  # of the wait

    def begin(self) -> None:
        """The output of a reply is awaited from now on."""
        self._begin = self.clock.now()
        self.go_on()

    def go_on(self) -> None:
        """A reply is over: if it was a call, its result is awaited, and the user has waited since the reply began."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def end(self) -> None:
        """The conversation is over."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        heard = self._begin  # when the last filler has been played
        for number in range(MAX_FILLERS):
            await self.clock.until(max(heard, self.output_ends()) + self.voice.seconds)
            if not self.is_waiting() or self.settings().modality != "audio":
                return
            made = await self._made(number)
            if made is None or not self.is_waiting():
                return
            text, sound = made
            self.start(text, sound)
            heard = self.clock.now() + len(sound) / self.rate
            if number + 1 < MAX_FILLERS:
                await self._made(number + 1)  # while this one is played: its synthesis would lengthen the silence

    async def _made(self, number: int) -> tuple[str, Samples] | None:
        """The words and the sound of a filler; None where it could not be spoken, which is no failure of the reply."""
        settings = self.settings()
        text = FILLERS[filler_language(self.history, settings)][number]
        try:
            return text, await self.voice.sound(text, settings.voice, settings.speed)
        except Exception as error:
            log_failure(logger, error, "a filler could not be spoken")
            return None


def filler_language(history: History, settings: ConversationSettings) -> str:
    """The language of the user's last words by their script, else that of the session, else English."""
    spoken = (item for item in reversed(history.items) if isinstance(item.content, Message))
    words = next((written(item) for item in spoken if written(item)), "")
    for language, first, last in SCRIPTS:
        if any(first <= ord(letter) <= last for letter in words):
            return language
    language = (settings.recognition.language or "en").lower()[:2]
    return language if language in FILLERS else "en"


def has_open_calls(history: History) -> bool:
    """Whether a call since the user's last turn has no output; those that wait for approval are the user's affair."""
    answered: set[str] = set()
    for item in reversed(history.items):
        content = item.content
        if isinstance(content, Message) and content.role == "user":
            return False
        if isinstance(content, ToolOutput):
            answered.add(content.call_id)
        elif isinstance(content, ToolCall) and item.is_complete:
            is_open = content.call_id not in answered if content.hosted is None else content.hosted.state == "running"
            if is_open:
                return True
    return False
