"""The time of each stage of `viva demo` by itself, measured on the same question after the conversation."""

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import torch

from vivavoce.audio.io import Sound
from vivavoce.cascade.interfaces import ChatModel, ChatText
from vivavoce.cascade.local_chat import LocalChat
from vivavoce.cascade.local_recogniser import LocalRecogniser
from vivavoce.cascade.local_synthesiser import TTSSynthesiser
from vivavoce.cascade.parts import LoadedCascade
from vivavoce.cli.demo_conversation import DemoResult
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.engine.sampling import Generation
from vivavoce.models.moss_speech.codec import DECODER_RATE
from vivavoce.models.moss_speech.prompt import DEFAULT_SYSTEM, Turn
from vivavoce.models.whisper.steps import TranscriptionOptions
from vivavoce.s2s.moss_speech import MossSpeechBackend


@torch.no_grad()
def speech_costs(pipeline: MossSpeechBackend, question: Sound) -> dict[str, float]:
    """The times of a speech-to-speech model."""
    codec, core, prompt = pipeline.codec, pipeline.core, pipeline.prompt
    started = time.perf_counter()
    codes = codec.encode(question)
    encoder = (time.perf_counter() - started) / max(1, len(codes))
    turns = [Turn("system", DEFAULT_SYSTEM["speech"]), Turn("user", codes.tolist())]
    sequence = core.open(prompt.rows(turns, "speech"))
    core.step()
    started = time.perf_counter()
    rows = core.complete(sequence, Generation(pipeline.options.sampling, max_new_rows=250))
    frame = (time.perf_counter() - started) / len(rows)
    core.close(sequence)
    spoken = torch.tensor(pipeline.model.spoken_codes(rows))
    config = codec.flow.config
    state = codec.start(pipeline.voice_of(None), pipeline.options.left_chunks)
    first = config.chunk + config.lookahead
    started = time.perf_counter()
    sound, state = codec.step(state, spoken[:first])
    chunk = time.perf_counter() - started
    rest, _ = codec.step(state, spoken[first:], final=True)
    seconds = (len(sound) + len(rest)) / DECODER_RATE
    vocoder = time.perf_counter() - started
    return {
        "encoder_ms_per_frame": encoder * 1e3,
        "lm_ms_per_frame": frame * 1e3,
        "first_chunk_ms": chunk * 1e3,
        "rtf": (frame * len(rows) + vocoder) / seconds,
    }


def cascade_costs(
    cascade: LoadedCascade, question: Sound, answer: DemoResult, settings: ConversationSettings
) -> dict[str, float]:
    """The times of a cascade."""
    assert isinstance(cascade.asr, LocalRecogniser)
    assert isinstance(cascade.voice, TTSSynthesiser)
    recogniser = recogniser_ms(cascade.asr, question)
    first_words, chat = asyncio.run(_chat_times(cascade.chat, settings, answer.heard))
    started = time.perf_counter()
    first_sound, seconds = 0.0, 0.0
    for piece in cascade.voice.speaker.stream(answer.said or "Yes."):
        first_sound = first_sound or time.perf_counter() - started
        seconds += piece.shape[-1] / cascade.output_rate
    tts = time.perf_counter() - started
    return {
        "recogniser_ms": recogniser,
        "first_words_ms": first_words * 1e3,
        "first_piece_ms": first_sound * 1e3,
        "rtf": (chat + tts) / seconds,
    }


def recogniser_ms(recogniser: LocalRecogniser, question: Sound) -> float:
    samples = torch.from_numpy(question.mono().resampled(recogniser.rate).samples[0])
    started = time.perf_counter()
    list(
        recogniser.listener.segments(
            samples, TranscriptionOptions(padding="trim", timestamps=False, temperatures=(0.0,))
        )
    )
    return (time.perf_counter() - started) * 1e3


async def _chat_times(chat: ChatModel, settings: ConversationSettings, heard: str) -> tuple[float, float]:
    """Seconds to the first text of a reply and to its end, with the instructions prefilled."""
    messages = [{"role": "system", "content": settings.instructions}, {"role": "user", "content": heard}]
    async with AsyncExitStack() as stack:
        if isinstance(chat, LocalChat):  # a new one, since its thread ended with the conversation
            local = await stack.enter_async_context(LocalChat(chat.core, chat.tokenizer, chat.options))
            await local.read(messages[:1])
            chat = local
        started, first = time.perf_counter(), 0.0
        async for piece in chat.reply(messages, ConversationSettings()):
            if isinstance(piece, ChatText):
                first = first or time.perf_counter() - started
        return first, time.perf_counter() - started


def speech_cost_line(result: dict[str, Any]) -> str:
    return (
        f"cost: encoder {result['encoder_ms_per_frame']:.1f} ms, language model {result['lm_ms_per_frame']:.1f} ms "
        f"a frame of 80 ms, first chunk {result['first_chunk_ms']:.0f} ms; RTF {result['rtf']:.2f}"
    )


def written_cost_line(result: dict[str, Any]) -> str:
    return (
        f"cost: recogniser {result['recogniser_ms']:.0f} ms a turn, language model {result['lm_ms_per_frame']:.1f} ms "
        f"a frame of 80 ms, first chunk {result['first_chunk_ms']:.0f} ms; RTF {result['rtf']:.2f}"
    )


def cascade_cost_line(result: dict[str, Any]) -> str:
    return (
        f"cost: recogniser {result['recogniser_ms']:.0f} ms a turn, first words {result['first_words_ms']:.0f} ms, "
        f"first piece of sound {result['first_piece_ms']:.0f} ms; RTF {result['rtf']:.2f}"
    )
