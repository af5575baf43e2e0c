import builtins
import io
import struct

import av
import numpy as np
import pytest
import soundfile

from tests.memory import peak_bytes, seconds_of
from vivavoce.audio.io import FORMATS, Sound, blocks, float_to_pcm16, pcm16_to_float, read, write
from vivavoce.errors import InputError, MissingDependencyError

RATES = (8_000, 16_000, 24_000, 44_100, 48_000)
LARGEST_ERROR = {
    "wav": 1e-3,
    "wav-float": 0.0,
    "flac": 1e-3,
    "mp3": 0.3,
    "ogg": 0.2,
    "opus": 0.45,
    "m4a": 0.3,
}  # relative


def encoded(sound, format):
    file = io.BytesIO()
    write(file, sound, format)
    return file.getvalue()


def wav(samples, rate=16_000, subtype="PCM_16"):
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_comes_back(make_voice, format, channels, rate):
    samples = np.stack([make_voice(rate, 0.8, seed=3)] * channels) * np.float32([[1.0], [0.5]])[:channels]
    back = read(encoded(Sound(samples, rate), format), mono=False)
    assert back.rate == (48_000 if (format, rate) == ("opus", 44_100) else rate)
    expected = Sound(samples, rate).resampled(back.rate).samples
    length = expected.shape[1]
    assert back.channels == channels
    assert length <= back.samples.shape[1] <= length + (1_024 if format == "m4a" else 0)
    shifts = (-1, 0, 1) if format == "opus" else (0,)  # its own resampler is off by a sample
    errors = [np.linalg.norm(np.roll(back.samples[:, :length], shift) - expected) for shift in shifts]
    assert min(errors) <= LARGEST_ERROR[format] * np.linalg.norm(expected)


def test_int16_survives_exactly():
    values = np.arange(-32_768, 32_768).astype(np.int16)
    assert np.array_equal(float_to_pcm16(pcm16_to_float(values)), values)
    assert np.array_equal(pcm16_to_float(values.tobytes()), pcm16_to_float(values))
    for format in ("wav", "flac"):
        assert np.array_equal(
            float_to_pcm16(read(encoded(Sound(pcm16_to_float(values), 16_000), format)).samples[0]), values
        )


def test_conversion_to_int16_limits_instead_of_wrapping():
    assert float_to_pcm16(np.float32([1.0, 1.7, -1.7, 0.99999, 1e30])).tolist() == [32767, 32767, -32768, 32767, 32767]
    with pytest.raises(InputError, match="1 of 3 samples are NaN or infinite, the first at sample 1"):
        float_to_pcm16(np.float32([0.0, np.nan, 0.0]))
    with pytest.raises(InputError, match="odd number"):
        pcm16_to_float(b"\x00\x01\x02")


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"])
def test_wav_encodings_are_read(make_voice, subtype):
    samples = make_voice(16_000, 0.2)
    back = read(wav(samples, subtype=subtype)).samples[0]
    assert np.linalg.norm(back - samples) < 0.1 * np.linalg.norm(samples)


def test_webm_and_the_sound_of_a_video_are_read(make_voice):
    samples = make_voice(48_000, 0.5)[None]
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as container:
        stream = container.add_stream("libopus", rate=48_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(float_to_pcm16(samples), format="s16", layout="mono")
        frame.sample_rate, frame.pts = 48_000, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    back = read(file.getvalue())
    assert back.rate == 48_000
    assert np.corrcoef(back.samples[0, : samples.size], samples[0, : back.samples.size])[0, 1] > 0.9


def test_paths_bytes_and_open_files_give_the_same(tmp_path, make_voice):
    path = tmp_path / "voice.flac"
    write(path, Sound(make_voice(24_000, 0.3), 24_000))
    expected = read(path, rate=16_000).samples
    with path.open("rb") as file:
        for source in (str(path), path.read_bytes(), bytearray(path.read_bytes()), io.BytesIO(path.read_bytes()), file):
            assert np.array_equal(read(source, rate=16_000).samples, expected)


def test_the_content_counts_not_the_name(tmp_path, make_voice):
    path = tmp_path / "flac_inside.wav"
    path.write_bytes(encoded(Sound(make_voice(16_000, 0.1), 16_000), "flac"))
    assert read(path).seconds == pytest.approx(0.1)


@pytest.mark.parametrize("channels", [2, 7])
def test_channels_mix_down_to_their_mean_or_are_kept(make_voice, channels):
    samples = np.stack([make_voice(16_000, 0.1, seed=seed) for seed in range(channels)])
    data = wav(samples.T, subtype="FLOAT")
    assert np.allclose(read(data).samples[0], samples.mean(axis=0), atol=1e-6)
    assert np.array_equal(read(data, mono=False).samples, samples)


@pytest.mark.parametrize("rate", [None, 8_000, 24_000])
def test_blocks_are_the_file_cut_up(make_voice, rate):
    data = wav(make_voice(16_000, 1.05), subtype="FLOAT")
    parts = list(blocks(data, seconds=0.1, rate=rate))
    assert [round(part.seconds, 3) for part in parts] == [0.1] * 10 + [0.05]
    assert np.array_equal(np.concatenate([part.samples for part in parts], axis=1), read(data, rate=rate).samples)


def test_an_hour_is_read_in_the_memory_of_a_block(tmp_path, make_voice):
    path, minute = tmp_path / "hour.wav", float_to_pcm16(make_voice(8_000, 60.0))
    with soundfile.SoundFile(path, "w", 8_000, 1, "PCM_16") as file:
        for _ in range(60):
            file.write(minute)
    seconds, peak = peak_bytes(seconds_of, path, 16_000, 10.0)
    assert seconds == pytest.approx(3_600)
    assert peak < 8_000_000  # a block is 640 kB, the hour 230 MB


def test_ten_milliseconds_are_a_sound(make_voice):
    for format in FORMATS:
        assert read(encoded(Sound(make_voice(16_000, 0.01), 16_000), format)).seconds >= 0.01


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
def test_a_truncated_file_is_refused(make_voice, format, share):
    data = encoded(Sound(make_voice(16_000, 6.0), 16_000), format)
    with pytest.raises(InputError, match=r"cut short|damaged|not an audio file"):
        read(data[: int(len(data) * share)])


def test_a_wav_written_as_a_stream_is_whole(make_voice):
    data = bytearray(wav(make_voice(16_000, 0.5)))
    position = data.index(b"data") + 4
    for unknown in (0x7FFFFFFF, 0xFFFFFFFF):
        data[4:8] = data[position : position + 4] = struct.pack("<I", unknown)
        assert read(bytes(data)).seconds == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"the sound is empty \(0 bytes\)"),
        (b"hello, I am no sound at all. " * 50, "not an audio file"),
        (bytes(4_000), "not an audio file"),
        (b"RIFF", "not an audio file"),
        (wav(np.zeros(0, np.float32)), "no samples"),
        (wav(np.float32([0, np.nan, 0]), subtype="FLOAT"), "1 of 3 samples are NaN or infinite, the first at sample 1"),
        (wav(np.float32([0, np.inf]), subtype="FLOAT"), "NaN or infinite"),
        (wav(np.zeros(100, np.float32), rate=3), "3 Hz is out of range"),
        (wav(np.zeros(100, np.float32), rate=2_000_000_000), "2000000000 Hz is out of range"),
    ],
    ids=["empty", "text", "zeros", "head", "no-samples", "nan", "infinite", "slow", "fast"],
)
def test_bad_input_is_named(data, message):
    with pytest.raises(InputError, match=message) as caught:
        read(data)
    assert "\n" not in str(caught.value)


def test_a_picture_has_no_audio_track():
    file = io.BytesIO()
    with av.open(file, "w", format="image2pipe") as container:
        stream = container.add_stream("png", rate=1)
        stream.width = stream.height = 16
        stream.pix_fmt = "rgb24"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8))))
        container.mux(stream.encode(None))
    with pytest.raises(InputError, match=r"no audio track|not an audio file"):
        read(file.getvalue())


def test_a_playlist_cannot_make_us_open_another_file(tmp_path, make_voice):
    secret = tmp_path / "secret.ts"
    with av.open(str(secret), "w", format="mpegts") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(make_voice(16_000, 1.0)[None], format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 16_000, 0
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    playlists = {
        "list.m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{secret}\n#EXT-X-ENDLIST\n",
        "list.ffconcat": "ffconcat version 1.0\nfile secret.ts\n",
    }
    for name, text in playlists.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match="not an audio file"):
            read(tmp_path / name)
        with av.open((tmp_path / name).open("rb")) as unguarded:
            assert next(unguarded.decode(audio=0)).samples > 0


def test_missing_file_and_folder_are_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*nothing\.wav: No such file"):
        read(tmp_path / "nothing.wav")
    with pytest.raises(InputError, match="Is a directory"):
        read(tmp_path)
    with pytest.raises(InputError, match="No such file"):
        write(tmp_path / "nowhere" / "a.wav", Sound(np.zeros(10, np.float32), 16_000))


def test_headerless_pcm_is_not_guessed_at(tmp_path):
    path = tmp_path / "voice.raw"
    path.write_bytes(bytes(1_000))
    with pytest.raises(InputError, match=r"not an audio file|no audio track"):
        read(path)


def test_what_cannot_be_written_is_named():
    sound = Sound(np.zeros(100, np.float32), 96_000)
    with pytest.raises(InputError, match="sound format 'aiff'; name one of wav"):
        write("a.aiff", sound)
    with pytest.raises(InputError, match=r"mp3 cannot hold 1 channel.* at 96000 Hz"):
        write(io.BytesIO(), sound, "mp3")
    with pytest.raises(InputError, match="not 3"):
        write(io.BytesIO(), Sound(np.zeros((3, 100), np.float32), 16_000), "m4a")
    with pytest.raises(InputError, match="without samples"):
        write(io.BytesIO(), Sound(np.zeros(0, np.float32), 16_000), "wav")


def test_without_pyav_the_extra_is_named(monkeypatch, make_voice):
    data = encoded(Sound(make_voice(16_000, 0.1), 16_000), "m4a")
    real_import = builtins.__import__

    def import_without_av(name, *rest):
        if name == "av":
            raise ImportError(name)
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", import_without_av)
    with pytest.raises(MissingDependencyError, match=r"pip install 'vivavoce\[media\]'"):
        read(data)


def test_a_sound_refuses_what_is_no_sound():
    for samples, message in (
        (np.zeros(4, np.int16), "int16"),
        (np.zeros((1, 1, 4)), "shape"),
        (np.zeros((0, 4)), "shape"),
    ):
        with pytest.raises(InputError, match=message):
            Sound(samples, 16_000)
