"""Recogniser, chat endpoint and voice in a row: what each hands on, over real HTTP."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from tests.dialogue.voices import silence, talk
from vivavoce.audio.player import SimulatedClock
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.chat_messages import PENDING_OUTPUT, chat_messages
from vivavoce.cascade.interfaces import ChatEnd, ChatText
from vivavoce.cascade.remote import ChatEndpoint
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue.events import InputTranscript, ReplyAudio, ReplyDone, ReplyItemStarted, ReplyStarted, ReplyText
from vivavoce.dialogue.items import AudioPart, Item, Message, TextPart, ToolCall, ToolOutput
from vivavoce.dialogue.reply import SpeakingOptions
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.dialogue.settings import ConversationSettings, RecognitionSettings, Tool
from vivavoce.errors import InputError, VivaError
from vivavoce.tts.text import cleaned


class Endpoint(ThreadingHTTPServer):
    """A chat endpoint that streams what it is told to; bytes are sent as they are, and are the last it sends."""

    def __init__(self, chunks, status=200):
        super().__init__(("127.0.0.1", 0), Handler)
        self.chunks, self.status = chunks, status
        self.asked = []
        self.was_left = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.path = self.path
        self.send_response(self.server.status)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for chunk in self.server.chunks:
                if isinstance(chunk, bytes):
                    self.wfile.write(chunk)
                    return
                line = chunk if isinstance(chunk, str) else json.dumps(chunk)
                self.wfile.write(f"data: {line}\n\n".encode())
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.was_left.set()

    def log_message(self, *args):
        pass


def words(*texts, reason="stop"):
    chunks = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    end = {"choices": [{"delta": {}, "finish_reason": reason}]}
    return [*chunks, end, {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 7}}]


@pytest.fixture
def serve():
    servers = []

    def start(chunks, status=200):
        servers.append(Endpoint(chunks, status))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


class Listener:
    """Hears how long a turn was; in the language of nobody, nothing."""

    asked = 0

    async def transcribe(self, samples, rate, language=None):
        self.asked += 1
        if language == "nobody's":
            return " "
        return f"I spoke for {len(samples) / rate:.0f} second"


class Voice:
    """Says a text as noise, 50 ms a letter."""

    rate = 16_000

    def __init__(self):
        self.said = []

    async def speak(self, text, voice, speed):
        cleaned(text)  # raises where there is nothing to say
        self.said.append(text)
        noise = np.random.default_rng(len(text)).standard_normal(800 * len(text))
        for part in np.array_split((0.05 * noise).astype("f"), 4):
            await asyncio.sleep(0)
            yield part


async def converse(endpoint, play, settings=None, tools=()):
    """Play a conversation on a cascade until its first reply is over; its events, the voice, the conversation."""
    voice, listener, events = Voice(), Listener(), []
    pipeline = CascadeBackend(WholeTurns(listener), ChatEndpoint(endpoint.url, "some-model", key="k"), voice)
    options = DialogueOptions(speaking=SpeakingOptions(max_ahead=None))
    clock = SimulatedClock()
    conversation = LiveConversation(pipeline, settings, options, input_rate=16_000, clock=clock)
    over = asyncio.Event()

    async def read():
        async for event in conversation.events():
            events.append(event)
            if isinstance(event, ReplyDone):
                over.set()

    reader = asyncio.ensure_future(read())
    if isinstance(play, np.ndarray):
        for start in range(0, len(play) - 511, 512):
            clock.advance(0.032)
            conversation.hear(play[start : start + 512].astype("f"))
            await asyncio.sleep(0)
    else:
        play(conversation)
    async with asyncio.timeout(30):
        await over.wait()
    items = conversation.items
    await conversation.close()
    await reader
    return events, voice, items, listener


async def test_speech_becomes_words_becomes_a_reply_becomes_speech(serve):
    endpoint = serve(words("Well, ", "of course. You spoke", " for a while. Bye"))
    settings = ConversationSettings(instructions="Be brief.", transcribe_input=True)
    said = np.concatenate([silence(0.5), talk(1.0), silence(0.7)])
    events, voice, items, listener = await converse(endpoint, said, settings)
    assert voice.said == ["Well, of course.", "You spoke for a while.", "Bye"]
    assert endpoint.path == "/v1/chat/completions"
    assert endpoint.asked[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "I spoke for 1 second"},
    ]
    assert listener.asked == 1, "the held reply and the transcript share one recognition"
    transcript = next(event for event in events if isinstance(event, InputTranscript))
    assert transcript.text == "I spoke for 1 second" and transcript.item == items[0].id
    assert items[0].content.parts[0].transcript == transcript.text
    assert items[1].content.parts[0].transcript == "Well, of course. You spoke for a while. Bye"
    done = next(event for event in events if isinstance(event, ReplyDone))
    assert done.reason == "completed" and done.usage.input_text == 11 and done.usage.output_text == 7
    first_sound = next(index for index, event in enumerate(events) if isinstance(event, ReplyAudio))
    texts = [index for index, event in enumerate(events) if isinstance(event, ReplyText)]
    assert texts[0] < first_sound < texts[1], "the first sentence is spoken before the second is written"


async def test_text_that_cannot_be_spoken_is_written_only(serve):
    endpoint = serve(words("Good morning! ", "😊😊\n", "```python\n"))
    events, voice, items, _ = await converse(endpoint, lambda conversation: conversation.reply())
    assert next(event for event in events if isinstance(event, ReplyDone)).reason == "completed"
    assert voice.said == ["Good morning!"]
    assert items[-1].content.parts[0].transcript == "Good morning! 😊😊\n```python\n"


async def test_tools_pass_through(serve):
    call = [
        {"index": 0, "id": "call_9", "function": {"name": "book", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"seats"'}},
        {"index": 0, "function": {"arguments": ": 2}"}},
    ]
    chunks = [{"choices": [{"delta": {"tool_calls": [part]}}]} for part in call]
    endpoint = serve([*chunks, {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}])
    tool = Tool("book", "Book a table", {"type": "object"})
    settings = ConversationSettings(tools=(tool,), tool_choice="book")

    def play(conversation):
        conversation.add(Message("user", (TextPart("A table for two"),)))
        conversation.add(ToolCall("call_1", "look", "{}"))
        conversation.add(ToolOutput("call_1", "free"))
        conversation.reply()

    events, _, items, _ = await converse(endpoint, play, settings)
    assert items[-1].content == ToolCall("call_9", "book", '{"seats": 2}')
    assert [event.kind for event in events if isinstance(event, ReplyItemStarted)] == ["tool_call"]
    asked = endpoint.asked[0]
    assert asked["tools"][0]["function"]["name"] == "book"
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "book"}}
    assert [message["role"] for message in asked["messages"]] == ["user", "assistant", "tool"]
    assert asked["messages"][1]["tool_calls"][0]["id"] == asked["messages"][2]["tool_call_id"] == "call_1"


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 48_000])
async def test_a_spoken_item_is_recognised_at_its_own_rate(serve, rate):
    endpoint = serve(words("I see."))

    def play(conversation):
        conversation.add(Message("user", (AudioPart(np.zeros(2 * rate, "f"), rate), AudioPart(talk(1.0), 16_000))))
        conversation.reply()

    await converse(endpoint, play)
    assert endpoint.asked[0]["messages"] == [{"role": "user", "content": "I spoke for 3 second"}]


async def test_a_turn_without_words_is_not_answered(serve):
    endpoint = serve(words("Pardon?"))
    said = np.concatenate([silence(0.5), talk(1.0), silence(0.7)])
    events, voice, _, _ = await converse(
        endpoint, said, ConversationSettings(recognition=RecognitionSettings(("nobody's",)))
    )
    assert not endpoint.asked and not voice.said
    assert next(event for event in events if isinstance(event, ReplyDone)).reason == "completed"


def test_calls_made_together_are_one_message():
    contents = [ToolCall("a", "book", "{}"), ToolCall("b", "look", "{}"), ToolOutput("a", "1"), ToolOutput("b", "2")]
    items = [Item(f"item_{index}", content) for index, content in enumerate(contents)]
    messages = chat_messages(items, "", {})
    assert [message["role"] for message in messages] == ["assistant", "tool", "tool"]
    assert [call["id"] for call in messages[0]["tool_calls"]] == ["a", "b"]


def chat_roles(*contents, **options) -> list[tuple[str, str]]:
    items = [Item(f"item_{index}", content, **options) for index, content in enumerate(contents)]
    return [(message["role"], message["content"]) for message in chat_messages(items, "", {})]


def test_outputs_follow_their_calls_however_late_they_came():
    asked, again = (Message("user", (TextPart(text),)) for text in ("Book it", "And now?"))
    call, other = ToolCall("a", "book", "{}"), ToolCall("b", "look", "{}")
    assert chat_roles(asked, call, other, again) == [
        ("user", "Book it"),
        ("assistant", None),
        ("tool", PENDING_OUTPUT),
        ("tool", PENDING_OUTPUT),
        ("user", "And now?"),
    ]
    late = chat_roles(asked, call, other, again, ToolOutput("b", "2"), ToolOutput("a", "1"), again)
    assert late == [
        ("user", "Book it"),
        ("assistant", None),
        ("tool", "1"),
        ("tool", "2"),
        ("user", "And now?"),
        ("user", "And now?"),
    ]
    same_id = chat_roles(call, ToolOutput("a", "first"), asked, call)
    assert same_id == [("assistant", None), ("tool", "first"), ("user", "Book it"), *chat_roles(call)]


def test_outputs_without_a_call_and_calls_that_were_cut_leave_a_valid_request():
    assert chat_roles(ToolOutput("lost", "7")) == [("system", "Output of a function: 7")]
    assert chat_roles(ToolCall("a", "book", '{"seats'), is_complete=False) == []


async def test_written_replies_are_not_cut_into_sentences(serve):
    endpoint = serve(words("One. Tw", "o."))

    def play(conversation):
        conversation.add(Message("user", (TextPart("Count"),)))
        conversation.reply()

    events, voice, items, _ = await converse(endpoint, play, ConversationSettings(modality="text"))
    assert [event.delta for event in events if isinstance(event, ReplyText)] == ["One. Tw", "o."]
    assert not voice.said and items[-1].content.parts[0].text == "One. Two."


@pytest.mark.parametrize(
    ("chunks", "status", "message"),
    [
        ([], 503, "answered 503"),
        (["{not json"], 200, "invalid JSON"),
        ([{"error": {"message": "the prompt was: SECRET"}}], 200, "the chat endpoint failed"),
        ([{"error": "SECRET"}], 200, "the chat endpoint failed"),
        ([b"<html><p>SECRET</p></html>"], 200, "streamed no events"),
        (["SECRET"], 200, "invalid JSON"),
        ([b'{"error": {"message": "SECRET", "code": "context_length_exceeded"}}'], 400, "(context_length_exceeded)"),
        ([b'{"error": {"message": "SECRET", "code": "SECRET words"}}'], 400, "answered 400"),
        ([b""], 200, "streamed no events"),
        ([{"choices": [{"delta": {"content": "And th"}}]}, b"\n"], 200, "middle of its answer"),
        (["null"], 200, "unexpected event"),
        ([{"choices": [None]}], 200, "unexpected event"),
        ([{"choices": [{"delta": {"content": 5}}]}], 200, "unexpected event"),
        ([{"choices": [{"delta": {"tool_calls": [{"index": "x", "function": 5}]}}]}], 200, "unexpected event"),
    ],
)
async def test_an_endpoint_that_fails_fails_the_reply_and_is_not_quoted(serve, chunks, status, message):
    events, *_ = await converse(serve(chunks, status), lambda conversation: conversation.reply())
    done = next(event for event in events if isinstance(event, ReplyDone))
    assert done.reason == "failed" and message in done.error and "SECRET" not in done.error


async def test_an_unreachable_endpoint_is_named():
    endpoint = ChatEndpoint("http://127.0.0.1:9/v1", "m", timeout=2)
    with pytest.raises(VivaError, match=r"127\.0\.0\.1:9"):
        await anext(endpoint.reply([], ConversationSettings()))
    with pytest.raises(InputError, match="http"):
        ChatEndpoint("ftp://somewhere", "m")


async def test_closing_a_reply_closes_its_connection(serve):
    endless = serve({"choices": [{"delta": {"content": "word " * 200}}]} for _ in range(100_000))
    stream = ChatEndpoint(endless.url, "m").reply([], ConversationSettings())
    assert isinstance(await anext(stream), ChatText)
    await stream.aclose()
    assert await asyncio.to_thread(endless.was_left.wait, 20)


async def test_a_reply_cut_by_its_length_says_so(serve):
    endpoint = serve(words("And then", reason="length"))
    pieces = [piece async for piece in ChatEndpoint(endpoint.url, "m").reply([], ConversationSettings())]
    assert pieces == [ChatText("And then"), ChatEnd("length", 11, 7)]
    events, *_ = await converse(serve(words("And", reason="length")), lambda conversation: conversation.reply())
    assert next(event for event in events if isinstance(event, ReplyDone)).reason == "max_output_tokens"
    assert any(isinstance(event, ReplyStarted) for event in events)
