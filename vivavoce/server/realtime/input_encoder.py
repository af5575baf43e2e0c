"""Encodes the events of the user's turns and of their transcripts as events of the protocol."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET

from vivavoce.dialogue import events as dialogue
from vivavoce.dialogue.items import Item
from vivavoce.server.metrics import Metrics, TurnClock
from vivavoce.server.realtime import server_events as events
from vivavoce.server.realtime.items import wire_item
from vivavoce.server.realtime.server_events import ServerEvent
from vivavoce.server.realtime.session_settings import is_by_speaker
from vivavoce.server.realtime.session_types import SessionObject


@dataclass
class InputEventEncoder:
    """Encodes the events of the user's turns. `send` takes each event at once."""

    send: Callable[[ServerEvent], None]
    metrics: Metrics
    clock: TurnClock
    session: Callable[[], SessionObject]
    """The session object in force."""
    announced_commits: set[str] = field(default_factory=set)
    """Turns that the client committed and that were announced; the conversation reports them once more."""
    _transcripts: dict[str, str] = field(default_factory=dict)

    def encode(self, event: dialogue.Event) -> bool:
        """Encode an event of the input; False for all others."""
        handle = _HANDLERS.get(type(event))
        if handle is not None:
            handle(self, event)
        return handle is not None

    def announce_turn(self, item: Item, previous: str | None) -> None:
        """Send the events of a committed turn."""
        wire = wire_item(item)
        self.send(events.InputAudioBufferCommitted(item.id, previous))
        self.send(events.ConversationItemAdded(previous, wire))
        self.send(events.ConversationItemDone(previous, wire))

    def _speech_started(self, event: dialogue.SpeechStarted) -> None:
        self.send(events.InputAudioBufferSpeechStarted(event.item, event.audio_start_ms))

    def _speech_stopped(self, event: dialogue.SpeechStopped) -> None:
        self.clock.note_turn_end(event.audio_end_ms - event.silence_ms)
        self.send(events.InputAudioBufferSpeechStopped(event.item, event.audio_end_ms))

    def _turn_committed(self, event: dialogue.TurnCommitted) -> None:
        if event.item.id in self.announced_commits:
            self.announced_commits.remove(event.item.id)
        else:
            self.announce_turn(event.item, event.previous)

    def _turn_ignored(self, event: dialogue.TurnIgnored) -> None:
        self.clock.note_turn_ignored()
        self.metrics.ignored.labels(event.reason).inc()
        self.send(events.InputAudioBufferCleared())

    def _overlap_judged(self, event: dialogue.OverlapJudged) -> None:
        self.metrics.overlaps.labels(event.verdict).inc()

    def _turn_timed_out(self, event: dialogue.TurnTimedOut) -> None:
        self.send(events.InputAudioBufferTimeoutTriggered(event.item, event.audio_start_ms, event.audio_end_ms))

    def _input_transcript(self, event: dialogue.InputTranscript) -> None:
        """Deltas cannot be revised on the wire: text that changed is sent with the final transcript."""
        sent = self._transcripts.get(event.item, "")
        logprobs = [events.Logprob(each.text, list(each.data), each.logprob) for each in event.logprobs] or UNSET
        if event.text.startswith(sent) and len(event.text) > len(sent):
            self._transcripts[event.item] = event.text
            # The tokens of a text whose beginning was sent before are not those of its rest.
            self.send(
                events.TranscriptionDelta(event.item, event.text[len(sent) :], logprobs=UNSET if sent else logprobs)
            )
        if event.is_final:
            self._transcripts.pop(event.item, None)
            usage = events.DurationUsage(event.seconds)
            transcription = self.session().audio.input.transcription
            if transcription is not None and is_by_speaker(transcription) and event.text:
                whole = (dialogue.SpeakerSegment("A", event.text, 0.0, event.seconds),)
                for number, each in enumerate(event.segments or whole):
                    id = f"seg_{event.item}_{number}"
                    self.send(
                        events.TranscriptionSegment(event.item, id, each.text, each.start, each.end, each.speaker)
                    )
            languages = [events.DetectedLanguage(code) for code in event.languages] or UNSET
            self.send(
                events.TranscriptionCompleted(event.item, event.text, usage, languages=languages, logprobs=logprobs)
            )

    def _input_transcript_failed(self, event: dialogue.InputTranscriptFailed) -> None:
        error = events.server_error("transcription_failed", event.message)
        self.send(events.TranscriptionFailed(event.item, error))


_HANDLERS: dict[type, Callable[[InputEventEncoder, Any], None]] = {
    dialogue.SpeechStarted: InputEventEncoder._speech_started,
    dialogue.SpeechStopped: InputEventEncoder._speech_stopped,
    dialogue.TurnCommitted: InputEventEncoder._turn_committed,
    dialogue.TurnIgnored: InputEventEncoder._turn_ignored,
    dialogue.OverlapJudged: InputEventEncoder._overlap_judged,
    dialogue.TurnTimedOut: InputEventEncoder._turn_timed_out,
    dialogue.InputTranscript: InputEventEncoder._input_transcript,
    dialogue.InputTranscriptFailed: InputEventEncoder._input_transcript_failed,
}
