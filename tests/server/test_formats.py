"""Formats of sound against FFmpeg, and streams against whole sounds."""

import contextlib
import io
import json

import av
import numpy as np
import pytest
import soundfile

from tests.server.scripted import pitch, tone
from vivavoce.server.realtime.audio_formats import (
    A_LAW,
    MU_LAW,
    FormatReader,
    FormatWriter,
    OpusReader,
    OpusWriter,
    WireFormat,
    decode,
    encode,
    resample,
    wire_format,
)
from vivavoce.server.realtime.call_peer import CallOutput
from vivavoce.server.realtime.client_events import decode_client_event, decode_object
from vivavoce.server.realtime.session_types import SessionParams
from vivavoce.server.wire import WireError

LAWS = [(MU_LAW, "pcm_mulaw"), (A_LAW, "pcm_alaw")]
EVERY_CODE = bytes(range(256))


@pytest.mark.parametrize(("kind", "codec"), LAWS)
def test_telephone_codes_mean_what_ffmpeg_says(kind, codec):
    decoder = av.CodecContext.create(codec, "r")
    decoder.sample_rate, decoder.layout = 8000, "mono"
    theirs = decoder.decode(av.Packet(EVERY_CODE))[0].to_ndarray()[0]
    assert np.array_equal(np.rint(decode(EVERY_CODE, WireFormat(kind, 8000)) * 32768), theirs)


def codes(samples: np.ndarray, kind: str) -> np.ndarray:
    return np.frombuffer(encode((samples / 32768).astype(np.float32), WireFormat(kind, 8000)), np.uint8)


@pytest.mark.parametrize(("kind", "subtype"), [(MU_LAW, "ULAW"), (A_LAW, "ALAW")])
def test_every_sample_gets_the_code_that_libsndfile_gives(kind, subtype):
    samples = np.arange(0, 32768).astype(np.int16)
    file = io.BytesIO()
    soundfile.write(file, samples, 8000, format="RAW", subtype=subtype)
    assert codes(samples, kind).tobytes() == file.getvalue()
    mirrored = ~samples if kind == A_LAW else -samples  # the reference code of G.711 negates A-law in one's complement
    assert np.array_equal(codes(mirrored[1:], kind), codes(samples[1:], kind) ^ 0x80)


@pytest.mark.parametrize("format", [WireFormat(), WireFormat(rate=8000), WireFormat(MU_LAW, 8000)])
def test_a_stream_in_pieces_is_the_whole_sound(format):
    samples = tone(440, 0.5, 16_000)
    writer, reader = FormatWriter(16_000, format), FormatReader(format, 16_000)
    packets = [data for begin in range(0, len(samples), 777) for data in writer.write(samples[begin : begin + 777])]
    data = b"".join(packets + writer.flush())
    whole = resample(samples, 16_000, format.rate)
    assert len(data) == len(encode(whole, format))
    step = 0.04 * np.abs(whole) if format.type == MU_LAW else 0.0  # of the code; rounding may differ in the last bit
    assert (np.abs(decode(data, format) - whole) <= step + 2 / 32_768).all()
    cut = 500 * format.bytes_per_sample
    read = np.concatenate([reader.read(data[begin : begin + cut]) for begin in range(0, len(data), cut)])
    assert abs(pitch(read, 16_000) - 440) < 5


def test_opus_there_and_back():
    writer, reader = OpusWriter(24_000), OpusReader(16_000)
    samples = tone(440, 1.0, 24_000)
    packets = writer.write(samples) + writer.flush()
    assert len(packets) == 50 and max(map(len, packets)) < 400  # 20 ms each
    sound = np.concatenate([reader.read(packet) for packet in packets])
    assert abs(len(sound) / 16_000 - 1.0) < 0.03 and abs(pitch(sound[1600:], 16_000) - 440) < 5


@pytest.mark.parametrize("data", [b"\xff" * 3, b"\x01"])
def test_what_is_no_opus_packet_is_an_error_and_the_stream_goes_on(data):
    reader = OpusReader(16_000)
    for packet in OpusWriter(16_000).write(tone(440, 0.1)):
        reader.read(packet)
    with contextlib.suppress(WireError):  # some garbage is a packet, of noise
        reader.read(data)
    assert len(reader.read(OpusWriter(16_000).write(tone(440, 0.1))[0])) > 0


@pytest.mark.parametrize("text", ["a", "%%%%", "AAAA=A", "é", 5, None])
def test_what_is_no_base64_is_refused(text):
    with pytest.raises(WireError) as refused:
        decode_client_event(json.dumps({"type": "input_audio_buffer.append", "audio": text}))
    assert refused.value.param == "audio"


def test_half_a_sample_is_refused():
    with pytest.raises(WireError, match="half a sample"):
        decode(b"\x00\x01\x02", WireFormat())


@pytest.mark.parametrize("value", [{"type": "audio/pcm", "rate": 12345}, {"type": "mp3"}, "pcm99", 7, []])
def test_unknown_formats_are_refused(value):
    with pytest.raises(WireError):
        decode_object(json.dumps({"audio": {"output": {"format": value}}}), SessionParams)


def test_formats_in_the_words_of_the_beta_protocol():
    assert wire_format("pcm16") == WireFormat()
    assert wire_format("g711_ulaw") == WireFormat(MU_LAW, 8000)
    assert wire_format("g711_alaw") == WireFormat(A_LAW, 8000)


def test_a_callers_packets_join_to_the_sound_and_fade_at_its_ends():
    output = CallOutput(16_000)
    sound = tone(400, 0.205)
    for begin in range(0, len(sound), 320):
        is_end = begin + 320 >= len(sound)
        output.play(sound[begin : begin + 320], is_end)
    joined = np.concatenate([output.packet() for _ in range(12)])
    whole = resample(sound, 16_000, 48_000)
    assert np.allclose(joined[240 : len(whole) - 240], whole[240:-240], atol=1e-6)
    assert joined[0] == 0 and not joined[len(whole) :].any()
    assert np.abs(np.diff(joined)).max() < 0.3 * 2 * np.pi * 400 / 48_000 * 1.2


def test_a_caller_hears_silence_instead_of_half_a_packet_and_nothing_after_a_clear():
    output = CallOutput(48_000)
    output.play(tone(400, 0.03, 48_000), is_end=False)
    assert output.packet().any() and not output.packet().any()  # the other 10 ms wait for their rest
    output.play(tone(400, 0.5, 48_000), is_end=False)
    assert output.packet().any()
    output.clear()
    rest = output.packet()
    assert not rest[240:].any() and not output.packet().any()
