"""What each client event does to a conversation, and the decoding of its audio."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vivavoce.dialogue.conversation import Conversation, ReplyRequest
from vivavoce.dialogue.items import Content, ImagePart, Message, Samples
from vivavoce.errors import InputError, VivaError
from vivavoce.server.metrics import TurnClock
from vivavoce.server.realtime import client_events as client
from vivavoce.server.realtime import server_events as events
from vivavoce.server.realtime.audio_formats import InputFormats, slices
from vivavoce.server.realtime.encoder import EventEncoder, ResponseRequest
from vivavoce.server.realtime.hosted_tools import HostedTools
from vivavoce.server.realtime.items import (
    McpApprovalResponseItem,
    ResponseParams,
    audio_ms,
    content_of,
    contents_of,
    wire_item,
)
from vivavoce.server.realtime.session_config import Configuration
from vivavoce.server.realtime.session_types import value_or
from vivavoce.server.wire import WireError

COMMIT_EMPTY = (
    "Error committing input audio buffer: buffer too small. Expected at least 100ms of audio, but buffer only has "
    "0.00ms of audio."
)
CANCEL_NOT_ACTIVE = "Cancellation failed: no active response found"
MAX_IMAGE_BYTES = 32 << 20
MAX_UNPROCESSED_SECONDS = 1.0  # of a session's audio; a client that sends faster than it is processed waits


class DecodedAudio(NamedTuple):
    """Audio of a client that a door process has decoded."""

    event_id: str | None
    wire_bytes: int
    samples: Samples
    """At the conversation's rate."""

    @property
    def is_long(self) -> bool:
        """Whether it is passed on in slices, so that other sessions run between them."""
        return len(self.samples) > LONG_SAMPLES


LONG_SAMPLES = 9_600


class AudioInputStream:
    """The input audio of one session."""

    def __init__(
        self, conversation: Conversation, configuration: Configuration, clock: TurnClock, max_bytes: int
    ) -> None:
        self._conversation, self._configuration, self._clock = conversation, configuration, clock
        self._max_bytes = max_bytes
        self._pending_bytes = 0
        self.on_samples: Callable[[Samples], None] | None = None
        """Is given the samples too, as they arrive."""
        self.configure()

    def configure(self) -> None:
        """Restart decoding in the format of the session."""
        self.formats = self._configured_formats()
        self._reader = self.formats.new_reader()

    def configure_if_changed(self) -> None:
        """Restart decoding only if the format has changed, so that the resampler keeps its state otherwise."""
        if self.formats != self._configured_formats():
            self.configure()

    def _configured_formats(self) -> InputFormats:
        format, binary = self._configuration.input_format, self._configuration.binary
        return InputFormats(format.type, format.rate, binary, self._conversation.input_rate)

    def reset_pending(self) -> None:
        """Reset the count of bytes that wait for a commit."""
        self._pending_bytes = 0

    async def append(self, data: bytes) -> None:
        """Decode audio of an `input_audio_buffer.append` event."""
        if self.formats.binary == "opus":
            raise WireError("this session takes audio as binary Opus packets, not as base64", "binary_negotiated")
        await self._append(data)

    async def append_binary(self, data: bytes) -> None:
        """Decode audio of a binary message."""
        if self.formats.binary is None:
            raise WireError("binary messages need session.viva.binary to be raw or opus", "binary_not_negotiated")
        await self._append(data)

    def add_samples(self, samples: Samples) -> None:
        """Pass samples at the conversation's rate on to it."""
        self._conversation.hear(samples)
        if self.on_samples is not None:
            self.on_samples(samples)
        self._clock.note_received_audio(len(samples) / self._conversation.input_rate)

    async def _add_slice(self, samples: Samples) -> None:
        """As `add_samples`; waits where the conversation has too many to process."""
        self.add_samples(samples)
        await self._conversation.drain_input(MAX_UNPROCESSED_SECONDS)

    @property
    def is_behind(self) -> bool:
        """Whether the conversation has too many samples to process."""
        return self._conversation.unprocessed_seconds > MAX_UNPROCESSED_SECONDS

    def append_decoded(self, audio: DecodedAudio) -> None:
        """Take audio that a door process has decoded."""
        self._check_limit(audio.wire_bytes)
        self.add_samples(audio.samples)

    async def append_long(self, audio: DecodedAudio) -> None:
        """Take long audio that a door process has decoded, in slices."""
        self._check_limit(audio.wire_bytes)
        for begin in range(0, len(audio.samples), LONG_SAMPLES):
            await self._add_slice(audio.samples[begin : begin + LONG_SAMPLES])
            await asyncio.sleep(0)

    async def _append(self, data: bytes) -> None:
        self._check_limit(len(data))
        for piece in [data] if self.formats.binary == "opus" else slices(data, self.formats.format):
            await self._add_slice(self._reader.read(piece))
            if len(piece) < len(data):
                await asyncio.sleep(0)

    def _check_limit(self, size: int) -> None:
        """WireError where too much audio waits for a commit; with turn detection none waits."""
        if self._configuration.ends_turns:
            return
        if self._pending_bytes + size > self._max_bytes:
            limit = self._max_bytes >> 20
            raise WireError(f"{limit} MiB of audio already wait for a commit; commit or clear them", "buffer_full")
        self._pending_bytes += size


@dataclass
class ClientEventHandlers:
    """Handles the events of a session's client. A refused event changes nothing."""

    conversation: Conversation
    configuration: Configuration
    encoder: EventEncoder
    audio: AudioInputStream
    clock: TurnClock
    updated: Callable[[], None]
    """Sends `session.updated`."""
    hosted: HostedTools

    async def handle(self, event: client.AnyClientEvent) -> None:
        """Apply an event; all but audio take effect after the audio before them."""
        if not isinstance(event, client.InputAudioBufferAppend):
            await self.conversation.drain_input()
        outcome = _HANDLERS[type(event)](self, event)
        if outcome is not None:
            await outcome

    def session_update(self, event: client.SessionUpdate) -> None:
        session, refused = self.configuration.changed_but_for_tools(event.session)
        events.check_depth(session)
        settings = self.configuration.settings(session)
        self.conversation.update(lambda _: settings)
        self.configuration.session = self.encoder.session = session
        self.audio.configure_if_changed()
        self.updated()
        for error in refused[1:]:
            self.encoder.send(events.error_event(error, event.event_id))
        if refused:
            raise refused[0]

    async def append(self, event: client.InputAudioBufferAppend) -> None:
        await self.audio.append(event.audio)

    def commit(self, event: client.InputAudioBufferCommit) -> None:
        previous = self.conversation.items[-1].id if self.conversation.items else None
        try:
            item = self.conversation.commit()
        except InputError as error:
            raise WireError(COMMIT_EMPTY, "input_audio_buffer_commit_empty") from error
        self.audio.reset_pending()
        self.clock.note_reply_request()
        self.encoder.input.announced_commits.add(item.id)
        self.encoder.input.announce_turn(item, previous)

    def clear_input(self, event: client.InputAudioBufferClear) -> None:
        self.conversation.clear_input()
        self.audio.reset_pending()
        self.encoder.send(events.InputAudioBufferCleared())

    def clear_output(self, event: client.OutputAudioBufferClear) -> None:
        with suppress(VivaError):
            self.conversation.cancel()
        if not self.encoder.cut(None):
            self.encoder.send(events.OutputAudioBufferCleared(self.encoder.last_reply))

    def item_create(self, event: client.ConversationItemCreate) -> None:
        if isinstance(event.item, McpApprovalResponseItem):
            self.hosted.answer_approval(event.item)
            return
        self.configuration.check_images([event.item], ["item"])
        content = content_of(event.item, self.configuration.input_format, self.conversation.input_rate)
        self._check_image_bytes(content)
        id = value_or(event.item.id, None)
        if id is not None and self._has_item(id):
            message = f"Error adding item: an item with id '{id}' already exists."
            raise WireError(message, "item_create_duplicate_item_id")
        after = event.previous_item_id
        if after is not None and after != "root" and not self._has_item(after):
            message = f"Error adding item: the previous item with id '{after}' does not exist."
            raise WireError(message, "item_create_invalid_previous_item_id")
        item, previous = self.conversation.add(content, id, event.previous_item_id)
        added = wire_item(item)
        self.encoder.send(events.ConversationItemAdded(previous, added))
        self.encoder.send(events.ConversationItemDone(previous, added))

    def item_retrieve(self, event: client.ConversationItemRetrieve) -> None:
        if (listed := self.hosted.item(event.item_id)) is not None:
            self.encoder.send(events.ConversationItemRetrieved(listed))
            return
        self._require_item(event.item_id, "retrieving", "item_retrieve_invalid_item_id")
        formats = (self.configuration.input_format, self.configuration.output_format)
        item = wire_item(self.conversation.item(event.item_id), audio=formats)
        self.encoder.send(events.ConversationItemRetrieved(item))

    def _check_image_bytes(self, content: Content) -> None:
        """WireError where the pictures of the history would need too much memory."""
        stored = sum(_image_bytes(item.content) for item in self.conversation.items)
        if (new := _image_bytes(content)) and stored + new > MAX_IMAGE_BYTES:
            limit = MAX_IMAGE_BYTES >> 20
            raise WireError(f"The images of a session may have {limit} MiB; delete some.", "images_too_large", "item")

    def _has_item(self, id: str) -> bool:
        return any(item.id == id for item in self.conversation.items)

    def _require_item(self, id: str, doing: str, code: str) -> None:
        try:
            self.conversation.item(id)
        except InputError as error:
            raise WireError(f"Error {doing} item: the item with id '{id}' does not exist.", code) from error

    def item_truncate(self, event: client.ConversationItemTruncate) -> None:
        self._require_item(event.item_id, "truncating", "item_truncate_invalid_item_id")
        end = self._cut_to(event.item_id, event.audio_end_ms)
        self.encoder.truncated = (event.item_id, end)
        self.encoder.send(events.ConversationItemTruncated(event.item_id, end))

    def _cut_to(self, id: str, end: int) -> int:
        """Truncate an item; the milliseconds where it now ends. Stock clients stop a response by this event, so the
        reply of the item is cancelled too."""
        reply, cut = self.encoder.reply_with(id), self.encoder.truncated
        if reply is not None:
            with suppress(VivaError):
                self.conversation.cancel(reply)
            self.encoder.cut(reply, truncates=False)
        try:
            self.conversation.truncate(id, end)
        except InputError as error:
            item = self.conversation.item(id)
            length = audio_ms(item)
            is_ours = isinstance(item.content, Message) and item.content.role == "assistant"
            if length is None or not is_ours:
                raise WireError("Only model output audio messages can be truncated", None) from error
            if length > end or (reply is None and (cut is None or cut[0] != id)):
                raise WireError(f"Audio content of {length}ms is already shorter than {end}ms") from error
            return length  # it was interrupted meanwhile, and truncated to what was played
        return end

    def item_delete(self, event: client.ConversationItemDelete) -> None:
        self._require_item(event.item_id, "deleting", "item_delete_invalid_item_id")
        self.conversation.delete(event.item_id)
        self.encoder.send(events.ConversationItemDeleted(event.item_id))

    def response_create(self, event: client.ResponseCreate) -> None:
        if self.configuration.is_transcription:
            raise WireError("a transcription session has no responses", "transcription_session")
        params = value_or(event.response, None)
        if params in (None, ResponseParams()) and self.hosted.answers_already():
            return
        requested, request = self._request(params)
        active = self.encoder.open_reply
        if active is not None and not requested.is_out_of_band:
            raise _already_active(active)
        try:
            reply = self.conversation.reply(request)
        except InputError as error:
            if requested.is_out_of_band:
                raise WireError(str(error), "rate_limit_exceeded") from error
            raise _already_active(active or self.encoder.last_reply) from error
        self.clock.note_reply_request()
        self.encoder.requested[reply] = requested

    def _request(self, params: ResponseParams | None) -> tuple[ResponseRequest, ReplyRequest | None]:
        if params is None:
            return ResponseRequest(self.configuration.session), None
        session = self.configuration.changed(params, "response")
        content = None
        if (items := value_or(params.input, None)) is not None:
            self.configuration.check_images(items, [f"response.input[{index}]" for index in range(len(items))])
            rate, format = self.conversation.input_rate, self.configuration.input_format
            content = contents_of(items, format, rate, self.conversation.item)
        settings = replace(self.configuration.settings(session), turn=self.conversation.settings.turn)
        settings = replace(settings, output_schema=self.configuration.output_schema(params, settings))
        is_out_of_band = params.conversation == "none"
        requested = ResponseRequest(session, value_or(params.metadata, None), is_out_of_band)
        return requested, ReplyRequest(settings, is_out_of_band, content)

    def response_cancel(self, event: client.ResponseCancel) -> None:
        reply = event.response_id
        try:
            self.conversation.cancel(reply)
        except VivaError as error:
            if not self.encoder.cut(reply):  # generated, but still being sent
                raise WireError(CANCEL_NOT_ACTIVE, "response_cancel_not_active") from error
        else:
            self.encoder.cut(reply, truncates=self.encoder.plays_audio)  # other clients send a truncate event

    def played(self, event: client.VivaPlayed) -> None:
        self.encoder.client_played(event.response_id, event.audio_ms)


def _image_bytes(content: Content) -> int:
    parts = content.parts if isinstance(content, Message) else ()
    return sum(len(part.url) for part in parts if isinstance(part, ImagePart))


def _already_active(reply: str) -> WireError:
    message = f"Conversation already has an active response in progress: {reply}."
    return WireError(
        f"{message} Wait until the response is finished before creating a new one.",
        "conversation_already_has_active_response",
    )


_HANDLERS: dict[type, Callable[[ClientEventHandlers, Any], Awaitable[None] | None]] = {
    client.SessionUpdate: ClientEventHandlers.session_update,
    client.TranscriptionSessionUpdate: ClientEventHandlers.session_update,
    client.InputAudioBufferAppend: ClientEventHandlers.append,
    client.InputAudioBufferCommit: ClientEventHandlers.commit,
    client.InputAudioBufferClear: ClientEventHandlers.clear_input,
    client.OutputAudioBufferClear: ClientEventHandlers.clear_output,
    client.ConversationItemCreate: ClientEventHandlers.item_create,
    client.ConversationItemRetrieve: ClientEventHandlers.item_retrieve,
    client.ConversationItemTruncate: ClientEventHandlers.item_truncate,
    client.ConversationItemDelete: ClientEventHandlers.item_delete,
    client.ResponseCreate: ClientEventHandlers.response_create,
    client.ResponseCancel: ClientEventHandlers.response_cancel,
    client.VivaPlayed: ClientEventHandlers.played,
}
