"""The event log: numbered, read by many at their own pace, kept for those who come back, and no longer."""

import asyncio
import json

import pytest

from vivavoce.server.realtime import event_log as module
from vivavoce.server.realtime.event_log import EventLog
from vivavoce.server.realtime.server_events import OutputTextDelta


def event(text: str = "") -> OutputTextDelta:
    return OutputTextDelta("resp", "item", 0, delta=text)


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
    log.append_frame(b"head", b"sound")
    assert cursor.pending_bytes == log.stored_bytes > 1000
    await read(cursor, 1)
    assert cursor.pending_bytes == len(b"head") + 4 + len(b"sound")
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
