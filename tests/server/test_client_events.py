"""Client events beyond a plain turn, over a real socket."""

import asyncio
import base64

import numpy as np
import pytest

from tests.server.harness import connected, eventually
from tests.server.scripted import pitch, tone, watermark
from vivavoce.dialogue import events as dialogue
from vivavoce.dialogue.items import AudioPart, Item, Message
from vivavoce.server.realtime.audio_formats import WireFormat, decode, encode

RATE = 24_000
PREVIOUS_UNKNOWN = "item_create_invalid_previous_item_id"
TRUNCATE = {"type": "conversation.item.truncate", "item_id": "nobody", "content_index": 0}


def says(text: str, role: str = "user", **fields) -> dict:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}], **fields}


async def create(client, item: dict, **fields) -> dict:
    await client.send("conversation.item.create", item=item, **fields)
    added = await client.until("conversation.item.added")
    done = await client.until("conversation.item.done")
    assert added["item"] == done["item"]
    return added


async def test_items_are_put_where_the_client_says(server):
    async with connected(server) as client:
        assert (await create(client, says("two", id="b")))["previous_item_id"] is None
        assert (await create(client, says("three", "assistant", id="c")))["previous_item_id"] == "b"
        assert (await create(client, says("one", "system", id="a"), previous_item_id="root"))[
            "previous_item_id"
        ] is None
        middle = await create(client, says("two and a half", id="b2"), previous_item_id="b")
        assert middle["previous_item_id"] == "b"
        assert [item.id for item in server.host.opened[0].items] == ["a", "b", "b2", "c"]
        await client.send("conversation.item.create", item=says("x"), previous_item_id="nobody", event_id="mine")
        error = await client.error()
        assert error["event_id"] == "mine" and "nobody" in error["message"]
        await client.send("conversation.item.create", item=says("x", id="a"))
        assert (await client.error())["code"] == "item_create_duplicate_item_id"


async def test_a_spoken_item_brings_its_sound(server):
    async with connected(server) as client:
        sound = base64.b64encode(encode(tone(650, 0.5, RATE), WireFormat())).decode()
        item = {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": sound}]}
        added = await create(client, item)
        assert added["item"]["content"] == [{"type": "input_audio", "transcript": None}]
        await client.send("response.create")
        done = await client.until("response.done")
        assert done["response"]["output"][0]["content"][0]["transcript"] == "You said: tone 650"


async def test_an_out_of_band_reply_leaves_the_history_and_does_not_wait(server):
    async with connected(server) as client:
        await create(client, says("a long one", id="first"))
        await client.send("response.create")
        spoken = (await client.until("response.output_audio.delta"))["response_id"]
        asked = {
            "conversation": "none",
            "output_modalities": ["text"],
            "metadata": {"topic": "names"},
            "input": [{"type": "item_reference", "id": "first"}, says("and this")],
        }
        await client.send("response.create", response=asked)
        done = await client.until("response.done")
        response = done["response"]
        assert response["id"] != spoken and response["conversation_id"] is None  # the long one still speaks
        assert response["metadata"] == {"topic": "names"}
        assert response["output"][0]["content"][0]["text"] == "You said: and this"
        beside = [event for event in client.events if event.get("response_id") == response["id"]]
        assert {"response.output_item.added", "response.output_text.delta"} <= {event["type"] for event in beside}
        assert len(server.host.opened[0].items) == 2
        items = {event["item"]["id"] for event in client.of_type("conversation.item.added")}
        assert response["output"][0]["id"] not in items
        await client.send("response.create", response={"input": [{"type": "item_reference", "id": "nobody"}]})
        assert "nobody" in (await client.error())["message"]


async def test_cancelling_what_is_made_but_not_yet_heard(server):
    async with connected(server) as client:
        await create(client, says("a long one"))
        await client.send("response.create")
        item = (await client.until("response.output_audio.delta"))["item_id"]
        await client.send("response.cancel")
        done = (await client.until("response.done"))["response"]
        assert done["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
        truncated = client.of_type("conversation.item.truncated") or [await client.until("conversation.item.truncated")]
        assert truncated[0]["item_id"] == item and truncated[0]["audio_end_ms"] < 5000
        await client.send("response.cancel")
        assert (await client.error())["code"] == "response_cancel_not_active"
        assert len(client.of_type("response.done")) == 1


async def test_a_failed_reply_says_so(server):
    async with connected(server) as client:
        response = await client.say("please fail")
        assert response["status"] == "failed" and "script" in response["status_details"]["error"]["message"]
        assert (await client.say("and now?"))["status"] == "completed"


async def test_transcription_sessions_write_down_and_never_answer(server):
    for query, updates in (("?intent=transcription", False), ("?model=any", True)):
        async with connected(server, query) as client:
            created = await client.until("session.created")
            if updates:
                await client.send("transcription_session.update", session={"type": "transcription"})
                created = await client.until("session.updated")
            assert created["session"]["type"] == "transcription"
            assert created["session"]["object"] == "realtime.transcription_session"
            await client.speak(np.concatenate([tone(500, 0.5, RATE), np.zeros(RATE // 2, np.float32)]))
            completed = await client.until("conversation.item.input_audio_transcription.completed")
            assert completed["transcript"] == "tone 500" and completed["usage"] == {"type": "duration", "seconds": 1.0}
            deltas = client.of_type("conversation.item.input_audio_transcription.delta")
            assert "".join(event["delta"] for event in deltas) == "tone 500"
            await client.send("response.create")
            assert (await client.error())["code"] == "transcription_session"
            assert not client.of_type("response.created")


async def test_words_that_are_revised_wait_for_the_whole_text(server):
    async with connected(server) as client:
        await client.until("conversation.created")
        conversation = server.host.opened[0]
        for text, is_final in (("I s", False), ("I see", False), ("Ice", False), ("Ice cream", True)):
            conversation.emit(dialogue.InputTranscript("item", text, is_final))
        completed = await client.until("conversation.item.input_audio_transcription.completed")
        deltas = client.of_type("conversation.item.input_audio_transcription.delta")
        assert [event["delta"] for event in deltas] == ["I s", "ee"] and completed["transcript"] == "Ice cream"


async def test_a_turn_of_somebody_else_clears_the_buffer(server):
    async with connected(server) as client:
        await client.until("conversation.created")
        conversation = server.host.opened[0]
        conversation.emit(dialogue.SpeechStarted("item_1", 1000))
        conversation.emit(dialogue.SpeechStopped("item_1", 3000, 500))
        conversation.emit(dialogue.TurnIgnored("item_1"))
        await client.until("input_audio_buffer.cleared")
        assert not client.of_type("input_audio_buffer.committed")


async def test_segments_of_a_turn_name_their_speakers(server):
    async with connected(server) as client:
        await client.until("conversation.created")
        transcription = {"model": "gpt-4o-transcribe-diarize"}
        audio = {"input": {"transcription": transcription}}
        await client.send("session.update", session={"type": "realtime", "audio": audio})
        await client.until("session.updated")
        said = (dialogue.SpeakerSegment("A", "Hello.", 0.0, 1.2), dialogue.SpeakerSegment("B", "Hi.", 1.4, 2.0))
        server.host.opened[0].emit(dialogue.InputTranscript("item_1", "Hello. Hi.", True, 2.0, segments=said))
        await client.until("conversation.item.input_audio_transcription.completed")
        segments = client.of_type("conversation.item.input_audio_transcription.segment")
        assert [(each["speaker"], each["text"], each["start"]) for each in segments] == [
            ("A", "Hello.", 0.0),
            ("B", "Hi.", 1.4),
        ]
        assert len({each["id"] for each in segments}) == 2


async def test_warnings_and_silence_reach_the_client_that_asks(server):
    async with connected(server) as client:
        await client.until("conversation.created")
        server.host.opened[0].emit(dialogue.Warned("slow", "nobody asked yet"))
        await client.send("session.update", session={"viva": {"warnings": True}})
        await client.until("session.updated")
        server.host.opened[0].emit(dialogue.TurnTimedOut("item_1", 1000, 6000))
        server.host.opened[0].emit(dialogue.Warned("slow", "the machine is slow"))
        timed_out = await client.until("input_audio_buffer.timeout_triggered")
        assert (timed_out["item_id"], timed_out["audio_start_ms"], timed_out["audio_end_ms"]) == ("item_1", 1000, 6000)
        assert (await client.until("viva.warning"))["message"] == "the machine is slow"
        assert len(client.of_type("viva.warning")) == 1


async def test_a_reported_playback_position_replaces_the_estimate(server):
    async with connected(server) as client:
        await create(client, says("a long one"))
        await client.send("response.create")
        delta = await client.until("response.output_audio.delta")
        await client.send("viva.played", response_id=delta["response_id"], audio_ms=40)
        await client.speak(tone(700, 0.1, RATE))
        truncated = await client.until("conversation.item.truncated")
        assert truncated["item_id"] == delta["item_id"] and truncated["audio_end_ms"] == 40


async def test_sound_is_ducked_without_a_step(server):
    async with connected(server) as client:
        await client.until("conversation.created")
        conversation = server.host.opened[0]
        conversation.emit(dialogue.ReplyStarted("resp"))
        conversation.emit(dialogue.ReplyItemStarted("resp", "item", "message", None))
        sound = tone(400, 0.2, 16_000)
        conversation.emit(dialogue.ReplyAudio("resp", "item", sound))
        await client.until("response.output_audio.delta")
        await client.until("response.output_audio.delta")  # the first 0.2 s went out at once
        conversation.emit(dialogue.ReplyAudio("resp", "item", sound, gain=0.25))
        part = AudioPart(np.concatenate([sound, sound]), 16_000, "")
        conversation.emit(dialogue.ReplyItemDone("resp", Item("item", Message("assistant", (part,)))))
        conversation.emit(dialogue.ReplyDone("resp", "completed", dialogue.Usage()))
        await client.until("response.done")
        heard = decode(client.sound(), WireFormat())
        assert np.abs(heard[:4000]).max() == pytest.approx(0.3, abs=0.01)
        assert np.abs(heard[-4000:]).max() == pytest.approx(0.075, abs=0.005)
        steps = np.abs(np.diff(heard[200:-200]))  # but for the filter's answer to the tone's sudden ends
        assert steps.max() < 0.3 * 2 * np.pi * 400 / RATE * 1.1


async def test_sound_that_is_none_costs_a_piece_and_not_the_session(server):
    async with connected(server) as client:
        await client.until("conversation.created")
        conversation = server.host.opened[0]
        conversation.emit(dialogue.ReplyStarted("resp"))
        conversation.emit(dialogue.ReplyItemStarted("resp", "item", "message", None))
        conversation.emit(dialogue.ReplyAudio("resp", "item", np.full(500, np.nan, np.float32)))
        conversation.emit(dialogue.ReplyDone("resp", "completed", dialogue.Usage()))
        done = (await client.until("response.done"))["response"]
        assert done["output"][0]["status"] == "incomplete" and not client.of_type("error")
        assert done["status_details"]["error"]["code"] == "sound_lost"
        assert (await client.say("go on"))["status"] == "completed"


async def test_a_conversation_that_fails_ends_its_session_with_a_word(server):
    async with connected(server) as client, connected(server) as other:
        await client.until("conversation.created")
        server.host.opened[0].emit("no event at all")
        assert (await client.error())["code"] == "session_failed"
        assert await client.closed() == 1011
        assert (await other.say("and you?", output_modalities=["text"]))["status"] == "completed"
    await eventually(lambda: not server.host.alive, "both conversations are closed")


async def test_output_after_the_end_of_a_reply_dies(server):
    async with connected(server) as client:
        await client.say("short", output_modalities=["text"])
        reply = client.of_type("response.done")[0]["response"]["id"]
        conversation = server.host.opened[0]
        conversation.emit(dialogue.ReplyText(reply, "item", "stale"))
        conversation.emit(dialogue.ReplyAudio(reply, "item", tone(400, 0.1, 16_000)))
        conversation.emit(dialogue.ReplyDone(reply, "completed", dialogue.Usage()))
        await client.say("again", output_modalities=["text"])
        assert not [event for event in client.events if event.get("delta") == "stale"]
        assert len(client.of_type("response.done")) == 2


async def test_eight_sessions_at_once_hear_their_own_answers(server):
    async def talk(number: int) -> None:
        async with connected(server) as client:
            await client.say(f"watermark {number}")
            sound = decode(client.sound(), WireFormat())
            assert abs(pitch(sound, RATE) - watermark(f"You said: watermark {number}")) < 5

    await asyncio.gather(*(talk(number) for number in range(8)))


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ({"type": "nonsense"}, "invalid_value"),
        ({"type": None}, "missing_required_parameter"),
        ({"type": ["session.update"]}, "invalid_type"),
        ({}, "invalid_value"),
        ({"type": "session.update"}, "missing_required_parameter"),
        ({"type": "session.update", "session": []}, "invalid_type"),
        ({"type": "input_audio_buffer.append"}, "missing_required_parameter"),
        ({"type": "input_audio_buffer.append", "audio": "abc"}, "invalid_value"),
        ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "invalid_audio"),
        ({"type": "input_audio_buffer.commit"}, "input_audio_buffer_commit_empty"),
        ({"type": "conversation.item.create"}, "missing_required_parameter"),
        ({"type": "conversation.item.create", "item": {"type": "message", "role": "ghost"}}, "invalid_value"),
        ({"type": "conversation.item.create", "item": says("x") | {"id": "i" * 65}}, "string_above_max_length"),
        ({"type": "conversation.item.retrieve"}, "missing_required_parameter"),
        ({"type": "conversation.item.create", "item": says("x"), "previous_item_id": "nobody"}, PREVIOUS_UNKNOWN),
        ({"type": "conversation.item.retrieve", "item_id": "nobody"}, "item_retrieve_invalid_item_id"),
        ({"type": "conversation.item.delete", "item_id": "nobody"}, "item_delete_invalid_item_id"),
        ({"type": "conversation.item.truncate", "item_id": "x", "audio_end_ms": 1}, "missing_required_parameter"),
        (TRUNCATE | {"audio_end_ms": 1}, "item_truncate_invalid_item_id"),
        (TRUNCATE | {"audio_end_ms": -1}, "integer_below_min_value"),
        (TRUNCATE | {"audio_end_ms": 1, "content_index": 1}, "invalid_value"),
        ({"type": "conversation.item.delete", "item_id": 7}, "invalid_type"),
        ({"type": "response.create", "response": {"metadata": {"a": 1}}}, "invalid_type"),
        ({"type": "response.create", "response": {"conversation": "other"}}, "invalid_value"),
        ({"type": "response.cancel"}, "response_cancel_not_active"),
        ({"type": "viva.played", "response_id": "x", "audio_ms": "1"}, "invalid_type"),
    ],
)
async def test_what_is_wrong_is_an_error_that_names_the_event(server, event, code):
    async with connected(server) as client:
        await client.send(**({"type": "", **event} | {"event_id": "mine"}))
        error = await client.error()
        assert error["code"] == code and error["event_id"] == "mine" and error["message"]
        assert (await client.say("still there?", output_modalities=["text"]))["status"] == "completed"
