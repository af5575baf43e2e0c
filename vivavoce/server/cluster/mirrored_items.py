"""The items of a mirrored session: its history, and those of replies in progress."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import UNSET
from msgspec.structs import replace

from vivavoce.server.cluster.replica_events import decode_audio_delta
from vivavoce.server.realtime.audio_formats import WireFormat
from vivavoce.server.realtime.items import (
    ClientItem,
    ContentPart,
    ConversationItem,
    InputAudio,
    InputImage,
    InputText,
    MessageItem,
    OutputAudio,
    OutputText,
    Response,
)


@dataclass
class MirroredReply:
    """A reply in progress."""

    response: Response
    items: dict[str, ConversationItem] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    audio: dict[str, list[str]] = field(default_factory=dict)
    """The audio events of each item, as they were sent."""


@dataclass
class MirroredHistory:
    """The history of a session, with as much of its audio as is kept."""

    kept_sound_seconds: float
    _items: dict[str, ConversationItem] = field(default_factory=dict)
    _order: list[str] = field(default_factory=list)

    def __contains__(self, id: str) -> bool:
        return id in self._items

    def __iter__(self) -> Iterator[ConversationItem]:
        for id in self._order:
            yield self._items[id]

    def add(self, item: ConversationItem, previous: str | None) -> None:
        """Add an item after another, or replace it where it is known."""
        id = id_of(item)
        if id not in self._items:
            index = 0 if previous is None else len(self._order)
            if previous in self._items:
                index = self._order.index(previous) + 1
            self._order.insert(index, id)
        self._items[id] = item

    def replace(self, item: ConversationItem) -> None:
        """Replace an item that is known."""
        self._items[id_of(item)] = item

    def delete(self, id: str) -> None:
        """Remove an item, where it is known."""
        if self._items.pop(id, None) is not None:
            self._order.remove(id)

    def set_transcript(self, id: str, transcript: str) -> None:
        """Store what was transcribed of the user's audio in an item, where it is known."""
        item = self._items.get(id)
        for part in [] if item is None else audio_parts(item):
            if isinstance(part, InputAudio):
                part.transcript = transcript

    def drop_audio(self) -> list[str]:
        """Drop stored audio, which is in a format no longer configured; the ids of its items."""
        dropped = []
        for id, item in self._items.items():
            stored = [part for part in audio_parts(item) if part.audio]
            for part in stored:
                part.audio = UNSET
            if stored:
                dropped.append(id)
        return dropped

    def limit_audio(self, input_format: WireFormat, output_format: WireFormat) -> None:
        """Drop audio beyond `kept_sound_seconds`, the oldest first; its text stays."""
        left_ms = self.kept_sound_seconds * 1000
        for id in reversed(self._order):
            for part in audio_parts(self._items[id]):
                format = output_format if isinstance(part, OutputAudio) else input_format
                left_ms -= len(part.audio or b"") / bytes_per_ms(format)
                if left_ms < 0:
                    part.audio = UNSET


def creatable(item: ConversationItem, input_format: WireFormat, output_format: WireFormat) -> ClientItem | None:
    """An item as a client would create it; None where neither its audio nor its text is known, and for MCP."""
    if not isinstance(item, ClientItem):
        return None
    if not isinstance(item, MessageItem):
        return replace(item, object=UNSET, status=UNSET)
    is_one_format = input_format == output_format
    parts = [part for each in item.content if (part := _creatable_part(each, is_one_format)) is not None]
    return MessageItem(id=item.id, role=item.role, content=parts) if parts else None


def _creatable_part(part: ContentPart, is_one_format: bool) -> ContentPart | None:
    """`is_one_format`: audio of replies can be sent as a client's."""
    if isinstance(part, InputText | OutputText):
        return part if part.text else None
    if isinstance(part, InputImage):
        return part if part.image_url else None
    is_output = isinstance(part, OutputAudio)
    if part.audio and (not is_output or is_one_format):
        return part
    if not part.transcript:
        return None
    return OutputText(part.transcript) if is_output else InputText(part.transcript)


def as_sent(reply: MirroredReply, id: str, item: ConversationItem) -> ConversationItem:
    """An item of a reply in progress, with the text and audio that were sent."""
    text, deltas = reply.text.get(id, ""), reply.audio.get(id)
    if not isinstance(item, MessageItem):
        return replace(item, status="incomplete")
    if deltas is None:
        return replace(item, status="incomplete", content=[OutputText(text)])
    audio = b"".join(decode_audio_delta(delta).delta for delta in deltas)
    return replace(item, status="incomplete", content=[OutputAudio(text or None, audio)])


def without_audio(item: ConversationItem) -> ConversationItem:
    if not isinstance(item, MessageItem):
        return item
    parts = [replace(part, audio=UNSET) if isinstance(part, OutputAudio) else part for part in item.content]
    return replace(item, content=parts)


def audio_parts(item: ConversationItem) -> list[InputAudio | OutputAudio]:
    parts = item.content if isinstance(item, MessageItem) else []
    return [part for part in parts if isinstance(part, InputAudio | OutputAudio)]


def id_of(item: ConversationItem) -> str:
    """The id, which every item of a server has."""
    return item.id or ""


def bytes_per_ms(format: WireFormat) -> float:
    return format.rate * format.bytes_per_sample / 1000
