"""Where a conversation's sound comes from and goes to: this machine's devices, or files at the pace of a microphone."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vivavoce.audio.io import Sound, read, write
from vivavoce.audio.resample import LiveResampler
from vivavoce.dialogue.items import Samples
from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.talk.playback import PlaybackBuffer

logger = logging.getLogger(__name__)

PACKET_SECONDS = 0.02
MAX_LATE_SECONDS = 0.1  # that packets may be sent sooner after each other, to be in time again
MAX_WAIT_SECONDS = 30.0  # after a file, for a reply
PAUSE_SECONDS = 0.4  # after a reply, before the next file
NO_DEVICE = "use files instead: --wav QUESTION.wav --out TALK.wav"

Hear = Callable[[Samples], None]


class TalkAudio(Protocol):
    """A microphone and a loudspeaker."""

    prompt: str
    """The line that tells the user that the conversation begins."""

    async def run(self, hear: Hear, rate: int, playback: PlaybackBuffer, is_idle: Callable[[], bool]) -> None:
        """Give the microphone's samples at `rate` to `hear` and play the buffer, until there is no more to hear.

        `is_idle`: neither the user nor a reply speaks, and no reply is being generated.
        """
        ...


class DeviceAudio:
    """This machine's microphone and loudspeaker by name, number or part of a name, each at its own rate."""

    prompt = "speak; Ctrl-C ends it"

    def __init__(self, microphone: str | None = None, loudspeaker: str | None = None) -> None:
        self._devices = sound_devices()
        self._microphone = _device_info(self._devices, microphone, "input")
        self._loudspeaker = _device_info(self._devices, loudspeaker, "output")

    async def run(self, hear: Hear, rate: int, playback: PlaybackBuffer, is_idle: Callable[[], bool]) -> None:
        """Until the task is cancelled."""
        loop = asyncio.get_running_loop()
        recorded_rate = int(self._microphone["default_samplerate"])
        filters = LiveResampler(recorded_rate, rate)
        state = filters.initial_state()

        def take(samples: Samples) -> None:
            nonlocal state
            output, state = filters.step(state, samples[None])
            hear(output[0])

        def recorded(data: Any, frames: int, time: object, status: object) -> None:
            loop.call_soon_threadsafe(take, data[:, 0].copy())

        microphone = _open_stream(
            self._devices,
            self._devices.InputStream,
            self._microphone,
            recorded,
            blocksize=round(PACKET_SECONDS * recorded_rate),
        )
        with microphone, loudspeaker_stream(self._devices, self._loudspeaker, playback):
            await loop.create_future()  # the callbacks do the work


class FileAudio:
    """Files in place of the microphone, in real time, one after the other; each waits for the reply to the last.

    The reply is played where there is a loudspeaker, unless the conversation is written to a file.
    """

    prompt = "listening to the file"

    def __init__(self, files: Sequence[Path], out: Path | None = None) -> None:
        self._out = out
        self._sounds = [read(file).mono() for file in files]
        for file, sound in zip(files, self._sounds, strict=True):
            if not sound.samples.any():
                raise InputError(f"{file} is silent; use a recording of a question")
        self._heard: list[Samples] = []
        self._played: list[Samples] = []
        self.silence_line: str | None = None
        """Why nothing is played; None: it is, or is written."""

    async def run(self, hear: Hear, rate: int, playback: PlaybackBuffer, is_idle: Callable[[], bool]) -> None:
        """Until the last reply is over."""
        async with AsyncExitStack() as stack:
            is_played = self._out is None and self._open_loudspeaker(stack, playback)
            pace = PacketPace(hear, None if is_played else playback, rate, self._heard, self._played)
            for sound in self._sounds:
                for packet in pace.packets(sound.resampled(rate).samples[0]):
                    await pace.send(packet)
                await pace.wait(lambda: is_idle() and playback.is_empty)
        if self._out is not None:
            self._write(rate, playback.rate)

    def _open_loudspeaker(self, stack: AsyncExitStack, playback: PlaybackBuffer) -> bool:
        try:
            devices = sound_devices()
            stack.enter_context(loudspeaker_stream(devices, _device_info(devices, None, "output"), playback))
        except (InputError, MissingDependencyError) as error:
            logger.debug("no loudspeaker", exc_info=True)
            self.silence_line = f"the reply is not played: {error}"
            return False
        return True

    def _write(self, input_rate: int, rate: int) -> None:
        """Write both sides: the microphone left, the replies right."""
        assert self._out is not None
        heard = Sound(np.concatenate(self._heard), input_rate).resampled(rate).samples[0]
        played = np.concatenate(self._played)
        length = max(len(heard), len(played))
        sides = [np.pad(side, (0, length - len(side))) for side in (heard, played)]
        write(self._out, Sound(np.stack(sides), rate))


class PacketPace:
    """Sends packets at the pace of a microphone, and empties the playback buffer where no loudspeaker does."""

    def __init__(
        self, hear: Hear, playback: PlaybackBuffer | None, rate: int, heard: list[Samples], played: list[Samples]
    ) -> None:
        self._hear, self._playback, self._heard, self._played = hear, playback, heard, played
        self._size = round(PACKET_SECONDS * rate)
        self._loop = asyncio.get_running_loop()
        self._started, self._sent = self._loop.time(), 0

    def packets(self, sound: Samples) -> list[Samples]:
        """A sound in packets, the last one filled up with silence."""
        padded = np.pad(sound, (0, -len(sound) % self._size))
        return np.split(padded, len(padded) // self._size)

    async def send(self, packet: Samples) -> None:
        """Wait until the packet is due, and send it.

        After a stall of the process the rest is sent later: in a burst it would come sooner than it was spoken.
        """
        self._sent += 1
        wait = self._started + self._sent * PACKET_SECONDS - self._loop.time()
        if wait < -MAX_LATE_SECONDS:
            self._started -= wait
        await asyncio.sleep(max(0.0, wait))
        self._hear(packet)
        self._heard.append(packet)
        if self._playback is not None:
            self._played.append(self._playback.read(round(PACKET_SECONDS * self._playback.rate)))

    async def wait(self, is_over: Callable[[], bool]) -> None:
        """Send silence until it has been over for a moment, or for too long."""
        quiet, silence = 0.0, np.zeros(self._size, np.float32)
        for _ in range(round(MAX_WAIT_SECONDS / PACKET_SECONDS)):
            await self.send(silence)
            quiet = quiet + PACKET_SECONDS if is_over() else 0.0
            if quiet >= PAUSE_SECONDS:
                return


def sound_devices() -> Any:
    """The module sounddevice; MissingDependencyError where it or PortAudio is not installed."""
    try:
        import sounddevice
    except ImportError as error:
        raise MissingDependencyError(
            f"microphone and loudspeaker need sounddevice: pip install 'vivavoce[talk]'; or {NO_DEVICE}"
        ) from error
    except OSError as error:
        raise MissingDependencyError(
            f"sounddevice needs the library PortAudio (on Debian: apt install libportaudio2); or {NO_DEVICE}"
        ) from error
    return sounddevice


def _device_info(devices: Any, name: str | None, kind: str) -> dict[str, Any]:
    """A device by name, number or part of a name; None: the default."""
    what = "microphone" if kind == "input" else "loudspeaker"
    try:
        found: dict[str, Any] = devices.query_devices(int(name) if name and name.isdigit() else name, kind)
    except (ValueError, devices.PortAudioError) as error:
        wanted = f"no {what}" if name is None else f"no {what} {name!r}"
        raise InputError(f"{wanted} was found ({error}); {NO_DEVICE}") from error
    return found


def loudspeaker_stream(devices: Any, device: dict[str, Any], playback: PlaybackBuffer) -> Any:
    """A stream, to be used as `with`, that plays the buffer at the loudspeaker's own rate."""
    rate = int(device["default_samplerate"])
    filters = LiveResampler(playback.rate, rate)
    state, waiting = filters.initial_state(), np.zeros(0, np.float32)

    def fill(data: Any, frames: int, time: object, status: object) -> None:
        nonlocal state, waiting
        while len(waiting) < frames:
            piece = playback.read(-(-(frames - len(waiting)) * playback.rate // rate))
            output, state = filters.step(state, piece[None])
            waiting = np.concatenate([waiting, output[0]])
        data[:, 0], waiting = waiting[:frames], waiting[frames:]

    stream = _open_stream(devices, devices.OutputStream, device, fill, latency="low")
    playback.latency = float(stream.latency)
    return stream


def _open_stream(devices: Any, kind: Any, device: dict[str, Any], callback: Any, **options: Any) -> Any:
    """A stream of one channel at the device's own rate."""
    try:
        return kind(
            samplerate=int(device["default_samplerate"]),
            device=device["index"],
            channels=1,
            dtype="float32",
            callback=callback,
            **options,
        )
    except devices.PortAudioError as error:
        raise InputError(f"the device {device['name']!r} cannot be opened ({error}); {NO_DEVICE}") from error
