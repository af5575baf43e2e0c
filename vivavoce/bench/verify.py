"""`viva verify`: compares a model on each device with the CPU in float32.

First logits and the audio of greedy decoding, for the same text and voice, are compared with the CPU's; limits are
wider for lower precision, where a single different code changes the audio.
"""

import gc
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce import hub
from vivavoce.audio.io import Sound
from vivavoce.bench.verify_subjects import Question, VerifiableKind, VerifiedModel, VerifyOutput, kind_of
from vivavoce.device import Device, pick
from vivavoce.errors import InputError, VivaError
from vivavoce.evaluation.machine import stage, synchronize

Status = Literal["passed", "failed", "absent"]
SEED = 7
MIN_LOUDNESS_DB = -60.0
BANDS = 48
LOWEST_HZ = 60.0


@dataclass(frozen=True)
class Limits:
    """Allowed differences from the CPU in float32."""

    logits: float  # relative to the largest logit
    loudness_db: float
    spectrum_db: float
    duration: float  # relative


EXACT = Limits(logits=1e-3, loudness_db=0.5, spectrum_db=1.0, duration=0.02)
ROUNDED = Limits(logits=0.1, loudness_db=6.0, spectrum_db=8.0, duration=0.6)


@dataclass(frozen=True)
class Check:
    """One comparison. `limit` is the largest value that passes; None for a boolean check."""

    name: str
    value: float
    limit: float | None
    passed: bool


@dataclass
class VerifyVerdict:
    """Result for one device."""

    device: str
    status: Status
    name: str = ""
    why: str = ""
    checks: list[Check] = field(default_factory=list)
    load_seconds: float | None = None
    first_ms: float | None = None
    rtf: float | None = None
    seconds: float | None = None
    memory_bytes: int | None = None
    spectrum_db: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class ReferenceOutput:
    """Output of the CPU in float32."""

    logits: NDArray[np.float32] | None
    output: VerifyOutput


def run(
    model: str,
    devices: Sequence[str] = ("cpu",),
    dtype: str = "auto",
    ask: Question | None = None,
    skip_absent: bool = False,
    out: Path | None = None,
) -> dict[str, Any]:
    """Verify on all devices, print a table, write the report and its plot to `out`; `passed` is the overall result."""
    folder = hub.resolve(model) if not Path(model).is_file() else Path(model)
    kind, ask = kind_of(folder), ask or Question()
    with stage("cpu in float32, the reference"):
        reference = _reference(kind, folder, ask)
    verdicts = []
    for spec in devices:
        with stage(spec):
            verdicts.append(_verdict(kind, folder, spec, dtype, ask, reference))
        gc.collect()
    passes = ("passed", "absent") if skip_absent else ("passed",)
    result = {
        "model": model,
        "kind": kind.name,
        "text": ask.text,
        "voice": ask.voice,
        "torch": torch.__version__,
        "reference": {"seconds": reference.output.seconds, "spectrum_db": _spectrum(reference.output.sound)},
        "devices": [asdict(verdict) for verdict in verdicts],
        "passed": all(verdict.status in passes for verdict in verdicts) and bool(verdicts),
    }
    _print(result)
    if out is not None:
        _save(result, out)
    return result


def _reference(kind: VerifiableKind, folder: Path, ask: Question) -> ReferenceOutput:
    subject = kind.load(folder, pick("cpu"), "float32")
    reference = ReferenceOutput(subject.first_logits(ask), subject.make(ask, None))
    problems = [check.name for check in _sound_checks(reference.output.sound, None, EXACT) if not check.passed]
    if problems:
        raise VivaError(f"on the CPU in float32 this model already fails: {', '.join(problems)}")
    return reference


def _verdict(
    kind: VerifiableKind, folder: Path, spec: str, dtype: str, ask: Question, reference: ReferenceOutput
) -> VerifyVerdict:
    try:
        device = pick(spec)
    except InputError as error:
        if "is not known" in str(error):
            raise
        return VerifyVerdict(spec, "absent", why=str(error))
    verdict = VerifyVerdict(spec, "failed", device.name)
    before = _memory(device)
    try:
        began = time.perf_counter()
        subject = kind.load(folder, device, dtype)
        synchronize(device)
        verdict.load_seconds = time.perf_counter() - began
        _run_checks(verdict, subject, device, ask, reference)
    except (VivaError, RuntimeError) as error:
        verdict.why = " ".join(str(error).split())
        return verdict
    verdict.memory_bytes = max(0, _memory(device) - before)
    verdict.status = "passed" if all(check.passed for check in verdict.checks) else "failed"
    return verdict


def _run_checks(
    verdict: VerifyVerdict, subject: VerifiedModel, device: Device, ask: Question, reference: ReferenceOutput
) -> None:
    limits = EXACT if subject.is_exact else ROUNDED
    logits, output = subject.first_logits(ask), subject.make(ask, None)
    verdict.checks += [*_logit_checks(logits, reference.logits, limits), *_text_checks(output, reference.output)]
    verdict.checks += _sound_checks(output.sound, reference.output.sound, limits)
    verdict.spectrum_db = _spectrum(output.sound)
    began = time.perf_counter()
    first = subject.make(ask, SEED)
    synchronize(device)
    verdict.rtf = (time.perf_counter() - began) / first.seconds
    verdict.first_ms, verdict.seconds = 1e3 * first.first_seconds, first.seconds
    verdict.checks.append(_flag_check("same seed, same result", _is_same(first, subject.make(ask, SEED))))


def _logit_checks(found: NDArray[np.float32] | None, wanted: NDArray[np.float32] | None, limits: Limits) -> list[Check]:
    if found is None or wanted is None:
        return []
    if not np.isfinite(found).all():
        return [_flag_check("logits are numbers", False)]
    difference = float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-6))
    return [_flag_check("logits are numbers", True), _bounded_check("first logits", difference, limits.logits)]


def _text_checks(output: VerifyOutput, wanted: VerifyOutput) -> list[Check]:
    if output.text is None or wanted.text is None:
        return []
    return [_flag_check("same text", output.text.split() == wanted.text.split())]


def _sound_checks(sound: Sound | None, wanted: Sound | None, limits: Limits) -> list[Check]:
    if sound is None:
        return []
    checks = [
        _flag_check("samples are numbers", bool(np.isfinite(sound.samples).all())),
        Check("loudness in dBFS", _loudness(sound), MIN_LOUDNESS_DB, _loudness(sound) > MIN_LOUDNESS_DB),
    ]
    if wanted is None:
        return checks
    spectra = [np.array(_spectrum(each)) for each in (sound, wanted)]
    return [
        *checks,
        _bounded_check("duration, share apart", abs(sound.seconds / wanted.seconds - 1), limits.duration),
        _bounded_check("loudness, dB apart", abs(_loudness(sound) - _loudness(wanted)), limits.loudness_db),
        _bounded_check(
            "spectrum, dB apart", float(np.sqrt(np.mean((spectra[0] - spectra[1]) ** 2))), limits.spectrum_db
        ),
    ]


def _flag_check(name: str, is_so: bool) -> Check:
    return Check(name, float(is_so), None, is_so)


def _bounded_check(name: str, value: float, limit: float) -> Check:
    return Check(name, value, limit, value <= limit)


def _is_same(first: VerifyOutput, again: VerifyOutput) -> bool:
    if first.sound is None or again.sound is None:
        return first.text == again.text
    one, two = first.sound.samples, again.sound.samples
    return one.shape == two.shape and bool(np.allclose(one, two, atol=1e-4))


def _loudness(sound: Sound) -> float:
    return float(10 * np.log10(np.mean(np.square(sound.samples, dtype=np.float64)) + 1e-20))


def _spectrum(sound: Sound | None) -> list[float]:
    """Mean power in logarithmic bands, in dB: the timbre, independent of the words."""
    if sound is None:
        return []
    samples = sound.mono().samples[0]
    size = 2048
    padded = np.pad(samples, (0, max(0, size - len(samples))))
    frames = np.lib.stride_tricks.sliding_window_view(padded, size)[:: size // 2] * np.hanning(size)
    power = np.square(np.abs(np.fft.rfft(frames))).mean(axis=0)
    lowest = min(LOWEST_HZ, sound.rate / 64)
    edges = np.geomspace(lowest, sound.rate / 2, BANDS + 1) / sound.rate * size
    bands = [power[int(low) : max(int(low) + 1, int(high))].mean() for low, high in itertools.pairwise(edges)]
    return [float(10 * np.log10(band + 1e-9)) for band in bands]


def _memory(device: Device) -> int:
    """Allocated bytes: by torch on the device, by the process on a CPU."""
    if device.kind in ("cuda", "npu"):
        return int(getattr(torch, device.kind).memory_allocated(device.index))
    if device.kind == "mps":
        return int(torch.mps.current_allocated_memory())
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * 4096


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(stderr=True, highlight=False)
    console.print(f"{result['model']} ({result['kind']}), compared with the CPU in float32")
    table = Table("device", "verdict", "load s", "first ms", "RTF", "memory MB", "checks")
    for device in result["devices"]:
        checks = [
            f"{'✓' if check['passed'] else '✗'} {check['name']}"
            + ("" if check["limit"] is None else f" {check['value']:.3g} ({check['limit']:g})")
            for check in device["checks"]
        ]
        table.add_row(
            device["device"],
            device["status"],
            *(_shown(device[name], scale) for name, scale in (("load_seconds", 1), ("first_ms", 1), ("rtf", 1))),
            _shown(device["memory_bytes"], 1e-6),
            escape("\n".join([*checks, *([device["why"]] if device["why"] else [])])),
        )
    console.print(table)
    console.print("passed" if result["passed"] else "failed")


def _shown(value: float | None, scale: float) -> str:
    return "–" if value is None else f"{value * scale:.3g}"


def _save(result: dict[str, Any], out: Path) -> None:
    file = out if out.suffix == ".json" else out / "verify.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=2), encoding="utf8")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    spectrum, speed = figure.subplots(1, 2)
    spectrum.plot(result["reference"]["spectrum_db"], color="black", label="CPU, float32")
    for device in result["devices"]:
        if device["spectrum_db"]:
            spectrum.plot(device["spectrum_db"], linestyle="--", label=device["device"])
    spectrum.set(xlabel="band, low to high", ylabel="dB", title="mean spectrum")
    spectrum.legend()
    present = [device for device in result["devices"] if device["rtf"] is not None]
    speed.bar([device["device"] for device in present], [device["rtf"] for device in present])
    speed.set(ylabel="seconds of work a second of sound", title="real-time factor")
    figure.suptitle(f"{result['model']}: {'passed' if result['passed'] else 'failed'}", fontsize=10)
    figure.savefig(file.with_suffix(".png"), dpi=130)
