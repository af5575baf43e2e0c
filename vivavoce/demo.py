"""`viva demo`: conversations on an untrained miniature, from files on disk to frames of speech, offline.

Three callers speak at once. What they say arrives frame by frame and is prefilled while they still talk; the first one
pauses, a reply is started on a fork and dropped because they go on; the second interrupts, and the history is cut to
what was heard. The weights are random, so the frames are nonsense; every part they go through is the real one.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from vivavoce import hub
from vivavoce.device import Device, pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.engine.sequence import Sequence
from vivavoce.engine.streaming import StreamingEngine
from vivavoce.minis.untrained import write_untrained
from vivavoce.models.interface import Row
from vivavoce.models.moss_speech import MossSpeech
from vivavoce.models.moss_speech_prompt import MossSpeechPrompt, Turn
from vivavoce.models.tokenizer import TextTokenizer

FRAME_MS = 80
REPLY_FRAMES = 25
HEARD_FRAMES = 8


def run(device: str = "auto", seed: int = 0) -> dict[str, Any]:
    """Hold the conversations, print what happens, and return it."""
    place = pick(device)
    with tempfile.TemporaryDirectory() as folder:
        write_untrained(Path(folder), seed)
        found = hub.resolve(folder)
        shards = len(list(found.glob("*.safetensors")))
        model = MossSpeech.load(found, place.torch_device, place.dtype)
        prompt = MossSpeechPrompt(model.config, TextTokenizer.load(found))
    _say(f"MOSS-Speech in miniature, untrained: {shards} shards loaded on {place.name} ({place.dtype})")
    result = asyncio.run(_converse(model, prompt, place, seed))
    _say(
        f"{result['frames']} frames ({result['seconds_of_speech']:.1f} s of speech) for "
        f"{len(result['callers'])} callers in {result['seconds']:.2f} s; {result['pages_held']} cache pages still held"
    )
    return result | {"device": place.name, "shards": shards}


async def _converse(model: MossSpeech, prompt: MossSpeechPrompt, place: Device, seed: int) -> dict[str, Any]:
    core = Engine(model, place, place.dtype, EngineLimits(cache_rows=4096))
    core.runner.warm_up()
    begun = time.perf_counter()
    async with StreamingEngine(core) as engine:
        callers = await asyncio.gather(
            _goes_on_after_a_pause(engine, model, prompt, seed),
            _interrupts(engine, model, prompt, seed + 1),
            _listens(engine, model, prompt, seed + 2),
        )
    frames = sum(caller["frames"] for caller in callers)
    return {
        "callers": callers,
        "frames": frames,
        "seconds_of_speech": frames * FRAME_MS / 1000,
        "seconds": time.perf_counter() - begun,
        "pages_held": core.scheduler.pool.size - core.scheduler.pool.free,
    }


async def _goes_on_after_a_pause(
    engine: StreamingEngine, model: MossSpeech, prompt: MossSpeechPrompt, seed: int
) -> dict[str, Any]:
    sequence = await _hear(engine, prompt, seed, frames=20)
    fork = await engine.fork(sequence)
    await engine.append(fork, _turn_end(prompt))
    held = await engine.generate(fork, _settings(seed))
    await anext(held)
    _say("caller 1 pauses: a reply is started on a fork and held … they go on: it is dropped without a trace")
    await held.aclose()
    await engine.close(fork)
    await engine.append(sequence, prompt.codes(_codes(seed + 10, 12)))
    return await _answer(engine, model, prompt, sequence, seed, "caller 1")


async def _interrupts(
    engine: StreamingEngine, model: MossSpeech, prompt: MossSpeechPrompt, seed: int
) -> dict[str, Any]:
    sequence = await _hear(engine, prompt, seed, frames=30)
    await engine.append(sequence, _turn_end(prompt))
    asked = len(sequence)
    reply = await engine.generate(sequence, _settings(seed))
    heard = 0
    async for _ in reply:
        heard += 1
        if heard == HEARD_FRAMES:
            break
    await reply.aclose()
    dropped = len(sequence) - asked - heard
    await engine.rewind(sequence, asked + heard)
    _say(f"caller 2 interrupts after {heard} frames: the reply stops, {dropped} frames nobody heard are forgotten")
    again = [*prompt.close_speech(), *prompt.close_turn(), *prompt.open_turn("user"), *prompt.open_speech()]
    await engine.append(sequence, again + prompt.codes(_codes(seed + 20, 10)))
    return await _answer(engine, model, prompt, sequence, seed, "caller 2")


async def _listens(engine: StreamingEngine, model: MossSpeech, prompt: MossSpeechPrompt, seed: int) -> dict[str, Any]:
    sequence = await _hear(engine, prompt, seed, frames=40)
    return await _answer(engine, model, prompt, sequence, seed, "caller 3")


async def _hear(engine: StreamingEngine, prompt: MossSpeechPrompt, seed: int, frames: int) -> Sequence:
    """A conversation up to where the user has spoken so many frames, each prefilled as it comes."""
    head = prompt.turn(Turn("system", "You are the front desk. Answer the guest in speech."))
    sequence = await engine.open(head + prompt.open_turn("user") + prompt.open_speech())
    for code in _codes(seed, frames):
        await engine.append(sequence, prompt.codes([code]))
    return sequence


async def _answer(
    engine: StreamingEngine, model: MossSpeech, prompt: MossSpeechPrompt, sequence: Sequence, seed: int, name: str
) -> dict[str, Any]:
    """End the user's turn and read the reply."""
    await engine.append(sequence, _turn_end(prompt))
    begun = time.perf_counter()
    reply = await engine.generate(sequence, _settings(seed))
    rows: list[Row] = []
    first_ms = 0.0
    async for row in reply:
        first_ms = first_ms or (time.perf_counter() - begun) * 1000
        rows.append(row)
    codes = model.spoken_codes(rows)
    _say(f"{name}: first frame after {first_ms:.0f} ms, {len(codes)} frames, codes {codes[:8]} …")
    await engine.close(sequence)
    return {"name": name, "first_frame_ms": first_ms, "frames": len(codes), "codes": codes, "finish": reply.finish}


def _turn_end(prompt: MossSpeechPrompt) -> list[Row]:
    """The user has finished; the machine's turn begins, in speech."""
    return [*prompt.close_speech(), *prompt.close_turn(), *prompt.open_reply("speech")]


def _settings(seed: int) -> Generation:
    return Generation(Sampling(0.7, 20, 0.95), max_new_rows=REPLY_FRAMES, min_new_rows=REPLY_FRAMES, seed=seed)


def _codes(seed: int, count: int) -> list[int]:
    return [int(code) for code in np.random.default_rng(seed).integers(0, 1024, count)]


def _say(line: str) -> None:
    from rich.console import Console

    Console().print(f"• {line}", highlight=False)
