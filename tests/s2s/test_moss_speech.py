"""MOSS-Speech behind a conversation, on the untrained miniature: real encoder, engine and vocoder."""

import asyncio
import copy
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.dialogue.voices import silence, talk
from tests.s2s.small_parts import SpeechParts, small_speech
from vivavoce.audio.chunking import ChunkGapEstimate
from vivavoce.audio.io import Sound
from vivavoce.audio.level import buzz
from vivavoce.audio.player import SimulatedClock
from vivavoce.device import pick
from vivavoce.dialogue.backend import ReplyPlan, Spoke
from vivavoce.dialogue.conversation import ReplyRequest
from vivavoce.dialogue.events import (
    InputTranscript,
    ItemTruncated,
    ReplyAudio,
    ReplyDone,
    ReplyStarted,
    ReplyText,
    TurnCommitted,
)
from vivavoce.dialogue.items import AudioPart, Message, TextPart
from vivavoce.dialogue.moderation import CallableChecker, Moderation
from vivavoce.dialogue.reply import GuardLimits, SpeakingOptions
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.dialogue.settings import ConversationSettings, TurnSettings
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.engine.sequence import Admission
from vivavoce.errors import CapacityError, InputError
from vivavoce.models.moss_speech.codec import DECODER_RATE
from vivavoce.models.moss_speech.prompt import DEFAULT_SYSTEM, Turn

# Turns follow each other here before the replies are played: they would be joined.
AT_ONCE = DialogueOptions(
    speaking=SpeakingOptions(max_ahead=None, guards=GuardLimits(stuck_seconds=None)), join_within_ms=0
)
SHORT = ConversationSettings(max_output_tokens=12)
WINDOW = 512


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> SpeechParts:
    return small_speech(tmp_path_factory.mktemp("untrained"))


@dataclass
class Caller:
    """A conversation and what it told."""

    conversation: LiveConversation
    clock: SimulatedClock
    events: list = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def on(cls, pipeline, options=AT_ONCE, settings=SHORT) -> "Caller":
        clock = SimulatedClock()
        settings = replace(settings, turn=replace(settings.turn, silence_duration_ms=240))
        caller = cls(LiveConversation(pipeline, settings, options, input_rate=16_000, clock=clock), clock)
        caller.reader = asyncio.get_running_loop().create_task(caller._read())
        return caller

    async def _read(self):
        async for event in self.conversation.events():
            self.events.append(event)
            self.news.set()

    async def hear(self, samples):
        for start in range(0, len(samples) - WINDOW + 1, WINDOW):
            self.clock.advance(0.032)
            self.conversation.hear(samples[start : start + WINDOW].astype(np.float32))
            await asyncio.sleep(0)

    async def until(self, kind, count=1):
        while len(self.all(kind)) < count:
            self.news.clear()
            async with asyncio.timeout(60):
                await self.news.wait()

    def all(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def sound(self, reply=None):
        return np.concatenate([e.samples for e in self.all(ReplyAudio) if reply in (None, e.reply)])

    async def settled(self):
        """All orders to the mind so far are done."""
        done = asyncio.Event()

        async def note():
            done.set()

        self.conversation._state._enqueue(note)
        await done.wait()

    async def close(self):
        await self.conversation.close()
        await self.reader


def pages_held(pipeline) -> int:
    pool = pipeline.core.scheduler.pool
    return pool.size - pool.free


def asked(seed=0, seconds=1.0):
    return np.concatenate([silence(0.32), talk(seconds, seed), silence(0.32)])


async def test_a_turn_of_speech_gets_speech_and_leaves_nothing(parts):
    async with parts.pipeline() as pipeline:
        caller = Caller.on(pipeline)
        await caller.hear(asked())
        await caller.until(ReplyDone)
        assert len(caller.sound()) == 12 * parts.codec.samples_per_code
        usage = caller.all(ReplyDone)[0].usage
        assert usage.output_audio == 12 and usage.input_audio > 10 and usage.input_text > 10
        assert pages_held(pipeline) > 0
        await caller.close()
        assert pages_held(pipeline) == 0 and not pipeline.core.scheduler.sequences


async def test_the_sound_is_what_the_codec_makes_of_the_codes(parts):
    async with parts.pipeline() as pipeline:
        caller = Caller.on(pipeline)
        await caller.hear(asked())
        await caller.until(ReplyDone)
        await caller.settled()
        codes = caller.conversation._state._codes[caller.all(ReplyAudio)[0].item]
        with torch.no_grad():
            whole = parts.codec.speak(torch.tensor(codes), parts.voice, left_chunks=10)
        np.testing.assert_allclose(caller.sound(), whole.numpy(), atol=2e-2)
        assert np.corrcoef(caller.sound(), whole.numpy())[0, 1] > 0.9999
        await caller.close()


async def test_the_sequence_is_the_conversation_in_the_published_format(parts):
    async with parts.pipeline() as pipeline:
        caller = Caller.on(pipeline)
        for turn in range(2):
            await caller.hear(asked(turn))
            await caller.until(ReplyDone, turn + 1)
            caller.clock.advance(2.0)  # until it has been played
        caller.conversation.add(Message("user", (TextPart("And in writing?"),)))
        await caller.settled()
        state = caller.conversation._state
        turns = [Turn("system", DEFAULT_SYSTEM["speech"])]
        for item in caller.conversation.items[:-1]:
            turns.append(Turn(item.content.role, state._codes[item.id]))
        turns.append(Turn("user", "And in writing?"))
        expected = [row for turn in turns for row in parts.prompt.turn(turn)]
        text = [(row[0], row[1] if row[0] == parts.model.config.modality_pad_token_id else None) for row in expected]
        have = [
            (row[0], row[1] if row[0] == parts.model.config.modality_pad_token_id else None)
            for row in state._sequence.rows
        ]
        assert have == text
        await caller.close()
        assert pages_held(pipeline) == 0


async def test_a_dropped_held_reply_leaves_no_trace(parts):
    """Dropped replies leave the sequence as if they had never been: the answer is the same without holding."""
    said = np.concatenate([silence(0.32), talk(0.8, 1), silence(0.128), talk(0.8, 2), silence(0.32)])
    sounds = []
    for holds in (True, False):
        async with parts.pipeline() as pipeline:
            options = DialogueOptions(speaking=AT_ONCE.speaking, holds_replies=holds)
            caller = Caller.on(pipeline, options)
            await caller.hear(said)
            await caller.until(ReplyDone)
            (item,) = [event.item for event in caller.all(TurnCommitted)]
            await caller.settled()
            sounds.append((caller.conversation._state._codes[item.id], caller.sound()))
            await caller.close()
            assert pages_held(pipeline) == 0
    held, plain = sounds
    # Without holding, the turn ends with the silence that confirmed it.
    assert plain[0][: len(held[0]) - 1] == held[0][:-1]
    assert len(held[1]) == len(plain[1])


async def test_an_interrupted_reply_is_cut_to_the_codes_that_were_heard(parts):
    async with parts.pipeline() as pipeline:
        caller = Caller.on(pipeline, settings=ConversationSettings(max_output_tokens=25))
        await caller.hear(asked())
        await caller.until(ReplyDone)
        reply = caller.all(ReplyStarted)[0].reply
        caller.conversation.played(reply, 1000)
        await caller.hear(talk(1.0, seed=6))
        cut = caller.all(ItemTruncated)[0]
        assert cut.audio_end_ms == 1000
        await caller.settled()
        state, config = caller.conversation._state, parts.model.config
        made = state._codes[cut.item.id]
        rows = state._rows_of[cut.item.id][1]
        kept = [row[1] for row in rows if row[0] == config.modality_pad_token_id and row[1] != config.eosp_token_id]
        assert len(made) == 25 and kept == made[:12]  # 12.5 frames a second, half a frame is none
        assert state._sequence.rows[: len(state._rows)] == state._rows
        await caller.close()
        assert pages_held(pipeline) == 0


async def test_text_in_text_out(parts):
    async with parts.pipeline() as pipeline:
        caller = Caller.on(pipeline, settings=ConversationSettings(modality="text", max_output_tokens=30))
        caller.conversation.add(Message("user", (TextPart("Hello"),)))
        caller.conversation.reply()
        await caller.until(ReplyDone)
        text = "".join(event.delta for event in caller.all(ReplyText))
        assert text and caller.conversation.items[-1].content.parts[0].text == text
        assert not caller.all(ReplyAudio) and caller.all(ReplyDone)[0].usage.output_audio == 0
        await caller.close()
        assert pages_held(pipeline) == 0


@pytest.mark.parametrize("rate", [16_000, 24_000])
async def test_sound_added_as_an_item_is_heard(parts, rate):
    async with parts.pipeline() as pipeline:
        caller = Caller.on(pipeline)
        sound = Sound(talk(0.8), 16_000).resampled(rate).samples[0]
        item, _ = caller.conversation.add(Message("user", (AudioPart(sound, rate),)))
        caller.conversation.reply()
        await caller.until(ReplyDone)
        assert len(caller.conversation._state._codes[item.id]) == 10
        await caller.close()
        assert pages_held(pipeline) == 0


async def test_what_fails_while_nothing_waits_for_it_is_logged(parts, caplog, monkeypatch):
    async def fail(*job):
        raise RuntimeError("the encoder failed")

    async with parts.pipeline() as pipeline:
        caller = Caller.on(pipeline)
        await caller.settled()
        with monkeypatch.context() as planted:
            planted.setattr(pipeline.speech_encoder, "do", fail)
            caller.conversation.add(Message("user", (AudioPart(talk(0.8), 16_000),)))
            await caller.settled()
        caller.conversation.reply()
        await caller.until(ReplyDone)
        assert caller.all(ReplyDone)[0].reason != "failed", "the next command recovers"
        await caller.close()
    (record,) = [each for each in caplog.records if each.exc_info]
    assert record.name == "vivavoce.s2s.conversation" and "in _codes_of" in caplog.text


async def test_a_reply_out_of_band_does_not_touch_the_conversation(parts):
    async with parts.pipeline() as pipeline:
        caller = Caller.on(pipeline)
        await caller.hear(asked())
        await caller.until(ReplyDone)
        await caller.settled()
        before = list(caller.conversation._state._rows)
        question = Message("user", (TextPart("Was that polite?"),))
        caller.conversation.reply(ReplyRequest(is_out_of_band=True, input=[question]))
        await caller.until(ReplyDone, 2)
        await caller.settled()
        assert caller.conversation._state._rows == before
        assert len(pipeline.core.scheduler.sequences) == 1
        caller.conversation.reply(ReplyRequest(is_out_of_band=True))
        await caller.until(ReplyDone, 3)
        await caller.settled()
        assert caller.conversation._state._rows == before
        assert len(pipeline.core.scheduler.sequences) == 1
        alone, seen = (event.usage for event in caller.all(ReplyDone)[1:])
        assert seen.input_audio > alone.input_audio == 0, "without an input it sees the conversation"
        assert seen.cached_text + seen.cached_audio == len(before) and alone.cached_audio == 0
        await caller.close()
        assert pages_held(pipeline) == 0


async def test_long_calls_drop_their_oldest_turns_and_keep_the_instructions(parts):
    async with parts.pipeline(cache_rows=1024, context=640) as pipeline:
        settings = ConversationSettings(instructions="Be kind.", max_output_tokens=12)
        caller = Caller.on(pipeline, settings=settings)
        for turn in range(8):
            await caller.hear(asked(turn, seconds=1.6))
            await caller.until(ReplyDone, turn + 1)
            await caller.settled()
            assert len(caller.conversation._state._rows) < 640
        assert {event.reason for event in caller.all(ReplyDone)} == {"max_output_tokens"}
        state = caller.conversation._state
        assert (
            state._first_visible in [item.id for item in caller.conversation.items[1:]]
            and len(caller.conversation.items) == 16
        )
        head = parts.prompt.turn(Turn("system", "Be kind."))
        assert state._rows[: len(head)] == head
        await caller.close()
        assert pages_held(pipeline) == 0


async def test_eight_concurrent_replies_equal_single_ones(parts):
    questions = [asked(seed, seconds=0.8) for seed in range(8)]

    async def answer(pipeline, question):
        caller = Caller.on(pipeline)
        await caller.hear(question)
        await caller.until(ReplyDone)
        sound = caller.sound()
        await caller.close()
        return sound

    async with parts.pipeline(voices_together=8) as pipeline:
        together = await asyncio.gather(*(answer(pipeline, question) for question in questions))
        assert pipeline.vocoder.jobs > pipeline.vocoder.batches, "several voices were made in one pass"
        assert pages_held(pipeline) == 0
    async with parts.pipeline() as pipeline:
        for question, sound in list(zip(questions, together, strict=True))[::4]:
            np.testing.assert_allclose(await answer(pipeline, question), sound, atol=1e-3)
    assert len({sound.tobytes() for sound in together}) == 8


@pytest.mark.full
async def test_a_first_chunk_that_would_not_last_waits_for_the_second(parts):
    async def said(pipeline, expected: float) -> list[np.ndarray]:
        pipeline.second_chunk_gap = ChunkGapEstimate(seconds=expected, share=0.0, margin=0.0)
        state, settings = pipeline.open(None), ConversationSettings(max_output_tokens=30)
        state.set_history((), settings)
        state.listen(buzz(1.0, 16_000).samples[0])
        pieces = [piece async for piece in state.reply(ReplyPlan("item", settings, lambda: 0.0)).pieces()]
        await state.close()
        return [piece.samples for piece in pieces if isinstance(piece, Spoke)]

    async with parts.pipeline(max_loop=None) as pipeline:
        soon, late = await said(pipeline, 0.001), await said(pipeline, 60.0)
        lacking = await said(pipeline, len(soon[0]) / DECODER_RATE + 1e-6)
        assert not pipeline.speaking
    assert len(late[0]) == len(soon[0]) + len(soon[1])
    assert len(lacking[0]) == len(soon[0]), "it is kept back for as long as it lacks, not until the second is there"
    assert np.allclose(np.concatenate(late), np.concatenate(soon), atol=1e-4)


@pytest.mark.full
async def test_under_load_chunks_are_long_and_the_first_waits_for_the_second(parts):
    settings = ConversationSettings(max_output_tokens=30)

    async def said(pipeline) -> list[int]:
        state = pipeline.open(None)
        state.set_history((), settings)
        state.listen(buzz(1.0, 16_000).samples[0])
        pieces = [piece async for piece in state.reply(ReplyPlan("item", settings, lambda: 0.0)).pieces()]
        await state.close()
        return [len(piece.samples) for piece in pieces if isinstance(piece, Spoke)]

    async with parts.pipeline(max_loop=None) as pipeline:
        pipeline.speaking |= {object(), object()}  # others
        crowded = await said(pipeline)
        assert crowded[0] >= pipeline.policy.unit.frames * 2 * parts.codec.samples_per_code
        pipeline.speaking.clear()
        assert (await said(pipeline))[0] < crowded[0]


async def test_process_settings_are_restored_on_close(parts):
    before = sys.getswitchinterval(), torch.get_num_threads()
    async with parts.pipeline(switch_seconds=0.003):
        assert sys.getswitchinterval() == pytest.approx(0.003) and torch.get_num_threads() == 1
    assert (sys.getswitchinterval(), torch.get_num_threads()) == before


async def test_a_faster_voice_says_the_same_in_less_time(parts):
    sounds = {}
    for speed in (1.0, 1.25):
        async with parts.pipeline() as pipeline:
            caller = Caller.on(pipeline, settings=ConversationSettings(speed=speed, max_output_tokens=25))
            await caller.hear(asked())
            await caller.until(ReplyDone)
            sounds[speed] = caller.sound()
            reply = caller.all(ReplyStarted)[0].reply
            caller.conversation.played(reply, 800)
            await caller.hear(talk(1.0, seed=6))
            await caller.settled()
            item = caller.all(ItemTruncated)[0].item
            rows = caller.conversation._state._rows_of[item.id][1]
            pad = parts.model.config.modality_pad_token_id
            assert sum(row[0] == pad for row in rows) - 1 == round(10 * speed), "12.5 frames a second, faster"
            await caller.close()
    assert len(sounds[1.25]) == round(len(sounds[1.0]) / 1.25)


async def test_a_reply_that_is_stuck_ends(parts):
    stuck = copy.deepcopy(parts.model)
    stuck.audio_lm_head.weight.data.zero_()  # every code is as likely, and greedy takes the first
    settings = ConversationSettings(sampling=GREEDY, max_output_tokens=200)
    async with replace(parts, model=stuck).pipeline(max_loop=20) as pipeline:
        caller = Caller.on(pipeline, settings=settings)
        await caller.hear(asked())
        await caller.until(ReplyDone)
        done = caller.all(ReplyDone)[0]
        assert done.reason == "max_output_tokens" and done.usage.output_audio == 24
        await caller.close()
        assert pages_held(pipeline) == 0


async def test_captions_come_with_the_sound(parts):
    class Captioner:
        async def transcribe(self, samples, rate, language=None):
            return f"[{len(samples)}]"

    async with parts.pipeline(captioner=Captioner(), caption_seconds=0.4) as pipeline:
        caller = Caller.on(pipeline, settings=ConversationSettings(max_output_tokens=30))
        caller.conversation.add(Message("user", (TextPart("Hello"),)))
        caller.conversation.reply()
        await caller.until(ReplyDone)
        texts = [event.delta for event in caller.all(ReplyText)]
        assert len(texts) > 1 and sum(int(text.strip(" []")) for text in texts) == len(caller.sound())
        assert caller.conversation.items[-1].content.parts[0].transcript == "".join(texts)
        await caller.close()


@pytest.mark.parametrize("forbidden", [None, 0, 1])
async def test_with_words_first_sound_is_emitted_after_its_words_are_checked(parts, forbidden):
    class Captioner:
        events = 0

        async def transcribe(self, samples, rate, language=None):
            self.events += 1
            return f"stretch{self.events - 1}:{len(samples)}"

    moderation = Moderation(CallableChecker(lambda text: f"stretch{forbidden}:" in text))
    options = DialogueOptions(speaking=replace(AT_ONCE.speaking, moderation=moderation))
    async with parts.pipeline(captioner=Captioner(), caption_seconds=0.4, words_first=True) as pipeline:
        caller = Caller.on(pipeline, options, ConversationSettings(max_output_tokens=30))
        caller.conversation.add(Message("user", (TextPart("Hello"),)))
        caller.conversation.reply()
        await caller.until(ReplyDone)
        lengths = [int(event.delta.partition(":")[2]) for event in caller.all(ReplyText)]
        heard = sum(len(event.samples) for event in caller.all(ReplyAudio))
        assert sum(lengths) == heard, "what is told is what is heard"
        assert len(lengths) == forbidden if forbidden is not None else len(lengths) > 1
        reason = caller.all(ReplyDone)[0].reason
        assert reason == ("max_output_tokens" if forbidden is None else "content_filter")
        await caller.close()


async def test_the_model_transcribes_its_output_and_input(parts):
    async with parts.pipeline(captioner="model") as pipeline:
        options = DialogueOptions(speaking=AT_ONCE.speaking, transcriber=pipeline.words)
        caller = Caller.on(pipeline, options, ConversationSettings(max_output_tokens=12, transcribe_input=True))
        await caller.hear(asked())
        await caller.until(ReplyDone)
        await caller.until(InputTranscript)
        await caller.settled()
        codes = caller.conversation._state._codes[caller.all(ReplyAudio)[0].item]
        prompt = parts.prompt
        rows = prompt.turn(Turn("system", "Write down what is said.")) + prompt.turn(Turn("user", codes))
        alone = Engine(parts.model, pick("cpu"), limits=EngineLimits(cache_rows=1024))
        sequence = alone.open(rows + prompt.open_reply("text"))
        made = alone.complete(sequence, Generation(GREEDY, max_new_rows=16 + 2 * len(codes)))
        words = parts.tokenizer.decode([row[0] for row in made if not parts.model.ends(row)]).strip()
        assert "".join(event.delta for event in caller.all(ReplyText)) == words
        await caller.close()
        assert pages_held(pipeline) == 0


async def test_an_engine_that_is_full_fails_the_reply_and_not_the_conversation(parts):
    async with parts.pipeline(cache_rows=128, context=128) as pipeline:
        caller = Caller.on(pipeline, settings=ConversationSettings(instructions="x" * 500, max_output_tokens=5))
        caller.conversation.add(Message("user", (TextPart("Hello"),)))
        caller.conversation.reply()
        await caller.until(ReplyDone)
        assert caller.all(ReplyDone)[0].reason == "failed" and "rows" in caller.all(ReplyDone)[0].error
        caller.conversation.update(lambda _: ConversationSettings(instructions="Hi", max_output_tokens=5))
        caller.conversation.reply()
        await caller.until(ReplyDone, 2)
        assert caller.all(ReplyDone)[1].reason == "max_output_tokens"
        await caller.close()
        assert pages_held(pipeline) == 0


HAPPENINGS = ["talk", "pause", "silence", "reply", "cancel", "commit", "clear", "delete", "add", "truncate", "wait"]


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(HAPPENINGS), min_size=2, max_size=9), st.sampled_from(["silence", "none"]))
def test_any_order_of_calls_frees_all_pages(parts, happenings, detector):
    sounds = {"talk": talk(0.5, 3), "pause": silence(0.128), "silence": silence(0.4)}

    async def play():
        async with parts.pipeline(cache_rows=2048) as pipeline:
            settings = ConversationSettings(max_output_tokens=10, turn=TurnSettings(detector=detector))
            caller = Caller.on(pipeline, settings=settings)
            conversation = caller.conversation
            for what in happenings:
                if what in sounds:
                    await caller.hear(sounds[what])
                elif what == "wait":
                    await caller.settled()
                else:
                    _try(conversation, what)
            await caller.close()
            started = [event.reply for event in caller.all(ReplyStarted)]
            assert sorted(event.reply for event in caller.all(ReplyDone)) == sorted(started)
            assert pages_held(pipeline) == 0 and not pipeline.core.scheduler.sequences

    asyncio.run(play())


def _try(conversation, what):
    some = conversation.items[0].id if conversation.items else "item_nobody"
    with suppress(InputError):
        {
            "reply": conversation.reply,
            "cancel": conversation.cancel,
            "commit": conversation.commit,
            "clear": conversation.clear_input,
            "delete": lambda: conversation.delete(some),
            "add": lambda: conversation.add(Message("user", (TextPart("hello"),))),
            "truncate": lambda: conversation.truncate(conversation.items[-1].id if conversation.items else "x", 100),
        }[what]()


async def test_a_conversation_is_refused_where_playback_has_no_slack_left(parts):
    async with parts.pipeline(admission=Admission(wanted_slack=0.1, rows=64)) as pipeline:
        beside = pipeline.open(lambda item, text, is_final: None)
        pipeline.core.slack.note(pipeline.core.scheduler.now(), left=0.02)
        with pytest.raises(CapacityError, match="20 ms of audio left"):
            pipeline.open(lambda item, text, is_final: None)
        await beside.close()
