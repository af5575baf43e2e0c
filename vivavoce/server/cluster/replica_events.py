"""The events of a replica that the ingress reads; all others are forwarded unread."""

from typing import get_args

import msgspec

from vivavoce.server.realtime import server_events as events
from vivavoce.server.realtime.server_events import ServerEvent

EVENT_PREFIX = '{"type":"'  # of every event of our server
AUDIO_DELTA = "response.output_audio.delta"
ReplicaEvent = (
    events.Error
    | events.SessionCreated
    | events.SessionUpdated
    | events.SessionResumed
    | events.ConversationItemAdded
    | events.ConversationItemDone
    | events.ConversationItemRetrieved
    | events.ConversationItemTruncated
    | events.ConversationItemDeleted
    | events.TranscriptionCompleted
    | events.InputAudioBufferSpeechStarted
    | events.InputAudioBufferSpeechStopped
    | events.InputAudioBufferTimeoutTriggered
    | events.InputAudioBufferCommitted
    | events.InputAudioBufferCleared
    | events.ResponseCreated
    | events.ResponseDone
    | events.OutputItemAdded
    | events.OutputItemDone
    | events.OutputTextDelta
    | events.OutputAudioTranscriptDelta
)
REPLICA_EVENTS = {str(event.__struct_config__.tag) for event in get_args(ReplicaEvent)}

_replica_events = msgspec.json.Decoder(ReplicaEvent)
_audio_deltas = msgspec.json.Decoder(events.OutputAudioDelta)


def decode_replica_event(text: str) -> ServerEvent | None:
    """An event of a replica; None for those that the ingress does not read."""
    return _replica_events.decode(text) if type_of(text) in REPLICA_EVENTS else None


def decode_audio_delta(text: str) -> events.OutputAudioDelta:
    """An event of the type `AUDIO_DELTA`."""
    return _audio_deltas.decode(text)


def type_of(text: str) -> str:
    """The type of an event, without decoding it; empty where it does not come first."""
    return text[len(EVENT_PREFIX) : text.find('"', len(EVENT_PREFIX))] if text.startswith(EVENT_PREFIX) else ""
