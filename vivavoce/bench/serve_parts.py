"""Parts of `viva bench serve`: the pipeline under test, its results, isolated stage timings, and the report."""

import re
import sys
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vivavoce import hub
from vivavoce.bench.codec_shapes import random_codec
from vivavoce.bench.serve_plot import percentile_text, save_levels
from vivavoce.device import Device, resolve_dtype
from vivavoce.dialogue.history import HistoryWindow
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import median_seconds
from vivavoce.implementations import choose_moss_speech_codec
from vivavoce.minis.untrained import CONFIG as TINY
from vivavoce.minis.untrained import untrained_codec
from vivavoce.models.flow.state import VoicePrompt
from vivavoce.models.moss_speech.codec import ENCODER_RATE, GraphedCodec, MossSpeechCodec, SpokenState
from vivavoce.models.moss_speech.cpu import CpuCodec
from vivavoce.models.moss_speech.model import MossSpeech, MossSpeechConfig
from vivavoce.models.moss_speech.prompt import MossSpeechPrompt
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.s2s.conversation import REPLY_ROOM
from vivavoce.s2s.moss_speech import MossSpeechBackend, load_moss_speech
from vivavoce.s2s.options import MossSpeechOptions

SHAPES = ("true", "tiny", "mini")
ROWS_A_SECOND = 12.5
OTHER_ROWS = 96  # per session: instructions, turn markers, and the last partial page
TINY_PROMPT_CODES = 15


@dataclass(frozen=True)
class ServeLoad:
    """The load that a pipeline must have memory for."""

    sessions: int
    question_seconds: float
    reply_seconds: float
    turns: int = 1
    """Questions and replies of one session."""

    @property
    def reply_rows(self) -> int:
        return round(self.reply_seconds * ROWS_A_SECOND)

    @property
    def context(self) -> int:
        return self.turns * (round(self.question_seconds * ROWS_A_SECOND) + self.reply_rows) + OTHER_ROWS

    def limits(self) -> EngineLimits:
        """Engine limits for all sessions and some newcomers, without history compaction."""
        return EngineLimits(
            cache_rows=(self.sessions + 8) * self.context + REPLY_ROOM,
            context=round(self.context / HistoryWindow().high) + REPLY_ROOM,
            sequences_per_step=max(8, self.sessions + 8),
        )


class WordTokenizer(TextTokenizer):
    """About as many ids as the published tokenizer gives; their values do not matter to random weights."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__(None)
        self._vocabulary = vocabulary

    def encode(self, text: str) -> list[int]:
        """One id per special token, word and punctuation mark."""
        pieces = re.findall(r"<\|[^|]*\|>|\w+| ?[^\w\s]|\n", text)
        return [zlib.crc32(piece.encode()) % self._vocabulary for piece in pieces]

    def decode(self, ids: list[int]) -> str:
        return ""


def build(shape: str, device: Device, dtype: str, load: ServeLoad, options: MossSpeechOptions) -> MossSpeechBackend:
    """A pipeline sized for the load, whose replies have a fixed length."""
    if shape not in SHAPES:
        raise InputError(f"shape must be one of {', '.join(SHAPES)}, not {shape!r}")
    options = replace(
        options,
        max_output_tokens=load.reply_rows,
        min_output_tokens=load.reply_rows + 1,
        max_loop=None,
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
    """The fastest codec implementation of the device, and a voice."""
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
class SessionResult:
    """Measurements of one session, in seconds."""

    ttfa: float | None = None
    """From the end of the turn to the first audio."""
    v2v: float | None = None
    """From the end of the turn to the first audible sample, if played at once."""
    underruns: int = 0
    dry_seconds: float = 0.0
    sound_seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Level:
    """Figures of one session count. Milliseconds; percentiles are over sessions."""

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
    """Share of time spent in engine steps."""
    step_ms: float
    max_step_ms: float
    min_slack_ms: float | None
    """Smallest playback lead when a row of the language model arrived."""
    passes: int
    replies_a_pass: float
    ways: dict[str, dict[str, float]]
    """Per batcher: batches, jobs and milliseconds per batch, and share of time."""
    first_sound_parts_ms: dict[str, float]
    """Median breakdown of the time to first audio: encoding, start, code generation, decoding, sending."""
    loop_lag_ms: float
    """Event loop lag, 99th percentile."""
    threads: dict[str, float]
    """CPU share of each thread."""
    memory_bytes: int | None
    reserved_bytes: int | None
    watts: float | None
    failed: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether every reply was played without an underrun."""
        return not self.underruns and not self.failed

    def as_json(self) -> dict[str, Any]:
        """The fields under the names that `serve.json` has had since its first version."""
        old = {"max_step_ms": "longest_step_ms", "min_slack_ms": "least_slack_ms"}
        return {old.get(name, name): value for name, value in asdict(self).items()} | {"holds": self.holds}


REPEATS = 5
SETTLING = 2  # warm-up hops until shapes are constant
HEARD_SECONDS = 2.0


@torch.inference_mode()
def stages(pipeline: MossSpeechBackend, device: Device, batches: Sequence[int]) -> dict[str, Any]:
    """Milliseconds of hops by size and batch, of encoder steps by batch, and of a first audio chunk."""
    unit = pipeline.policy.unit
    sizes = pipeline.policy.sizes()
    return {
        "how": f"median of {REPEATS}, wall time, sound and codes read back",
        "hop_ms": {size: {count: _hop_ms(pipeline, device, count, size) for count in batches} for size in sizes},
        "first_codes": unit.frames + unit.lookahead,
        "first_sound_ms": _first_ms(pipeline, device),
        "encoder_ms": {count: _encoder_ms(pipeline, device, count) for count in batches},
        "speaking_bytes": _started_states(pipeline, 1)[0].nbytes,
        "voice_bytes": pipeline.voice_of(None).cache.nbytes,
    }


def _started_states(pipeline: MossSpeechBackend, count: int) -> list[SpokenState]:
    voice, left = pipeline.voice_of(None), pipeline.options.left_chunks
    return [pipeline.codec.start(voice, left, seed) for seed in range(count)]


def _codes(count: int) -> torch.Tensor:
    return torch.arange(count) % 64


def _hop_ms(pipeline: MossSpeechBackend, device: Device, count: int, size: int) -> float:
    unit, live = pipeline.policy.unit, [False] * count
    states = _started_states(pipeline, count)
    for given in (unit.frames + unit.lookahead, *[unit.frames] * 3):
        _, states = pipeline.codec.step_batch(states, [_codes(given)] * count, live)

    def hop() -> None:
        nonlocal states
        sounds, states = pipeline.codec.step_batch(states, [_codes(size)] * count, live)
        torch.cat(sounds).cpu()

    return median_seconds(hop, device, REPEATS, SETTLING) * 1e3


def _first_ms(pipeline: MossSpeechBackend, device: Device) -> float:
    unit = pipeline.policy.unit

    def speak() -> None:
        sound, _ = pipeline.codec.step(_started_states(pipeline, 1)[0], _codes(unit.frames + unit.lookahead))
        sound.cpu()

    return median_seconds(speak, device, REPEATS, SETTLING) * 1e3


def _encoder_ms(pipeline: MossSpeechBackend, device: Device, count: int) -> float:
    encoder = pipeline.codec.speech_encoder
    noise = 0.1 * torch.randn(round(HEARD_SECONDS * ENCODER_RATE), generator=torch.Generator().manual_seed(0))
    _, states = encoder.step_batch([encoder.initial_state()] * count, [noise] * count)
    piece = noise[: encoder.samples_per_code]

    def step() -> None:
        nonlocal states
        codes, states = encoder.step_batch(states, [piece] * count)
        torch.cat(codes).cpu()

    return median_seconds(step, device, REPEATS, SETTLING) * 1e3


def print_level(level: Level) -> None:
    """Print a level on stderr as soon as it is measured."""
    first, newcomer = percentile_text(level.ttfa_ms), percentile_text(level.newcomer_ttfa_ms)
    slack = "" if level.min_slack_ms is None else f", least slack {level.min_slack_ms:.0f} ms"
    memory = "" if level.memory_bytes is None else f", {level.memory_bytes / 1e9:.0f} GB"
    watts = "" if level.watts is None else f", {level.watts:.0f} W"
    failed = f"; failed: {'; '.join(level.failed)}" if level.failed else ""
    print(
        f"{level.sessions} sessions: first sound p50/p95/p99 {first} ms, of newcomers {newcomer} ms; "
        f"{level.underruns} underruns in {level.sessions_that_ran_dry} sessions ({level.dry_seconds:.2f} s dry) of "
        f"{level.sound_seconds:.0f} s of sound; step {level.step_ms:.1f} ms (longest {level.max_step_ms:.0f}), "
        f"engine busy {level.engine_busy:.0%}{slack}; {level.replies_a_pass:.1f} replies a pass; "
        f"loop lag {level.loop_lag_ms:.1f} ms{memory}{watts}{failed}",
        file=sys.stderr,
        flush=True,
    )
    parts = ", ".join(f"{part} {each:.0f}" for part, each in level.first_sound_parts_ms.items())
    ways = "; ".join(
        f"{name} {way['passes']:.0f} × {way['ms']:.0f} ms of {way['jobs']:.1f} ({way['share']:.0%})"
        for name, way in level.ways.items()
    )
    threads = ", ".join(f"{name} {share:.0%}" for name, share in level.threads.items() if share >= 0.005)
    reserved = "" if level.reserved_bytes is None else f"; {level.reserved_bytes / 1e9:.0f} GB reserved"
    print(f"  first sound: {parts} ms; {ways}; of a core: {threads}{reserved}", file=sys.stderr, flush=True)


def print_stages(costs: dict[str, Any]) -> None:
    hops = "; ".join(f"hops of {size} codes {_by_count(each)}" for size, each in costs["hop_ms"].items())
    print(
        f"milliseconds by replies in the pass: {hops}; first sound {costs['first_sound_ms']:.1f}; "
        f"speech encoder {_by_count(costs['encoder_ms'])}; a reply holds {costs['speaking_bytes'] / 1e6:.0f} MB",
        file=sys.stderr,
        flush=True,
    )


def _by_count(milliseconds: dict[int, float]) -> str:
    return ", ".join(f"{count}: {each:.1f}" for count, each in milliseconds.items())


def print_result(result: dict[str, Any]) -> None:
    print(
        f"{result['what']}: shape {result['shape']} in {result['dtype']} on {result['device']}, replies of "
        f"{result['reply_seconds']:.0f} s: {result['most_without_a_gap']} sessions without a gap",
        file=sys.stderr,
        flush=True,
    )


def save(result: dict[str, Any], out: Path) -> None:
    """Write `serve.json`, and `serve.png` if matplotlib is installed."""
    curves = {"ttfa_ms": "at start", "newcomer_ttfa_ms": "newcomer under load"}
    title = f"{result['shape']} shape, {result['dtype']}, {result['device']}"
    save_levels(result, out, curves, "milliseconds to the first sound", title)
