"""Speaking a plan with Kokoro in large batches, for a GPU: tens of hours of speech in minutes.

Utterances of about the same length share a pass, each as a whole. Sound is resampled and trimmed on the device, and
only 16-bit samples leave it. Rooms, noise and lines of the plan are left out: training draws its own. With a limit of
seconds a random subset of `mixed` is spoken, after all of the other parts.
"""

import argparse
import json
import lzma
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vivavoce import hub
from vivavoce.device import pick
from vivavoce.errors import InputError
from vivavoce.implementations import choose_kokoro_generator
from vivavoce.models.kokoro.config import RATE as KOKORO_RATE
from vivavoce.models.kokoro.config import read_vocabulary
from vivavoce.models.kokoro.decoder import time_mask
from vivavoce.models.kokoro.model import GeneratedSound, Kokoro, PhonemeText, PreparedSpeech
from vivavoce.models.kokoro.voices import VoiceTables
from vivavoce.models.kokoro.windows import FEATURES_A_SECOND
from vivavoce.train.corpus import Corpus
from vivavoce.train.dialogue_utterances import PARTS_BY_BEGINNING, PlannedCounts, planned_utterances
from vivavoce.train.lm.dialogue_plan import add_plan_options, plan_of
from vivavoce.train.utterances import PARTS, Utterance, plan_of_texts, read_plan
from vivavoce.train.voices import CLICK, FRAME, LEAD, QUIET, RATE, TAIL

PHONEMES_A_SECOND = 14.0  # about, at speed 1
MAX_ROWS = 256
CUDA_SECONDS, CPU_SECONDS = 500.0, 0.0  # of sound in a batch, padding included; 0: the CPU's generator takes one text
BLOCK = KOKORO_RATE // 4  # samples that the lengths of batches are multiples of: few distinct transforms
AUDIBLE = 1e-3


class PlannedSpeech(Protocol):
    """A text with its phonemes, and how to speak it."""

    @property
    def text(self) -> str: ...
    @property
    def voice(self) -> str: ...
    @property
    def speed(self) -> float: ...
    @property
    def phonemes(self) -> str: ...


class TimedSpeech(NamedTuple):
    """Speech at 16 kHz, and when each of its words ends, in seconds."""

    samples: NDArray[np.int16]
    word_ends: tuple[float, ...]


class BatchSynthesizer:
    """Kokoro for many utterances at once."""

    def __init__(self, model: Kokoro, folder: Path, seconds_a_batch: float | None = None) -> None:
        self.model = model
        self.vocabulary = read_vocabulary(folder)
        self.tables = VoiceTables(folder, 2 * model.config.style)
        device = model.bert_encoder.weight.device
        self._generate: Callable[[PreparedSpeech], GeneratedSound] = model.generate
        """Of single texts."""
        if device.type == "cpu":
            choice = choose_kokoro_generator(pick("cpu"))
            self._generate = choice.cls(model.decoder.generator, choice.dtype)
        self.seconds_a_batch = seconds_a_batch or (CUDA_SECONDS if device.type == "cuda" else CPU_SECONDS)

    def batches(self, utterances: Sequence[PlannedSpeech]) -> list[list[int]]:
        """Indices of utterances by length; the padded sound of a batch is about `seconds_a_batch` long."""
        expected = [len(each.phonemes) / PHONEMES_A_SECOND / each.speed + 1.0 for each in utterances]
        batches: list[list[int]] = [[]]
        for index in sorted(range(len(utterances)), key=expected.__getitem__):
            rows = len(batches[-1]) + 1
            if rows > 1 and (rows * expected[index] > self.seconds_a_batch or rows > MAX_ROWS):
                batches.append([])
            batches[-1].append(index)
        return batches

    def speak(self, utterances: Sequence[PlannedSpeech]) -> list[NDArray[np.int16] | None]:
        """The sound of each at 16 kHz, trimmed; None where it is silent."""
        return [None if spoken is None else spoken.samples for spoken in self.speak_words(utterances)]

    @torch.inference_mode()
    def speak_words(
        self, utterances: Sequence[PlannedSpeech], lengthening: Sequence[Sequence[float]] = ()
    ) -> list[TimedSpeech | None]:
        """As `speak`, with the ends of words; `lengthening`: factors on the durations of each text's phonemes."""
        factors = lengthening or [()] * len(utterances)
        texts = [self._text(each, factor) for each, factor in zip(utterances, factors, strict=True)]
        prepared = self.model.prepare(texts)
        generate = self._generate if len(texts) == 1 else self.model.generate
        rows = generate(prepared).samples.float()
        lengths = prepared.row_lengths * self.model.config.generator.hop
        rows = rows * time_mask(lengths, rows.shape[1])[:, 0]
        low = at_training_rate(functional.pad(rows, (0, -rows.shape[1] % BLOCK)))
        begins, ends = speech_bounds(low, lengths * RATE // KOKORO_RATE)
        samples = (low.clamp(-1, 1) * 32767).round().to(torch.int16).cpu().numpy()
        spoken = list[TimedSpeech | None]()
        for number, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            moments = _word_ends(self._spoken(utterances[number]), prepared.durations[number])
            word_ends = tuple(round(moment - begin / RATE, 3) for moment in moments)
            spoken.append(TimedSpeech(samples[number, begin:end].copy(), word_ends) if end > begin else None)
        return spoken

    def _spoken(self, utterance: PlannedSpeech) -> str:
        """The phonemes that the model knows, as many as it takes."""
        known = "".join(phoneme for phoneme in utterance.phonemes if phoneme in self.vocabulary)
        return known[: self.model.config.max_phonemes]

    def _text(self, utterance: PlannedSpeech, lengthening: Sequence[float]) -> PhonemeText:
        ids = [self.vocabulary[phoneme] for phoneme in self._spoken(utterance)]
        if not ids:
            raise InputError(f"{utterance.text!r} has no phonemes in the plan; write it with `viva train plan`")
        style = self.tables.style(utterance.voice, len(ids))
        return PhonemeText(ids, style, utterance.speed, len(ids), tuple(lengthening))


def _word_ends(phonemes: str, durations: Sequence[int]) -> list[float]:
    """Seconds at which the words of a text end; `durations` begin and end with a boundary."""
    starts = [0, *accumulate(durations)]
    ends = [*(place for place, phoneme in enumerate(phonemes) if phoneme == " "), len(phonemes)]
    return [starts[place + 1] * 2 / FEATURES_A_SECOND for place in ends]


def at_training_rate(rows: Tensor) -> Tensor:
    """24 → 16 kHz by dropping the upper third of the spectrum.  # [row, time] → [row, 2/3 · time]"""
    size = rows.shape[1] * RATE // KOKORO_RATE
    spectrum = torch.fft.rfft(rows, dim=-1)[:, : size // 2 + 1]
    return torch.fft.irfft(spectrum, n=size, dim=-1) * (RATE / KOKORO_RATE)


def speech_bounds(rows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """First and last sample of the speech with a little silence around it, as `voices.trimmed`; equal if silent."""
    inside = time_mask(lengths, rows.shape[1])[:, 0]
    frames = rows.shape[1] // FRAME
    level = (rows * inside)[:, : frames * FRAME].abs().unflatten(1, (frames, FRAME)).amax(-1)
    loudest = level.amax(1, keepdim=True)
    number = torch.arange(frames, device=rows.device)
    first = torch.where(level > CLICK * loudest, number, frames).amin(1)
    last = torch.where(level > QUIET * loudest, number, -1).amax(1)
    begins = (first * FRAME - LEAD).clamp(min=0)
    ends = torch.minimum((last + 1) * FRAME + TAIL, lengths)
    return begins, torch.where(loudest[:, 0] > AUDIBLE, ends, begins)


def speak_batched(
    utterances: Sequence[Utterance],
    synthesizer: BatchSynthesizer,
    seconds: float | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, Corpus]:
    """The corpora of a plan by part; after `seconds` no further batch of `mixed` begins."""
    started = time.monotonic()
    spoken: dict[str, list[tuple[NDArray[np.int16], str, str]]] = {part: [] for part in PARTS}
    made = 0.0
    for number, batch in enumerate(_ordered(utterances, synthesizer)):
        elapsed = time.monotonic() - started
        if seconds is not None and elapsed > seconds and batch[0].part == "mixed":
            break
        for utterance, samples in zip(batch, synthesizer.speak(batch), strict=True):
            if samples is not None:
                spoken[utterance.part].append((samples, utterance.text, f"kokoro-{utterance.voice}"))
                made += len(samples) / RATE
        if number % 20 == 0:
            report(json.dumps({"batch": number, "hours": round(made / 3600, 2), "elapsed": round(elapsed, 1)}))
    corpora = {part: Corpus.of(utterances_of_part) for part, utterances_of_part in spoken.items() if utterances_of_part}
    report(json.dumps({"hours": round(made / 3600, 2), "elapsed": round(time.monotonic() - started, 1)}))
    return corpora


def _ordered(utterances: Sequence[Utterance], synthesizer: BatchSynthesizer) -> Iterator[list[Utterance]]:
    """Batches of one part each, `mixed` last and shuffled."""
    for part in sorted(PARTS, key=lambda part: part == "mixed"):
        chosen = [each for each in utterances if each.part == part]
        batches = synthesizer.batches(chosen) if chosen else []
        random.Random(part).shuffle(batches)
        yield from ([chosen[index] for index in batch] for batch in batches)


Planned = TypeVar("Planned", bound=Any)


def with_phonemes(utterances: Sequence[Planned], known: Callable[[str], bool]) -> Iterator[Planned]:
    """The utterances with their phonemes; those that have none are left out."""
    from vivavoce.tts.phonemes import phonemiser_of

    for utterance in utterances:
        spoken = phonemiser_of(utterance.text, utterance.voice[0])(utterance.text)
        kept = " ".join("".join(filter(known, spoken)).split())
        if kept:
            yield replace(utterance, phonemes=kept)


def plan_main(arguments: Sequence[str] | None = None) -> None:
    """`viva train plan --out FILE`: sentences with voices and phonemes, to be spoken by `--batched`."""
    parser = argparse.ArgumentParser(description="Plan utterances of English sentences in Kokoro's voices.")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--texts", type=Path, help="a sentence a line")
    kind.add_argument(
        "--dialogues", action="store_true", help="the dialogues of `viva train lm-data` with these options"
    )
    parser.add_argument("--held-out", type=Path, help="sentences for held-out voices, to evaluate with")
    parser.add_argument("--kokoro", required=True, metavar="MODEL", help="name or folder of the model")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; compressed if it ends in .xz")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="with --dialogues: factor on what is no part of dialogues"
    )
    parser.add_argument(
        "--beginning-with",
        choices=PARTS_BY_BEGINNING,
        default="encoder",
        help="with --dialogues: the first part of the model that is trained",
    )
    add_plan_options(parser)
    options = parser.parse_args(arguments)
    vocabulary = read_vocabulary(hub.resolve(options.kokoro))
    if options.dialogues:
        counts = PlannedCounts().scaled(options.scale)
        utterances = planned_utterances(plan_of(options), counts, options.beginning_with)
    else:
        texts, held_out = (_lines(file) for file in (options.texts, options.held_out))
        utterances = plan_of_texts(texts, held_out, options.seed)
    planned = with_phonemes(utterances, vocabulary.__contains__)
    content = "".join(f"{utterance.to_json()}\n" for utterance in planned).encode()
    options.out.write_bytes(lzma.compress(content) if options.out.suffix == ".xz" else content)
    print(f"{content.count(10)} utterances in {options.out}")


def _lines(file: Path | None) -> list[str]:
    lines = [] if file is None else file.read_text(encoding="utf8").splitlines()
    return [line.strip() for line in lines if line.strip()]


def batched_corpora(plan: Path, kokoro: Path, out: Path, device: str, seconds: float | None) -> dict[str, Corpus]:
    """Speak a plan on a device, and write its corpora."""
    out.mkdir(parents=True, exist_ok=True)
    synthesizer = BatchSynthesizer(Kokoro.load(kokoro, device), kokoro)
    corpora = speak_batched(read_plan(plan), synthesizer, seconds, lambda line: print(line, flush=True))
    for part, corpus in corpora.items():
        corpus.save(out / part)
    return corpora
