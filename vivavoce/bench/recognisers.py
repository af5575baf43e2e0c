"""`viva bench recognisers`: word errors, character errors and speed of recognisers on recordings with texts.

Any recogniser is measured through the interface that `viva transcribe` uses; they take turns on every recording, so
that all of them see the same machine load. Noise can be added to the recordings, and suppressed again.
"""

import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from vivavoce.asr.backends import Backend, fitting, load_backend
from vivavoce.audio.denoise import denoised
from vivavoce.audio.io import read
from vivavoce.bench.asr import RATE, LabelledRecording, spoken_sentences
from vivavoce.bench.noisy_speech import noise_beds
from vivavoce.device import pick
from vivavoce.errors import InputError
from vivavoce.evaluation.asterisk_prompts import PACKAGE, TEXTS, prompt_files
from vivavoce.evaluation.machine import stage
from vivavoce.evaluation.scoring import error_rate
from vivavoce.hub import resolve
from vivavoce.models.whisper.steps import TranscriptionOptions
from vivavoce.train.front_desk.answers import normalise

MIN_PROMPT_WORDS = 4


def asterisk_prompts(root: Path, count: int = 100, seed: int = 0) -> list[LabelledRecording]:
    """Prompts of a telephone system, spoken by a person: of Debian's asterisk-core-sounds-en and -en-g722 below `root`.

    Random prompts of four words or more, without digits and remarks in brackets.
    """
    if not (root / TEXTS).is_file():
        raise InputError(f"{root / TEXTS} is missing: install or unpack {PACKAGE} and {PACKAGE}-g722")
    found = prompt_files(root, MIN_PROMPT_WORDS)
    chosen = random.Random(seed).sample(found, min(count, len(found)))
    return [
        LabelledRecording(torch.from_numpy(read(sound, rate=RATE).samples[0].copy()), text) for sound, text in chosen
    ]


@dataclass
class Recogniser:
    """A backend under test and what it wrote."""

    name: str
    kind: str
    backend: Backend
    denoises: bool = False
    texts: list[str] = field(default_factory=list)
    seconds: float = 0.0
    processor: float = 0.0
    """CPU seconds of this process, independent of other load."""

    def transcribe(self, samples: torch.Tensor, options: TranscriptionOptions) -> None:
        """Transcribe a recording and add its text and times."""
        if self.denoises:
            samples = torch.from_numpy(denoised(samples.numpy()).mixed[0])
        began, computed = time.perf_counter(), time.process_time()
        segments = list(self.backend.segments(samples, options))
        self.seconds += time.perf_counter() - began
        self.processor += time.process_time() - computed
        self.texts.append("".join(segment.text for segment in segments).strip())

    def figures(self, references: Sequence[str], sound_seconds: float) -> dict[str, Any]:
        """Errors and speed, and the recordings with the most errors."""
        words = [(normalise(reference).split(), normalise(text).split()) for reference, text in self._pairs(references)]
        letters = [(characters(reference), characters(text)) for reference, text in self._pairs(references)]
        wrong = [
            {"reference": reference, "text": text}
            for (reference, text), (expected, written) in zip(self._pairs(references), letters, strict=True)
            if expected != written
        ]
        return {
            "model": self.name,
            "backend": self.kind,
            "denoised": self.denoises,
            "wer": round(error_rate(*zip(*words, strict=True)), 4),
            "cer": round(error_rate(*zip(*letters, strict=True)), 4),
            "rtf": round(self.seconds / sound_seconds, 3),
            "processor_rtf": round(self.processor / sound_seconds, 3),
            "wrong": wrong,
        }

    def _pairs(self, references: Sequence[str]) -> list[tuple[str, str]]:
        return list(zip(references, self.texts, strict=True))


def characters(text: str) -> str:
    """A text without spaces, punctuation and case: what character errors are counted on."""
    return re.sub(r"[\W_]", "", text.lower())


def run(
    models: Sequence[str],
    speech: Path | None = None,
    max_recordings: int | None = None,
    language: str | None = None,
    prompt: str | None = None,
    beams: int = 1,
    device: str = "auto",
    dtype: str = "auto",
    out: Path | None = None,
    snr: float | None = None,
    noise: Path | None = None,
    denoise: bool = False,
) -> dict[str, Any]:
    """Measure, print, write `recognisers.json` to `out`, and return what was measured.

    With `snr` noise is added, of the files of a folder or synthetic. With `denoise` every recogniser also gets the
    recordings with noise suppressed.
    """
    target = pick(device)
    with stage("loading"):
        is_asterisk = speech is not None and (speech / TEXTS).is_file()
        if is_asterisk and speech is not None:
            spoken = asterisk_prompts(speech, max_recordings or 100)
        else:
            spoken = spoken_sentences(speech, max_recordings)
        listeners = [
            Recogniser(name, fitting(resolve(name), target), load_backend(name, "auto", device, dtype))
            for name in models
        ]
        if denoise:
            listeners += [replace(one, denoises=True, texts=[]) for one in listeners]
        if (beds := noise_beds(snr, noise)) is not None:
            spoken = [
                replace(one, samples=torch.from_numpy(beds.added(one.samples.numpy(), number)))
                for number, one in enumerate(spoken)
            ]
    seconds = sum(one.seconds for one in spoken)
    options = TranscriptionOptions(language, prompt=prompt, beams=beams)
    with stage(f"{len(spoken)} recordings of {seconds:.0f} s in all, {len(listeners)} recognisers"):
        for number, recording in enumerate(spoken):
            first = number % len(listeners)
            for one in (*listeners[first:], *listeners[:first]):
                one.transcribe(recording.samples, options)
    result: dict[str, Any] = {
        "what": "recognisers",
        "device": target.name,
        "threads": torch.get_num_threads(),
        "recordings": len(spoken),
        "sound_seconds": round(seconds, 1),
        "language": language,
        "snr_db": snr,
        "noise": None if snr is None else "synthetic" if noise is None else noise.name,
        "beams": beams,
        "recognisers": [one.figures([one.text for one in spoken], seconds) for one in listeners],
    }
    print_result(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "recognisers.json").write_text(json.dumps(result, indent=2, ensure_ascii=False), encoding="utf8")
    return result


def print_result(result: dict[str, Any]) -> None:
    """A row for each recogniser."""
    title = f"{result['recordings']} recordings, {result['sound_seconds']} s, {result['device']}"
    if result["snr_db"] is not None:
        title += f", {result['noise']} noise at {result['snr_db']:g} dB"
    shown = Table("model", "backend", "noise", "word errors", "character errors", "RTF", "CPU RTF", title=title)
    for one in result["recognisers"]:
        rates = (f"{one['wer']:.1%}", f"{one['cer']:.1%}", str(one["rtf"]), str(one["processor_rtf"]))
        shown.add_row(one["model"], one["backend"], "suppressed" if one["denoised"] else "as it is", *rates)
    Console().print(shown)
