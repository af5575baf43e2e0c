"""One reply as the protocol tells it: every event from `response.created` to the one `response.done`."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vivavoce.dialogue.events import AudioPart, EndReason, Item, Message, ReplyItemStarted, TextPart, ToolCall, Usage
from vivavoce.server.wire_items import wire_item

Wire = dict[str, Any]
STATUS: dict[EndReason, str] = {
    "completed": "completed",
    "turn_detected": "cancelled",
    "client_cancelled": "cancelled",
    "max_output_tokens": "incomplete",
    "content_filter": "incomplete",
    "failed": "failed",
}


@dataclass
class OpenItem:
    """An item that is being told."""

    started: ReplyItemStarted
    output_index: int
    text: str = ""


@dataclass
class WireReply:
    """What was told of a reply so far. Methods give the next events, without their ids."""

    id: str
    session: Wire
    """The session as it stood when the reply began, with what the client overrode."""
    conversation_id: str | None
    metadata: Wire | None = None
    is_out_of_band: bool = False
    output: list[Wire] = field(default_factory=list)
    open: dict[str, OpenItem] = field(default_factory=dict)
    items: list[str] = field(default_factory=list)
    """Ids of its items, also of those that were not told yet."""
    spoken: str | None = None
    """The item whose sound is on the way."""
    cut: EndReason | None = None
    """Why it ended early although the conversation had made it whole: its sound was still waiting to be sent."""
    is_done: bool = False

    @property
    def part_type(self) -> str:
        return str(self.session["output_modalities"][0])

    def created(self) -> list[Wire]:
        """The reply begins."""
        return [{"type": "response.created", "response": self._response("in_progress", None, None)}]

    def item_started(self, started: ReplyItemStarted) -> list[Wire]:
        """Its next item begins; the one part of a message too."""
        opened = OpenItem(started, len(self.output) + len(self.open))
        self.open[started.item] = opened
        item = wire_item(self._empty(started), "in_progress")
        events: list[Wire] = [
            {"type": "response.output_item.added", "response_id": self.id, "output_index": opened.output_index}
            | {"item": item}
        ]
        if not self.is_out_of_band:
            events.append({"type": "conversation.item.added", "previous_item_id": started.previous, "item": item})
        if started.kind == "message":
            part = {"type": "audio", "transcript": ""} if self.part_type == "audio" else {"type": "text", "text": ""}
            events.append({"type": "response.content_part.added", **self._place(started.item), "part": part})
        return events

    def text(self, item: str, delta: str) -> list[Wire]:
        """Words: the text itself, or what the sound says."""
        self.open[item].text += delta
        kind = "output_audio_transcript" if self.part_type == "audio" else "output_text"
        return [{"type": f"response.{kind}.delta", **self._place(item), "delta": delta}]

    def sound(self, item: str, base64_sound: str) -> Wire:
        """Sound as base64 text."""
        return {"type": "response.output_audio.delta", **self._place(item), "delta": base64_sound}

    def arguments(self, item: str, delta: str) -> list[Wire]:
        """A part of a tool call's arguments."""
        self.open[item].text += delta
        return [{"type": "response.function_call_arguments.delta", **self._call_place(item), "delta": delta}]

    def item_done(self, item: Item) -> list[Wire]:
        """The item is whole, or ends here."""
        opened = self.open[item.id]
        content = item.content
        events = self._call_done(item.id, content) if isinstance(content, ToolCall) else self._part_done(item)
        wire = wire_item(item)
        events.append(
            {"type": "response.output_item.done", "response_id": self.id, "output_index": opened.output_index}
            | {"item": wire}
        )
        if not self.is_out_of_band:
            previous = {"previous_item_id": opened.started.previous}
            events.append({"type": "conversation.item.done", **previous, "item": wire})
        del self.open[item.id]
        self.output.append(wire)
        return events

    def done(self, reason: EndReason, usage: Usage, error: str | None) -> list[Wire]:
        """The one end of the reply; items that are open still end with it."""
        self.is_done = True
        events: list[Wire] = []
        for opened in list(self.open.values()):
            events += self.item_done(self._as_far_as_told(opened))
        reason = self.cut if self.cut and reason == "completed" else reason
        response = self._response(STATUS[reason], _details(reason, error), usage)
        return [*events, {"type": "response.done", "response": response}]

    def _part_done(self, item: Item) -> list[Wire]:
        place, said = self._place(item.id), _words(item)
        if self.part_type == "text":
            part = {"type": "text", "text": said}
            events = [{"type": "response.output_text.done", **place, "text": said}]
        else:
            part = {"type": "audio", "transcript": said}
            events = [
                {"type": "response.output_audio.done", **place},
                {"type": "response.output_audio_transcript.done", **place, "transcript": said},
            ]
        return [*events, {"type": "response.content_part.done", **place, "part": part}]

    def _call_done(self, item: str, call: ToolCall) -> list[Wire]:
        place = self._call_place(item)
        return [
            {"type": "response.function_call_arguments.done", **place, "name": call.name, "arguments": call.arguments}
        ]

    def _place(self, item: str) -> Wire:
        index = self.open[item].output_index
        return {"response_id": self.id, "item_id": item, "output_index": index, "content_index": 0}

    def _call_place(self, item: str) -> Wire:
        opened = self.open[item]
        place = {"response_id": self.id, "item_id": item, "output_index": opened.output_index}
        return place | {"call_id": opened.started.call_id or item}

    def _empty(self, started: ReplyItemStarted) -> Item:
        if started.kind == "tool_call":
            return Item(started.item, ToolCall(started.call_id or started.item, started.tool_name or "", ""))
        return Item(started.item, Message("assistant", ()))

    def _as_far_as_told(self, opened: OpenItem) -> Item:
        started = opened.started
        if started.kind == "tool_call":
            call = ToolCall(started.call_id or started.item, started.tool_name or "", opened.text)
            return Item(started.item, call, is_complete=False)
        is_spoken = self.part_type == "audio"
        part = AudioPart(np.zeros(0, np.float32), 24_000, opened.text) if is_spoken else TextPart(opened.text)
        return Item(started.item, Message("assistant", (part,)), is_complete=False)

    def _response(self, status: str, details: Wire | None, usage: Usage | None) -> Wire:
        response: Wire = {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": details,
            "output": list(self.output),
            "conversation_id": None if self.is_out_of_band else self.conversation_id,
            "output_modalities": self.session["output_modalities"],
            "max_output_tokens": self.session["max_output_tokens"],
            "metadata": self.metadata,
            "usage": None if usage is None else wire_usage(usage),
        }
        spoken = self.session["audio"]["output"]
        if self.part_type == "audio":
            response["audio"] = {"output": {"format": spoken["format"], "voice": spoken["voice"]}}
        return response


def wire_usage(usage: Usage) -> Wire:
    """What a reply cost, in the protocol's words."""
    given, made = usage.input_text + usage.input_audio, usage.output_text + usage.output_audio
    return {
        "total_tokens": given + made,
        "input_tokens": given,
        "output_tokens": made,
        "input_token_details": {
            "text_tokens": usage.input_text,
            "audio_tokens": usage.input_audio,
            "image_tokens": 0,
            "cached_tokens": 0,
            "cached_tokens_details": {"text_tokens": 0, "audio_tokens": 0, "image_tokens": 0},
        },
        "output_token_details": {"text_tokens": usage.output_text, "audio_tokens": usage.output_audio},
    }


def _details(reason: EndReason, error: str | None) -> Wire | None:
    if reason == "completed":
        return {"type": "completed"}
    if reason == "failed":
        message = error or "the reply could not be made"
        return {"type": "failed", "error": {"type": "server_error", "code": "reply_failed", "message": message}}
    return {"type": STATUS[reason], "reason": reason}


def _words(item: Item) -> str:
    if not isinstance(item.content, Message):
        return ""
    parts = item.content.parts
    return "".join((part.transcript or "") if isinstance(part, AudioPart) else part.text for part in parts)
