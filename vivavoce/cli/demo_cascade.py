"""`viva demo --cascade`: the same question to a recogniser, a chat model and a TTS model, with the same figures."""

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch

from vivavoce.audio.io import Sound
from vivavoce.cascade.backend import ChatModel, ChatText
from vivavoce.cascade.local_chat import LocalChat
from vivavoce.cascade.parts import CascadeParts, LoadedCascade, LocalRecogniser, TTSSynthesiser, load_cascade
from vivavoce.cli.demo import DemoResult, DemoSubject, demonstrate
from vivavoce.dialogue.events import ConversationSettings
from vivavoce.errors import InputError
from vivavoce.models.whisper.transcriber import TranscriptionOptions

FRONT_DESK = """\
You are the voice of the front desk of the Garden Hotel. Answer in one short sentence, and only from these facts:
- Breakfast is served from seven until ten in the morning.
- The restaurant is open every day from noon until eleven.
- We have soup, salmon, chicken, steak and curry.
- A room is ninety euros a night, with breakfast.
- The wifi is free. The password is garden.
- You can check in from three in the afternoon.
- Please check out by eleven in the morning.
- You can pay by card or in cash."""


def run(
    device: str = "auto",
    parts: CascadeParts | None = None,
    wav: Path | None = None,
    microphone: float | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Ask, print what was heard and said and how long each stage took, and return it; with `out`, write the reply."""
    chosen = parts or CascadeParts()
    settings = ConversationSettings(instructions=FRONT_DESK)

    def load() -> DemoSubject:
        cascade = load_cascade(chosen, device)
        if not (isinstance(cascade.asr, LocalRecogniser) and isinstance(cascade.voice, TTSSynthesiser)):
            raise InputError(
                "the demo measures each part in this process; name models for recogniser and TTS, not addresses"
            )
        name = f"{chosen.asr} → {chosen.chat} → {chosen.tts}"

        def costs(question: Sound, answer: DemoResult) -> dict[str, float]:
            return _stage_costs(cascade, question, answer)

        return DemoSubject(name, cascade, costs, _cost_line, settings)

    return demonstrate(load, wav, microphone, out)


def _stage_costs(cascade: LoadedCascade, question: Sound, answer: DemoResult) -> dict[str, float]:
    """The time of each stage by itself, measured on the same question after the conversation."""
    assert isinstance(cascade.asr, LocalRecogniser)
    assert isinstance(cascade.voice, TTSSynthesiser)
    samples = torch.from_numpy(question.mono().resampled(cascade.input_rate).samples[0])
    started = time.perf_counter()
    list(
        cascade.asr.listener.segments(
            samples, TranscriptionOptions(padding="trim", timestamps=False, temperatures=(0.0,))
        )
    )
    recogniser = time.perf_counter() - started
    first_words, chat = asyncio.run(_chat_times(cascade.chat, answer.heard))
    started = time.perf_counter()
    first_sound, seconds = 0.0, 0.0
    for piece in cascade.voice.speaker.stream(answer.said or "Yes."):
        first_sound = first_sound or time.perf_counter() - started
        seconds += piece.shape[-1] / cascade.output_rate
    tts = time.perf_counter() - started
    return {
        "ear_ms": recogniser * 1e3,
        "first_words_ms": first_words * 1e3,
        "first_piece_ms": first_sound * 1e3,
        "rtf": (chat + tts) / seconds,
    }


async def _chat_times(chat: ChatModel, heard: str) -> tuple[float, float]:
    """Seconds to the first text of a reply and to its end, with the instructions prefilled."""
    messages = [{"role": "system", "content": FRONT_DESK}, {"role": "user", "content": heard}]
    async with AsyncExitStack() as stack:
        if isinstance(chat, LocalChat):  # its thread has ended with the conversation
            local = await stack.enter_async_context(LocalChat(chat.core, chat.tokenizer, chat.options))
            await local.read(messages[:1])
            chat = local
        started, first = time.perf_counter(), 0.0
        async for piece in chat.reply(messages, ConversationSettings()):
            if isinstance(piece, ChatText):
                first = first or time.perf_counter() - started
        return first, time.perf_counter() - started


def _cost_line(result: dict[str, Any]) -> str:
    return (
        f"cost: recogniser {result['ear_ms']:.0f} ms a turn, first words {result['first_words_ms']:.0f} ms, "
        f"first piece of sound {result['first_piece_ms']:.0f} ms; RTF {result['rtf']:.2f}"
    )
