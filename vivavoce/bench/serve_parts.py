"""Whom `viva bench serve` talks to: a pipeline of the published shape on random weights, of a tiny one, or a model."""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from vivavoce import hub
from vivavoce.bench.codec_quality import random_codec
from vivavoce.device import Device, resolve_dtype
from vivavoce.dialogue.history import HistoryWindow
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import median_seconds
from vivavoce.implementations import choose_moss_speech_codec
from vivavoce.minis.untrained import CONFIG as TINY
from vivavoce.minis.untrained import untrained_codec
from vivavoce.models.flow.state import VoicePrompt
from vivavoce.models.moss_speech.codec import EAR_RATE, GraphedCodec, MossSpeechCodec, SpokenState
from vivavoce.models.moss_speech.cpu import CpuCodec
from vivavoce.models.moss_speech.model import MossSpeech, MossSpeechConfig
from vivavoce.models.moss_speech.prompt import MossSpeechPrompt
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.s2s.conversation import REPLY_ROOM
from vivavoce.s2s.loading import load_moss_speech
from vivavoce.s2s.moss_speech import MossSpeechBackend, MossSpeechOptions

SHAPES = ("true", "tiny", "mini")
ROWS_A_SECOND = 12.5
OTHER_ROWS = 96  # of a session: instructions, heads and ends of turns, and its last page
TINY_PROMPT_CODES = 15


@dataclass(frozen=True)
class ServeLoad:
    """What a pipeline is to have room for."""

    sessions: int
    question_seconds: float
    reply_seconds: float

    @property
    def reply_rows(self) -> int:
        """Rows of one reply."""
        return round(self.reply_seconds * ROWS_A_SECOND)

    @property
    def context(self) -> int:
        """Rows of one session."""
        return round(self.question_seconds * ROWS_A_SECOND) + self.reply_rows + OTHER_ROWS

    def limits(self) -> EngineLimits:
        """An engine that holds them all, and a few who come and go; no past is so long that it must be compacted."""
        return EngineLimits(
            cache_rows=(self.sessions + 8) * self.context + REPLY_ROOM,
            context=round(self.context / HistoryWindow().high) + REPLY_ROOM,
            sequences_per_step=max(8, self.sessions + 8),
        )


class WordTokenizer(TextTokenizer):
    """As many ids as a published tokenizer would give, roughly; what they mean is nothing to random weights."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(None)
        self._vocabulary = vocabulary

    def encode(self, text: str) -> list[int]:
        """One id for each special token, word and sign."""
        pieces = re.findall(r"<\|[^|]*\|>|\w+| ?[^\w\s]|\n", text)
        return [zlib.crc32(piece.encode()) % self._vocabulary for piece in pieces]

    def decode(self, ids: list[int]) -> str:
        """Nothing."""
        return ""


def build(shape: str, device: Device, dtype: str, load: ServeLoad, options: MossSpeechOptions) -> MossSpeechBackend:
    """A pipeline that has room for the load and whose replies last as long as they are meant to."""
    if shape not in SHAPES:
        raise InputError(f"shape must be one of {', '.join(SHAPES)}, not {shape!r}")
    options = replace(
        options,
        most_output_tokens=load.reply_rows,
        least_output_tokens=load.reply_rows + 1,
        longest_loop=None,
        captioner=None,
    )
    if shape == "mini":
        folder = hub.resolve("mini-speech")
        return load_moss_speech(folder, None, None, str(device), dtype, load.limits(), options)
    kind = resolve_dtype(dtype, device)
    config = MossSpeechConfig() if shape == "true" else TINY
    model = MossSpeech.random(config, device.torch_device, kind, deviation=0.02 if shape == "true" else 0.15)
    codec, voice = _random_voice(shape, device)
    tokenizer = WordTokenizer(min(config.vocab_size, TINY.pad_token_id))
    core = Engine(model, device, kind, load.limits())
    prompt = MossSpeechPrompt(config, tokenizer)
    return MossSpeechBackend(core, codec, prompt, tokenizer, {"random": codec.flow.voice(voice)}, options)


def _random_voice(shape: str, device: Device) -> tuple[MossSpeechCodec, VoicePrompt]:
    """A codec as fast as the device has it, and a voice."""
    if shape == "true":
        codec, voice = random_codec(shape, device, torch.float16 if device.kind == "cuda" else torch.float32)
    else:
        codec = untrained_codec(device.torch_device)
        flow, codes = codec.flow.config, TINY_PROMPT_CODES
        voice = VoicePrompt(
            torch.arange(codes), torch.randn(codes * flow.ratio, flow.mel_bands), torch.randn(flow.speaker_dim)
        )
    choice = choose_moss_speech_codec(device)
    if choice.cls is GraphedCodec:
        return GraphedCodec(codec), voice
    return (CpuCodec(codec) if choice.cls is CpuCodec else codec), voice


@dataclass
class Talked:
    """What one session went through. Seconds."""

    ttfa: float | None = None
    """From the end of its turn to the first sound."""
    v2v: float | None = None
    """From the end of its turn to the first sound that can be heard, played at once."""
    underruns: int = 0
    dry_seconds: float = 0.0
    sound_seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Level:
    """One number of sessions. Milliseconds; percentiles are of sessions."""

    sessions: int
    ttfa_ms: dict[int, float]
    newcomer_ttfa_ms: dict[int, float]
    v2v_ms: dict[int, float]
    underruns: int
    sessions_that_ran_dry: int
    dry_seconds: float
    sound_seconds: float
    wall_seconds: float
    engine_busy: float
    """Share of the time in which the language model stepped."""
    step_ms: float
    longest_step_ms: float
    least_slack_ms: float | None
    """The least time a listener had left when a row of the language model came."""
    passes: int
    replies_a_pass: float
    ways: dict[str, dict[str, float]]
    """Of the ear and each way of the voice: passes, jobs in one, milliseconds of one, and the share of time it took."""
    first_sound_parts_ms: dict[str, float]
    """Where the wait for a first sound goes, medians: turn heard, reply begun, codes there, sound made, let out."""
    loop_lag_ms: float
    """The latest that the event loop was, at the 99th percentile."""
    threads: dict[str, float]
    """Shares of a core."""
    memory_bytes: int | None
    reserved_bytes: int | None
    watts: float | None
    failed: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether every listener heard every reply without a gap."""
        return not self.underruns and not self.failed


REPEATS = 5
SETTLING = 2  # hops after which a reply has the shapes it keeps
HEARD_SECONDS = 2.0


@torch.inference_mode()
def stages(pipeline: MossSpeechBackend, device: Device, batches: Sequence[int]) -> dict[str, Any]:
    """Milliseconds of hops by their codes and replies, of ear steps by streams, and of a first sound alone."""
    grain = pipeline.policy.grain
    sizes = pipeline.policy.sizes()
    return {
        "how": f"median of {REPEATS}, wall time, sound and codes read back",
        "hop_ms": {size: {count: _hop_ms(pipeline, device, count, size) for count in batches} for size in sizes},
        "first_codes": grain.frames + grain.lookahead,
        "first_sound_ms": _first_ms(pipeline, device),
        "ear_ms": {count: _ear_ms(pipeline, device, count) for count in batches},
        "speaking_bytes": _begun(pipeline, 1)[0].nbytes,
        "voice_bytes": pipeline.voice_of(None).cache.nbytes,
    }


def _begun(pipeline: MossSpeechBackend, count: int) -> list[SpokenState]:
    voice, left = pipeline.voice_of(None), pipeline.options.left_chunks
    return [pipeline.codec.start(voice, left, seed) for seed in range(count)]


def _codes(count: int) -> torch.Tensor:
    return torch.arange(count) % 64


def _hop_ms(pipeline: MossSpeechBackend, device: Device, count: int, size: int) -> float:
    grain, live = pipeline.policy.grain, [False] * count
    states = _begun(pipeline, count)
    for given in (grain.frames + grain.lookahead, *[grain.frames] * 3):
        _, states = pipeline.codec.step_batch(states, [_codes(given)] * count, live)

    def hop() -> None:
        nonlocal states
        sounds, states = pipeline.codec.step_batch(states, [_codes(size)] * count, live)
        torch.cat(sounds).cpu()

    return median_seconds(hop, device, REPEATS, SETTLING) * 1e3


def _first_ms(pipeline: MossSpeechBackend, device: Device) -> float:
    grain = pipeline.policy.grain

    def speak() -> None:
        sound, _ = pipeline.codec.step(_begun(pipeline, 1)[0], _codes(grain.frames + grain.lookahead))
        sound.cpu()

    return median_seconds(speak, device, REPEATS, SETTLING) * 1e3


def _ear_ms(pipeline: MossSpeechBackend, device: Device, count: int) -> float:
    ear = pipeline.codec.ear
    noise = 0.1 * torch.randn(round(HEARD_SECONDS * EAR_RATE), generator=torch.Generator().manual_seed(0))
    _, states = ear.step_batch([ear.initial_state()] * count, [noise] * count)
    piece = noise[: ear.samples_per_code]

    def step() -> None:
        nonlocal states
        codes, states = ear.step_batch(states, [piece] * count)
        torch.cat(codes).cpu()

    return median_seconds(step, device, REPEATS, SETTLING) * 1e3
