"""Calls of `viva bench telephone` by an unmodified sipp, which plays recorded questions over RTP.

sipp does not listen to what it receives: whether replies came, and when, is read from the server's `/metrics`.
"""

import asyncio
import csv
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vivavoce.audio.io import Sound
from vivavoce.bench.serve_watch import MetricsPage, bucket_percentiles, metric_total, read_metrics
from vivavoce.bench.telephone_caller import LINE, NOISE_DBFS, CallFailedError
from vivavoce.bench.turn_sounds import RATE, Samples, room_noise
from vivavoce.errors import InputError
from vivavoce.server.realtime.audio_formats import encode

PROGRAM = "sipp"
SCENARIO = Path(__file__).with_name("telephone_sipp.xml")
SOUND_FILE, STATISTICS_FILE = "questions.ulaw", "statistics.csv"
LEAD_SECONDS = 1.0
CALLS_PER_SECOND = 10
SPARE_SECONDS = 30.0  # beyond the length of the calls, after which sipp gives up
ENDED_SECONDS = 10.0
HOST = "127.0.0.1"
SOME_FAILED = 1  # exit status


@dataclass(frozen=True)
class SippPlan:
    """Calls at once, each with a number of questions."""

    sip_port: int
    calls: int
    turns: int
    reply_seconds: float
    """For a reply, after each question; the next question interrupts one that takes longer."""


def is_installed() -> bool:
    """Whether there is a sipp."""
    return shutil.which(PROGRAM) is not None


def sipp_program() -> str:
    """The path of sipp."""
    path = shutil.which(PROGRAM)
    if path is None:
        raise InputError("the parts sipp and sipp-model need sipp, which is in Debian's package sip-tester")
    return path


def spoken_line(questions: Sequence[Samples], plan: SippPlan) -> Samples:
    """What each caller sends: room noise, and questions with time for a reply after each, at 24 kHz."""
    parts = [np.zeros(round(LEAD_SECONDS * RATE), np.float32)]
    for turn in range(plan.turns):
        parts += [questions[turn % len(questions)], np.zeros(round(plan.reply_seconds * RATE), np.float32)]
    spoken = np.concatenate(parts)
    return spoken + room_noise(len(spoken) / RATE, NOISE_DBFS)[: len(spoken)]


async def measure_sipp(url: str, plan: SippPlan, questions: Sequence[Samples]) -> dict[str, Any]:
    """Run the calls; what sipp has counted, and what the server has."""
    program, spoken = sipp_program(), spoken_line(questions, plan)
    before, began = await asyncio.to_thread(read_metrics, url), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="viva-bench-sipp-") as name:
        folder = Path(name)
        (folder / SOUND_FILE).write_bytes(encode(Sound(spoken, RATE).resampled(LINE.rate).samples[0], LINE))
        rows = await _run(program, folder, plan, len(spoken) / RATE)
    seconds = time.monotonic() - began
    after = await _after_all_calls(url, before, plan.calls)
    return (
        _sipp_counts(rows)
        | _server_counts(before, after)
        | {
            "calls": plan.calls,
            "asked": plan.calls * plan.turns,
            "seconds": round(seconds, 1),
        }
    )


async def _run(program: str, folder: Path, plan: SippPlan, seconds: float) -> list[dict[str, str]]:
    """The rows of sipp's statistics, one for each second."""
    limit = seconds + plan.calls / CALLS_PER_SECOND + SPARE_SECONDS
    options = {
        "-sf": SCENARIO,
        "-i": HOST,
        "-mi": HOST,
        "-m": plan.calls,
        "-l": plan.calls,
        "-r": CALLS_PER_SECOND,
        "-d": round(1000 * seconds),
        "-timeout": f"{limit:.0f}s",
        "-stf": STATISTICS_FILE,
        "-fd": 1,
    }
    given = [str(word) for option in options.items() for word in option]
    flags = ("-nostdin", "-timeout_error", "-trace_err", "-trace_stat")
    with (folder / "output.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program, f"{HOST}:{plan.sip_port}", *given, *flags, cwd=folder, stdout=log, stderr=log
        )
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    statistics = folder / STATISTICS_FILE
    if code not in (0, SOME_FAILED) or not statistics.exists():
        texts = [file.read_text(errors="replace") for file in (*folder.glob("*_errors.log"), folder / "output.log")]
        raise CallFailedError(f"sipp has ended with {code}: {' '.join(texts)[-1000:]}")
    with statistics.open(encoding="utf8", newline="") as file:
        return list(csv.DictReader(file, delimiter=";"))


async def _after_all_calls(url: str, before: MetricsPage, calls: int) -> MetricsPage:
    """The metrics once the server has ended all calls, some of which it may have refused."""
    ends = time.monotonic() + ENDED_SECONDS
    while True:
        page = await asyncio.to_thread(read_metrics, url)
        ended = _difference(before, page, "viva_calls_ended_total")
        if ended >= calls or time.monotonic() > ends:
            return page
        await asyncio.sleep(0.1)


def _sipp_counts(rows: Sequence[dict[str, str]]) -> dict[str, Any]:
    last = rows[-1]
    return {
        "calls_at_once": max(int(row["CurrentCall"]) for row in rows),
        "successful": int(last["SuccessfulCall(C)"]),
        "failed": int(last["FailedCall(C)"]),
        "retransmissions": int(last["Retransmissions(C)"]),
    }


def _server_counts(before: MetricsPage, after: MetricsPage) -> dict[str, Any]:
    measured = _difference(before, after, "viva_v2v_seconds_count")
    mean = _difference(before, after, "viva_v2v_seconds_sum") / measured if measured else None
    return {
        "answered": int(_difference(before, after, "viva_replies_total", reason="completed")),
        "underruns": int(_difference(before, after, "viva_underruns_total")),
        "v2v_ms_mean": None if mean is None else round(1000 * mean, 1),
        "v2v_ms_p95_at_most": bucket_percentiles(before, after, "v2v_seconds", 0.95).get("server"),
    }


def _difference(before: MetricsPage, after: MetricsPage, name: str, **labels: str) -> float:
    return metric_total(after, name, **labels) - metric_total(before, name, **labels)
