"""A client's audio: bytes to samples at the conversation's rate, a slice at a time."""

import asyncio

from vivavoce.dialogue.events import Conversation, Samples
from vivavoce.server.metrics import TurnClock
from vivavoce.server.realtime.audio_formats import FormatReader, OpusReader, SoundReader, WireFormat
from vivavoce.server.realtime.session_config import Configuration
from vivavoce.server.wire_error import WireError

SLICE_SECONDS = 0.2  # given to the conversation at once; between slices other sessions run


class AudioInputStream:
    """The input audio of one session."""

    def __init__(
        self, conversation: Conversation, configuration: Configuration, clock: TurnClock, max_bytes: int
    ) -> None:
        self._conversation, self._configuration, self._clock = conversation, configuration, clock
        self._max_bytes = max_bytes
        self._waiting_bytes = 0
        self.configure()

    def configure(self) -> None:
        """Take the session's format from now on."""
        rate = self._conversation.input_rate
        self._format = self._configuration.input_format
        self._binary = self._configuration.binary
        self._reader: SoundReader = OpusReader(rate) if self._binary == "opus" else FormatReader(self._format, rate)

    def configure_if_changed(self) -> None:
        """The same, but a stream whose format stays goes on without a seam."""
        if (self._format, self._binary) != (self._configuration.input_format, self._configuration.binary):
            self.configure()

    def forget_waiting(self) -> None:
        """What waited for a commit was committed or cleared."""
        self._waiting_bytes = 0

    async def append(self, data: bytes) -> None:
        """Audio that came as base64."""
        if self._binary == "opus":
            raise WireError("this session's sound comes as binary Opus packets, not as base64", "binary_negotiated")
        await self._append(data)

    async def append_binary(self, data: bytes) -> None:
        """Audio that came as a binary message."""
        if self._binary is None:
            raise WireError("binary messages need session.viva.binary to be raw or opus", "binary_not_negotiated")
        await self._append(data)

    def hear(self, samples: Samples) -> None:
        """Samples at the conversation's rate."""
        self._conversation.hear(samples)
        self._clock.heard(len(samples) / self._conversation.input_rate)

    async def _append(self, data: bytes) -> None:
        self._check_room(len(data))
        for piece in [data] if self._binary == "opus" else slices(data, self._format):
            self.hear(self._reader.read(piece))
            if len(piece) < len(data):
                await asyncio.sleep(0)

    def _check_room(self, size: int) -> None:
        """Without turn detection sound waits for its commit, and must not fill the memory."""
        if self._configuration.ends_turns:
            return
        if self._waiting_bytes + size > self._max_bytes:
            limit = self._max_bytes >> 20
            raise WireError(f"{limit} MiB of sound wait for a commit already; commit or clear them", "buffer_full")
        self._waiting_bytes += size


def slices(data: bytes, format: WireFormat) -> list[bytes]:
    """The bytes in pieces of whole samples."""
    if len(data) % format.bytes_per_sample:
        raise WireError(f"16-bit PCM has two bytes a sample; {len(data)} bytes end in half a sample", "invalid_audio")
    step = round(SLICE_SECONDS * format.rate) * format.bytes_per_sample
    return [data[begin : begin + step] for begin in range(0, len(data), step)]
