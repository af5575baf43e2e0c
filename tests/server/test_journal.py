"""The journal: numbered, read by many at their own pace, kept for those who come back, and no longer."""

import asyncio
import json

import pytest

from vivavoce.server.realtime import event_log as module
from vivavoce.server.realtime.event_log import EventLog


def event(text: str = "") -> dict:
    return {"type": "test", "text": text}


async def read(cursor, count: int) -> list[dict]:
    told = []
    for _ in range(count):
        entry = await asyncio.wait_for(cursor.next(), 5)
        cursor.advance(entry)
        told.append(json.loads(entry.payload))
    return told


async def test_every_reader_gets_everything_in_order():
    journal = EventLog("tag", 30)
    early = journal.open_cursor(0)
    first = [journal.append(event(str(number))) for number in range(3)]
    late = journal.open_cursor(2)
    assert await read(early, 3) == first
    assert await read(late, 1) == first[2:]
    waiting = asyncio.create_task(read(late, 1))
    await asyncio.sleep(0)
    fourth = journal.append(event("3"))
    assert await waiting == [fourth] and await read(early, 1) == [fourth]
    assert [told["event_id"] for told in first] == ["event_tag_1", "event_tag_2", "event_tag_3"]


async def test_ids_of_others_are_not_known():
    journal = EventLog("tag", 30)
    journal.append(event())
    assert journal.sequence_of("event_tag_1") == 1
    for id in ("event_tag_2", "event_gat_1", "event_tag_-1", "event_tag_", "nonsense", "event_tag_" + "9" * 40):
        assert journal.sequence_of(id) is None


async def test_what_was_read_long_ago_is_forgotten_and_what_was_not_is_kept():
    journal = EventLog("tag", keep_seconds=0)
    slow, fast = journal.open_cursor(0), journal.open_cursor(0)
    for number in range(10):
        journal.append(event(str(number)))
    await read(fast, 10)
    await read(slow, 4)
    journal.append(event("10"))
    assert journal.first == 5  # the slow one has still to read it
    journal.close_cursor(slow)
    journal.append(event("11"))
    assert journal.first == 11  # the fast one has read up to 10


async def test_without_a_reader_everything_waits():
    journal = EventLog("tag", keep_seconds=0)
    for number in range(10):
        journal.append(event(str(number)))
    assert journal.first == 1 and len(await read(journal.open_cursor(0), 10)) == 10


async def test_pending_bytes_are_those_not_read():
    journal = EventLog("tag", 30)
    cursor = journal.open_cursor(0)
    assert cursor.pending_bytes == 0
    journal.append(event("x" * 1000))
    journal.append_frame(b"head", b"sound")
    assert cursor.pending_bytes == journal.kept_bytes > 1000
    await read(cursor, 1)
    assert cursor.pending_bytes == len(b"head") + 4 + len(b"sound")
    cursor.advance(await cursor.next())
    assert cursor.pending_bytes == 0


async def test_no_more_than_so_many_bytes_are_kept(monkeypatch):
    monkeypatch.setattr(module, "KEPT_BYTES", 5000)
    journal = EventLog("tag", keep_seconds=1000)
    cursor = journal.open_cursor(0)
    for _ in range(100):
        journal.append(event("x" * 200))
        await read(cursor, 1)
    assert journal.kept_bytes < 6000
    late = journal.open_cursor(3)  # it comes too late for some, and reads the oldest there is
    assert (await late.next()).sequence == journal.first


@pytest.mark.parametrize("text", ["ü", "\n", '"'])
async def test_an_event_is_the_json_it_was(text):
    journal = EventLog("tag", 30)
    journal.append(event(text))
    assert (await read(journal.open_cursor(0), 1))[0]["text"] == text
