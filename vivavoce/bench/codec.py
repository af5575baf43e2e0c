"""`viva bench codec`: speed and streaming error of the MOSS-Speech codec.

Time to first audio, cost of a hop over a long reply beside recomputing everything, many sessions in a batch, and chunk
policies on a simulated player; then what streaming changes in the signal: left windows, chunk edges, vocoder
look-ahead, and the running normalisation of the speech encoder. Random weights: speed does not depend on their values,
and errors only compare settings with each other.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vivavoce.audio.chunking import ChunkPolicy, ChunkUnit, FixedPolicy, LeadPolicy, simulate
from vivavoce.audio.io import read
from vivavoce.audio.level import buzz
from vivavoce.bench.codec_errors import codes_that_differ, jumps_at_edges, look_right_errors, window_errors
from vivavoce.bench.codec_shapes import PROMPT_CODES, SHAPES, random_codec, random_codes
from vivavoce.device import Device, pick, resolve_dtype
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import median_seconds, stage, synchronize
from vivavoce.implementations import choose_moss_speech_codec
from vivavoce.models.flow.model import FlowDecoder
from vivavoce.models.flow.state import FlowVoice, VoicePrompt
from vivavoce.models.moss_speech.codec import DECODER_RATE, ENCODER_RATE, GraphedCodec, MossSpeechCodec, SpokenState


def print_result(result: dict[str, Any]) -> None:
    """Print text and tables on stderr."""
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True, highlight=False)
    console.print(f"{result['what']}, shape {result['shape']}, flow in {result['dtype']}, on {result['device']}")
    console.print(
        f"first sound from {result['first_sound_codes']} codes: {result['first_sound_ms']:.1f} ms; "
        f"hop of 5 codes (0.4 s of sound): {result['hop_ms'][5]:.1f} ms, "
        f"RTF {result['rtf']:.3f}; hop {len(result['hops_ms'])} / hop 5: "
        f"{result['hop_last_over_hop_5']:.2f}; speech encoder: {result['encoder']['step_ms']:.1f} ms per 80 ms"
    )
    recomputed = ", ".join(f"{hop}: {ms:.0f} ms" for hop, ms in result["recomputed_ms"].items())
    console.print(
        f"flow alone, run eagerly: recomputing everything at hop {recomputed}; keeping only codes and recomputing the "
        f"window {result['window_recomputed_ms']:.0f} ms"
    )
    errors = ", ".join(f"{window}: {error:.3f}" for window, error in result["windows"].items())
    console.print(f"mel under a left window of chunks, relative difference from full context: {errors}")
    held = ", ".join(f"{frames}: {error:.1e}" for frames, error in result["look_right"].items())
    console.print(f"vocoder on {result['speech']}, difference from the whole by mel frames held back: {held}")
    encoder = result["encoder"]
    console.print(
        f"speech encoder on it: {encoder['codes_that_differ']:.1%} of {encoder['codes']} codes differ from exact ones"
    )
    table = Table("sessions", "hop ms", "worst", "GB/s of the flow", "RTF", "underruns")
    for row in result["sessions"]:
        cells = (f"{row['hop_ms']:.1f}", f"{row['worst_hop_ms']:.1f}", f"{row['gb_s']:.0f}", f"{row['rtf']:.3f}")
        table.add_row(str(row["sessions"]), *cells, str(row["underruns"]))
    console.print(table)
    policies = Table("policy", "first sound ms", "added delay ms", "underruns", "chunks", "work s", "edges / inside")
    for row in result["policies"]:
        policies.add_row(
            row["policy"],
            f"{row['first_sound'] * 1e3:.0f}",
            f"{row['added_delay'] * 1e3:.0f}",
            str(row["underruns"]),
            str(row["chunks"]),
            f"{row['decode_seconds']:.2f}",
            f"{row['largest_jump_at_edges']:.3f} / {row['p999_jump_inside']:.3f}",
        )
    console.print(policies)
    console.print("edges: the largest jump between samples where chunks meet; inside: the 99.9th percentile of all")


def save(result: dict[str, Any], out: Path) -> None:
    """Write `codec.json` and `codec.png`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "codec.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(result["hops_ms"]) + 1), result["hops_ms"], label="cached state (flow and vocoder)")
    hops, times = zip(*result["recomputed_ms"].items(), strict=True)
    axes.plot(hops, times, "o-", label="recomputed (flow alone)")
    axes.axhline(result["hop_sound_ms"], color="grey", linestyle=":", label="audio produced by a hop")
    axes.set(xlabel="hop of 5 codes", ylabel="milliseconds", yscale="log", ylim=(1, None))
    axes.set_title(f"MOSS-Speech codec, {result['shape']} shape, {result['dtype']}, {result['device']}", fontsize=10)
    axes.legend()
    figure.savefig(out / "codec.png", dpi=130)


FIRST_CODES = 8  # a chunk of 5 and its look-ahead of 3
CODE_SECONDS = 0.08
REPLY_CODES = 100  # length of the reply for the chunk policies
RECOMPUTED_AT = (5, 20, 50, 100, 200)  # hops at which the whole prefix is recomputed, for comparison
SETTLING = 3  # warm-up hops until shapes are constant


def run(
    device: str = "auto",
    dtype: str = "auto",
    shape: str = "true",
    sessions: list[int] | None = None,
    hops: int = 200,
    left_chunks: int = 8,
    seconds_per_code: float = 0.007,
    speech: Path | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure, print, write `codec.json` and `codec.png` to `out`, and return what was measured."""
    if shape not in SHAPES:
        raise InputError(f"shape must be one of {', '.join(SHAPES)}, not {shape!r}")
    target = pick(device)
    kind = resolve_dtype("float16" if dtype == "auto" and target.kind == "cuda" else dtype, target)
    plain, prompt = random_codec(shape, target, kind)
    codec = GraphedCodec(plain) if choose_moss_speech_codec(target).cls is GraphedCodec else plain
    voice = codec.flow.voice(prompt)
    sessions = sessions or [1, 8, 32]
    if isinstance(codec, GraphedCodec):
        with stage("capturing graphs"):
            codec.warm_up(voice, sessions, left_chunks=left_chunks)

    def recording(rate: int) -> Tensor:
        sound = buzz(3.0, rate) if speech is None else read(speech, rate)
        return torch.from_numpy(sound.samples[0])

    with stage("warming up and timing hops"):
        by_codes = {count: _hop_seconds(codec, voice, target, left_chunks, count) for count in (5, 10, 20)}
        first = _first_sound_seconds(codec, voice, target, left_chunks)
    with stage(f"a reply of {hops} hops"):
        series = _long_reply(codec, voice, target, left_chunks, hops)
    with stage("recomputing everything, for comparison"):
        recomputed = _recomputed(plain.flow, prompt, target, hops)
        window_recomputed = _window_recomputed_seconds(plain.flow, voice, target, left_chunks)
    with stage("concurrent sessions"):
        session_rows = [_sessions(codec, voice, target, left_chunks, count) for count in sessions]
    with stage("chunk policies"):
        codes = plain.speech_encoder.encode(recording(ENCODER_RATE))[:REPLY_CODES].cpu()
        policies = [
            row | jumps_at_edges(codec, voice, left_chunks, codes, _clipped(sizes, len(codes)))
            for row, sizes in _policies(seconds_per_code, by_codes, first)
        ]
    with stage("windows, vocoder look-ahead and speech encoder"):
        sound = {
            "windows": window_errors(plain.flow, prompt),
            "encoder": _encoder_figures(plain, target) | codes_that_differ(plain, recording(ENCODER_RATE)),
            "look_right": look_right_errors(plain, recording(DECODER_RATE)),
            "speech": "a synthetic buzz" if speech is None else speech.name,
        }
    result = {
        "what": "MOSS-Speech codec, codes to 24 kHz sound, random weights",
        "shape": shape,
        "device": target.name,
        "dtype": str(kind).removeprefix("torch."),
        "torch": torch.__version__,
        "how": "wall time with the sound read back; medians",
        "prompt_codes": PROMPT_CODES,
        "left_chunks": left_chunks,
        "voice_bytes": voice.cache.nbytes,
        "state_bytes": plain.start(voice, left_chunks).nbytes,
        "first_sound_ms": first * 1e3,
        "first_sound_codes": FIRST_CODES,
        "hop_sound_ms": 5 * CODE_SECONDS * 1e3,
        "hop_ms": {count: seconds * 1e3 for count, seconds in by_codes.items()},
        "rtf": by_codes[5] / (5 * CODE_SECONDS),
        "hops_ms": [seconds * 1e3 for seconds in series],
        "hop_last_over_hop_5": _around(series, hops) / _around(series, 5),
        "recomputed_ms": recomputed,
        "window_recomputed_ms": window_recomputed * 1e3,
        "sessions": session_rows,
        **sound,
        "policies": policies,
    }
    print_result(result)
    if out is not None:
        save(result, out)
    return result


def _first_sound_seconds(codec: MossSpeechCodec, voice: FlowVoice, device: Device, left_chunks: int) -> float:
    """From the first codes of a reply to its first samples on the host."""
    codes = random_codes(codec.flow.config, FIRST_CODES)

    def speak() -> None:
        sound, _ = codec.step(codec.start(voice, left_chunks), codes)
        if not len(sound.cpu()):
            raise AssertionError(f"{FIRST_CODES} codes gave no sound")

    return median_seconds(speak, device, repeats=10 if device.kind == "cuda" else 2, warm_up=2)


def _hop_seconds(codec: MossSpeechCodec, voice: FlowVoice, device: Device, left_chunks: int, count: int) -> float:
    """A hop of `count` codes in the middle of a reply."""
    repeats = 10 if device.kind == "cuda" else 3
    return sorted(_long_reply(codec, voice, device, left_chunks, 5 + repeats, count)[5:])[repeats // 2]


def _long_reply(
    codec: MossSpeechCodec, voice: FlowVoice, device: Device, left_chunks: int, hops: int, count: int = 5
) -> list[float]:
    """Seconds of each hop of a long reply."""
    codes = random_codes(codec.flow.config, (hops + 1) * count + FIRST_CODES)
    state = codec.start(voice, left_chunks)
    _, state = codec.step(state, codes[: FIRST_CODES + count])
    times = []
    for hop in range(hops):
        begin = FIRST_CODES + (hop + 1) * count
        piece = codes[begin : begin + count]
        if not len(piece):
            break
        synchronize(device)
        start = time.perf_counter()
        sound, state = codec.step(state, piece)
        sound.cpu()
        times.append(time.perf_counter() - start)
    return times


def _around(series: list[float], hop: int) -> float:
    """Median over the hops around one, robust to single outliers."""
    window = sorted(series[max(0, hop - 5) : hop + 5])
    return window[len(window) // 2]


@torch.no_grad()
def _recomputed(flow: FlowDecoder, prompt: VoicePrompt, device: Device, hops: int) -> dict[int, float]:
    """Milliseconds of the flow alone when a hop recomputes prompt and reply."""
    times = {}
    for hop in (hop for hop in RECOMPUTED_AT if hop <= hops):
        codes = random_codes(flow.config, hop * flow.config.chunk + flow.config.lookahead)
        decode = partial(flow, codes, prompt, streaming=True, final=False)
        times[hop] = median_seconds(decode, device, repeats=2, warm_up=1) * 1e3
    return times


@torch.no_grad()
def _window_recomputed_seconds(flow: FlowDecoder, voice: FlowVoice, device: Device, left_chunks: int) -> float:
    """A hop of the flow alone that keeps only codes and recomputes its left window."""
    chunk = flow.config.chunk
    codes = random_codes(flow.config, (left_chunks + 3) * chunk + flow.config.lookahead)
    state = flow.start(voice, max(1, left_chunks), recompute=True)
    _, state = flow.step(state, codes[: (left_chunks + 2) * chunk + flow.config.lookahead])
    following = codes[-chunk:]
    return median_seconds(lambda: flow.step(state, following), device, repeats=2, warm_up=1)


def _sessions(codec: MossSpeechCodec, voice: FlowVoice, device: Device, left_chunks: int, count: int) -> dict[str, Any]:
    """One batched hop of `count` sessions; it must take less time than the audio it produces."""
    codes = random_codes(codec.flow.config, 200)
    states = [codec.start(voice, left_chunks, seed) for seed in range(count)]
    live = [False] * count
    _, states = codec.step_batch(states, [codes[:FIRST_CODES]] * count, live)
    times = []
    for hop in range(SETTLING + (12 if device.kind == "cuda" else 2)):
        begin = FIRST_CODES + 5 * hop
        synchronize(device)
        start = time.perf_counter()
        sounds, states = codec.step_batch(states, [codes[begin : begin + 5]] * count, live)
        torch.cat(sounds).cpu()
        times.append(time.perf_counter() - start)
    steady = times[SETTLING:]
    median = sorted(steady)[len(steady) // 2]
    report = simulate(FixedPolicy(_grain(codec), 5, 5), 200, 0.007, lambda chunk, frames, is_last: max(steady))
    return {
        "sessions": count,
        "hop_ms": median * 1e3,
        "gb_s": _hop_bytes(codec, voice, states) / median / 1e9,
        "worst_hop_ms": max(steady) * 1e3,
        "rtf": median / (5 * CODE_SECONDS),
        "underruns": report.underruns,
    }


def _hop_bytes(codec: MossSpeechCodec, voice: FlowVoice, states: Sequence[SpokenState]) -> int:
    """Bytes a flow hop moves: weights at every Euler step, the voice, each window in and out."""
    flow = getattr(codec.flow, "flow", codec.flow)  # unwrap the CUDA graph wrapper
    weights = sum(parameter.nbytes for parameter in flow.parameters())
    return codec.flow.config.euler_steps * weights + voice.cache.nbytes + 2 * sum(state.nbytes for state in states)


@torch.no_grad()
def _encoder_figures(codec: MossSpeechCodec, device: Device) -> dict[str, float]:
    """The streaming speech encoder: time per 80 ms of audio, ten seconds into a turn."""
    noise = 0.1 * torch.randn(16_000 * 12, generator=torch.Generator().manual_seed(0))
    _, state = codec.speech_encoder.step(codec.speech_encoder.initial_state(), noise[:160_000])
    times = []
    for begin in range(160_000, 160_000 + 1280 * 12, 1280):
        synchronize(device)
        start = time.perf_counter()
        codes, state = codec.speech_encoder.step(state, noise[begin : begin + 1280])
        codes.cpu()
        times.append(time.perf_counter() - start)
    median = sorted(times[2:])[len(times[2:]) // 2]
    return {"step_ms": median * 1e3, "rtf": median / CODE_SECONDS}


def _grain(codec: MossSpeechCodec) -> ChunkUnit:
    return ChunkUnit(codec.flow.config.chunk, codec.flow.config.lookahead)


def _policies(
    seconds_per_code: float, by_codes: dict[int, float], first: float
) -> list[tuple[dict[str, Any], list[int]]]:
    """Simulate each policy on a reply of 200 codes (16 s) with measured hop times; figures and chunk sizes."""
    unit = ChunkUnit(5, 3)
    policies: dict[str, ChunkPolicy] = {
        "lead": LeadPolicy(unit),
        "lead, cautious": LeadPolicy(unit, share=0.25, max_seconds=0.8),
        "fixed 2 then 4": FixedPolicy(unit, 2, 4),
        "fixed 5 then 10": FixedPolicy(unit, 5, 10),
        "fixed 25 then 25": FixedPolicy(unit, 25, 25),
    }
    per_code = max(0.0, (by_codes[20] - by_codes[5]) / 15)
    results = []
    for name, policy in policies.items():
        sizes: list[int] = []

        def seconds(chunk: int, frames: int, is_last: bool, sizes: list[int] = sizes) -> float:
            sizes.append(frames)
            return max(first if chunk == 0 else 0.0, by_codes[5] + per_code * (frames - 5))

        results.append(({"policy": name} | asdict(simulate(policy, 200, seconds_per_code, seconds)), sizes))
    return results


def _clipped(sizes: list[int], total: int) -> list[int]:
    """The first chunk sizes, cut to a sum of `total` codes."""
    clipped: list[int] = []
    while sum(clipped) < total:
        clipped.append(min(sizes[len(clipped)], total - sum(clipped)))
    return clipped
