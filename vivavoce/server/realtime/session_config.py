"""What is in force for one session: the session object, and what it means for the conversation and for the sound."""

from typing import Any

from vivavoce.dialogue.events import ConversationSettings
from vivavoce.server.host import Host
from vivavoce.server.realtime.audio_formats import WireFormat
from vivavoce.server.wire_settings import (
    conversation_settings,
    default_session,
    input_format,
    merged,
    output_format,
)

Wire = dict[str, Any]


class Configuration:
    """A session object that is always whole and valid."""

    def __init__(self, host: Host, model: str, kind: str = "realtime", change: Wire | None = None) -> None:
        self._base, self._voices = host.settings, tuple(host.voices)
        self.wire = default_session(self._base, model, kind)
        if change is not None:
            self.wire = self.changed(change)

    def changed(self, change: Any, param: str = "session") -> Wire:
        """The session object after a change; WireError where it cannot be made."""
        return merged(self.wire, change, self._base.turn, self._voices, param)

    def settings(self, wire: Wire | None = None) -> ConversationSettings:
        """What this session object, or another, asks of the conversation."""
        return conversation_settings(wire or self.wire, self._base, self._voices)

    @property
    def input_format(self) -> WireFormat:
        return input_format(self.wire)

    @property
    def output_format(self) -> WireFormat:
        return output_format(self.wire)

    @property
    def binary(self) -> str | None:
        """How sound comes and goes in binary frames: raw, opus, or not at all."""
        return (self.wire.get("viva") or {}).get("binary")

    @property
    def is_transcription(self) -> bool:
        return bool(self.wire["type"] == "transcription")

    @property
    def ends_turns(self) -> bool:
        """Whether we find the end of a turn; else the client commits it."""
        return self.wire["audio"]["input"]["turn_detection"] is not None
