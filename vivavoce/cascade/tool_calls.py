"""Tool calls in the text of local chat models, as Qwen writes them.

`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once or several times. Small models often leave the tags out: a
reply that begins with such an object, of a tool that was offered, is a call too.
"""

import json
import logging
from collections.abc import Collection

from vivavoce.cascade.interfaces import ChatCall, ChatPiece, ChatText
from vivavoce.cascade.sentences import first_tag, held_length
from vivavoce.dialogue.history import new_id

logger = logging.getLogger(__name__)

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"


def forced_start(choice: str) -> str:
    """How a reply has to begin for a choice of tools: a name, or `required`; empty if the model is free."""
    if choice in ("auto", "none"):
        return ""
    start = f'{OPEN_CALL}\n{{"name": "'
    return start if choice == "required" else f'{start}{choice}", "arguments": '


class ToolCallReader:
    """Separates calls from streamed text; the result does not depend on how the text is chunked."""

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = frozenset(tools)
        self._held = ""  # the open call, or a possible start of a tag
        self._is_inside = self._has_words = False
        self._made: list[tuple[str, str]] = []

    def push(self, text: str) -> list[ChatPiece]:
        """The pieces that this text completes."""
        rest, pieces = self._held + text, list[ChatPiece]()
        while True:
            if not self._is_inside and not self._has_words and rest.lstrip().startswith("{"):
                content, rest = _split_object(rest.lstrip())
                if not content:  # incomplete
                    self._held = rest
                    return pieces
                pieces += self._call(content) if self._is_call(content) else self._words(content)
                continue
            tag = CLOSE_CALL if self._is_inside else OPEN_CALL
            at, found = first_tag(rest, (tag,))
            if not found:
                break
            pieces += self._call(rest[:at]) if self._is_inside else self._words(rest[:at].rstrip("\n"))
            rest, self._is_inside = rest[at + len(tag) :], not self._is_inside
        is_blank = not rest.strip() and not self._has_words  # before or between calls
        length = len(rest) if self._is_inside or is_blank else held_length(rest, (OPEN_CALL,))
        pieces += self._words(rest[: len(rest) - length])
        self._held = rest[len(rest) - length :]
        return pieces

    def flush(self) -> list[ChatPiece]:
        """The rest, after the last text. A call that was not closed counts if its JSON is complete."""
        held, self._held = self._held, ""
        if self._is_inside:
            return self._call(held)
        return self._words(held) if held.strip() and not self._made else []

    def _is_call(self, content: str) -> bool:
        call = json.loads(content)
        return call.get("name") in self._tools and "arguments" in call

    def _call(self, content: str) -> list[ChatPiece]:
        try:
            call = json.loads(content)
            name, arguments = str(call["name"]), call.get("arguments") or {}
        except (ValueError, KeyError, TypeError, AttributeError):  # what was said is not logged
            logger.warning("a chat model wrote a tool call that is not JSON with a name; it is left out")
            return []
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if (name, written) in self._made:  # small models repeat themselves
            return []
        self._made.append((name, written))
        return [ChatCall(len(self._made) - 1, new_id("call"), name, written)]

    def _words(self, text: str) -> list[ChatPiece]:
        self._has_words = self._has_words or bool(text.strip())
        return [ChatText(text)] if text else []


def _split_object(text: str) -> tuple[str, str]:
    """The JSON object that a text begins with, and the rest; an empty one if it is incomplete."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return "", text
    return text[:end], text[end:]
