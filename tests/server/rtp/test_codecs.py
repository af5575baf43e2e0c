"""Payloads of each codec, against FFmpeg's and against recordings of others; comfort noise; reception reports."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from aiortc.rtp import RtpPacket

from tests.server.rtp.network import CODEC, Call, Network
from vivavoce.audio.io import float_to_pcm16
from vivavoce.audio.level import rms_dbfs
from vivavoce.audio.resample import resample
from vivavoce.server.realtime.audio_formats import to_mono
from vivavoce.server.rtp.codecs import G722Decoder, RtpCodec, new_decoder, new_encoder
from vivavoce.server.rtp.comfort_noise import ComfortNoise, NoiseDescription
from vivavoce.server.wire import WireError

RECORDING = Path(__file__).parents[2] / "data" / "english" / "agent-newlocation.g722"
FFMPEG = {"opus": "libopus", "G722": "g722", "PCMU": "pcm_mulaw", "PCMA": "pcm_alaw", "L16": "pcm_s16be"}


@pytest.fixture(scope="module")
def speech():
    return G722Decoder().decode(RECORDING.read_bytes())


def frames(samples, codec):
    size = codec.sample_rate // 50
    return [samples[at : at + size] for at in range(0, len(samples) - size + 1, size)]


def signal_to_noise(clean, other):
    """In dB, at the best delay."""
    count = min(len(clean), len(other))
    lag = int(np.argmax([np.dot(clean[: count - lag], other[lag:count]) for lag in range(1_000)]))
    clean, other = clean[: count - lag], other[lag:count]
    other = other * (np.dot(clean, other) / np.dot(other, other))
    return 10 * np.log10(np.sum(clean**2) / (np.sum((clean - other) ** 2) + 1e-12))


@pytest.mark.parametrize(("name", "least"), [("opus", 5), ("G722", 15), ("PCMU", 30), ("PCMA", 30), ("L16", 60)])
def test_ffmpeg_decodes_what_is_encoded(speech, name, least):
    codec = CODEC[name]
    clean, encode = resample(speech, 16_000, codec.sample_rate), new_encoder(codec)
    decoder = av.CodecContext.create(FFMPEG[name], "r")
    decoder.sample_rate, decoder.layout = codec.sample_rate, "mono"
    decoded = [to_mono(frame) for each in frames(clean, codec) for frame in decoder.decode(av.Packet(encode(each)))]
    assert signal_to_noise(clean, np.concatenate(decoded)) > least


@pytest.mark.parametrize(("name", "least"), [("opus", 5), ("G722", 15), ("PCMU", 30), ("PCMA", 30), ("L16", 60)])
def test_what_ffmpeg_encodes_is_decoded(speech, name, least):
    codec = CODEC[name]
    clean, decoder = resample(speech, 16_000, codec.sample_rate), new_decoder(codec)
    encoder = av.CodecContext.create(FFMPEG[name], "w")
    encoder.sample_rate, encoder.layout, encoder.format = codec.sample_rate, "mono", "s16"
    decoded = []
    for number, each in enumerate(frames(clean, codec)):
        frame = av.AudioFrame.from_ndarray(float_to_pcm16(each)[None], format="s16", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = (
            codec.sample_rate,
            Fraction(1, codec.sample_rate),
            number * len(each),
        )
        decoded += [decoder.decode(bytes(packet)) for packet in encoder.encode(frame)]
    assert signal_to_noise(clean, np.concatenate(decoded)) > least


def test_g722_of_a_stream_is_that_of_the_whole(speech):
    decoder, data = G722Decoder(), RECORDING.read_bytes()
    pieces = [decoder.decode(data[at : at + 160]) for at in range(0, len(data), 160)]
    np.testing.assert_array_equal(np.concatenate(pieces), speech)


def test_payloads_have_20_ms():
    silence = {name: np.zeros(codec.sample_rate // 50, np.float32) for name, codec in CODEC.items()}
    sizes = {name: len(new_encoder(CODEC[name])(silence[name])) for name in ("PCMU", "PCMA", "G722", "L16")}
    assert sizes == {"PCMU": 160, "PCMA": 160, "G722": 160, "L16": 640}
    opus = new_encoder(CODEC["opus"])(silence["opus"])
    assert len(new_decoder(CODEC["opus"]).decode(opus)) == 960


@pytest.mark.parametrize(("name", "payload"), [("opus", b"\xff"), ("L16", b"\x00\x01\x02")])
def test_payloads_that_are_not_valid_are_refused_and_the_next_is_played(name, payload):
    decoder = new_decoder(CODEC[name])
    with pytest.raises(WireError):
        decoder.decode(payload)
    frame = np.full(CODEC[name].sample_rate // 50, 0.25, np.float32)
    assert len(decoder.decode(new_encoder(CODEC[name])(frame))) == len(frame)


def test_a_codec_that_is_not_supported_is_refused():
    for make in (new_decoder, new_encoder):
        with pytest.raises(WireError, match="'GSM' is not supported"):
            make(RtpCodec("GSM", 3, 8_000))


# Comfort noise


def test_comfort_noise_has_the_level_and_the_spectrum_of_its_description():
    noise = ComfortNoise()
    assert not noise.make(160).any()
    noise.describe(NoiseDescription.parse(bytes([50])))
    white = noise.make(8_000)
    assert rms_dbfs(white) == pytest.approx(-50, abs=0.5)
    noise.describe(NoiseDescription(-50.0, (-0.9,)))  # low frequencies
    low = np.abs(np.fft.rfft(noise.make(8_000))) ** 2
    assert low[:1_000].sum() > 20 * low[3_000:].sum()
    assert NoiseDescription.parse(b"") is None


def test_comfort_noise_is_like_what_ffmpeg_described():
    random = np.random.default_rng(0)
    white = random.standard_normal(8_320)
    coloured = np.convolve(white, np.ones(8) / 8, "same")[:8_000] * 0.004
    encoder = av.CodecContext.create("comfortnoise", "w")
    encoder.sample_rate, encoder.layout, encoder.format = 8_000, "mono", "s16"
    encoder.open()
    payload = b""
    for at in range(0, len(coloured) - encoder.frame_size, encoder.frame_size):
        piece = float_to_pcm16(coloured[at : at + encoder.frame_size].astype(np.float32))
        frame = av.AudioFrame.from_ndarray(piece[None], format="s16", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = 8_000, Fraction(1, 8_000), at
        payload = ([bytes(packet) for packet in encoder.encode(frame)] or [payload])[-1]
    noise = ComfortNoise()
    noise.describe(NoiseDescription.parse(payload))
    made = noise.make(8_000)
    assert rms_dbfs(made) == pytest.approx(rms_dbfs(coloured.astype(np.float32)), abs=3)

    def centroid(samples):
        power = np.abs(np.fft.rfft(samples)) ** 2
        return np.dot(power, np.arange(len(power))) / power.sum()

    assert centroid(made) == pytest.approx(centroid(coloured), rel=0.35)
    assert centroid(made) < 0.5 * 2_000  # that of white noise


def test_a_pause_with_comfort_noise_is_heard_as_noise():
    call = Call("PCMU", Network(), rate=8_000)
    call.queue.write(0.3 * np.sin(np.arange(16_000) / 3).astype(np.float32))

    def suppress(number, packet):
        """Speech for half a second, then a description of the noise and nothing for one second."""
        if 25 < number < 75:
            return []
        if number == 25:
            parsed = RtpPacket.parse(packet)
            parsed.payload_type, parsed.payload = 13, bytes([45])
            return [parsed.serialize()]
        return [packet]

    heard = call.run(2.0, suppress)
    pause = heard[round(0.8 * 8_000) : round(1.4 * 8_000)]
    assert rms_dbfs(pause) == pytest.approx(-45, abs=1)
    assert rms_dbfs(heard[-2_000:]) > -20
    assert call.receiver.playout.concealed_seconds == 0
