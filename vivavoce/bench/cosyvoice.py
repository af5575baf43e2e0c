"""Speed of CosyVoice 3 on random weights of the published shapes (speed does not depend on their values).

Time to first audio alone and under load, real-time factor, cost of late hops beside early ones, every part beside its
bandwidth and compute floors, and whether half precision stays finite.
`python -m vivavoce.bench.cosyvoice --device cuda --out DIR` needs torch only; `--tiny` runs anywhere.
"""

import argparse
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vivavoce.bench.cosyvoice_shapes import LEFT_CHUNKS, CosyVoiceBenchSetup, finite
from vivavoce.cpu_speed import is_bfloat16_fast, is_int8_fast
from vivavoce.device import pick, resolve_dtype
from vivavoce.errors import InputError
from vivavoce.evaluation.machine import median_seconds, read_bandwidth, stage
from vivavoce.implementations import choose_cosyvoice_flow
from vivavoce.models.cosyvoice.folder import graphed, warm_up
from vivavoce.models.cosyvoice.lm import CosyVoiceLM
from vivavoce.models.flow.cuda import BUCKETS, GraphedFlow, bucket_of
from vivavoce.models.flow.model import FlowSpeech
from vivavoce.models.flow.state import FlowVoice
from vivavoce.tts.cosyvoice import RATE, PlaybackLead, round_layers
from vivavoce.tts.cosyvoice_engine import CODE_SECONDS, CosyVoiceSynthesizer
from vivavoce.tts.cosyvoice_hops import UtteranceOptions

logger = logging.getLogger(__name__)

ROUNDS = 10
PROMPT_ROWS = 256  # smallest prompt bucket of the CUDA graphs


@dataclass(frozen=True)
class TimedPart:
    """Milliseconds of one part of a hop or step, and its floors."""

    name: str
    dtype: str
    ms: float
    bytes_ms: float
    """Floor: reading the weights once."""
    flops_ms: float
    """Floor: the multiplications at the rate of one large matmul."""
    rtf: float

    @property
    def over_floor(self) -> float:
        """Ratio to the larger floor."""
        return self.ms / max(self.bytes_ms, self.flops_ms)

    def __str__(self) -> str:
        floors = f"to read the weights {self.bytes_ms:.2f}, to multiply {self.flops_ms:.2f}"
        return f"{self.name}, {self.dtype}: {self.ms:.1f} ms ({floors}), {self.rtf:.2f} s a second of speech"


def run(
    device: str = "auto",
    dtype: str = "auto",
    tiny: bool = False,
    streams: Sequence[int] = (1, 16),
    hops: int = 100,
    rounds: int = ROUNDS,
    only: Sequence[str] = (),
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure, print, write `cosyvoice.json` to `out` and return it; `only` selects sections."""
    target = pick(device)
    setup = CosyVoiceBenchSetup(target, resolve_dtype(dtype, target), tiny)
    result: dict[str, Any] = {
        "what": "CosyVoice 3, " + ("small shapes" if tiny else "published shapes") + ", random weights",
        "device": target.name,
        "dtype": str(setup.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "how": "wall time until samples are on the host; medians",
    }
    bench = Bench(setup, rounds)
    sections: dict[str, Callable[[], Any]] = {
        "finite": lambda: finite(setup),
        "hops": lambda: bench.hops(hops),
        "first_sound": bench.sequential,
        "together": lambda: [bench.concurrent(count) for count in streams],
        "parts": bench.parts,
        "memory": bench.memory,
    }
    unknown = [name for name in only if name not in sections]
    if unknown:
        raise InputError(f"unknown section {unknown[0]!r}; use one of {', '.join(sections)}")
    for name, section in sections.items():
        if only and name not in only:
            continue
        with stage(name):
            result[name] = _or_error(section)
        print(f"{name}: {json.dumps(result[name])}", flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / "cosyvoice.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    return result


def _or_error(section: Callable[[], Any]) -> Any:
    """The figures of a section, or its error, so that the other sections still run."""
    try:
        return section()
    except Exception as error:
        logger.debug("a section of the bench failed", exc_info=True)
        return {"error": f"{type(error).__name__}: {error}"[:500]}


class Bench:
    """The measurements, each on the same models."""

    def __init__(self, setup: CosyVoiceBenchSetup, rounds: int) -> None:
        self.setup, self.device, self.rounds = setup, setup.device, rounds
        self.warm_up_seconds = 0.0
        self._warm: set[int] = set()

    @cached_property
    def lm(self) -> CosyVoiceLM:
        return self.setup.lm()

    @cached_property
    def plain(self) -> FlowSpeech:
        """Flow and vocoder without CUDA graphs."""
        return self.setup.speech(self.setup.dtype)

    @cached_property
    def speech(self) -> FlowSpeech:
        """Flow and vocoder as served, with CUDA graphs where available."""
        return graphed(self.plain) if choose_cosyvoice_flow(self.device).cls is GraphedFlow else self.plain

    @cached_property
    def voice(self) -> FlowVoice:
        return self.speech.flow.voice(self.setup.prompt(self.plain.flow))

    @cached_property
    def synthesizer(self) -> CosyVoiceSynthesizer:
        return CosyVoiceSynthesizer(self.lm, self.speech, self.device, LEFT_CHUNKS)

    def warm_up(self, streams: int) -> None:
        """Capture graphs for up to `streams` texts, outside the measurement."""
        batches = {size for size in BUCKETS if size <= bucket_of(streams)} - self._warm
        began = time.perf_counter()
        if batches:
            self.synthesizer.warm_up(self.voice, sorted(batches), {*batches, PROMPT_ROWS})
        self._warm |= batches
        self.warm_up_seconds += time.perf_counter() - began

    def memory(self) -> dict[str, float]:
        """Sizes of weights, voice and reply state in MB, and warm-up seconds."""
        state = self.speech.start(self.voice, LEFT_CHUNKS)
        flow = sum(each.nbytes for each in self.plain.flow.parameters()) + _table_bytes(self.plain)
        sizes = {
            "lm": sum(each.nbytes for each in self.lm.parameters()),
            "flow": flow,
            "voice": self.voice.cache.nbytes,
            "voice_seconds": len(self.voice.codes) * CODE_SECONDS * 1e6,
            "reply": state.nbytes,
            "warm_up_seconds": self.warm_up_seconds * 1e6,
        }
        return {name: size / 1e6 for name, size in sizes.items()}

    def hops(self, count: int) -> dict[str, Any]:
        """The time of every hop of one long reply."""
        config = self.speech.flow.config
        if self.device.graphs:
            warm_up(self.speech, self.voice, [1], LEFT_CHUNKS)
        state = self.speech.start(self.voice, LEFT_CHUNKS)
        times = []
        for number in range(count + 1):
            size = self.speech.flow.first_hop(self.voice) + config.lookahead if number == 0 else config.chunk
            codes = self.setup.codes(size, seed=number)
            began = time.perf_counter()
            sound, state = self.speech.step(state, codes)
            sound.cpu()
            times.append((time.perf_counter() - began) * 1e3)
        early, late = median(times[3:8]), median(times[-5:])
        return {"first_ms": times[0], "hop_5_ms": early, f"hop_{count}_ms": late, "late_over_early": late / early}

    def sequential(self) -> dict[str, float]:
        """Sequential texts: time to first audio, and real-time factor."""
        self.warm_up(1)
        firsts, rtfs = [], []
        for number in range(self.rounds + 1):
            first, whole, seconds = self._timed_utterance(number)
            if number:
                firsts.append(first * 1e3)
                rtfs.append(whole / seconds)
        return {"ms": median(firsts), "worst_ms": max(firsts), "rtf": median(rtfs)}

    def concurrent(self, count: int) -> dict[str, float]:
        """`count` concurrent texts; then one more that joins while they run."""
        self.warm_up(count)
        self._run_concurrently(count)  # warms up the allocator
        rounds = [self._run_concurrently(count) for _ in range(2)]
        utterances = [each for _, texts in rounds for each in texts]
        firsts = [first * 1e3 for first, _, _ in utterances]
        return {
            "streams": count,
            "first_ms_median": median(firsts),
            "first_ms_worst": max(firsts),
            "rtf": sum(wall for wall, _ in rounds) / sum(seconds for _, _, seconds in utterances),
            "joining_first_ms": self._first_sound_beside(count),
        }

    def _run_concurrently(self, count: int) -> tuple[float, list[tuple[float, float, float]]]:
        """Seconds until the last of `count` texts is done, and the times of each."""
        utterances: list[tuple[float, float, float]] = []
        threads = [
            threading.Thread(target=lambda number: utterances.append(self._timed_utterance(number)), args=(number,))
            for number in range(count)
        ]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began, utterances

    def _first_sound_beside(self, count: int) -> float:
        """Median time to first audio of a text that joins `count - 1` running ones."""
        is_over, began = threading.Event(), threading.Semaphore(0)

        def keep_speaking(number: int) -> None:
            has_started = False
            while not is_over.is_set():
                for _ in self._sounds(number):
                    if not has_started:
                        has_started = True
                        began.release()
                    if is_over.is_set():
                        break

        threads = [threading.Thread(target=keep_speaking, args=(number,)) for number in range(count - 1)]
        for thread in threads:
            thread.start()
        for _ in threads:
            began.acquire()
        firsts = [self._timed_utterance(count, whole=False)[0] * 1e3 for _ in range(self.rounds)]
        is_over.set()
        for thread in threads:
            thread.join()
        return median(firsts)

    def _sounds(self, seed: int) -> Iterator[Tensor]:
        playback = PlaybackLead(time.monotonic)
        rows, generation = self.setup.text(self.lm, self.setup.reply_codes, seed)
        for sound in self.synthesizer.text(rows, generation, UtteranceOptions(self.voice, playback.lead, seed)):
            playback.feed(len(sound) / RATE)
            yield sound

    def _timed_utterance(self, seed: int, whole: bool = True) -> tuple[float, float, float]:
        """Seconds to the first samples and to the last, and seconds of audio."""
        began, first, samples = time.perf_counter(), 0.0, 0
        for sound in self._sounds(seed):
            first = first or time.perf_counter() - began
            samples += len(sound)
            if not whole:
                break
        return first, time.perf_counter() - began, samples / RATE

    def parts(self) -> list[dict[str, Any]]:
        """Each part alone, in every precision this device supports, beside its floors."""
        results = []
        for part in self._parts():
            print(part, flush=True)
            results.append(vars(part) | {"over_floor": part.over_floor})
        return results

    def _parts(self) -> Iterator[TimedPart]:
        bandwidth = read_bandwidth(self.device)
        yield self._lm_part(bandwidth, "")
        kinds = [self.setup.dtype]
        if self.device.kind == "cpu":
            kinds = [torch.float32, torch.bfloat16] if is_bfloat16_fast() else [torch.float32]
        for dtype in kinds:
            speech = self.speech if dtype == self.setup.dtype else self.setup.speech(dtype)
            plain = self.plain if dtype == self.setup.dtype else speech
            voice = self.voice if dtype == self.setup.dtype else speech.flow.voice(self.setup.prompt(plain.flow))
            yield self._flow_part(speech, plain, voice, bandwidth)
        yield self._vocoder_part(bandwidth)
        if self.device.kind == "cpu" and is_int8_fast():
            round_layers(self.lm)
            yield self._lm_part(bandwidth, "int8")

    def _lm_part(self, bandwidth: float, rounded: str) -> TimedPart:
        engine, rows = self.synthesizer.engine, self.setup.text(self.lm, 64, 0)
        sequence = engine.open(rows[0])
        engine.generate(sequence, rows[1])
        while sequence.pending > 1:
            engine.step()
        seconds = median_seconds(engine.step, self.device, repeats=20, warm_up=5)
        engine.close(sequence)
        layers = sum(each.numel() for each in self.setup.lm_layers)
        size = 1 if rounded else self.setup.dtype.itemsize
        floors = layers * size / bandwidth * 1e3, 2 * layers / self._rate(self.setup.dtype) * 1e3
        name = rounded or str(self.setup.dtype).removeprefix("torch.")
        return TimedPart("language model, one code", name, seconds * 1e3, *floors, seconds / CODE_SECONDS)

    def _flow_part(self, speech: FlowSpeech, plain: FlowSpeech, voice: FlowVoice, bandwidth: float) -> TimedPart:
        chunk, dtype = plain.flow.config.chunk, next(plain.flow.parameters()).dtype
        state = speech.flow.start(voice, LEFT_CHUNKS)
        _, state = speech.flow.step(state, self.setup.codes(plain.flow.first_hop(voice) + plain.flow.config.lookahead))
        codes, repeats = self.setup.codes(chunk), 2 if self.device.kind == "cpu" else 5
        seconds = median_seconds(lambda: speech.flow.step(state, codes), self.device, repeats=repeats, warm_up=1)
        operations = _operations(lambda: plain.flow.step(state, codes))
        estimator = sum(each.nbytes for each in plain.flow.decoder.parameters())
        reads = plain.flow.config.euler_steps * estimator / bandwidth
        flops = operations / self._rate(dtype)
        name = str(dtype).removeprefix("torch.")
        return TimedPart(
            "flow, 25 codes", name, seconds * 1e3, reads * 1e3, flops * 1e3, seconds / (chunk * CODE_SECONDS)
        )

    def _vocoder_part(self, bandwidth: float) -> TimedPart:
        hop = 50
        vocoder, mel = self.setup.vocoder, torch.randn(1, 80, hop, device=self.device.torch_device)
        _, (state,) = vocoder.step_batch([vocoder.initial_state(0)], [mel], [False])
        replayed = self.speech.vocoder
        seconds = median_seconds(
            lambda: replayed.step_batch([state], [mel], [False]), self.device, repeats=5, warm_up=2
        )
        operations = _operations(lambda: vocoder.step_batch([state], [mel], [False]))
        reads = sum(each.nbytes for each in vocoder.parameters()) / bandwidth
        flops = operations / self._rate(torch.float32)
        return TimedPart("vocoder, 50 frames", "float32", seconds * 1e3, reads * 1e3, flops * 1e3, seconds)

    def _rate(self, dtype: torch.dtype) -> float:
        """FLOP/s of one large matmul."""
        size = 4096 if self.device.kind != "cpu" else 1024
        one = torch.randn(size, size, device=self.device.torch_device).to(dtype)
        return 2 * size**3 / median_seconds(lambda: one @ one, self.device, repeats=5, warm_up=2)


def _operations(action: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        action()
    return int(counter.get_total_flops())


def _table_bytes(speech: FlowSpeech) -> int:
    table = getattr(speech.flow.decoder.estimator, "table", None)
    return 0 if table is None else int(table.nbytes)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Speed of CosyVoice 3 on random weights.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tiny", action="store_true", help="small shapes that run anywhere in seconds")
    parser.add_argument("--streams", default="1,16")
    parser.add_argument("--hops", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", default="", help="some of finite,hops,first_sound,together,parts,memory")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    streams = [int(part) for part in given.streams.split(",")]
    only = [name for name in given.only.split(",") if name]
    run(given.device, given.dtype, given.tiny, streams, given.hops, given.rounds, only, given.out)


if __name__ == "__main__":
    main()
