"""Speed of a Whisper of a published shape on random weights (speed does not depend on their values).

Measures the encoder on full windows; a decoder step beside its memory-bandwidth floor (weights, keys and values read
once); the cost of verifying a draft beside a plain step; and concurrent requests beside sequential ones.
`python -m vivavoce.bench.asr_shape --shape large-v2 --device cuda` needs torch only.
"""

import argparse
import json
import platform
import time
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vivavoce.device import Device, pick, resolve_dtype
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.engine.sequence import Sequence
from vivavoce.engine.speculative import Speculation
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import median_seconds, read_bandwidth, stage, synchronize
from vivavoce.models.interface import Row
from vivavoce.models.whisper.config import SIZES, WhisperSettings, WhisperTokens
from vivavoce.models.whisper.cuda import WindowEncoder
from vivavoce.models.whisper.engine import WhisperWriter
from vivavoce.models.whisper.model import Whisper

WARM_UP, REPEATS = 3, 20
STEPS, TIMES = 8, 5  # steps per measurement (they may overlap), and measurements
CONTEXT = 64  # tokens of each text when its step is measured
DRAFTED = 7  # draft tokens verified per text


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of a step at one batch size, its floor, and with draft verification."""

    texts: int
    step_ms: float
    floor_ms: float
    check_ms: float

    @property
    def over_floor(self) -> float:
        """Ratio to the memory-bandwidth floor."""
        return self.step_ms / self.floor_ms

    @property
    def break_even_accepted(self) -> float:
        """Draft tokens that must be accepted on average before drafts pay, if drafting is free."""
        return self.check_ms / self.step_ms - 1


class WrongGuesses:
    """Drafts of a fixed length that are always rejected."""

    def __init__(self, token: int) -> None:
        self.token = token

    def propose(self, sequence: Sequence, max_rows: int) -> list[Row]:
        """Repeat a suppressed token."""
        return [(self.token, sequence.rows[-1][1])] * max_rows


def run(
    shape: str = "large-v2",
    device: str = "auto",
    dtype: str = "auto",
    batches: Many[int] = (1, 8, 32, 64),
    requests: int = 64,
    tokens: int = 100,
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure, print, write `asr-shape.json` to `out`, and return what was measured."""
    if shape not in SIZES:
        raise InputError(f"shape must be one of {', '.join(SIZES)}, not {shape!r}")
    target = pick(device)
    kind = resolve_dtype(dtype, target)
    config = SIZES[shape]
    with stage("reading memory, for the floor"):
        bandwidth = read_bandwidth(target)
    with stage("random weights"):
        bench = ShapeBench(Whisper.random(config, target.torch_device, kind), target, max(*batches, requests))
    result: dict[str, Any] = {
        "what": "Whisper, random weights",
        "shape": shape,
        "device": target.name,
        "dtype": str(kind).removeprefix("torch."),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "how": f"wall time, median of {REPEATS} after {WARM_UP}, of steps {TIMES} times {STEPS}; steps from {CONTEXT} "
        f"tokens of full windows on, sampling and reading the tokens included; {DRAFTED} draft tokens a text to verify",
    }
    with stage("encoder"):
        result["encoder_ms"] = {str(windows): bench.encoder_ms(windows) for windows in (1, 8)}
    with stage("decoder"):
        bench.fill()
        costs = [bench.step_cost(texts, bandwidth) for texts in batches]
        result["steps"] = [
            asdict(c) | {"over_floor": c.over_floor, "kept_to_pay": c.break_even_accepted} for c in costs
        ]
    with stage("requests"):
        result["requests"] = bench.requests(requests, tokens)
    print_result(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "asr-shape.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    return result


class ShapeBench:
    """A random model with its engine, and the measurements on them."""

    def __init__(self, model: Whisper, device: Device, windows: int) -> None:
        self.model, self.device, self.windows = model, device, windows
        self.tokens = WhisperTokens.of_vocabulary(model.config.vocab_size)
        settings = WhisperSettings.of_size(model.config, self.tokens)
        never_ends = (*settings.suppressed, self.tokens.endoftext)
        self.encoder = WindowEncoder(model.encoder)
        self.writer = WhisperWriter(model, self.tokens, WhisperSettings(suppressed=never_ends), windows)
        rows = windows * (CONTEXT + 16 * STEPS * (1 + TIMES))
        limits = EngineLimits(cache_rows=min(rows, windows * model.config.max_target_positions),
                              rows_per_step=1024, sequences_per_step=windows)  # fmt: skip
        self.engine = Engine(self.writer, device, model.decoder.embed_tokens.weight.dtype, limits)
        self._windows: list[int] = []

    def mel(self, windows: int) -> torch.Tensor:
        """Random mel input.  # [window, mel, frame]"""
        config, like = self.model.config, self.model.decoder.embed_tokens.weight
        return torch.randn(windows, config.num_mel_bins, config.window_frames, device=like.device, dtype=like.dtype)

    @torch.inference_mode()
    def encoder_ms(self, windows: int) -> float:
        mel = self.mel(windows)
        return 1e3 * median_seconds(lambda: self.encoder(mel), self.device, REPEATS, WARM_UP)

    @torch.inference_mode()
    def fill(self) -> None:
        """Encode a window for every text."""
        while len(self._windows) < self.windows:
            self._windows += self._encoded(min(8, self.windows - len(self._windows)))

    def _encoded(self, count: int) -> list[int]:
        return self.writer.store.hold(self.model.decoder.cross_kv(self.encoder(self.mel(count))))

    def step_cost(self, texts: int, bandwidth: float) -> StepCost:
        """Time a step of `texts` sequences, with and without drafts."""
        prompt = self.tokens.prompt("en" if self.tokens.is_multilingual else None)
        filler = [*prompt, *range(1000, 1000 + CONTEXT - len(prompt))]
        sequences = [self.engine.open(self.writer.prompt(w, filler, False)) for w in self._windows[:texts]]
        seconds = {}
        for name, speculation in (
            ("step", None),
            ("check", Speculation(WrongGuesses(self.tokens.endoftext - 1), DRAFTED)),
        ):
            for sequence in sequences:
                self.engine.rewind(sequence, CONTEXT)
                self.engine.generate(sequence, Generation(GREEDY, max_new_rows=64), speculation=speculation)
            self.engine.step()
            seconds[name] = median_seconds(self._some_steps, self.device, TIMES, warm_up=1) / STEPS
        for sequence in sequences:
            self.engine.close(sequence)
        floor = self.bytes_a_step(texts) / bandwidth
        return StepCost(texts, seconds["step"] * 1e3, floor * 1e3, seconds["check"] * 1e3)

    def _some_steps(self) -> None:
        for _ in range(STEPS):
            self.engine.step()

    def bytes_a_step(self, texts: int) -> int:
        """Bytes a step reads: decoder weights without position table and cross-KV projections, the cross-attention
        keys and values of every window, and every text's own KV cache."""
        decoder = self.model.decoder
        weights = sum(p.nbytes for p in decoder.parameters()) - decoder.embed_positions.weight.nbytes
        for layer in decoder.stack:
            cross_kv = (layer.encoder_attn.k_proj, layer.encoder_attn.v_proj)
            weights -= sum(p.nbytes for projection in cross_kv for p in projection.parameters())
        row = self.writer.kv_shape.bytes_per_row(decoder.embed_tokens.weight.dtype)
        return weights + texts * row * (self.model.config.max_source_positions + CONTEXT)

    @torch.inference_mode()
    def requests(self, count: int, tokens: int) -> dict[str, Any]:
        """Requests of one full window each: concurrent, and sequential (extrapolated from a few)."""
        for window in self._windows:
            self.writer.store.release(window)
        self._windows = []
        self._answer(1, tokens)
        few = min(count, 4)
        sequential = sum(self._answer(1, tokens) for _ in range(few)) / few * count
        self._answer(min(count, self.windows), tokens)
        concurrent = self._answer(min(count, self.windows), tokens)
        seconds = self.model.config.window_seconds * count
        return {
            "count": count,
            "tokens_each": tokens,
            "together_s": concurrent,
            "one_by_one_s": sequential,
            "times_the_throughput": sequential / concurrent,
            "audio_seconds_per_second": seconds / concurrent,
            "tokens_per_second": count * tokens / concurrent,
        }

    def _answer(self, count: int, tokens: int) -> float:
        """Seconds to encode `count` windows and generate `tokens` tokens for each."""
        synchronize(self.device)
        began = time.perf_counter()
        prompt = self.tokens.prompt("en" if self.tokens.is_multilingual else None)
        sequences, held = [], []
        for first in range(0, count, 8):
            for window in self._encoded(min(8, count - first)):
                held.append(window)
                sequences.append(self.engine.open(self.writer.prompt(window, prompt, False)))
                self.engine.generate(sequences[-1], Generation(GREEDY, max_new_rows=tokens))
        while self.engine.has_work:
            self.engine.step()
        synchronize(self.device)
        seconds = time.perf_counter() - began
        for window, sequence in zip(held, sequences, strict=True):
            self.engine.close(sequence)
            self.writer.store.release(window)
        return seconds


def print_result(result: dict[str, Any]) -> None:
    """Print plain lines, for machines without rich."""
    print(f"{result['what']}, {result['shape']}, {result['dtype']} on {result['device']}, torch {result['torch']}")
    print(f"memory reads {result['bandwidth_gb_s']} GB/s; {result['how']}")
    for windows, ms in result["encoder_ms"].items():
        print(f"encoder, {windows} window(s): {ms:.2f} ms")
    for step in result["steps"]:
        print(
            f"decoder, {step['texts']:3d} texts: step {step['step_ms']:.3f} ms, floor {step['floor_ms']:.3f} ms "
            f"({step['over_floor']:.2f} x), verifying {DRAFTED} draft tokens {step['check_ms']:.3f} ms: "
            f"pays above {step['kept_to_pay']:.2f} accepted"
        )
    requests = result["requests"]
    print(
        f"{requests['count']} requests of {requests['tokens_each']} tokens: concurrent {requests['together_s']:.2f} s, "
        f"sequential {requests['one_by_one_s']:.2f} s: {requests['times_the_throughput']:.2f} x; "
        f"{requests['audio_seconds_per_second']:.0f} s of sound and {requests['tokens_per_second']:.0f} tokens a second"
    )


def main(arguments: Many[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Speed of a Whisper of a published shape, on random weights.")
    parser.add_argument("--shape", default="large-v2", choices=list(SIZES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    batches = [int(part) for part in given.batches.split(",")]
    run(given.shape, given.device, given.dtype, batches, given.requests, given.tokens, given.out)


if __name__ == "__main__":
    main()
