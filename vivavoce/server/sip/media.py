"""The session of a call over SIP, and the media that it speaks and hears through."""

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack

from vivavoce.dialogue.items import Samples
from vivavoce.errors import InputError
from vivavoce.server.config import ServerOptions
from vivavoce.server.realtime.output import OutputPiece, Pacing
from vivavoce.server.realtime.response import ResponseEncoder
from vivavoce.server.realtime.session import Opening, RealtimeSession
from vivavoce.server.realtime.sessions import Sessions
from vivavoce.server.rtp.stream import MediaSettings, RtpStream
from vivavoce.server.sip.sdp import LocalAudio
from vivavoce.server.telephony.call import attach_without_reading, note_digit
from vivavoce.server.wire import WireError

logger = logging.getLogger(__name__)

PROVIDER = "sip"


class CallMedia:
    """The audio sink of a session, and its connection."""

    session: RealtimeSession
    stream: RtpStream
    local: LocalAudio

    def __init__(self, dropped: Callable[[], None]) -> None:
        """`dropped` is called where the session ends, or ends its connection."""
        self._dropped = dropped
        self.settings: MediaSettings | None = None
        """What was agreed with the peer."""
        self.on_heard: Callable[[Samples], None] = self.feed
        """Gets the audio of the peer while it does not hold the call."""
        self.is_open = False
        """Whether there is a session."""
        self._is_waiting = self._is_held_session = False
        self._opened = AsyncExitStack()

    async def open(
        self,
        sessions: Sessions,
        opening: Opening,
        source: str,
        hosts: tuple[str, str],
        is_secure: bool,
        call_id: str,
    ) -> None:
        """Open the session and its media, bound to the first host, and described with the second; WireError where
        the server is full.
        """
        self.session = sessions.open(opening, source, PROVIDER, self)
        self.is_open = True
        self._opened.push_async_callback(self._end_session)
        self.session.start()
        bound, public = hosts
        conversation, ports = self.session.conversation, sessions.options.sip.port_range
        try:
            rates = conversation.input_rate, conversation.output_rate
            self.stream = await RtpStream.open(bound, ports, *rates, name=call_id)
        except InputError as error:
            raise WireError(str(error), "no_port", status=503) from error
        self._opened.push_async_callback(self.stream.close)
        self.stream.on_audio, self.stream.on_digit = self._hear, self.note_digit
        self.local = LocalAudio(public, self.stream.port, is_secure)

    def attach(self) -> None:
        """Begin the conversation."""
        attach_without_reading(self.session, self)
        self._hold_or_resume()

    @property
    def is_waiting(self) -> bool:
        """Whether replies wait for a peer that has not answered yet."""
        return self._is_waiting

    @is_waiting.setter
    def is_waiting(self, is_waiting: bool) -> None:
        self._is_waiting = is_waiting
        self._hold_or_resume()

    @property
    def is_held(self) -> bool:
        """Whether the audio does not go both ways."""
        return self.settings is None or self.settings.direction != "sendrecv"

    @property
    def silent_seconds(self) -> float:
        """Since the last packet of the peer; 0 while it is not to send any."""
        return 0.0 if self.is_held else self.stream.statistics().idle_seconds

    def configure(self, settings: MediaSettings) -> None:
        """Use new settings. While the peer holds the call, replies wait and its music is not heard."""
        self.stream.configure(settings)
        self.settings = settings
        self._hold_or_resume()

    def send_digits(self, digits: str) -> None:
        """Press keys; WireError where one is no key."""
        try:
            self.stream.send_digits(digits)
        except ValueError as error:
            raise WireError(str(error), param="digits") from error

    def note_digit(self, digit: str) -> None:
        """The peer has pressed a key."""
        note_digit(self.session, digit)

    async def close(self) -> None:
        """Close what was opened."""
        await self._opened.aclose()

    async def _end_session(self) -> None:
        self.session.detach(self)
        await self.session.close(1000, "the call ended")

    def feed(self, samples: Samples) -> None:
        """Let the session hear audio of the peer."""
        self.session.audio.add_samples(samples)
        self.session.note_activity()

    def _hear(self, samples: Samples) -> None:
        if not self.is_held and not self.session.is_closed:
            self.on_heard(samples)

    def _hold_or_resume(self) -> None:
        is_held = self.is_held or self._is_waiting
        if is_held != self._is_held_session:
            self._is_held_session = is_held
            (self.session.hold if is_held else self.session.unhold)()

    # Connection

    def drop(self, code: int, reason: str) -> None:
        """Hang up."""
        self._dropped()

    # AudioSink

    def pacing(self, options: ServerOptions) -> Pacing:
        """With a small lead: the clock of the stream paces the packets."""
        return Pacing.of_calls(options)

    def send(self, reply: ResponseEncoder, piece: OutputPiece) -> None:
        """Play a chunk."""
        if len(piece.samples):
            self.stream.write(piece.samples)

    def clear(self) -> None:
        """Drop the audio that was not played."""
        self.stream.clear()
