"""`viva bench asr`: what a recogniser gets wrong and what it costs, plain, with drafts, and by faster-whisper.

Every recording is heard by every contender in turn, so that all see the same machine; then many recordings are heard at
once, with and without drafts, to see where drafts stop paying; and as streams, to see how long a word takes to be told.
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
from vivavoce.asr.backends import Backend, MoonshineBackend, OwnBackend, own_listener
from vivavoce.asr.backends.ctranslate2 import load_converted
from vivavoce.asr.batch import TranscribingEngine
from vivavoce.asr.drafts import DraftChoice
from vivavoce.asr.streaming import POLICIES, LiveListener
from vivavoce.audio.io import read
from vivavoce.device import Device, dtype_name, pick
from vivavoce.errors import InputError, MissingDependencyError, VivaError
from vivavoce.evaluation.machine import stage
from vivavoce.hub import resolve
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.models.whisper.windows import Padding, TranscriptionOptions
from vivavoce.train.asr.evaluate import judge_texts
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
        """How long it is."""
        return len(self.samples) / RATE


def spoken_sentences(source: Path | None = None, most: int | None = None) -> list[LabelledRecording]:
    """The bundled questions; a folder's, by its `questions.json` or by a .txt beside each sound; or a corpus's."""
    found = list(_of_corpus(source) if source is not None and not source.is_dir() else _of_folder(source or BUNDLED))
    if not found:
        raise InputError(f"{source or BUNDLED} holds no sound with a text; put NAME.txt beside NAME.wav")
    return found[:most]


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


GREEDY_ONLY = (0.0,)  # a doubtful text is not tried again: all contenders write as much
PLAIN = "ours"
UNCOUNTED = 3  # recordings that everybody hears before anything counts: what is run for the first time is slow
TURNS = 5  # in which everybody hears all recordings at once, beginning with another each time; the median counts
CTRANSLATE2 = "faster-whisper int8"


@dataclass
class Contender:
    """Somebody who hears, and how he fared."""

    name: str
    backend: Backend
    wish: TranscriptionOptions
    texts: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    """Seconds of computing: what the machine does beside does not count in them."""
    tokens: list[tuple[int, ...]] = field(default_factory=list)

    def hear(self, samples: torch.Tensor) -> None:
        """Transcribe a recording and remember what came of it."""
        began, computed = time.perf_counter(), time.process_time()
        segments = list(self.backend.segments(samples, self.wish))
        self.seconds.append(time.perf_counter() - began)
        self.processor.append(time.process_time() - computed)
        self.texts.append("".join(segment.text for segment in segments).strip())
        self.tokens.append(tuple(token for segment in segments for token in segment.tokens))

    def figures(self, meant: Sequence[str], sound_seconds: float, plain: "Contender") -> dict[str, Any]:
        """What is told of him."""
        judged = judge_texts(self.texts, meant)
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
    most: int | None = None,
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
    place = pick(device)
    with stage("loading"):
        spoken = spoken_sentences(speech, most)
        listener = own_listener(resolve(model), place, dtype)
        choices = _choices(draft, heads, width)
        contenders = _contenders(listener, place, choices, padding)
        if peer:
            contenders += _peers(model, place, padding)
        if moonshine is not None:
            contenders.append(Contender("Moonshine base", MoonshineBackend(moonshine), TranscriptionOptions()))
    with stage(f"{len(spoken)} recordings, {len(contenders)} contenders"):
        _compete(contenders, spoken)
    seconds = sum(one.seconds for one in spoken)
    meant = [one.text for one in spoken]
    plain = next(one for one in contenders if one.name == PLAIN)
    result: dict[str, Any] = {
        "what": "speech recognition",
        "model": model,
        "device": place.name,
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
        "contenders": [one.figures(meant, seconds, plain) for one in contenders],
    }
    with stage("many at once"):
        result["batches"] = _batches(listener, place, choices, spoken, batches, padding)
    if live:
        with stage("live"):
            result["live"] = [_live(listener, place, policy, spoken, padding) for policy in POLICIES]
    print_result(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "asr.json").write_text(json.dumps(result, indent=2), encoding="utf8")
    return result


def _choices(drafts: Sequence[str], heads: str | None, width: int) -> dict[str, DraftChoice]:
    """Everybody who may guess, by name."""
    choices = {f"draft {Path(one).name}": DraftChoice(draft=one) for one in drafts}
    if heads is not None:
        choices["heads"] = DraftChoice(heads=heads)
        if width > 1:
            choices[f"heads, tree of {width} wide"] = DraftChoice(heads=heads, width=width, most=4 * width)
    return choices | {"lookup": DraftChoice(lookup=True)}


def _contenders(
    listener: WhisperTranscriber, device: Device, choices: Mapping[str, DraftChoice], padding: Padding
) -> list[Contender]:
    wish = TranscriptionOptions(padding=padding, temperatures=GREEDY_ONLY)
    other: Padding = "full" if padding == "trim" else "trim"
    made = [
        Contender(PLAIN, OwnBackend(listener, device), wish),
        Contender(
            f"ours, padding {other}",
            OwnBackend(listener, device),
            TranscriptionOptions(padding=other, temperatures=GREEDY_ONLY),
        ),
    ]
    return made + [Contender(f"ours, {name}", OwnBackend(listener, device, choice), wish)
                   for name, choice in choices.items()]  # fmt: skip


def _peers(model: str, device: Device, padding: Padding) -> list[Contender]:
    """faster-whisper on the same checkpoint, where it can be had; trimmed where the model's windows allow it."""
    try:
        peer = load_converted(resolve(model), device.kind, "int8" if device.kind == "cpu" else "float16",
                              torch.get_num_threads())  # fmt: skip
    except (MissingDependencyError, VivaError) as error:
        print(f"without faster-whisper: {error}")
        return []
    return [Contender(CTRANSLATE2, peer, TranscriptionOptions(padding=padding, temperatures=GREEDY_ONLY))]


def _compete(contenders: Sequence[Contender], spoken: Sequence[LabelledRecording]) -> None:
    """Everybody hears every recording, one recording after another, beginning with another each time."""
    for one in contenders:
        for recording in spoken[:UNCOUNTED]:
            one.hear(recording.samples)
        one.texts, one.seconds, one.processor, one.tokens = [], [], [], []
        if isinstance(one.backend, OwnBackend):
            one.backend.report()
    for number, recording in enumerate(spoken):
        first = number % len(contenders)
        for one in (*contenders[first:], *contenders[:first]):
            one.hear(recording.samples)


def _batches(
    listener: WhisperTranscriber,
    device: Device,
    choices: Mapping[str, DraftChoice],
    spoken: Sequence[LabelledRecording],
    batches: Sequence[int],
    padding: Padding,
) -> list[dict[str, Any]]:
    """All recordings, so many in flight at once, by each way to guess and by none: everybody in turn, some times."""
    rows, sounds = [], [one.samples for one in spoken]
    wish = TranscriptionOptions(padding=padding, temperatures=GREEDY_ONLY)
    for batch in batches:
        engines = {name: TranscribingEngine(listener, device, batch, choice)
                   for name, choice in (("plain", None), *choices.items())}  # fmt: skip
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for engine in engines.values():
            engine.transcribe(sounds[: max(batch, UNCOUNTED)], wish)
            engine.report()
        for turn in range(TURNS):
            names = [*engines][turn:] + [*engines][:turn]
            for name in names:
                began = time.perf_counter()
                engines[name].transcribe(sounds, wish)
                seconds[name].append(time.perf_counter() - began)
        middle = {name: float(np.median(taken)) for name, taken in seconds.items()}
        rows.append(
            {
                "in_flight": batch,
                "seconds": {name: round(taken, 3) for name, taken in middle.items()},
                "tokens_per_pass": {name: round(one.report().tokens_per_pass, 2) for name, one in engines.items()},
                "times_plain": {name: round(middle["plain"] / taken, 3) for name, taken in middle.items()},
            }
        )
    return rows


def _live(
    listener: WhisperTranscriber, device: Device, policy: str, spoken: Sequence[LabelledRecording], padding: Padding
) -> dict[str, Any]:
    """Every recording as a stream: what is told, how late, and the share of real time it takes."""
    live = LiveListener(
        TranscribingEngine(listener, device, 1), policy, TranscriptionOptions(padding=padding, temperatures=GREEDY_ONLY)
    )
    texts, latencies, taken = [], [], 0.0
    for one in spoken:
        began = time.perf_counter()
        _, state = live.step(live.initial_state(), one.samples.numpy())
        _, state = live.finish(state)
        taken += time.perf_counter() - began
        texts.append(state.text)
        latencies += [word.latency for word in state.told]
    judged = judge_texts(texts, [one.text for one in spoken])
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
    """The figures as tables."""
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
    together = Table("in flight", *(f"{name}: s (× plain, tokens/pass)" for name in names))
    for row in result["batches"]:
        cells = [
            f"{row['seconds'][n]:.2f} ({row['times_plain'][n]:.2f}, {row['tokens_per_pass'][n]:.2f})" for n in names
        ]
        together.add_row(str(row["in_flight"]), *cells)
    console.print(together)
    for one in result.get("live", ()):
        console.print(
            f"live, {one['policy']}, every {one['every_s']} s: WER {one['wer']:.1%}, a word is told "
            f"{one['word_latency_s_mean']} s after it ends (p95 {one['word_latency_s_p95']} s) beside computing, "
            f"RTF {one['rtf']:.3f}, {one['tokens_per_pass']} tokens a pass"
        )
