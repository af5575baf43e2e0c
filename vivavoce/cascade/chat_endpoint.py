"""Any chat endpoint that speaks OpenAI's `/chat/completions`, streamed: words and tool calls as they come."""

import asyncio
import http.client
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from vivavoce.cascade.sentences import ReasoningFilter
from vivavoce.dialogue.events import ConversationSettings, Item, Message, Tool, ToolCall
from vivavoce.dialogue.history import written
from vivavoce.errors import InputError, VivaError, shown


@dataclass(frozen=True)
class ChatText:
    """The next words."""

    text: str


@dataclass(frozen=True)
class ChatCall:
    """The next part of a tool call; the first part of each has an id and a name."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class ChatEnd:
    """The reply is over: why, and what it cost where the endpoint says so."""

    reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


ChatPiece = ChatText | ChatCall | ChatEnd


class ChatModel(Protocol):
    """Replies in writing."""

    def reply(self, messages: Sequence[dict[str, Any]], settings: ConversationSettings) -> AsyncIterator[ChatPiece]:
        """The reply as it comes; leaving it stops it."""
        ...


class ChatEndpoint:
    """An address such as `http://localhost:8000/v1` and a model's name there."""

    def __init__(self, base_url: str, model: str, key: str | None = None, timeout: float = 30.0) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"a chat endpoint's address begins with http:// or https://, not {base_url!r}")
        self.base_url, self.model, self.timeout = base_url.rstrip("/"), model, timeout
        self._parts = parts
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    async def reply(
        self, messages: Sequence[dict[str, Any]], settings: ConversationSettings
    ) -> AsyncIterator[ChatPiece]:
        """The reply as it comes; leaving it stops it."""
        loop = asyncio.get_running_loop()
        lines: asyncio.Queue[str | Exception | None] = asyncio.Queue()

        def push_line(line: str | Exception | None) -> None:
            with suppress(RuntimeError):  # the event loop has gone
                loop.call_soon_threadsafe(lines.put_nowait, line)

        request = _Request(self._connect(), self._path(), self._body(messages, settings), self._headers, push_line)
        request.start()
        try:
            reader = _AnswerReader()
            while (line := await lines.get()) is not None:
                if isinstance(line, Exception):
                    raise line
                for piece in reader.pieces(line):
                    yield piece
            for piece in reader.end():
                yield piece
        finally:
            request.stop()

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname or "", self._parts.port, timeout=self.timeout)

    def _path(self) -> str:
        return f"{self._parts.path.rstrip('/')}/chat/completions"

    def _body(self, messages: Sequence[dict[str, Any]], settings: ConversationSettings) -> bytes:
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "stream": True}
        body["stream_options"] = {"include_usage": True}
        if settings.tools:
            body["tools"] = [_tool(tool) for tool in settings.tools]
            named = settings.tool_choice not in ("auto", "none", "required")
            function = {"type": "function", "function": {"name": settings.tool_choice}}
            body["tool_choice"] = function if named else settings.tool_choice
        if settings.max_output_tokens:
            body["max_tokens"] = settings.max_output_tokens
        if settings.sampling is not None:
            body |= {"temperature": settings.sampling.temperature, "top_p": settings.sampling.top_p}
        return json.dumps(body).encode()


class _Request(threading.Thread):
    """One request, read on a thread of its own, because it may wait long for the next line."""

    def __init__(self, connection: Any, path: str, body: bytes, headers: dict[str, str], push_line: Any) -> None:
        super().__init__(name="viva-chat", daemon=True)
        self._connection, self._path, self._body, self._headers = connection, path, body, headers
        self._push_line = push_line
        self._is_stopped = False

    def run(self) -> None:
        try:
            self._connection.request("POST", self._path, self._body, self._headers)
            with self._connection.getresponse() as response:  # which may hold the socket on its own
                self._read(response)
        except VivaError as error:
            self._push_line(error)
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            where = f"{self._connection.host}:{self._connection.port}"
            failure = VivaError(f"the chat endpoint at {where} cannot be reached ({error})")
            failure.__cause__ = error
            self._push_line(failure)
        finally:
            self._connection.close()

    def _read(self, response: http.client.HTTPResponse) -> None:
        if response.status != 200:
            detail = response.read(500).decode("utf8", "replace").strip()
            raise VivaError(f"the chat endpoint answered {response.status}: {detail or response.reason}")
        for line in response:
            if self._is_stopped:
                return
            self._push_line(line.decode("utf8", "replace").strip())
        self._push_line(None)

    def stop(self) -> None:
        """Close the connection, so that the endpoint stops generating."""
        self._is_stopped = True
        socket = getattr(self._connection, "sock", None)
        if socket is not None:
            with suppress(OSError):
                socket.shutdown(2)


def chat_messages(past: Sequence[Item], instructions: str, spoken: dict[str, str]) -> list[dict[str, Any]]:
    """A history as chat messages; `spoken` has the words of spoken items."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    for item in past:
        content = item.content
        if isinstance(content, Message):
            text = spoken.get(item.id) or written(item)
            if text:
                messages.append({"role": content.role, "content": text})
        elif isinstance(content, ToolCall):
            function = {"name": content.name, "arguments": content.arguments}
            call = {"id": content.call_id, "type": "function", "function": function}
            if messages and "tool_calls" in messages[-1]:  # calls made together are one message, or they are refused
                messages[-1]["tool_calls"].append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            messages.append({"role": "tool", "tool_call_id": content.call_id, "content": content.output})
    return messages


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


class _AnswerReader:
    """Parses the server-sent events of an answer."""

    def __init__(self) -> None:
        self._begins = ""
        self._has_events = self._is_whole = False
        self._reason, self._usage = "stop", dict[str, int]()
        self._reasoning = ReasoningFilter()

    def pieces(self, line: str) -> list[ChatPiece]:
        """What is in the JSON of a `data:` line; nothing in any other line."""
        self._begins = self._begins or line
        if not line.startswith("data:"):
            return []
        data, self._has_events = line.removeprefix("data:").strip(), True
        if data == "[DONE]":
            self._is_whole = True
            return []
        try:
            return self._pieces(json.loads(data))
        except json.JSONDecodeError as error:
            raise VivaError(f"the chat endpoint sent what is no JSON: {shown(data)}") from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise VivaError(f"the chat endpoint sent an event of another form: {shown(data)}") from error

    def end(self) -> list[ChatPiece]:
        """The last pieces; an error where the answer is not whole."""
        if not self._has_events:
            raise VivaError(
                f"the chat endpoint streamed no answer but {shown(self._begins)}; "
                "its address is what comes before /chat/completions, and it must be able to stream"
            )
        if not self._is_whole:
            raise VivaError("the chat endpoint broke off in the middle of its answer")
        usage = self._usage
        end = ChatEnd(self._reason, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))
        return [*_text_pieces(self._reasoning.flush()), end]

    def _pieces(self, event: dict[str, Any]) -> list[ChatPiece]:
        if "error" in event:
            error = event["error"]
            raise VivaError(
                f"the chat endpoint failed: {error.get('message', error) if isinstance(error, dict) else error}"
            )
        self._usage = event.get("usage") or self._usage
        pieces: list[ChatPiece] = []
        for choice in event.get("choices") or []:
            self._reason = choice.get("finish_reason") or self._reason
            self._is_whole |= choice.get("finish_reason") is not None
            pieces += self._of_delta(choice.get("delta") or {})
        return pieces

    def _of_delta(self, delta: dict[str, Any]) -> list[ChatPiece]:
        """Text and calls; reasoning is left out, whether it has a field of its own or stands within the text."""
        text = self._reasoning.push(_text(delta["content"])) if delta.get("content") else ""
        calls = _calls(delta)
        return [*_text_pieces(text), *_text_pieces(self._reasoning.flush() if calls else ""), *calls]


def _text_pieces(text: str) -> list[ChatPiece]:
    return [ChatText(text)] if text else []


def _calls(delta: dict[str, Any]) -> list[ChatPiece]:
    pieces: list[ChatPiece] = []
    for call in delta.get("tool_calls") or []:
        function = call.get("function") or {}
        arguments = _text(function.get("arguments") or "")
        pieces.append(ChatCall(int(call.get("index", 0)), call.get("id"), function.get("name"), arguments))
    return pieces


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of text")
    return value
