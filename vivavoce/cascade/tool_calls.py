"""Tool calls in the text of local chat models, as Qwen writes them.

`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once or several times.
"""

import json
import logging

from vivavoce.cascade.backend import ChatCall, ChatPiece, ChatText
from vivavoce.cascade.sentences import first_tag, held_length
from vivavoce.dialogue.history import new_id

logger = logging.getLogger(__name__)

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
ANY_CHOICE = ("auto", "none", "required")


def forced_start(choice: str) -> str:
    """How a reply has to begin for a choice of tools: a name, or `required`; empty if the model is free."""
    if choice in ("auto", "none"):
        return ""
    start = f'{OPEN_CALL}\n{{"name": "'
    return start if choice == "required" else f'{start}{choice}", "arguments": '


class ToolCallReader:
    """Separates calls from streamed text; the result does not depend on how the text is chunked."""

    def __init__(self) -> None:
        self._held = ""  # the open call, or a possible start of a tag
        self._is_inside = False
        self._calls = 0

    def push(self, text: str) -> list[ChatPiece]:
        """The pieces that this text completes."""
        rest, pieces = self._held + text, list[ChatPiece]()
        while True:
            tag = CLOSE_CALL if self._is_inside else OPEN_CALL
            at, found = first_tag(rest, (tag,))
            if not found:
                break
            pieces += self._call(rest[:at]) if self._is_inside else _words(rest[:at].rstrip("\n"))
            rest, self._is_inside = rest[at + len(tag) :], not self._is_inside
        length = len(rest) if self._is_inside else held_length(rest, (OPEN_CALL,))
        if self._calls and not rest.strip():  # line breaks between calls
            length = len(rest)
        pieces += _words(rest[: len(rest) - length])
        self._held = rest[len(rest) - length :]
        return pieces

    def flush(self) -> list[ChatPiece]:
        """The rest, after the last text. A call that was not closed counts if its JSON is complete."""
        held, self._held = self._held, ""
        if self._is_inside:
            return self._call(held)
        return _words(held) if held.strip() else []

    def _call(self, content: str) -> list[ChatPiece]:
        try:
            call = json.loads(content)
            name, arguments = str(call["name"]), call.get("arguments") or {}
        except (ValueError, KeyError, TypeError, AttributeError):  # what was said is not logged
            logger.warning("a chat model wrote a tool call that is not JSON with a name; it is left out")
            return []
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self._calls += 1
        return [ChatCall(self._calls - 1, new_id("call"), name, written)]


def _words(text: str) -> list[ChatPiece]:
    return [ChatText(text)] if text else []
