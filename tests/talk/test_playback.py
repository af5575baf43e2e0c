"""The queue between the conversation and the loudspeaker, and the audio of devices and files."""

import asyncio
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from vivavoce.audio.io import Sound, read, write
from vivavoce.errors import InputError, MissingDependencyError
from vivavoce.talk.audio import MAX_LATE_SECONDS, PACKET_SECONDS, DeviceAudio, FileAudio, PacketPace, sound_devices
from vivavoce.talk.playback import PlaybackBuffer

RATE = 24_000


def tone(seconds: float, rate: int, hertz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def test_replies_are_played_in_order_and_silence_follows():
    playback = PlaybackBuffer(RATE)
    playback.add("one", np.full(3, 0.5, np.float32))
    playback.add("two", np.full(2, 0.25, np.float32))
    assert playback.read(4).tolist() == [0.5, 0.5, 0.5, 0.25]
    assert playback.played("one").samples == 3 and playback.played("two").samples == 1
    assert not playback.has("one") and playback.has("two") and not playback.is_empty
    assert playback.read(4).tolist() == [0.25, 0, 0, 0] and playback.is_empty


def test_a_cleared_reply_stops_and_the_next_one_is_played():
    playback = PlaybackBuffer(RATE)
    playback.add("one", np.full(8, 0.5, np.float32))
    playback.read(2)
    playback.add("two", np.full(2, 0.25, np.float32))
    playback.clear("one")
    assert playback.read(3).tolist() == [0.25, 0.25, 0]
    assert playback.played("one").samples == 2


def test_the_gain_holds_for_sound_that_was_queued_before_it():
    playback = PlaybackBuffer(RATE)
    playback.add("one", np.full(4, 0.5, np.float32))
    playback.set_gain(0.5)
    assert playback.read(4).tolist() == [0.25] * 4
    assert playback.level() == 0.25 and playback.level() == 0.0  # since the last call


def test_the_first_audible_sample_is_timed_with_the_latency_of_the_device():
    playback = PlaybackBuffer(RATE, clock=lambda: 10.0)
    playback.latency = 0.5
    playback.add("one", np.concatenate([np.zeros(RATE // 2), np.ones(RATE)]).astype(np.float32))
    playback.read(RATE)
    assert playback.played("one").first_audible == pytest.approx(11.0)
    assert playback.played("none").first_audible is None


async def converse(audio: FileAudio | DeviceAudio, playback: PlaybackBuffer, seconds: float) -> np.ndarray:
    """What the audio gives to a conversation within some seconds."""
    heard: list[np.ndarray] = []
    task = asyncio.create_task(audio.run(heard.append, RATE, playback, lambda: True))
    await asyncio.wait([task], timeout=seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return np.concatenate(heard)


async def test_a_file_is_heard_in_real_time_and_both_sides_are_written(tmp_path):
    write(tmp_path / "question.wav", Sound(tone(0.3, 16_000), 16_000))
    playback = PlaybackBuffer(RATE)
    playback.add("one", tone(0.2, RATE, 880.0))
    began = asyncio.get_running_loop().time()
    heard = await converse(FileAudio([tmp_path / "question.wav"], tmp_path / "both.wav"), playback, 30)
    assert asyncio.get_running_loop().time() - began >= 0.7  # the file, and the pause after it
    np.testing.assert_allclose(heard[2000:5000], tone(0.3, RATE)[2000:5000], atol=0.01)
    both = read(tmp_path / "both.wav", mono=False)
    assert both.samples.shape[0] == 2 and both.seconds >= 0.7
    np.testing.assert_allclose(both.samples[1, :4000], tone(0.2, RATE, 880.0)[:4000], atol=1e-3)


def test_a_silent_or_absent_file_is_refused(tmp_path):
    write(tmp_path / "silent.wav", Sound(np.zeros(16_000, np.float32), 16_000))
    with pytest.raises(InputError, match=r"silent\.wav is silent"):
        FileAudio([tmp_path / "silent.wav"])
    with pytest.raises(InputError, match=r"absent\.wav"):
        FileAudio([tmp_path / "absent.wav"])


class StandInStream:
    """A stream of sounddevice whose callback the test calls."""

    latency = 0.02
    opened: ClassVar[list["StandInStream"]] = []

    def __init__(self, **options):
        self.options, self.is_running = options, False
        StandInStream.opened.append(self)

    def __enter__(self):
        self.is_running = True
        return self

    def __exit__(self, *exc_info):
        self.is_running = False


class StandInPortAudioError(Exception):
    """As sounddevice's."""


def stand_in(devices: dict[str, dict]) -> SimpleNamespace:
    """The part of sounddevice that is used, with these devices by kind: there is no sound hardware in a test."""

    def query_devices(name, kind):
        if kind not in devices or name not in (None, devices[kind]["name"]):
            raise ValueError(f"No {kind} device matching {name!r}")
        return devices[kind]

    return SimpleNamespace(
        query_devices=query_devices,
        PortAudioError=StandInPortAudioError,
        InputStream=StandInStream,
        OutputStream=StandInStream,
    )


DEVICES = {
    "input": {"name": "microphone", "index": 1, "default_samplerate": 48_000.0},
    "output": {"name": "loudspeaker", "index": 2, "default_samplerate": 44_100.0},
}


async def test_devices_run_at_their_own_rates(monkeypatch):
    monkeypatch.setitem(sys.modules, "sounddevice", stand_in(DEVICES))
    monkeypatch.setattr(StandInStream, "opened", [])
    playback = PlaybackBuffer(RATE)
    playback.add("one", tone(1.0, RATE))
    task = asyncio.create_task(converse(DeviceAudio(), playback, 0.3))
    while len(StandInStream.opened) < 2 or not all(each.is_running for each in StandInStream.opened):
        await asyncio.sleep(0.01)
    microphone, loudspeaker = StandInStream.opened
    spoken = tone(0.2, 48_000)
    for packet in np.split(spoken, 10):
        microphone.options["callback"](packet[:, None], len(packet), None, None)
    played = np.zeros((4410, 1), np.float32)
    for block in np.split(played, 10):
        loudspeaker.options["callback"](block, len(block), None, None)
    heard = await task
    assert microphone.options["samplerate"] == 48_000 and loudspeaker.options["samplerate"] == 44_100
    assert 0.19 * RATE < len(heard) <= 0.2 * RATE
    np.testing.assert_allclose(heard[500:4000], tone(0.2, RATE)[500:4000], atol=0.02)
    np.testing.assert_allclose(played[500:4000, 0], tone(0.1, 44_100)[500:4000], atol=0.02)
    assert playback.latency == 0.02
    assert not any(each.is_running for each in StandInStream.opened)


def test_a_machine_without_devices_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "sounddevice", stand_in({"input": DEVICES["input"]}))
    with pytest.raises(InputError, match=r"no loudspeaker was found.*--wav"):
        DeviceAudio()
    with pytest.raises(InputError, match=r"no microphone 'other' was found"):
        DeviceAudio(microphone="other")
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with pytest.raises(MissingDependencyError, match=r"vivavoce\[talk\]"):
        sound_devices()


def test_a_device_that_is_in_use_is_named(monkeypatch):
    def refuse(**options):
        raise StandInPortAudioError("Device unavailable")

    module = stand_in(DEVICES)
    module.InputStream = refuse
    monkeypatch.setitem(sys.modules, "sounddevice", module)
    with pytest.raises(InputError, match="'microphone' cannot be opened"):
        asyncio.run(DeviceAudio().run(lambda samples: None, RATE, PlaybackBuffer(RATE), lambda: True))


def test_a_file_is_played_where_there_is_a_loudspeaker(monkeypatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "sounddevice", stand_in(DEVICES))
    monkeypatch.setattr(StandInStream, "opened", [])
    write(tmp_path / "question.wav", Sound(tone(0.1, RATE), RATE))
    audio = FileAudio([tmp_path / "question.wav"])
    asyncio.run(converse(audio, PlaybackBuffer(RATE), 30))
    assert len(StandInStream.opened) == 1 and audio.silence_line is None
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    asyncio.run(converse(audio, PlaybackBuffer(RATE), 30))
    assert audio.silence_line is not None and "not played" in audio.silence_line


async def test_after_a_stall_a_file_goes_on_at_the_pace_of_speech():
    heard: list[np.ndarray] = []
    pace = PacketPace(lambda packet: None, None, RATE, heard, [])
    packets = pace.packets(tone(0.4, RATE))
    await pace.send(packets[0])
    time.sleep(0.5)
    resumed = time.monotonic()
    for packet in packets[1:]:
        await pace.send(packet)
    assert time.monotonic() - resumed > (len(packets) - 2) * PACKET_SECONDS - MAX_LATE_SECONDS
    np.testing.assert_array_equal(np.concatenate(heard), tone(0.4, RATE))
