"""What is heard of a peer: packets through the jitter buffer and the decoder to audio, 20 ms at a time."""

import numpy as np

from vivavoce.dialogue.items import Samples
from vivavoce.server.realtime.audio_formats import resampler
from vivavoce.server.rtp.codecs import FRAMES_PER_SECOND, RtpCodec, new_decoder
from vivavoce.server.rtp.comfort_noise import ComfortNoise, NoiseDescription
from vivavoce.server.rtp.jitter import JitterBuffer, MediaPacket, Missing
from vivavoce.server.wire import WireError

EXCESS_SHARE = 0.75  # of the target, by which the delay may exceed it; beyond, silent frames are skipped
CALM_EXCESS, JITTER_EXCESS = 0.02, 0.05  # bounds of that excess
MIN_EXCESS = -0.005  # below, silent frames are repeated
LARGEST_EXCESS = 1.0  # beyond, any frame is skipped
SILENCE_POWER = 1e-5  # -50 dBFS
PAUSE_POWER = 0.01  # of a frame relative to the speech before it, -20 dB
SPEECH_DECAY = 0.999  # a frame, 20 s to a third


class Playout:
    """The audio of one codec, at the rate of the listener."""

    def __init__(self, codec: RtpCodec, rate: int) -> None:
        self.buffer = JitterBuffer(codec.clock_rate)
        self.concealed = 0
        """Samples made up for lost and late packets."""
        self.corrupt = 0
        """Packets whose payload could not be decoded."""
        self._codec = codec
        self._frame = codec.sample_rate // FRAMES_PER_SECOND
        self._units = codec.clock_rate / codec.sample_rate  # clock units per sample
        self._decoder = new_decoder(codec)
        self._noise = ComfortNoise()
        self._ready: Samples = np.zeros(0, np.float32)
        self._speech_power = 0.0
        self._resampler = resampler(codec.sample_rate, rate)
        self._state = self._resampler.initial_state()

    @property
    def concealed_seconds(self) -> float:
        """Seconds of audio made up for lost and late packets."""
        return self.concealed / self._codec.sample_rate

    @property
    def position(self) -> int | None:
        """Samples of the peer's stream, by its timestamps, up to the end of what was played; None while it pauses."""
        cursor = self.buffer.cursor
        return None if cursor is None else round(cursor / self._units) - len(self._ready)

    def pull(self, now: float) -> Samples:
        """The next 20 ms."""
        concealed = self.concealed
        frame = self._next_frame(now)
        excess = self.buffer.excess(now, (len(frame) + len(self._ready)) / self._codec.sample_rate)
        is_silent = self._is_silent(frame) and self.concealed == concealed
        max_excess = min(max(EXCESS_SHARE * self.buffer.target, CALM_EXCESS), JITTER_EXCESS)
        if excess > LARGEST_EXCESS or (is_silent and excess > max_excess):
            frame = self._next_frame(now)
        elif is_silent and excess < MIN_EXCESS:
            self._ready = np.concatenate([frame, self._ready])
        output, self._state = self._resampler.step(self._state, frame[None])
        return output[0]

    def _next_frame(self, now: float) -> Samples:
        while (wanted := self._frame - len(self._ready)) > 0:
            self._ready = np.concatenate([self._ready, self._next_samples(now, wanted)])
        frame, self._ready = self._ready[: self._frame], self._ready[self._frame :]
        return frame

    def _next_samples(self, now: float, wanted: int) -> Samples:
        units = max(1, round(wanted * self._units))
        match self.buffer.next(now):
            case MediaPacket() as packet:
                return self._played(packet, wanted)
            case Missing.LOST:
                units = min(units, self.buffer.gap)
                self.buffer.played(units)
                return self._conceal(max(1, round(units / self._units)))
            case Missing.LATE:
                self.buffer.stalled(units)
                return self._conceal(wanted)
            case Missing.PAUSED:
                return self._noise.make(wanted)

    def _played(self, packet: MediaPacket, wanted: int) -> Samples:
        if packet.is_comfort_noise:
            if (noise := NoiseDescription.parse(packet.payload)) is not None:
                self._noise.describe(noise)
            self.buffer.pause()
            return self._noise.make(wanted)
        try:
            samples = self._decoder.decode(packet.payload)
        except WireError:
            self.corrupt += 1
            samples = self._conceal(wanted)
        self.buffer.played(round(len(samples) * self._units))
        return samples

    def _conceal(self, count: int) -> Samples:
        self.concealed += count
        return self._decoder.conceal(count)

    def _is_silent(self, frame: Samples) -> bool:
        power = float(np.dot(frame, frame)) / len(frame)
        self._speech_power = max(power, SPEECH_DECAY * self._speech_power)
        return power < max(SILENCE_POWER, PAUSE_POWER * self._speech_power)
