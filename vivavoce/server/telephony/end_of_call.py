"""When the server ends a telephone call by itself: after silence, or after a goodbye."""

import re
from collections.abc import Callable, Iterable

from vivavoce.server.realtime import server_events as events
from vivavoce.server.realtime.session import RealtimeSession

SILENCE = "silence"
"""Why a call has ended whose caller did not answer."""


def ends_with_phrase(text: str, phrases: Iterable[str]) -> bool:
    """Whether the last words are one of the phrases, whatever their case and punctuation."""
    words = _plain(text)
    return any(
        words.endswith(phrase) and _is_boundary(words, len(words) - len(phrase)) for phrase in map(_plain, phrases)
    )


def _plain(text: str) -> str:
    """A text in lower case without punctuation."""
    return " ".join(re.findall(r"[^\W_]+(?:['’][^\W_]+)*", text.casefold()))


def _is_boundary(words: str, index: int) -> bool:
    """Whether a word begins here; scripts without spaces have no words to cut."""
    return index == 0 or words[index - 1] == " " or not words[index].isascii()


class EndOfCall:
    """Follows the events of the session of one call."""

    def __init__(self, session: RealtimeSession, end: Callable[[str], None]) -> None:
        """`end` ends the call for a reason."""
        options = session.options
        self._session, self._end = session, end
        self._max_prompts, self._phrases = options.call_silence_prompts, options.call_end_phrases
        self._unanswered = 0
        self._reply: str | None = None  # in progress
        if options.call_silence_seconds is not None:
            session.on_sent.append(self._note_silence)
        if self._phrases:
            session.on_sent.append(self._note_phrases)

    def _note_silence(self, event: events.ServerEvent) -> None:
        match event:
            case events.InputAudioBufferSpeechStarted() | events.InputAudioBufferDtmfEventReceived():
                self._unanswered = 0
            case events.InputAudioBufferTimeoutTriggered():
                self._unanswered += 1
                if self._unanswered > self._max_prompts:
                    self._end(SILENCE)

    def _note_phrases(self, event: events.ServerEvent) -> None:
        match event:
            case events.ResponseCreated(response=response) if response.conversation_id is not None:
                self._reply = response.id
            case events.ResponseDone(response=response) if response.id == self._reply:
                self._reply = None
            case events.OutputAudioTranscriptDone(response_id=reply, transcript=text):
                if ends_with_phrase(text, self._phrases):
                    self._session.hang_up(reply)
            case events.TranscriptionCompleted(transcript=text):
                if ends_with_phrase(text, self._phrases):
                    self._session.hang_up(self._reply)
