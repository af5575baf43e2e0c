"""The eleven client events of the protocol, and one of ours, done to a conversation."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from vivavoce.dialogue.events import Conversation, ReplyRequest
from vivavoce.errors import InputError, VivaError
from vivavoce.server.metrics import TurnClock
from vivavoce.server.realtime.audio_formats import sound_bytes
from vivavoce.server.realtime.audio_input import SoundInput
from vivavoce.server.realtime.session_config import Configuration
from vivavoce.server.telling import EventEncoder, RequestedReply, truncation
from vivavoce.server.wire_error import WireError
from vivavoce.server.wire_items import parse_content, parse_id, parse_input, sound_ms, wire_item
from vivavoce.server.wire_settings import text

Wire = dict[str, Any]


@dataclass
class ClientEvents:
    """What a client sends to one session. Whatever is wrong is raised, and has changed nothing."""

    conversation: Conversation
    configuration: Configuration
    teller: EventEncoder
    sound: SoundInput
    clock: TurnClock
    updated: Callable[[], None]
    """Tells the session as it is now."""

    async def handle(self, event: Wire) -> None:
        """Do what the event says."""
        kind = event.get("type")
        handler = HANDLERS.get(kind) if isinstance(kind, str) else None
        if handler is None:
            known = ", ".join(HANDLERS)
            raise WireError(f"the event type {kind!r} is unknown; known are {known}", "unknown_event_type", "type")
        outcome = handler(self, event)
        if outcome is not None:
            await outcome

    def session_update(self, event: Wire) -> None:
        wire = self.configuration.changed(event.get("session"))
        settings = self.configuration.settings(wire)
        self.conversation.update(lambda _: settings)
        self.configuration.wire = self.teller.session = wire
        self.sound.configure_if_changed()
        self.updated()

    async def append(self, event: Wire) -> None:
        await self.sound.hear_text(sound_bytes(event.get("audio")))

    def commit(self, event: Wire) -> None:
        previous = self.conversation.items[-1].id if self.conversation.items else None
        item = self.conversation.commit()
        self.sound.forget_waiting()
        self.clock.asked()
        self.teller.answered_commits.add(item.id)
        self.teller.announce_turn(item, previous)

    def clear_input(self, event: Wire) -> None:
        self.conversation.clear_input()
        self.sound.forget_waiting()
        self.teller.tell({"type": "input_audio_buffer.cleared"})

    def clear_output(self, event: Wire) -> None:
        with suppress(VivaError):
            self.conversation.cancel()
        if not self.teller.cut(None):
            self.teller.tell({"type": "output_audio_buffer.cleared", "response_id": self.teller.last_reply})

    def item_create(self, event: Wire) -> None:
        wire = event.get("item")
        content = parse_content(wire, self.configuration.input_format, self.conversation.input_rate)
        id = parse_id(wire["id"], "item.id") if isinstance(wire, dict) and wire.get("id") is not None else None
        after = event.get("previous_item_id")
        after = None if after is None else parse_id(after, "previous_item_id")
        if id is not None and any(item.id == id for item in self.conversation.items):
            raise WireError(f"there is an item {id!r} already", "item_exists", "item.id")
        item, previous = self.conversation.add(content, id, after)
        added = wire_item(item)
        self.teller.tell({"type": "conversation.item.added", "previous_item_id": previous, "item": added})
        self.teller.tell({"type": "conversation.item.done", "previous_item_id": previous, "item": added})

    def item_retrieve(self, event: Wire) -> None:
        item = self.conversation.item(parse_id(event.get("item_id"), "item_id"))
        formats = (self.configuration.input_format, self.configuration.output_format)
        self.teller.tell({"type": "conversation.item.retrieved", "item": wire_item(item, sound=formats)})

    def item_truncate(self, event: Wire) -> None:
        id = parse_id(event.get("item_id"), "item_id")
        if event.get("content_index", 0) != 0:
            raise WireError("an item has one part of sound, content_index 0", param="content_index")
        end = self._cut_to(id, milliseconds(event, "audio_end_ms"))
        self.teller.truncated = (id, end)
        self.teller.tell(truncation(id, end))

    def _cut_to(self, id: str, end: int) -> int:
        """Cut an item; where it ends then. Stock clients do this to stop a reply, and trust that nothing more comes."""
        reply, cut = self.teller.reply_with(id), self.teller.truncated
        if reply is not None:
            with suppress(VivaError):
                self.conversation.cancel(reply)
            self.teller.cut(reply, truncates=False)
        try:
            self.conversation.truncate(id, end)
        except VivaError:
            length = sound_ms(self.conversation.item(id))
            if length is None or length > end or (reply is None and (cut is None or cut[0] != id)):
                raise
            return length  # it was interrupted meanwhile, and cut to what was heard
        return end

    def item_delete(self, event: Wire) -> None:
        id = parse_id(event.get("item_id"), "item_id")
        self.conversation.delete(id)
        self.teller.tell({"type": "conversation.item.deleted", "item_id": id})

    def response_create(self, event: Wire) -> None:
        if self.configuration.is_transcription:
            raise WireError("a transcription session has no responses", "transcription_session")
        asked, request = self._request(event.get("response"))
        try:
            reply = self.conversation.reply(request)
        except InputError as error:
            code = "rate_limit_exceeded" if asked.is_out_of_band else "conversation_already_has_active_response"
            raise WireError(str(error), code) from error
        self.clock.asked()
        self.teller.asked[reply] = asked

    def _request(self, wire: Any) -> tuple[RequestedReply, ReplyRequest | None]:
        if wire is None:
            return RequestedReply(self.configuration.wire), None
        changed = self.configuration.changed(wire, "response")
        metadata, place = checked_metadata(wire.get("metadata")), wire.get("conversation", "auto")
        if place not in ("auto", "none", None):
            raise WireError(f"a response's conversation is auto or none, not {place!r}", param="response.conversation")
        content = None
        if wire.get("input") is not None:
            rate, format = self.conversation.input_rate, self.configuration.input_format
            content = parse_input(wire["input"], format, rate, self.conversation.item)
        settings = replace(self.configuration.settings(changed), turn=self.conversation.settings.turn)
        is_out_of_band = place == "none"
        return RequestedReply(changed, metadata, is_out_of_band), ReplyRequest(settings, is_out_of_band, content)

    def response_cancel(self, event: Wire) -> None:
        reply = event.get("response_id")
        reply = None if reply is None else text(reply, "response_id")
        try:
            self.conversation.cancel(reply)
        except VivaError as error:
            if not self.teller.cut(reply):  # made, but still being told
                raise WireError(str(error), "response_cancel_not_active") from error
        else:
            self.teller.cut(reply, truncates=self.teller.plays_itself)  # other clients say themselves what they heard

    def played(self, event: Wire) -> None:
        """Our addition: the client tells how much of a reply its loudspeaker has played."""
        self.teller.client_played(text(event.get("response_id"), "response_id"), milliseconds(event, "audio_ms"))


def milliseconds(event: Wire, name: str) -> int:
    """A time in a field of an event."""
    value = event.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 40:
        raise WireError(f"{name} must be a whole number of milliseconds, 0 or more, not {value!r}", param=name)
    return value


def checked_metadata(value: Any) -> Wire | None:
    """Up to 16 pairs of short texts."""
    if value is None:
        return None
    fits = isinstance(value, dict) and len(value) <= 16
    if not fits or any(not isinstance(text, str) or len(text) > 512 or len(name) > 64 for name, text in value.items()):
        raise WireError("metadata holds up to 16 texts of 512 characters under names of 64", param="response.metadata")
    return dict(value)


HANDLERS: dict[str, Callable[[ClientEvents, Wire], Awaitable[None] | None]] = {
    "session.update": ClientEvents.session_update,
    "input_audio_buffer.append": ClientEvents.append,
    "input_audio_buffer.commit": ClientEvents.commit,
    "input_audio_buffer.clear": ClientEvents.clear_input,
    "output_audio_buffer.clear": ClientEvents.clear_output,
    "conversation.item.create": ClientEvents.item_create,
    "conversation.item.retrieve": ClientEvents.item_retrieve,
    "conversation.item.truncate": ClientEvents.item_truncate,
    "conversation.item.delete": ClientEvents.item_delete,
    "response.create": ClientEvents.response_create,
    "response.cancel": ClientEvents.response_cancel,
    "viva.played": ClientEvents.played,
}
