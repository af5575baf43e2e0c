"""The server process of `viva bench telephone`: the code of `viva serve --sip` around scripted replies, or a model.

`python -m vivavoce.bench.telephone_server` reads a `TelephonePlan` in JSON from stdin and serves until terminated.
"""

import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from vivavoce.audio.io import read
from vivavoce.bench.serve_server import OPENS_PER_MINUTE, TURN_SILENCE_MS, ServerProcess
from vivavoce.bench.turn_sounds import BUNDLED
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.interfaces import ChatEnd, ChatText
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.dialogue.settings import ConversationSettings, TurnSettings
from vivavoce.server.config import ServerOptions
from vivavoce.server.host import ModelCard
from vivavoce.server.hosting import load, serve
from vivavoce.server.hosting.config import ConversationOptions, ServingOptions
from vivavoce.server.sip.options import SipOptions

EVERY_CALL = 100.0  # speech load: the number of calls is the bench's, and none is refused
REPLY_RATE = 24_000
REPLY_FILE = "09-order.opus"  # a recording of speech that the scripted replies play
CHUNK_SECONDS = 0.2
SCRIPTED = "scripted"


class TelephonePlan(msgspec.Struct, frozen=True):
    """What is served."""

    port: int
    sip_port: int
    model: str
    """`scripted`, or the name of a model."""
    device: str = "auto"
    max_sessions: int = 64
    front_end_processes: int | None = None
    """For voice activity, echo and levels; 0: in the event loop; None: by cores."""


class TelephoneServer(ServerProcess):
    """Starts the server and ends it; use as `with`."""

    MODULE = "vivavoce.bench.telephone_server"


class FixedWords:
    """A recogniser that takes no time."""

    async def transcribe(self, samples: Samples, rate: int, language: str | None = None) -> str:
        """The same words for every turn."""
        return "a question"


class FixedReply:
    """A chat model that takes no time."""

    async def reply(self, messages: Any, settings: ConversationSettings) -> AsyncIterator[ChatText | ChatEnd]:
        """One sentence."""
        yield ChatText("This reply is a recording.")
        yield ChatEnd("stop", 1, 1)


@dataclass
class RecordedVoice:
    """A synthesiser that plays a recording."""

    samples: Samples
    rate: int = REPLY_RATE

    async def speak(self, text: str, voice: str | None, speed: float) -> AsyncGenerator[Samples, None]:
        """The recording, in chunks."""
        size = round(CHUNK_SECONDS * self.rate)
        for begin in range(0, len(self.samples), size):
            yield self.samples[begin : begin + size]


@dataclass
class RecordedHost:
    """A host whose turns, barge-in and audio front end are the real ones, and whose replies are a recording."""

    options: DialogueOptions
    settings: ConversationSettings = field(
        default_factory=lambda: ConversationSettings(turn=TurnSettings(silence_duration_ms=TURN_SILENCE_MS))
    )
    models: Sequence[ModelCard] = (ModelCard(SCRIPTED),)
    voices: Sequence[str] = ()
    is_ready: bool = False
    speech: None = None
    transcriber: None = None
    name: str = SCRIPTED

    def __post_init__(self) -> None:
        self._recording = reply_recording()

    @property
    def parts(self) -> list[Any]:
        """What must be entered while the host is served."""
        return [] if self.options.front_end is None else [self.options.front_end]

    async def warm_up(self) -> None:
        """Start the audio front end."""
        if self.options.front_end is not None:
            await self.options.front_end.warm_up(self.options.activity, self.options.echo)
        self.is_ready = True

    def open(self, settings: ConversationSettings, model: str) -> LiveConversation:
        """A new conversation."""
        backend = CascadeBackend(WholeTurns(FixedWords()), FixedReply(), RecordedVoice(self._recording))
        return LiveConversation(backend, settings, self.options)

    def gauges(self) -> Mapping[str, float]:
        """None."""
        return {}


def reply_recording() -> Samples:
    """What the scripted replies sound like."""
    samples: Samples = read(BUNDLED / REPLY_FILE, rate=REPLY_RATE).mono().samples[0]
    return samples


def serve_telephone(plan: TelephonePlan) -> None:
    """Serve until terminated."""
    from vivavoce.log import configure
    from vivavoce.runtime import event_loop

    configure("warning", "text")
    sip = SipOptions(listen=(f"udp:127.0.0.1:{plan.sip_port}",), calls_per_source=plan.max_sessions)
    options = ServerOptions(
        port=plan.port,
        doors=0,
        max_sessions=plan.max_sessions,
        opens_per_minute=OPENS_PER_MINUTE,
        max_speech_load=EVERY_CALL,
        sip=sip,
    )
    conversation = ConversationOptions(front_end_processes=plan.front_end_processes)
    if plan.model == SCRIPTED:
        host: Any = RecordedHost(replace(DialogueOptions(), front_end=conversation.front_end(models_use_cores=False)))
    else:
        turn = TurnSettings(silence_duration_ms=TURN_SILENCE_MS)
        host = load(
            ServingOptions(model=plan.model, device=plan.device, turn=turn, conversation=conversation, server=options)
        )
    event_loop.run(serve(host, options))


if __name__ == "__main__":
    serve_telephone(msgspec.json.decode(sys.stdin.buffer.readline(), type=TelephonePlan))
