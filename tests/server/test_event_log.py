"""The event log: numbered, read by many at their own pace, kept for those who come back, and no longer."""

import asyncio
import json

import pytest

from tests.server.scripted import tone
from vivavoce.server.realtime import event_log as module
from vivavoce.server.realtime.audio_events import OPUS, AudioEventEncoder, AudioHead, AudioPiece
from vivavoce.server.realtime.audio_formats import MU_LAW, PCM
from vivavoce.server.realtime.event_log import EventLog
from vivavoce.server.realtime.server_events import OutputTextDelta


def event(text: str = "") -> OutputTextDelta:
    return OutputTextDelta("resp", "item", 0, delta=text)


def pieces(encoding: str, wire_rate: int, seconds: float, rate: int = 24_000) -> list[AudioPiece]:
    """An item's audio in pieces of 40 ms, with the piece that ends it."""
    head = AudioHead("resp", "item", 0, rate, encoding, wire_rate, is_binary=encoding == OPUS)
    sound, step = tone(440, seconds, rate), rate // 25
    starts = range(0, len(sound), step)
    return [
        *(AudioPiece(head, start, sound[start : start + step].tobytes(), False) for start in starts),
        AudioPiece(head, len(sound), b"", True),
    ]


async def read_audio(log: EventLog, after: int) -> list[str | bytes]:
    """All that a connection sends to a client that has the events up to `after`."""
    cursor, sent = log.open_cursor(after), []
    encoder = AudioEventEncoder(log.tag, cursor.after)
    while log.entry_at(cursor.position) is not None:
        entry = await cursor.next()
        cursor.advance(entry)
        sent += encoder.messages(entry.sequence, entry.payload)
    log.close_cursor(cursor)
    return sent


async def read(cursor, count: int) -> list[dict]:
    sent = []
    for _ in range(count):
        entry = await asyncio.wait_for(cursor.next(), 5)
        cursor.advance(entry)
        sent.append(json.loads(entry.payload))
    return sent


async def test_every_reader_gets_everything_in_order():
    log = EventLog("tag", 30)
    early = log.open_cursor(0)
    for number in range(3):
        log.append(event(str(number)))
    late = log.open_cursor(2)
    first = await read(early, 3)
    assert [sent["delta"] for sent in first] == ["0", "1", "2"]
    assert await read(late, 1) == first[2:]
    waiting = asyncio.create_task(read(late, 1))
    await asyncio.sleep(0)
    log.append(event("3"))
    fourth = await waiting
    assert fourth[0]["delta"] == "3" and await read(early, 1) == fourth
    assert [sent["event_id"] for sent in first] == ["event_tag_1", "event_tag_2", "event_tag_3"]


async def test_ids_of_others_are_not_known():
    log = EventLog("tag", 30)
    log.append(event())
    assert log.sequence_of("event_tag_1") == 1
    for id in ("event_tag_2", "event_gat_1", "event_tag_-1", "event_tag_", "nonsense", "event_tag_" + "9" * 40):
        assert log.sequence_of(id) is None


async def test_what_was_read_long_ago_is_forgotten_and_what_was_not_is_kept():
    log = EventLog("tag", replay_seconds=0)
    slow, fast = log.open_cursor(0), log.open_cursor(0)
    for number in range(10):
        log.append(event(str(number)))
    await read(fast, 10)
    await read(slow, 4)
    log.append(event("10"))
    assert log.first == 5  # the slow one has still to read it
    log.close_cursor(slow)
    log.append(event("11"))
    assert log.first == 11  # the fast one has read up to 10


async def test_without_a_reader_everything_waits():
    log = EventLog("tag", replay_seconds=0)
    for number in range(10):
        log.append(event(str(number)))
    assert log.first == 1 and len(await read(log.open_cursor(0), 10)) == 10


async def test_pending_bytes_are_those_not_read():
    log = EventLog("tag", 30)
    cursor = log.open_cursor(0)
    assert cursor.pending_bytes == 0
    log.append(event("x" * 1000))
    log.append_audio(pieces(PCM, 24_000, 0.04)[0])
    assert cursor.pending_bytes == log.stored_bytes > 1000
    await read(cursor, 1)
    assert cursor.pending_bytes == module.HEAD_BYTES + 4 * 960
    cursor.advance(await cursor.next())
    assert cursor.pending_bytes == 0


async def test_stored_events_are_limited_in_bytes(monkeypatch):
    monkeypatch.setattr(module, "MAX_REPLAY_BYTES", 5000)
    log = EventLog("tag", replay_seconds=1000)
    cursor = log.open_cursor(0)
    for _ in range(100):
        log.append(event("x" * 200))
        await read(cursor, 1)
    assert log.stored_bytes < 6000
    late = log.open_cursor(3)  # it comes too late for some, and reads the oldest there is
    assert (await late.next()).sequence == log.first


@pytest.mark.parametrize("text", ["ü", "\n", '"'])
async def test_an_event_is_the_json_it_was(text):
    log = EventLog("tag", 30)
    log.append(event(text))
    assert (await read(log.open_cursor(0), 1))[0]["delta"] == text


@pytest.mark.parametrize(("encoding", "rate"), [(PCM, 16_000), (MU_LAW, 8_000), (OPUS, 48_000)])
async def test_audio_is_resumed_after_any_event_sample_for_sample(encoding, rate):
    log = EventLog("tag", 30)
    log.append(event("before"))
    for piece in pieces(encoding, rate, seconds=1.3):
        log.append_audio(piece)
    log.append(event("after"))
    whole = await read_audio(log, 0)

    def number(message: str | bytes) -> int:
        is_frame = isinstance(message, bytes)
        return (
            int.from_bytes(message[8:12], "little")
            if is_frame
            else int(json.loads(message)["event_id"].rpartition("_")[2])
        )

    numbers = [number(message) for message in whole]
    assert numbers == sorted(set(numbers)) and numbers[-1] == log.last
    for index in range(len(whole)):
        resumed = await read_audio(log, numbers[index])
        if encoding == OPUS:  # its encoder adapts to what it has encoded before; the packets have the same positions
            assert [message[:12] for message in resumed] == [message[:12] for message in whole[index + 1 :]]
        else:
            assert resumed == whole[index + 1 :]


@pytest.mark.parametrize("count", [1, 2, 20])
async def test_audio_that_comes_after_a_resume_continues_sample_for_sample(count):
    log, sound = EventLog("tag", 30), pieces(PCM, 16_000, seconds=1.3)
    for piece in sound[:count]:
        log.append_audio(piece)
    cursor = log.open_cursor(log.last)
    for piece in sound[count:]:
        log.append_audio(piece)
    encoder, resumed = AudioEventEncoder(log.tag, cursor.after), []
    while log.entry_at(cursor.position) is not None:
        entry = await cursor.next()
        cursor.advance(entry)
        resumed += encoder.messages(entry.sequence, entry.payload)
    assert resumed == (await read_audio(log, 0))[count:]


async def test_the_end_of_audio_that_is_not_resampled_is_no_event():
    *_, end = pieces(PCM, 24_000, 0.1)
    assert end.is_silent and not AudioEventEncoder("tag", 0).messages(1, end)
