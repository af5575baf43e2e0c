"""Spoken sentences kept together: made by many processes from a plan, saved as one file, read by number."""

import gzip
import json
import multiprocessing
import random
import re
import wave
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vivavoce.audio.mel import WhisperMel
from vivavoce.errors import InputError, MissingDependencyError, VivaError
from vivavoce.models.speech_encoder.model import SpeechEncoder, SpeechEncoderConfig
from vivavoce.train.features import BatchMel
from vivavoce.train.front_desk import general_sentences, reply_sentences, user_sentences
from vivavoce.train.front_desk.answers import fixed_replies, slotted_replies
from vivavoce.train.front_desk.templates import word_strings
from vivavoce.train.synthesizers import Programs
from vivavoce.train.voices import HELD_OUT, RATE, TEACHER, TRAINING, SyntheticVoice, draw, programs, speak_many

Plan = list[tuple[str, SyntheticVoice]]
Job = tuple[Programs, list[int], SyntheticVoice, list[str]]  # sentences of one voice, and their places in the plan
Spoken = list[NDArray[np.int16] | None]
ASTERISK_TEXTS = Path("/usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz")
ASTERISK_SOUNDS = Path("/usr/share/asterisk/sounds/en")
POCKETSPHINX = Path("/usr/share/pocketsphinx/test/data")
FULL_SCALE = np.float32(32768)
MOST_FAILURES = 0.01
TEACHER_SHARES = {"replies": 0.2, "replies again": 0.1, "strings": 0.25}  # of what is learned from; the rest: anything
GUEST_SHARES = {"general": 0.3, "strings": 0.2}  # of what guests say in training; the rest: what they say at the desk
BATCH = 32  # sentences of one voice that a process takes at once


@dataclass
class Corpus:
    """Utterances end to end at 16 kHz, with what each says and who says it."""

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
        """How long all of it lasts."""
        return len(self.samples) / RATE

    def save(self, path: Path) -> None:
        """Write PATH.npz (sound) and PATH.json (words)."""
        np.savez(Path(path).with_suffix(".npz"), samples=self.samples, starts=self.starts)
        words = json.dumps({"texts": self.texts, "voices": self.voices})
        Path(path).with_suffix(".json").write_text(words)

    @classmethod
    def load(cls, path: Path) -> "Corpus":
        """A corpus that `save` wrote."""
        try:
            words = json.loads(Path(path).with_suffix(".json").read_text())
            with np.load(Path(path).with_suffix(".npz")) as sound:
                return cls(sound["samples"], sound["starts"], words["texts"], words["voices"])
        except OSError as error:
            raise InputError(f"no corpus at {path}: {error.strerror}; make one with `viva train corpora`") from error

    @classmethod
    def of(cls, utterances: Sequence[tuple[NDArray[np.int16], str, str]]) -> "Corpus":
        """A corpus of these sounds, texts and voices, in their order."""
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
    """The plan spoken by the programs of this machine or of the folder `root`; the same plan and seed, the same corpus.

    The seed decides the order of utterances. A sentence that a program fails on is left out; more than one in a
    hundred of them is an error.
    """
    jobs = [(programs(root), *job) for job in _jobs(plan)]
    found: dict[int, NDArray[np.int16]] = {}
    for numbers, sounds in _done(jobs, workers):
        found.update((number, sound) for number, sound in zip(numbers, sounds, strict=True) if sound is not None)
        if progress:
            progress(len(found), len(plan))
    failed = len(plan) - len(found)
    if failed > MOST_FAILURES * len(plan):
        lost = next(index for index in range(len(plan)) if index not in found)
        text, voice = plan[lost]
        raise InputError(f"{failed} of {len(plan)} sentences were not spoken, first {text!r} by {voice.name}")
    order = sorted(found)
    random.Random(f"corpus {seed}").shuffle(order)
    return Corpus.of([(found[number], plan[number][0], plan[number][1].name) for number in order])


def training_plan(seed: int, count: int, voices: Sequence[SyntheticVoice] = TRAINING) -> Plan:
    """So many utterances by these voices: guests' sentences, general ones and words without a sense.

    None is said twice: an ear that hears the same sentences again and again knows those, and misspells others.
    """
    source = random.Random(f"training plan {seed}")
    general, strings = (round(share * count) for share in GUEST_SHARES.values())
    sentences = general_sentences(general, seed) + word_strings(strings, seed + 10)
    sentences += user_sentences("train", count - len(sentences), seed)
    source.shuffle(sentences)
    return [(sentence, draw(source, 1, voices)[0]) for sentence in sentences]


def held_out_plan(seed: int, count: int) -> Plan:
    """Phrasings that training never used, by voices that it never heard."""
    source = random.Random(f"held-out plan {seed}")
    sentences = user_sentences("held_out", min(count, 1200), seed)
    return [(sentences[index % len(sentences)], source.choice(HELD_OUT)) for index in range(count)]


def teacher_plan(count: int, seed: int = 0) -> Plan:
    """What the voice of the replies is learned from: replies, sentences about anything, and words without a sense.

    Distinct replies are nearly all bookings of tables; a voice that learns from those alone says little else well. So
    the few others are said again and again.
    """
    counts = {kind: round(share * count) for kind, share in TEACHER_SHARES.items()}
    replies = reply_sentences(max(1, counts["replies"]), seed)
    strings = word_strings(counts["strings"], seed)
    again = list(islice(cycle([*fixed_replies(), *slotted_replies()]), counts["replies again"]))
    anything = general_sentences(max(0, count - len(replies) - len(strings) - len(again)), seed)
    return [(sentence, TEACHER) for sentence in (*dict.fromkeys([*replies, *anything, *strings]), *again)]


def _jobs(plan: Sequence[tuple[str, SyntheticVoice]]) -> list[tuple[list[int], SyntheticVoice, list[str]]]:
    """The plan in batches of one voice each."""
    by_voice: dict[SyntheticVoice, list[int]] = {}
    for number, (_, voice) in enumerate(plan):
        by_voice.setdefault(voice, []).append(number)
    return [
        (numbers[begin : begin + BATCH], voice, [plan[number][0] for number in numbers[begin : begin + BATCH]])
        for voice, numbers in by_voice.items()
        for begin in range(0, len(numbers), BATCH)
    ]


def _done(jobs: Sequence[Job], workers: int) -> Iterator[tuple[list[int], Spoken]]:
    """Jobs as they are done: here, or by processes that inherit nothing from this one."""
    if workers <= 1:
        yield from map(_speak_job, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(_speak_job, jobs)


def _speak_job(job: Job) -> tuple[list[int], Spoken]:
    programs, numbers, voice, texts = job
    try:
        return numbers, [_pcm(sound) for sound in speak_many(voice, texts, programs)]
    except MissingDependencyError:
        raise
    except (VivaError, OSError):  # one of them failed: find out which
        return numbers, [_speak_or_none(voice, text, programs) for text in texts]


def _speak_or_none(voice: SyntheticVoice, text: str, programs: Programs) -> NDArray[np.int16] | None:
    try:
        return _pcm(speak_many(voice, [text], programs)[0])
    except (VivaError, OSError):
        return None


def _pcm(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    return (samples * 32767).round().clip(-32768, 32767).astype(np.int16)


def human_recordings() -> list[tuple[NDArray[np.float32], str, str]]:
    """Real people reading known words, at 16 kHz: samples, text, package; none where no such package is installed."""
    return [*_asterisk_prompts(), *_pocketsphinx_clips()]


def _asterisk_prompts() -> Iterator[tuple[NDArray[np.float32], str, str]]:
    """One studio speaker (Debian: asterisk-core-sounds-en and -g722); prompts that are tones or spell are left out."""
    for line in _lines_of_gzip(ASTERISK_TEXTS):
        name, _, text = line.partition(": ")
        file = ASTERISK_SOUNDS / f"{name}.g722"
        if len(text.split()) > 1 and not re.search(r"[\[\]()<>;\d]", text) and file.exists():
            yield _decoded_g722(file), text.strip(), "asterisk-core-sounds-en"


def _lines_of_gzip(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode(errors="replace").splitlines() if path.exists() else []


def _decoded_g722(file: Path) -> NDArray[np.float32]:
    try:
        import av
    except ImportError as error:
        raise MissingDependencyError("reading G.722 needs PyAV: pip install 'vivavoce[media]'") from error
    with av.open(str(file), format="g722") as container:
        frames = [frame.to_ndarray().ravel() for frame in container.decode(audio=0)]
    return np.concatenate(frames).astype(np.float32) / FULL_SCALE


def _pocketsphinx_clips() -> Iterator[tuple[NDArray[np.float32], str, str]]:
    """LibriVox sentences and card names (Debian: pocketsphinx-testdata)."""
    for transcript in (POCKETSPHINX / "librivox" / "transcription", POCKETSPHINX / "cards" / "cards.transcription"):
        lines = transcript.read_text().splitlines() if transcript.exists() else []
        for text, name in (match.groups() for line in lines if (match := re.match(r"<s>(.*)</s>\s*\((.*)\)", line))):
            with wave.open(str(transcript.with_name(f"{name}.wav"))) as file:
                samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / FULL_SCALE
            yield samples, text.strip(), "pocketsphinx-testdata"


PADDING_AT_MOST = 1.25  # a batch ends where its longest sound would be this much longer than its shortest


class Sounds:
    """A corpus on the device, from which rows are taken that end, in silence, with a whole code."""

    def __init__(self, corpus: Corpus, config: SpeechEncoderConfig, device: torch.device | str) -> None:
        self.samples = torch.as_tensor(corpus.samples).to(device)
        ends = np.asarray(corpus.starts, dtype=np.int64)
        self.starts, self.lengths = ends[:-1], np.diff(ends)
        self.samples_per_code = config.frames_per_code * WhisperMel.HOP
        longest = config.segment_frames * WhisperMel.HOP
        if len(self.lengths) and self.lengths.max() > longest:
            raise InputError(f"a sound of the corpus has {self.lengths.max()} samples; one segment takes {longest}")

    def rows(self, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """Sounds side by side, and their lengths in whole codes.  # [row, time], [row]"""
        start, length = (torch.from_numpy(v[chosen]).to(self.samples.device) for v in (self.starts, self.lengths))
        whole = self.in_whole_codes(length)
        place = torch.arange(int(whole.max()), device=self.samples.device)
        taken = self.samples[(start[:, None] + place).clamp(max=len(self.samples) - 1)].float() / 32768
        return taken.masked_fill(place >= length[:, None], 0.0), whole

    def in_whole_codes(self, samples: Tensor) -> Tensor:
        """Lengths rounded up to what ends with a code."""
        return (samples + self.samples_per_code - 1) // self.samples_per_code * self.samples_per_code

    def alike(self, batch: int) -> list[np.ndarray]:
        """All sounds in batches of similar length."""
        order = np.argsort(self.lengths, kind="stable")
        order = order[self.lengths[order] > 0]
        batches, first = [], 0
        for place in range(1, len(order) + 1):
            full = place - first == batch or place == len(order)
            if full or self.lengths[order[place]] > PADDING_AT_MOST * self.lengths[order[first]] + 1280:
                batches.append(order[first:place])
                first = place
        return batches


@torch.no_grad()
def encode_batch(encoder: SpeechEncoder, mel: Tensor, lengths: Tensor) -> list[Tensor]:
    """Codes of each row's first frames.  # [batch, bins, frame], frames [batch] → [code] each"""
    per_code = encoder.config.frames_per_code
    if mel.shape[-1] > encoder.config.segment_frames:
        raise InputError(f"{mel.shape[-1]} mel frames are more than one segment; cut the sound at 30 s")
    codes = encoder.nearest(encoder.features(mel))
    return [row[: -(-length // per_code)] for row, length in zip(codes, lengths.tolist(), strict=True)]


@torch.no_grad()
def encode_corpus(
    encoder: SpeechEncoder,
    corpus: Corpus,
    device: torch.device | str,
    augmenter: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    batch: int = 256,
) -> list[np.ndarray]:
    """Codes of every sound of a corpus, in its order, int16 each; with an augmenter, of what it makes of them."""
    encoder = encoder.to(device)
    sounds, mel = Sounds(corpus, encoder.config, device), BatchMel(encoder.config.num_mel_bins, device)
    codes: list[np.ndarray] = [np.zeros(0, dtype=np.int16)] * len(sounds.lengths)
    for chosen in sounds.alike(batch):
        samples, lengths = sounds.rows(chosen)
        if augmenter is not None:
            samples, lengths = augmenter(samples, lengths)
            lengths = sounds.in_whole_codes(lengths).clamp(max=samples.shape[1])
        made = encode_batch(encoder, mel(samples, lengths, running=True), lengths // WhisperMel.HOP)
        for index, row in zip(chosen, _on_host(made), strict=True):
            codes[index] = row
    return codes


def _on_host(rows: Sequence[Tensor]) -> list[np.ndarray]:
    joined = torch.cat(list(rows)).to(torch.int16).cpu().numpy()
    return np.split(joined, np.cumsum([len(row) for row in rows])[:-1])


LEAD_IN = 0.25  # share of a crop that may lie before the sentence or after it


class Crops:
    """Batches of crops of one length; `shares` of voices by name, "" for all the others together."""

    def __init__(
        self,
        corpus: Corpus,
        indices: np.ndarray,
        length: int,
        shares: Mapping[str, float],
        device: torch.device | str,
    ) -> None:
        if len(indices) == 0:
            raise InputError("there is no sentence to cut crops from; give a larger corpus")
        self.length = length
        self.samples = torch.from_numpy(np.ascontiguousarray(corpus.samples)).to(device)
        starts, ends = sentence_bounds(corpus)
        self.starts, self.ends = (torch.from_numpy(each[indices]).to(device) for each in (starts, ends))
        self.weights = torch.from_numpy(_weights(corpus, indices, ends - starts, shares)).to(device)

    def batch(self, size: int, generator: torch.Generator) -> Tensor:
        """Crops with random levels, the long sentences the likelier.  # [sound, 1, sample] in ±1"""
        device = self.samples.device
        chosen = torch.multinomial(self.weights, size, replacement=True, generator=generator)
        starts, ends = self.starts[chosen], self.ends[chosen]
        slack = int(LEAD_IN * self.length)
        room = (ends - starts - self.length).clamp(min=0) + 2 * slack
        offset = (torch.rand(size, generator=generator, device=device) * room).long() - slack
        places = (starts + offset)[:, None] + torch.arange(self.length, device=device)
        inside = (places >= starts[:, None]) & (places < ends[:, None])
        samples = self.samples[places.clamp(0, len(self.samples) - 1)].float() / 32768
        level = 10 ** (torch.rand(size, 1, generator=generator, device=device) * 0.8 - 0.6)
        return (samples * inside * level).clamp(-1, 1)[:, None]


def sentence_bounds(corpus: Corpus) -> tuple[np.ndarray, np.ndarray]:
    """Where each sentence of a corpus begins and ends."""
    count = len(corpus.texts)
    bounds = np.append(np.asarray(corpus.starts, dtype=np.int64)[:count], len(corpus.samples))
    return bounds[:-1], bounds[1:]


def split_held_out(corpus: Corpus, share: float = 0.02, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sentences to learn from and sentences to judge by, no text in both."""
    texts = sorted(set(corpus.texts))
    held = set(np.random.default_rng(seed).permutation(len(texts))[: max(1, round(share * len(texts)))].tolist())
    held_texts = {texts[index] for index in held}
    is_held = np.array([text in held_texts for text in corpus.texts], dtype=bool)
    return np.flatnonzero(~is_held), np.flatnonzero(is_held)


def _weights(corpus: Corpus, indices: np.ndarray, lengths: np.ndarray, shares: Mapping[str, float]) -> np.ndarray:
    """How likely each sentence is: by its length within its group of voices, the groups by their shares."""
    groups = np.array([corpus.voices[index] if corpus.voices[index] in shares else "" for index in indices])
    weights = lengths[indices].astype(np.float32)
    for group in set(groups.tolist()):
        members = groups == group
        weights[members] *= shares.get(group, 0.0) / weights[members].sum()
    return weights if weights.sum() > 0 else np.ones_like(weights)
