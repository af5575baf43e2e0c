"""Synthetic speech corpora: sentences spoken by worker processes according to a plan, stored in two files.

`viva train corpora --out DIR [--synthesizers BUNDLE]` writes all corpora but the language model's: `mixed` for speech
encoder and ASR (training voices and the teacher), `held_out` to evaluate them, `teacher` for flow and vocoder, `tts`
for mini-tts (teacher, a second voice, and a few utterances of every other). `viva train questions --out DIR` writes
spoken questions with held-out phrasings and voices, for demonstrations and tests.

`viva train corpora --kokoro --out DIR` speaks a plan with Kokoro-82M instead, in English and Mandarin: `mixed` by its
training voices and mixtures of them, `held_out` by whole voices that nothing else has, `teacher` in one voice of the
desk. It writes the plan (`plan.jsonl`) and shards, from which a stopped run resumes.
"""

import argparse
import json
import multiprocessing
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vivavoce.cores import usable_cores
from vivavoce.errors import InputError, MissingDependencyError, VivaError
from vivavoce.train.front_desk import general_sentences, reply_sentences, user_sentences
from vivavoce.train.front_desk.answers import fixed_replies, slotted_replies
from vivavoce.train.front_desk.general import word_strings
from vivavoce.train.synthesizers import Programs
from vivavoce.train.voices import (
    HELD_OUT,
    OPTIONAL,
    RATE,
    TEACHER,
    TRAINING,
    VOICES,
    SyntheticVoice,
    draw,
    programs,
    speak_many,
    training_voices,
)

Plan = list[tuple[str, SyntheticVoice]]
Job = tuple[Programs, list[int], SyntheticVoice, list[str]]  # sentences of one voice and their indices in the plan
Spoken = list[NDArray[np.int16] | str]  # sounds, or why there is none
FULL_SCALE = np.float32(32768)
MAX_FAILURE_SHARE = 0.01
TEACHER_SHARES = {"replies": 0.2, "replies again": 0.1, "strings": 0.25}  # the rest: general sentences
USER_SHARES = {"general": 0.3, "strings": 0.2}  # the rest: front desk sentences
BATCH = 32  # sentences of one voice per job


@dataclass
class Corpus:
    """Concatenated utterances at 16 kHz with their texts and voices."""

    samples: NDArray[np.int16]
    starts: NDArray[np.int64]  # [utterance + 1]
    texts: list[str]
    voices: list[str]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], str, str]:
        begin, end = self.starts[index], self.starts[index + 1]
        return self.samples[begin:end].astype(np.float32) / FULL_SCALE, self.texts[index], self.voices[index]

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE

    def save(self, path: Path) -> None:
        """Write PATH.npz (audio) and PATH.json (texts and voices)."""
        np.savez(Path(path).with_suffix(".npz"), samples=self.samples, starts=self.starts)
        metadata = json.dumps({"texts": self.texts, "voices": self.voices})
        Path(path).with_suffix(".json").write_text(metadata)

    @classmethod
    def load(cls, path: Path) -> "Corpus":
        """Read a corpus written by `save`."""
        try:
            metadata = json.loads(Path(path).with_suffix(".json").read_text())
            with np.load(Path(path).with_suffix(".npz")) as audio:
                return cls(audio["samples"], audio["starts"], metadata["texts"], metadata["voices"])
        except OSError as error:
            raise InputError(f"no corpus at {path}: {error.strerror}; create one with `viva train corpora`") from error

    @classmethod
    def joined(cls, corpora: Sequence["Corpus"]) -> "Corpus":
        """Several corpora, one after the other."""
        lengths = np.concatenate([np.diff(corpus.starts) for corpus in corpora])
        return cls(
            np.concatenate([corpus.samples for corpus in corpora]),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            [text for corpus in corpora for text in corpus.texts],
            [voice for corpus in corpora for voice in corpus.voices],
        )

    @classmethod
    def of(cls, utterances: Sequence[tuple[NDArray[np.int16], str, str]]) -> "Corpus":
        """A corpus of (samples, text, voice), in this order."""
        starts = np.cumsum([0, *(len(samples) for samples, _, _ in utterances)]).astype(np.int64)
        samples = np.concatenate([np.zeros(0, np.int16), *(samples for samples, _, _ in utterances)])
        return cls(samples, starts, [text for _, text, _ in utterances], [voice for _, _, voice in utterances])


def build(
    plan: Sequence[tuple[str, SyntheticVoice]],
    workers: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    root: Path | None = None,
) -> Corpus:
    """Synthesize a plan with the installed programs or those of the folder `root`; deterministic for plan and seed.

    The seed decides the order of utterances. Sentences that a program fails on are left out; more than one in a hundred
    is an error.
    """
    jobs = [(programs(root), *job) for job in _jobs(plan)]
    spoken: dict[int, NDArray[np.int16]] = {}
    failed: dict[int, str] = {}
    for numbers, sounds in _run_jobs(jobs, workers):
        for number, sound in zip(numbers, sounds, strict=True):
            if isinstance(sound, str):
                failed[number] = sound
            else:
                spoken[number] = sound
        if len(failed) > MAX_FAILURE_SHARE * len(plan):
            first, reason = min(failed.items())
            text, voice = plan[first]
            raise InputError(
                f"{len(failed)} of {len(plan)} sentences could not be synthesized so far, "
                f"among them {text!r} with voice {voice.name}: {reason}"
            )
        if progress:
            progress(len(spoken), len(plan))
    order = sorted(spoken)
    random.Random(f"corpus {seed}").shuffle(order)
    return Corpus.of([(spoken[number], plan[number][0], plan[number][1].name) for number in order])


def training_plan(seed: int, count: int, voices: Sequence[SyntheticVoice] = TRAINING) -> Plan:
    """Utterances by training voices: user sentences, general sentences and random word strings.

    No sentence occurs twice: an encoder trained on repeated sentences memorises them and generalises worse.
    """
    source = random.Random(f"training plan {seed}")
    general, strings = (round(share * count) for share in USER_SHARES.values())
    sentences = general_sentences(general, seed) + word_strings(strings, seed + 10)
    sentences += user_sentences("train", count - len(sentences), seed)
    source.shuffle(sentences)
    return [(sentence, draw(source, 1, voices)[0]) for sentence in sentences]


def held_out_plan(seed: int, count: int) -> Plan:
    """Held-out phrasings by held-out voices."""
    source = random.Random(f"held-out plan {seed}")
    sentences = user_sentences("held_out", min(count, 1200), seed)
    return [(sentences[index % len(sentences)], source.choice(HELD_OUT)) for index in range(count)]


def teacher_plan(count: int, seed: int = 0) -> Plan:
    """Utterances of the reply voice: replies, general sentences, and random word strings.

    Nearly all distinct replies are table bookings, so the few others are repeated.
    """
    counts = {kind: round(share * count) for kind, share in TEACHER_SHARES.items()}
    replies = reply_sentences(max(1, counts["replies"]), seed)
    strings = word_strings(counts["strings"], seed)
    repeated = list(islice(cycle([*fixed_replies(), *slotted_replies()]), counts["replies again"]))
    general = general_sentences(max(0, count - len(replies) - len(strings) - len(repeated)), seed)
    return [(sentence, TEACHER) for sentence in (*dict.fromkeys([*replies, *general, *strings]), *repeated)]


def _jobs(plan: Sequence[tuple[str, SyntheticVoice]]) -> list[tuple[list[int], SyntheticVoice, list[str]]]:
    """The plan split into batches of one voice."""
    by_voice: dict[SyntheticVoice, list[int]] = {}
    for number, (_, voice) in enumerate(plan):
        by_voice.setdefault(voice, []).append(number)
    return [
        (numbers[begin : begin + BATCH], voice, [plan[number][0] for number in numbers[begin : begin + BATCH]])
        for voice, numbers in by_voice.items()
        for begin in range(0, len(numbers), BATCH)
    ]


def _run_jobs(jobs: Sequence[Job], workers: int) -> Iterator[tuple[list[int], Spoken]]:
    """Results in order of completion, from this process or spawned workers."""
    if workers <= 1:
        yield from map(_speak_job, jobs)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    try:
        for future in as_completed([pool.submit(_speak_job, job) for job in jobs]):
            yield future.result()
    except BrokenProcessPool as error:
        raise VivaError("a worker that synthesizes speech died; its error is above, or it was killed") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _speak_job(job: Job) -> tuple[list[int], Spoken]:
    programs, numbers, voice, texts = job
    try:
        return numbers, [_pcm(sound) for sound in speak_many(voice, texts, programs)]
    except MissingDependencyError:
        raise
    except (VivaError, OSError):  # retry one by one to find the failing sentence
        return numbers, [_speak_or_say_why_not(voice, text, programs) for text in texts]


def _speak_or_say_why_not(voice: SyntheticVoice, text: str, programs: Programs) -> NDArray[np.int16] | str:
    try:
        return _pcm(speak_many(voice, [text], programs)[0])
    except (VivaError, OSError) as error:
        return str(error)


def _pcm(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    return (samples * 32767).round().clip(-32768, 32767).astype(np.int16)


def sentence_bounds(corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """Start and end sample of each sentence."""
    count = len(corpus.texts)
    bounds = np.append(np.asarray(corpus.starts, dtype=np.int64)[:count], len(corpus.samples))
    return bounds[:-1], bounds[1:]


def split_held_out(corpus: Corpus, share: float = 0.02, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Indices of training and held-out sentences with no text in common."""
    texts = sorted(set(corpus.texts))
    held = set(np.random.default_rng(seed).permutation(len(texts))[: max(1, round(share * len(texts)))].tolist())
    held_texts = {texts[index] for index in held}
    is_held = np.array([text in held_texts for text in corpus.texts], dtype=bool)
    return np.flatnonzero(~is_held), np.flatnonzero(is_held)


SECOND_VOICE = next(voice for voice in VOICES if voice.name == "flite-slt-1.0")
OTHER_VOICES_DIVISOR = 20  # the TTS corpus takes one in this many utterances of other voices


@dataclass(frozen=True)
class Counts:
    """Number of utterances of each kind."""

    training: int = 40_000
    teacher: int = 9_000
    second_voice: int = 1_500
    held_out: int = 1_000

    def scaled(self, share: float) -> "Counts":
        scaled = (max(1, round(share * count)) for count in vars(self).values())
        return Counts(*scaled)


def write_corpora(
    out: Path, counts: Counts, workers: int, seed: int = 0, root: Path | None = None
) -> dict[str, Corpus]:
    """Synthesize all utterances once and write the corpora; returned by name."""
    replies = teacher_plan(counts.teacher, seed)
    second = [(text, SECOND_VOICE) for text, _ in teacher_plan(counts.second_voice, seed + 1)]
    spoken = training_plan(seed, counts.training, voices=training_voices(programs(root)))
    plan = [*spoken, *replies, *second, *held_out_plan(seed, counts.held_out)]
    whole = build(plan, workers, seed, None, root)
    reply_texts = {text for text, _ in (*replies, *second)}
    held_out_names = {voice.name for voice in HELD_OUT}
    teacher_names = {TEACHER.name, SECOND_VOICE.name}
    parts: dict[str, Callable[[str, str], bool]] = {
        "mixed": lambda voice, text: (
            voice not in held_out_names and not (voice == SECOND_VOICE.name and text in reply_texts)
        ),
        "held_out": lambda voice, text: voice in held_out_names,
        "teacher": lambda voice, text: voice == TEACHER.name and text in reply_texts,
        "tts": lambda voice, text: (
            (voice in teacher_names and text in reply_texts)
            or (voice not in held_out_names and _is_sampled(voice + text))
        ),
    }
    out.mkdir(parents=True, exist_ok=True)
    corpora = {name: _part(whole, is_chosen) for name, is_chosen in parts.items()}
    for name, part in corpora.items():
        part.save(out / name)
    return corpora


def _part(corpus: Corpus, is_chosen: Callable[[str, str], bool]) -> Corpus:
    chosen = [i for i in range(len(corpus)) if is_chosen(corpus.voices[i], corpus.texts[i])]
    return Corpus.of(
        [(corpus.samples[corpus.starts[i] : corpus.starts[i + 1]], corpus.texts[i], corpus.voices[i]) for i in chosen]
    )


def _is_sampled(name: str) -> bool:
    return zlib.crc32(name.encode()) % OTHER_VOICES_DIVISOR == 0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--synthesizers", type=Path, help="written by voices.bundle; default: the installed ones")
    parser.add_argument("--workers", type=int, default=usable_cores())
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of utterances")
    parser.add_argument("--seed", type=int, default=0)
    add_kokoro_options(parser)
    options = parser.parse_args(arguments)
    if options.kokoro:
        corpora = kokoro_corpora(options)
    else:
        if missing := sorted({voice.part for voice in OPTIONAL} - programs(options.synthesizers).parts):
            print(f"optional voices that are not installed: {', '.join(missing)}")
        counts = Counts().scaled(options.scale)
        corpora = write_corpora(options.out, counts, options.workers, options.seed, options.synthesizers)
    for name, corpus in corpora.items():
        print(f"{name}: {len(corpus)} utterances, {corpus.seconds / 3600:.2f} h, {len(set(corpus.voices))} voices")


def add_kokoro_options(parser: argparse.ArgumentParser) -> None:
    """The options of corpora that Kokoro speaks."""
    group = parser.add_argument_group("with Kokoro")
    group.add_argument("--kokoro", nargs="?", const="kokoro-82m", metavar="MODEL", help="default: kokoro-82m")
    group.add_argument("--languages", nargs="+", choices=["en", "zh"], default=["en", "zh"])
    group.add_argument("--edition", type=int, default=2, help="of the front desk's phrasings: 1 or 2")
    group.add_argument("--plan", type=Path, help="speak this plan rather than a new one")
    group.add_argument("--clean", action="store_true", help="without the rooms, noise and lines of the plan")
    group.add_argument("--shard", type=int, default=200, help="utterances of a shard")
    group.add_argument("--device", default="auto")
    group.add_argument(
        "--batched", action="store_true", help="speak a --plan of `viva train plan` in large batches, for a GPU"
    )
    group.add_argument("--seconds", type=float, help="with --batched: begin no batch after this time")


def kokoro_corpora(options: argparse.Namespace) -> dict[str, Corpus]:
    """Speak a plan, or what is missing of it, and join its shards."""
    from vivavoce import hub
    from vivavoce.device import pick
    from vivavoce.train.batch_synthesis import batched_corpora
    from vivavoce.train.shards import join, print_json, speak_plan
    from vivavoce.train.utterances import UtteranceCounts, plan, read_plan
    from vivavoce.tts.kokoro import KokoroTTS

    if options.batched:
        if options.plan is None:
            raise InputError("--batched needs a --plan with phonemes, written by `viva train plan`")
        device = str(pick(options.device).torch_device)
        return batched_corpora(options.plan, hub.resolve(options.kokoro), options.out, device, options.seconds)
    counts = UtteranceCounts().scaled(options.scale)
    utterances = (
        read_plan(options.plan) if options.plan else plan(options.languages, counts, options.seed, options.edition)
    )
    tts = KokoroTTS.load(options.kokoro, options.device)
    try:
        speak_plan(utterances, options.out, tts, options.shard, options.clean, print_json)
    finally:
        tts.close()
    return join(options.out, utterances, options.shard)


if __name__ == "__main__":
    main()
