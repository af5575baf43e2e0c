"""Remote parts of a cascade: clients of OpenAI's `/audio/transcriptions`, `/audio/speech` and `/chat/completions`.

Requests use the blocking `http.client` of the standard library on threads, so that no HTTP package is required.
"""

import asyncio
import http.client
import io
import json
import re
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Any, Self
from urllib.parse import urlsplit

from vivavoce.audio.io import Sound, pcm16_to_float, write
from vivavoce.cascade.chat_messages import tool_schema
from vivavoce.cascade.http_pool import ConnectionPool
from vivavoce.cascade.interfaces import ChatCall, ChatEnd, ChatPiece, ChatText
from vivavoce.cascade.sentences import ReasoningFilter
from vivavoce.dialogue.backend import EndpointRef, RecognitionAbilities, Resolver, TurnTranscript
from vivavoce.dialogue.events import TokenLogprob
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.settings import ConversationSettings, RecognitionSettings
from vivavoce.errors import EndpointError, InputError, UnreachableEndpointError, shown
from vivavoce.runtime.event_loop import iterate_on_thread

PCM_RATE = 24_000  # of `response_format` pcm
ASR_RATE = 16_000
PIECE_BYTES = 1 << 15
TIMEOUT_SECONDS = 30.0
ANY_MODEL = "default"
MAX_ERROR_BYTES = 4096
ERROR_CODE = re.compile(r"[a-z][a-z0-9_.-]{1,63}")  # an identifier, which quotes nothing


class RemoteRecogniser:
    """A `ReplyTranscriber` at an address. Use as `async with`, like `LocalRecogniser`."""

    def __init__(self, resolve: Resolver) -> None:
        self._resolve = resolve
        self.waiting = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass

    async def warm_up(self) -> None:
        """Check that there is an endpoint."""
        await self._resolve()

    @property
    def abilities(self) -> RecognitionAbilities:
        """All settings are passed on; what the endpoint refuses, it refuses turn by turn."""
        return RecognitionAbilities()

    async def transcribe(self, samples: Samples, rate: int, language: str | None = None) -> str:
        """The text of a turn."""
        settings = RecognitionSettings(() if language is None else (language,))
        return (await self.transcribe_turn(samples, rate, settings)).text

    async def transcribe_turn(self, samples: Samples, rate: int, settings: RecognitionSettings) -> TurnTranscript:
        """The transcript of a turn."""
        if not len(samples):
            return TurnTranscript("")
        self.waiting += 1
        try:
            kind, form = await asyncio.to_thread(_form, samples, rate, settings)
            return await self._request(kind, form)
        finally:
            self.waiting -= 1

    async def _request(self, kind: str, form: bytes) -> TurnTranscript:
        endpoint = await self._resolve()
        try:
            return await asyncio.to_thread(_transcript, endpoint, kind, form)
        except ConnectionError:  # another endpoint may have replaced it
            return await asyncio.to_thread(_transcript, await self._resolve(endpoint), kind, form)


class RemoteSynthesiser:
    """A `Synthesiser` at an address."""

    rate = PCM_RATE

    def __init__(self, resolve: Resolver) -> None:
        self._resolve = resolve
        self.voices: list[str] = []

    async def warm_up(self) -> None:
        """Check that there is an endpoint, and read its voices."""
        endpoint = await self._resolve()
        try:
            answer = await asyncio.to_thread(get_json, endpoint, "/audio/voices")
        except UnreachableEndpointError:
            raise
        except EndpointError:  # OpenAI's service has no such list
            return
        self.voices = [str(voice["id"]) for voice in answer.get("data", ())]

    async def speak(self, text: str, voice: str | None, speed: float) -> AsyncIterator[Samples]:
        """Stream the sound at `rate`; closing the iterator stops it."""
        endpoint = await self._resolve()
        known = voice if voice in self.voices else None
        body: dict[str, Any] = {"model": ANY_MODEL, "input": text, "voice": known or "default"}
        body |= {"speed": speed, "response_format": "pcm"}
        async for piece in iterate_on_thread(lambda: _speech(endpoint, body)):
            yield piece


def _form(samples: Samples, rate: int, settings: RecognitionSettings) -> tuple[str, bytes]:
    """A recording as a form, and the form's content type."""
    sound = Sound(samples, rate).mono().resampled(ASR_RATE)
    file = io.BytesIO()
    write(file, sound, "wav")
    edge = secrets.token_hex(16)
    fields = [("model", ANY_MODEL), ("response_format", "json"), *_recognition_fields(settings)]
    parts = [f'--{edge}\r\nContent-Disposition: form-data; name="{n}"\r\n\r\n{v}\r\n' for n, v in fields]
    head = f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="turn.wav"\r\n'
    begin = "".join(parts) + head + "Content-Type: audio/wav\r\n\r\n"
    return f"multipart/form-data; boundary={edge}", begin.encode() + file.getvalue() + f"\r\n--{edge}--\r\n".encode()


def _recognition_fields(settings: RecognitionSettings) -> list[tuple[str, str]]:
    """The settings as fields of a form; those that are not set are left out, as not every endpoint knows them."""
    languages = settings.languages
    fields = [("language", languages[0])] if len(languages) == 1 else [("languages[]", each) for each in languages]
    fields += [("prompt", settings.prompt)] if settings.prompt else []
    fields += [("keywords[]", each) for each in settings.keywords]
    return fields + ([("include[]", "logprobs")] if settings.with_logprobs else [])


def _connect(endpoint: EndpointRef) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
    parts = urlsplit(endpoint.url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    return kind(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS), parts.path.rstrip("/"), headers


def _answer(endpoint: EndpointRef, method: str, path: str, kind: str, body: bytes | None) -> Iterator[bytes]:
    """Stream the bytes of a response; UnreachableEndpointError without a connection, EndpointError for an error."""
    connection, prefix, headers = _connect(endpoint)
    try:
        connection.request(method, prefix + path, body, headers | {"Content-Type": kind})
        with connection.getresponse() as response:  # it may hold the socket
            if response.status != 200:
                raise _refused(response, f"the endpoint of {path}", endpoint.url)
            while piece := response.read1(PIECE_BYTES):
                yield piece
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableEndpointError(
            f"the endpoint of {path} cannot be reached", f"{endpoint.url}, {error}"
        ) from error
    finally:
        connection.close()


def _refused(response: http.client.HTTPResponse, what: str, where: str) -> EndpointError:
    """The error of an answer that is not 200; clients learn its status and its code, and not its text."""
    body = response.read(MAX_ERROR_BYTES).decode("utf8", "replace").strip()
    try:
        code = str(json.loads(body)["error"]["code"])
    except (ValueError, LookupError, TypeError):  # not in OpenAI's format
        code = ""
    reason = f" ({code})" if ERROR_CODE.fullmatch(code) else ""
    return EndpointError(f"{what} answered {response.status}{reason}", f"{where}: {body or response.reason}")


def _transcript(endpoint: EndpointRef, kind: str, form: bytes) -> TurnTranscript:
    answer = json.loads(b"".join(_answer(endpoint, "POST", "/audio/transcriptions", kind, form)))
    logprobs = tuple(
        TokenLogprob(str(each["token"]), bytes(each["bytes"] or ()), float(each["logprob"]))
        for each in answer.get("logprobs") or ()
    )
    languages = tuple(str(each["code"]) for each in answer.get("languages") or ())
    return TurnTranscript(str(answer.get("text", "")).strip(), logprobs, languages)


def get_json(endpoint: EndpointRef, path: str) -> dict[str, Any]:
    """JSON from an address; ConnectionError where it cannot be reached."""
    return dict(json.loads(b"".join(_answer(endpoint, "GET", path, "application/json", None))))


def _speech(endpoint: EndpointRef, body: dict[str, Any]) -> Iterator[Samples]:
    rest = b""
    for piece in _answer(endpoint, "POST", "/audio/speech", "application/json", json.dumps(body).encode()):
        data = rest + piece
        whole = len(data) - len(data) % 2
        rest = data[whole:]
        yield pcm16_to_float(data[:whole])


class ChatEndpoint:
    """An address such as `http://localhost:8000/v1` and a model's name there."""

    def __init__(self, base_url: str, model: str, key: str | None = None, timeout: float = 30.0) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"a chat endpoint's address begins with http:// or https://, not {base_url!r}")
        self.base_url, self.model, self.timeout = base_url.rstrip("/"), model, timeout
        self._parts, self._pool = parts, ConnectionPool(parts, timeout)
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    async def reply(
        self, messages: Sequence[dict[str, Any]], settings: ConversationSettings
    ) -> AsyncIterator[ChatPiece]:
        """Stream the reply; closing the iterator stops it."""
        request = _ChatRequest(self._pool, self._path(), self._body(messages, settings), self._headers)
        try:
            reader = _AnswerReader()
            async with aclosing(iterate_on_thread(request.lines)) as lines:
                async for line in lines:
                    for piece in reader.pieces(line):
                        yield piece
            for piece in reader.end():
                yield piece
        finally:
            request.stop()

    def close(self) -> None:
        """Close the connections that are kept for the next requests."""
        self._pool.close()

    def _path(self) -> str:
        return f"{self._parts.path.rstrip('/')}/chat/completions"

    def _body(self, messages: Sequence[dict[str, Any]], settings: ConversationSettings) -> bytes:
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "stream": True}
        body["stream_options"] = {"include_usage": True}
        if settings.tools:
            body["tools"] = [tool_schema(tool) for tool in settings.tools]
            named = settings.tool_choice not in ("auto", "none", "required")
            function = {"type": "function", "function": {"name": settings.tool_choice}}
            body["tool_choice"] = function if named else settings.tool_choice
            if settings.parallel_tool_calls is not None:
                body["parallel_tool_calls"] = settings.parallel_tool_calls
        if settings.output_schema is not None:
            schema = {"name": "reply", "schema": dict(settings.output_schema), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if settings.reasoning_effort is not None:
            body["reasoning_effort"] = settings.reasoning_effort
        if settings.max_output_tokens:
            body["max_tokens"] = settings.max_output_tokens
        if settings.sampling is not None:
            body |= {"temperature": settings.sampling.temperature, "top_p": settings.sampling.top_p}
        if settings.temperature is not None:
            body["temperature"] = settings.temperature
        return json.dumps(body).encode()


class _ChatRequest:
    """One streamed request: `lines` blocks on a thread, `stop` may be called from another."""

    def __init__(self, pool: ConnectionPool, path: str, body: bytes, headers: dict[str, str]) -> None:
        self._pool, self._path, self._body, self._headers = pool, path, body, headers
        self._connection, self._is_reused = pool.take()
        self._is_stopped = self._is_complete = False

    def lines(self) -> Iterator[str]:
        """The lines of the response."""
        try:
            with self._response() as response:  # it may hold the socket
                if response.status != 200:
                    raise _refused(response, "the chat endpoint", self._connection.host)
                for line in response:
                    yield line.decode("utf8", "replace").strip()
                self._is_complete = True
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            if not self._is_stopped:  # a socket that was shut down fails in several ways
                where = f"{self._connection.host}:{self._connection.port}"
                raise UnreachableEndpointError("the chat endpoint cannot be reached", f"{where}, {error}") from error
        finally:
            if self._is_complete and not self._is_stopped:
                self._pool.give_back(self._connection)
            else:
                self._connection.close()

    def _response(self) -> http.client.HTTPResponse:
        """The response; where the endpoint has closed a kept connection, over a new one."""
        try:
            self._connection.request("POST", self._path, self._body, self._headers)
            return self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            if not self._is_reused or self._is_stopped or isinstance(error, TimeoutError):
                raise
        self._connection = self._pool.new()
        self._connection.request("POST", self._path, self._body, self._headers)
        return self._connection.getresponse()

    def stop(self) -> None:
        """Shut the socket down, so that the endpoint stops generating and `lines` ends."""
        if self._is_complete:
            return
        self._is_stopped = True
        socket = self._connection.sock
        if socket is not None:
            with suppress(OSError):
                socket.shutdown(2)


class _AnswerReader:
    """Parses the server-sent events of an answer."""

    def __init__(self) -> None:
        self._first_line = ""
        self._has_events = self._is_complete = False
        self._reason, self._usage = "stop", dict[str, Any]()
        self._reasoning = ReasoningFilter()

    def pieces(self, line: str) -> list[ChatPiece]:
        """The pieces in the JSON of a `data:` line; none in any other line."""
        self._first_line = self._first_line or line
        if not line.startswith("data:"):
            return []
        data, self._has_events = line.removeprefix("data:").strip(), True
        if data == "[DONE]":
            self._is_complete = True
            return []
        try:
            return self._pieces(json.loads(data))
        except json.JSONDecodeError as error:
            raise EndpointError("the chat endpoint sent invalid JSON", shown(data)) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise EndpointError("the chat endpoint sent an unexpected event", shown(data)) from error

    def end(self) -> list[ChatPiece]:
        """The last pieces; EndpointError where the answer is incomplete."""
        if not self._has_events:
            raise EndpointError(
                "the chat endpoint streamed no events",
                f"but {shown(self._first_line)}; "
                "its address is the part before /chat/completions, and it must support streaming",
            )
        if not self._is_complete:
            raise EndpointError("the chat endpoint ended the stream in the middle of its answer")
        usage = self._usage
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        end = ChatEnd(self._reason, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0), cached)
        return [*_text_pieces(self._reasoning.flush()), end]

    def _pieces(self, event: dict[str, Any]) -> list[ChatPiece]:
        if "error" in event:
            error = event["error"]
            raise EndpointError(
                "the chat endpoint failed", str(error.get("message", error) if isinstance(error, dict) else error)
            )
        self._usage = event.get("usage") or self._usage
        pieces: list[ChatPiece] = []
        for choice in event.get("choices") or []:
            self._reason = choice.get("finish_reason") or self._reason
            self._is_complete |= choice.get("finish_reason") is not None
            pieces += self._of_delta(choice.get("delta") or {})
        return pieces

    def _of_delta(self, delta: dict[str, Any]) -> list[ChatPiece]:
        """Text and calls; reasoning is dropped, whether it is a separate field or part of the text."""
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
