"""`viva bench asr`: errors and speed of recognition: plain, with speculative drafts, and by faster-whisper.

Contenders take turns on every recording, so that all of them see the same machine load. Then many recordings run
concurrently, with and without drafts, to find the batch size at which drafts stop paying, and as live streams, to
measure how late a word is emitted.
"""

import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vivavoce import hub
from vivavoce.asr.backends import Backend, MoonshineBackend, OwnBackend, load_whisper
from vivavoce.asr.backends.ctranslate2 import load_converted
from vivavoce.asr.batch import TranscribingEngine
from vivavoce.asr.drafts import DraftChoice
from vivavoce.asr.streaming import POLICIES, LiveTranscriber
from vivavoce.audio.io import read
from vivavoce.device import Device, dtype_name, pick
from vivavoce.errors import InputError, MissingDependencyError, VivaError
from vivavoce.evaluation.machine import stage
from vivavoce.hub import resolve
from vivavoce.models.whisper.steps import Padding, TranscriptionOptions
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.train.asr.evaluate import score_texts
from vivavoce.train.corpus import Corpus

RATE = 16_000
BUNDLED = hub.BUNDLED / "questions"
INDEX = "questions.json"


@dataclass(frozen=True)
class LabelledRecording:
    """A recording at 16 kHz and its text."""

    samples: torch.Tensor  # [time]
    text: str

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE


def spoken_sentences(source: Path | None = None, max_recordings: int | None = None) -> list[LabelledRecording]:
    """The bundled questions; those of a folder with `questions.json` or a .txt beside each sound; or a corpus file."""
    found = list(_of_corpus(source) if source is not None and not source.is_dir() else _of_folder(source or BUNDLED))
    if not found:
        raise InputError(f"{source or BUNDLED} holds no sound with a text; put NAME.txt beside NAME.wav")
    return found[:max_recordings]


def _of_corpus(path: Path) -> Iterator[LabelledRecording]:
    corpus = Corpus.load(path)
    for number in range(len(corpus)):
        samples, text, _ = corpus[number]
        yield LabelledRecording(torch.from_numpy(samples), text)


def _of_folder(folder: Path) -> Iterator[LabelledRecording]:
    index = folder / INDEX
    if index.is_file():
        listed = [(folder / one["file"], one["text"]) for one in json.loads(index.read_text(encoding="utf8"))]
    else:
        pairs = [(next(folder.glob(f"{text.stem}.[!t]*"), None), text) for text in sorted(folder.glob("*.txt"))]
        listed = [(sound, text.read_text(encoding="utf8")) for sound, text in pairs if sound is not None]
    for sound, text in listed:
        yield LabelledRecording(torch.from_numpy(read(sound, rate=RATE).samples[0].copy()), text.strip())


GREEDY_ONLY = (0.0,)  # no temperature fallback, so that all contenders decode each window once
PLAIN = "ours"
UNCOUNTED = 3  # warm-up recordings for each contender
TURNS = 5  # repetitions of the batch measurement, in rotating order; the median is reported
CTRANSLATE2 = "faster-whisper int8"


@dataclass
class RecognitionContender:
    """A backend under test and its results so far."""

    name: str
    backend: Backend
    options: TranscriptionOptions
    texts: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    """CPU seconds of this process, independent of other load."""
    tokens: list[tuple[int, ...]] = field(default_factory=list)

    def transcribe(self, samples: torch.Tensor) -> None:
        """Transcribe a recording and store text, tokens and times."""
        began, computed = time.perf_counter(), time.process_time()
        segments = list(self.backend.segments(samples, self.options))
        self.seconds.append(time.perf_counter() - began)
        self.processor.append(time.process_time() - computed)
        self.texts.append("".join(segment.text for segment in segments).strip())
        self.tokens.append(tuple(token for segment in segments for token in segment.tokens))

    def figures(self, references: Sequence[str], sound_seconds: float, plain: "RecognitionContender") -> dict[str, Any]:
        judged = score_texts(self.texts, references)
        total = sum(self.seconds)
        figures: dict[str, Any] = {
            "name": self.name,
            "wer": round(judged.word_error_rate, 4),
            "cer": round(judged.letter_errors / max(1, judged.letters), 4),
            "rtf": round(total / sound_seconds, 4),
            "latency_ms_p50": round(1e3 * float(np.percentile(self.seconds, 50)), 1),
            "latency_ms_p95": round(1e3 * float(np.percentile(self.seconds, 95)), 1),
            "tokens_per_second": round(sum(len(tokens) for tokens in self.tokens) / total, 1),
            "times_plain": round(sum(plain.seconds) / total, 3),
            "times_plain_processor": round(sum(plain.processor) / sum(self.processor), 3),
            "same_text_as_plain": sum(one == other for one, other in zip(self.texts, plain.texts, strict=True)),
        }
        if isinstance(self.backend, OwnBackend):
            figures |= self.backend.report().as_dict()
        return figures


def run(
    model: str = "mini-asr",
    draft: Sequence[str] = (),
    heads: str | None = None,
    width: int = 1,
    speech: Path | None = None,
    max_recordings: int | None = None,
    batches: Sequence[int] = (1, 4, 16),
    moonshine: Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    peer: bool = True,
    live: bool = True,
    padding: Padding = "trim",
    out: Path | None = None,
) -> dict[str, Any]:
    """Measure, print, write `asr.json` to `out`, and return what was measured."""
    target = pick(device)
    with stage("loading"):
        spoken = spoken_sentences(speech, max_recordings)
        listener = load_whisper(resolve(model), target, dtype)
        choices = _choices(draft, heads, width)
        contenders = _contenders(listener, target, choices, padding)
        if peer:
            contenders += _peers(model, target, padding)
        if moonshine is not None:
            contenders.append(
                RecognitionContender("Moonshine base", MoonshineBackend(moonshine), TranscriptionOptions())
            )
    with stage(f"{len(spoken)} recordings, {len(contenders)} contenders"):
        _compete(contenders, spoken)
    seconds = sum(one.seconds for one in spoken)
    references = [one.text for one in spoken]
    plain = next(one for one in contenders if one.name == PLAIN)
    result: dict[str, Any] = {
        "what": "speech recognition",
        "model": model,
        "device": target.name,
        "dtype": dtype if dtype == "int8" else dtype_name(listener.model.decoder.embed_tokens.weight.dtype),
        "encoder_dtype": dtype_name(listener.model.encoder.conv1.weight.dtype),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "recordings": len(spoken),
        "sound_seconds": round(seconds, 1),
        "padding": padding,
        "how": "greedy; each recording by every contender in turn, one at a time, after three that are not counted; "
        "wall time from samples to text",
        "contenders": [one.figures(references, seconds, plain) for one in contenders],
    }
    with stage("concurrent recordings"):
        result["batches"] = _batches(listener, target, choices, spoken, batches, padding)
    if live:
        with stage("live"):
            result["live"] = [_live(listener, target, policy, spoken, padding) for policy in POLICIES]
    print_result(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "asr.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    return result


def _choices(drafts: Sequence[str], heads: str | None, width: int) -> dict[str, DraftChoice]:
    """The draft models and heads to compare, by name."""
    choices = {f"draft {Path(one).name}": DraftChoice(draft=one) for one in drafts}
    if heads is not None:
        choices["heads"] = DraftChoice(heads=heads)
        if width > 1:
            choices[f"heads, tree of {width} wide"] = DraftChoice(heads=heads, width=width, max_rows=4 * width)
    return choices | {"lookup": DraftChoice(lookup=True)}


def _contenders(
    listener: WhisperTranscriber, device: Device, choices: Mapping[str, DraftChoice], padding: Padding
) -> list[RecognitionContender]:
    options = TranscriptionOptions(padding=padding, temperatures=GREEDY_ONLY)
    other: Padding = "full" if padding == "trim" else "trim"
    contenders = [
        RecognitionContender(PLAIN, OwnBackend(listener, device), options),
        RecognitionContender(
            f"ours, padding {other}",
            OwnBackend(listener, device),
            TranscriptionOptions(padding=other, temperatures=GREEDY_ONLY),
        ),
    ]
    return contenders + [RecognitionContender(f"ours, {name}", OwnBackend(listener, device, choice), options)
                   for name, choice in choices.items()]  # fmt: skip


def _peers(model: str, device: Device, padding: Padding) -> list[RecognitionContender]:
    """faster-whisper on the same checkpoint, where installed; trimmed where the model's windows allow it."""
    try:
        peer = load_converted(resolve(model), device.kind, "int8" if device.kind == "cpu" else "float16",
                              torch.get_num_threads())  # fmt: skip
    except (MissingDependencyError, VivaError) as error:
        print(f"without faster-whisper: {error}")
        return []
    return [RecognitionContender(CTRANSLATE2, peer, TranscriptionOptions(padding=padding, temperatures=GREEDY_ONLY))]


def _compete(contenders: Sequence[RecognitionContender], spoken: Sequence[LabelledRecording]) -> None:
    """Run every contender on every recording, in rotating order."""
    for one in contenders:
        for recording in spoken[:UNCOUNTED]:
            one.transcribe(recording.samples)
        one.texts, one.seconds, one.processor, one.tokens = [], [], [], []
        if isinstance(one.backend, OwnBackend):
            one.backend.report()
    for number, recording in enumerate(spoken):
        first = number % len(contenders)
        for one in (*contenders[first:], *contenders[:first]):
            one.transcribe(recording.samples)


def _batches(
    listener: WhisperTranscriber,
    device: Device,
    choices: Mapping[str, DraftChoice],
    spoken: Sequence[LabelledRecording],
    batches: Sequence[int],
    padding: Padding,
) -> list[dict[str, Any]]:
    """All recordings with `batches` in flight, by each kind of draft and without, in rotating order."""
    rows, sounds = [], [one.samples for one in spoken]
    options = TranscriptionOptions(padding=padding, temperatures=GREEDY_ONLY)
    for batch in batches:
        engines = {name: TranscribingEngine(listener, device, batch, choice)
                   for name, choice in (("plain", None), *choices.items())}  # fmt: skip
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for engine in engines.values():
            engine.transcribe(sounds[: max(batch, UNCOUNTED)], options)
            engine.report()
        for turn in range(TURNS):
            names = [*engines][turn:] + [*engines][:turn]
            for name in names:
                began = time.perf_counter()
                engines[name].transcribe(sounds, options)
                seconds[name].append(time.perf_counter() - began)
        medians = {name: float(np.median(taken)) for name, taken in seconds.items()}
        rows.append(
            {
                "in_flight": batch,
                "seconds": {name: round(taken, 3) for name, taken in medians.items()},
                "tokens_per_pass": {name: round(one.report().tokens_per_pass, 2) for name, one in engines.items()},
                "times_plain": {name: round(medians["plain"] / taken, 3) for name, taken in medians.items()},
            }
        )
    return rows


def _live(
    listener: WhisperTranscriber, device: Device, policy: str, spoken: Sequence[LabelledRecording], padding: Padding
) -> dict[str, Any]:
    """Every recording as a live stream: error rate, word latency and real-time factor."""
    live = LiveTranscriber(
        TranscribingEngine(listener, device, 1), policy, TranscriptionOptions(padding=padding, temperatures=GREEDY_ONLY)
    )
    texts, latencies, taken = [], [], 0.0
    for one in spoken:
        began = time.perf_counter()
        _, state = live.step(live.initial_state(), one.samples.numpy())
        _, state = live.finish(state)
        taken += time.perf_counter() - began
        texts.append(state.text)
        latencies += [word.latency for word in state.words]
    judged = score_texts(texts, [one.text for one in spoken])
    return {
        "policy": policy,
        "every_s": live.every,
        "wer": round(judged.word_error_rate, 4),
        "word_latency_s_mean": round(float(np.mean(latencies)), 3) if latencies else None,
        "word_latency_s_p95": round(float(np.percentile(latencies, 95)), 3) if latencies else None,
        "rtf": round(taken / sum(one.seconds for one in spoken), 4),
        **live.engine.report().as_dict(),
    }


def print_result(result: Mapping[str, Any]) -> None:
    """Print the figures as tables on stderr."""
    from rich.console import Console
    from rich.table import Table

    console = Console(stderr=True, soft_wrap=True, highlight=False, width=160)
    console.print(
        f"{result['model']} ({result['dtype']}, encoder {result['encoder_dtype']}) on {result['device']}, "
        f"{result['threads']} thread(s): "
        f"{result['recordings']} recordings, {result['sound_seconds']} s, padding {result['padding']}; {result['how']}"
    )
    columns = ("", "WER", "CER", "RTF", "p50 ms", "p95 ms", "tokens/s", "× plain", "in CPU time", "same text",
               "tokens/pass", "kept")  # fmt: skip
    contenders = Table(*columns)
    for one in result["contenders"]:
        contenders.add_row(
            one["name"], f"{one['wer']:.1%}", f"{one['cer']:.1%}", f"{one['rtf']:.3f}", f"{one['latency_ms_p50']:.0f}",
            f"{one['latency_ms_p95']:.0f}", f"{one['tokens_per_second']:.0f}", f"{one['times_plain']:.2f}",
            f"{one['times_plain_processor']:.2f}",
            f"{one['same_text_as_plain']}/{result['recordings']}", str(one.get("tokens_per_pass", "–")),
            str(one.get("mean_kept", "–")),
        )  # fmt: skip
    console.print(contenders)
    names = list(result["batches"][0]["seconds"]) if result["batches"] else []
    batches = Table("in flight", *(f"{name}: s (× plain, tokens/pass)" for name in names))
    for row in result["batches"]:
        cells = [
            f"{row['seconds'][n]:.2f} ({row['times_plain'][n]:.2f}, {row['tokens_per_pass'][n]:.2f})" for n in names
        ]
        batches.add_row(str(row["in_flight"]), *cells)
    console.print(batches)
    for one in result.get("live", ()):
        console.print(
            f"live, {one['policy']}, every {one['every_s']} s: WER {one['wer']:.1%}, a word is emitted "
            f"{one['word_latency_s_mean']} s after it ends (p95 {one['word_latency_s_p95']} s), computing not counted, "
            f"RTF {one['rtf']:.3f}, {one['tokens_per_pass']} tokens a pass"
        )
