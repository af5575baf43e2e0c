"""One conversation in this process: the host that `viva serve` would serve, its sound and its captions."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

import numpy as np

from vivavoce.audio.level import peak, to_db
from vivavoce.dialogue.conversation import Conversation
from vivavoce.dialogue.events import (
    Event,
    InputTranscript,
    InputTranscriptFailed,
    ItemRetracted,
    ItemTruncated,
    OutputCleared,
    ReplyAudio,
    ReplyDone,
    ReplyStarted,
    ReplyText,
    SpeechStarted,
    TurnCommitted,
    Warned,
)
from vivavoce.dialogue.history import written
from vivavoce.dialogue.items import AudioPart, Item, Message, Samples
from vivavoce.nn.process_settings import frozen_heap
from vivavoce.server.hosting.hosts import SpeechHost
from vivavoce.talk.audio import FileAudio, TalkAudio
from vivavoce.talk.playback import PlaybackBuffer, PlayedAmount
from vivavoce.talk.screen import Screen
from vivavoce.talk.turns import TalkTurn

QUIET = 10 ** (-40 / 20)  # of a turn's peak; lower samples are not voiced
REPORT_SECONDS = 0.1
TRANSCRIPT_SECONDS = 5.0  # at the end, for the last transcript


async def talk(host: SpeechHost, audio: TalkAudio, screen: Screen) -> list[TalkTurn]:
    """Talk until the audio is over or the task is cancelled; returns the turns."""
    async with AsyncExitStack() as stack:
        for part in host.parts:
            await stack.enter_async_context(part)
        with screen.working("warming up"):
            await host.warm_up()
        screen.note(audio.prompt)
        stack.enter_context(frozen_heap())
        conversation = host.open(replace(host.settings, transcribe_input=True), host.name)
        return await TalkSession(conversation, screen).run(audio)


class TalkSession:
    """A conversation with its playback and its screen."""

    def __init__(self, conversation: Conversation, screen: Screen, clock: Callable[[], float] = time.monotonic) -> None:
        self.conversation, self.screen, self._clock = conversation, screen, clock
        self.playback = PlaybackBuffer(conversation.output_rate, clock)
        self.turns: list[TalkTurn] = []
        self._fillers: set[str] = set()  # replies that fill a wait: heard, but no turns
        self._user_speaks = False
        self._shown = 0  # turns whose captions are final

    def is_idle(self) -> bool:
        """Whether neither the user nor a reply speaks, and no reply is being generated."""
        return not self._user_speaks and all(turn.is_generated for turn in self.turns)

    async def run(self, audio: TalkAudio) -> list[TalkTurn]:
        """Talk until the audio is over or the task is cancelled."""
        listening = asyncio.create_task(self._listen())
        reporting = asyncio.create_task(self._report())
        try:
            with self.screen, suppress(asyncio.CancelledError):  # Ctrl-C ends it, and what was said is kept
                await audio.run(self._hear, self.conversation.input_rate, self.playback, self.is_idle)
                await self._wait_for_transcripts()
        finally:
            reporting.cancel()
            await self.conversation.close()
            await listening
            await asyncio.gather(reporting, return_exceptions=True)
            self._note_turns()
            self._show_complete(everything=True)
        if isinstance(audio, FileAudio) and audio.silence_line is not None:
            self.screen.note(audio.silence_line)
        return self.turns

    def _hear(self, samples: Samples) -> None:
        self.screen.heard(to_db(peak(samples)))
        self.conversation.hear(samples)

    async def _wait_for_transcripts(self) -> None:
        """A speech-to-speech model writes the user's words down after the reply."""
        with suppress(TimeoutError):
            async with asyncio.timeout(TRANSCRIPT_SECONDS):
                while any(turn.heard is None for turn in self.turns):
                    await asyncio.sleep(0.02)

    async def _listen(self) -> None:
        async for event in self.conversation.events():
            self._take(event)

    async def _report(self) -> None:
        """Tell the conversation what was played, and the screen what there is."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._note_turns()
            self._show_complete()
            self.screen.said(to_db(self.playback.level()))
            self.screen.show(self.turns[self._shown :])

    def _note_turns(self) -> None:
        for filler in self._fillers:
            self._report_played(filler)
        for turn in self.turns[self._shown :]:
            if turn.reply is None:
                continue
            played = self._report_played(turn.reply)
            turn.is_played = turn.is_generated and not self.playback.has(turn.reply)
            if turn.v2v_ms is None and played.first_audible is not None:
                turn.v2v_ms = (played.first_audible - turn.voiced_until) * 1e3

    def _report_played(self, reply: str) -> PlayedAmount:
        played = self.playback.played(reply)
        self.conversation.played(reply, round(played.samples / self.playback.rate * 1e3))
        return played

    def _take(self, event: Event) -> None:
        match event:
            case SpeechStarted():
                self._user_speaks = True
            case TurnCommitted(item=item):
                self._user_speaks = False
                self.turns.append(TalkTurn(item.id, voiced_until=self._clock() - _quiet_end(item)))
            case InputTranscript(item=item_id, text=text):
                self._turn(item=item_id).heard = text
            case InputTranscriptFailed(item=item_id, message=message):
                turn = self._turn(item=item_id)
                turn.heard, turn.error = "", message
            case ItemRetracted(item=item_id):  # the turn goes on, and comes whole
                self.turns[self._shown :] = [turn for turn in self.turns[self._shown :] if turn.item != item_id]
            case Warned(message=message):
                self.screen.note(message)
            case ReplyStarted(reply=reply, is_filler=True):
                self._fillers.add(reply)
            case ReplyText(reply=reply, delta=delta) if reply in self._fillers and self.turns:
                self.turns[-1].fillers.append(delta.strip())
            case _:
                self._take_reply(event)

    def _take_reply(self, event: Event) -> None:
        match event:
            case ReplyStarted(reply=reply):
                if not self.turns or self.turns[-1].reply is not None:
                    self.turns.append(TalkTurn("", heard="", voiced_until=self._clock()))
                self.turns[-1].reply = reply
            case ReplyText(reply=reply, delta=delta):
                self._turn(reply=reply).said += delta
            case ReplyAudio(reply=reply, item=item_id, samples=samples, gain=gain):
                self.playback.set_gain(gain)
                if len(samples):
                    self._turn(reply=reply).reply_item = item_id
                    self.playback.add(reply, samples)
            case OutputCleared(reply=reply):
                self.playback.clear(reply)
                self._turn(reply=reply).is_interrupted = True
            case ItemTruncated(item=cut):
                for turn in self.turns:
                    if turn.reply_item == cut.id:
                        turn.said = written(cut)
            case ReplyDone(reply=reply, reason=reason, error=error):
                turn = self._turn(reply=reply)
                turn.is_generated, turn.error = True, error or turn.error
                turn.is_interrupted = turn.is_interrupted or reason == "turn_detected"

    def _turn(self, item: str | None = None, reply: str | None = None) -> TalkTurn:
        found = [turn for turn in self.turns if turn.item == item or (reply is not None and turn.reply == reply)]
        return found[-1] if found else TalkTurn(item or "")

    def _show_complete(self, everything: bool = False) -> None:
        """Print the captions of turns that are complete, in order."""
        while self._shown < len(self.turns) and (everything or self.turns[self._shown].is_complete):
            self.screen.turn(self.turns[self._shown])
            self._shown += 1


def _quiet_end(item: Item) -> float:
    """Seconds at the end of a spoken turn without voice."""
    if not isinstance(item.content, Message):
        return 0.0
    for part in item.content.parts:
        if isinstance(part, AudioPart) and len(part.samples):
            loud = np.abs(part.samples)
            voiced = np.flatnonzero(loud > QUIET * loud.max())
            return (len(loud) - 1 - int(voiced[-1])) / part.rate if len(voiced) else 0.0
    return 0.0
