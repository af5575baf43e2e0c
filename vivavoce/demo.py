"""`viva demo`: conversations on an untrained miniature, from sound to sound, offline.

Three callers speak at once. Their sound is heard 80 ms at a time and prefilled while they still talk; the first one
pauses, a reply is started on a fork and dropped because they go on; the second interrupts, and the history is cut to
what was heard. Replies are decoded chunk by chunk as they are made. The weights are random, so what is said is noise;
every part it goes through is the real one.
"""

import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vivavoce import hub
from vivavoce.audio.buzz import buzz
from vivavoce.audio.sound import Sound
from vivavoce.device import Device, pick
from vivavoce.dialogue.chunking import Grain, LeadPolicy, next_chunk
from vivavoce.dialogue.player import SimulatedPlayer
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.engine.sequence import Sequence
from vivavoce.engine.streaming import Reply, StreamingEngine
from vivavoce.minis.untrained import untrained_codec, write_untrained
from vivavoce.models.flow_state import FlowVoice
from vivavoce.models.interface import Row
from vivavoce.models.moss_speech import MossSpeech
from vivavoce.models.moss_speech_codec import EAR_RATE, VOICE_RATE, MossSpeechCodec
from vivavoce.models.moss_speech_prompt import MossSpeechPrompt, Turn
from vivavoce.models.tokenizer import TextTokenizer

FRAME_SAMPLES = 1280  # 80 ms at 16 kHz
REPLY_FRAMES = 25
HEARD_FRAMES = 8


def run(device: str = "auto", seed: int = 0, out: Path | None = None) -> dict[str, Any]:
    """Hold the conversations, print what happens, and return it; with `out`, write each reply there as a WAV."""
    place = pick(device)
    with tempfile.TemporaryDirectory() as folder:
        write_untrained(Path(folder), seed)
        found = hub.resolve(folder)
        shards = len(list(found.glob("*.safetensors")))
        model = MossSpeech.load(found, place.torch_device, place.dtype)
        prompt = MossSpeechPrompt(model.config, TextTokenizer.load(found))
    codec = untrained_codec(place.torch_device, seed)
    _say(f"MOSS-Speech in miniature, untrained: {shards} shards loaded on {place.name} ({place.dtype})")
    result = asyncio.run(_converse(model, codec, prompt, place, seed))
    replies = result.pop("replies")
    if out is not None:
        _write(replies, out)
    _say(
        f"{result['seconds_of_speech']:.1f} s of (meaningless) speech for {len(result['callers'])} callers in "
        f"{result['seconds']:.2f} s; {result['pages_held']} cache pages still held"
    )
    return result | {"device": place.name, "shards": shards}


async def _converse(
    model: MossSpeech, codec: MossSpeechCodec, prompt: MossSpeechPrompt, place: Device, seed: int
) -> dict[str, Any]:
    core = Engine(model, place, place.dtype, EngineLimits(cache_rows=4096))
    core.runner.warm_up()
    voice = codec.voice(buzz(1.6, EAR_RATE, seed), torch.ones(codec.flow.config.speaker_dim))
    begun = time.perf_counter()
    async with StreamingEngine(core) as engine:
        callers = [Caller(f"caller {n}", engine, model, codec, prompt, voice, seed + n) for n in (1, 2, 3)]
        await asyncio.gather(callers[0].goes_on_after_a_pause(), callers[1].interrupts(), callers[2].listens())
    seconds = time.perf_counter() - begun
    return {
        "callers": [caller.report for caller in callers],
        "replies": {caller.name: caller.spoken for caller in callers},
        "seconds_of_speech": sum(caller.report["seconds_of_speech"] for caller in callers),
        "seconds": seconds,
        "pages_held": core.scheduler.pool.size - core.scheduler.pool.free,
    }


@dataclass
class Caller:
    """One conversation: an ear, a sequence, a voice."""

    name: str
    engine: StreamingEngine
    model: MossSpeech
    codec: MossSpeechCodec
    prompt: MossSpeechPrompt
    voice: FlowVoice
    seed: int
    spoken: list[torch.Tensor] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)

    async def goes_on_after_a_pause(self) -> None:
        """A reply begun too soon is dropped."""
        sequence = await self._greeted()
        await self._hear(sequence, 1.6)
        fork = await self.engine.fork(sequence)
        await self.engine.append(fork, self._turn_end())
        async with await self.engine.generate(fork, self._settings()) as held:
            await anext(held)
        await self.engine.close(fork)
        _say(f"{self.name} pauses: a reply is begun on a fork and held … they go on: it is dropped without a trace")
        await self._hear(sequence, 0.8)
        await self._answered(sequence)

    async def interrupts(self) -> None:
        """What nobody heard is forgotten."""
        sequence = await self._greeted()
        await self._hear(sequence, 2.4)
        await self.engine.append(sequence, self._turn_end())
        asked, heard = len(sequence), 0
        async with await self.engine.generate(sequence, self._settings()) as reply:
            async for _ in reply:
                heard += 1
                if heard == HEARD_FRAMES:
                    break
        dropped = len(sequence) - asked - heard
        await self.engine.rewind(sequence, asked + heard)
        _say(f"{self.name} interrupts after {heard} frames: the reply stops, {dropped} unheard frames are forgotten")
        ended = [*self.prompt.close_speech(), *self.prompt.close_turn()]
        await self.engine.append(sequence, ended + self.prompt.open_turn("user") + self.prompt.open_speech())
        await self._hear(sequence, 0.8)
        await self._answered(sequence)

    async def listens(self) -> None:
        """The plain case."""
        sequence = await self._greeted()
        await self._hear(sequence, 3.2)
        await self._answered(sequence)

    async def _greeted(self) -> Sequence:
        """A conversation in which the user is about to speak."""
        head = self.prompt.turn(Turn("system", "You are the front desk. Answer the guest in speech."))
        return await self.engine.open(head + self.prompt.open_turn("user") + self.prompt.open_speech())

    async def _hear(self, sequence: Sequence, seconds: float) -> None:
        """Sound becomes codes, and codes rows, as it arrives."""
        samples = torch.from_numpy(buzz(seconds, EAR_RATE, self.seed).samples[0])
        state = self.codec.ear.initial_state()
        for piece in samples.split(FRAME_SAMPLES):
            codes, state = self.codec.ear.step(state, piece)
            await self.engine.append(sequence, self.prompt.codes(codes.tolist()))
        codes, _ = self.codec.ear.finish(state)
        await self.engine.append(sequence, self.prompt.codes(codes.tolist()))

    async def _answered(self, sequence: Sequence) -> None:
        """The user's turn ends; the reply is read, decoded and played."""
        begun = time.perf_counter()
        await self.engine.append(sequence, self._turn_end())
        player = SimulatedPlayer()
        async with await self.engine.generate(sequence, self._settings()) as reply:
            codes = await self._speak(reply, player, begun)
        await self.engine.close(sequence)
        seconds = sum(len(piece) for piece in self.spoken) / VOICE_RATE
        first_ms = 0.0 if player.started is None else player.started * 1e3
        self.report = {
            "name": self.name,
            "first_sound_ms": first_ms,
            "codes": codes,
            "seconds_of_speech": seconds,
            "underruns": player.underruns,
            "finish": reply.finish,
        }
        _say(f"{self.name}: first sound after {first_ms:.0f} ms, {seconds:.1f} s spoken, {player.underruns} underruns")

    async def _speak(self, reply: Reply, player: SimulatedPlayer, begun: float) -> list[int]:
        """Frames to sound, in chunks that grow with the lead over the player; the codes that were spoken."""
        config = self.codec.flow.config
        policy = LeadPolicy(Grain(config.chunk, config.lookahead))
        state = self.codec.start(self.voice, left_chunks=4, seed=self.seed)
        rows: list[Row] = []
        spoken = chunks = fed = 0
        is_last = False
        while not is_last:
            row = await anext(reply, None)
            is_last = row is None
            rows += [] if row is None else [row]
            codes = self.model.spoken_codes(rows)
            lead = player.lead(time.perf_counter() - begun)
            size = next_chunk(policy, len(codes) - spoken, is_last, chunks, lead)
            if size or is_last:
                # A chunk is fed with the codes that follow it, which the decoder keeps for the next one.
                until = len(codes) if is_last else spoken + size + config.lookahead
                given = torch.tensor(codes[fed:until], dtype=torch.long)
                sound, state = self.codec.step(state, given, final=is_last)
                fed = until
                self.spoken.append(sound.cpu())
                player.feed(time.perf_counter() - begun, len(sound) / VOICE_RATE)
                spoken, chunks = spoken + size, chunks + 1
        player.finish(time.perf_counter() - begun)
        return self.model.spoken_codes(rows)

    def _turn_end(self) -> list[Row]:
        """The user has finished; the machine's turn begins, in speech."""
        return [*self.prompt.close_speech(), *self.prompt.close_turn(), *self.prompt.open_reply("speech")]

    def _settings(self) -> Generation:
        sampling = Sampling(temperature=0.7, top_k=20, top_p=0.95)
        return Generation(sampling, max_new_rows=REPLY_FRAMES, min_new_rows=REPLY_FRAMES, seed=self.seed)


def _write(replies: dict[str, list[torch.Tensor]], out: Path) -> None:
    from vivavoce.audio.files import write

    out.mkdir(parents=True, exist_ok=True)
    for name, pieces in replies.items():
        write(out / f"{name.replace(' ', '-')}.wav", Sound(torch.cat(pieces).float().numpy(), VOICE_RATE))
    _say(f"the replies are in {out}")


def _say(line: str) -> None:
    from rich.console import Console

    Console(soft_wrap=True).print(f"• {line}", highlight=False)
