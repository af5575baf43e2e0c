"""Make the language model's data: dialogues spoken in many voices, heard by a trained ear, as codes.

    viva train lm-data --corpus SPEECH                          # speak, no ear needed yet
    viva train lm-data --corpus SPEECH --ear EAR --out DATA     # hear (and speak, if it was not done)
    viva train lm-data --spelled --out DATA [--tiny]            # no speech: every word has its codes

DATA gets `train.npz` and `held_out.npz`: dialogues, guests' speech, the desk's replies.
"""

import argparse
import dataclasses
import hashlib
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vivavoce.audio.mel import WhisperMel
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.train.augment import NOISES, Augmenter, at_snr, noise
from vivavoce.train.corpus import Corpus, build
from vivavoce.train.features import BatchMel, Sounds, encode_batch
from vivavoce.train.front_desk import DECLINE, Exchange, dialogues, general_sentences, single_questions
from vivavoce.train.lm.batches import Ragged, SpokenDialogues, Utterances
from vivavoce.train.speech_encoder.batches import other_lengths, taken_at, warp_bands
from vivavoce.train.voices import HELD_OUT as UNHEARD
from vivavoce.train.voices import TEACHER, TRAINING, SyntheticVoice, draw, guests, programs

CLEAN, NOISY = 0, 1
TRAIN, HELD_OUT = "train.npz", "held_out.npz"
HELD_OUT_SNR_DB = 15.0
VALUED = ("table", "room", "wake_up", "price", "order")  # intents whose answers carry what the guest said
RECKONED, RECKONED_TIME = ("table", "wake_up"), "forty five"  # the desk says "a quarter to", and the next hour
EXAM_SEED = 0  # whatever is learned from, the exam asks the same questions


RATE = 16_000
SLOWEST = 1.3  # how much longer an augmenter may make a sound
FLOOR_DB = (-100.0, -66.0)  # level of the rush that is under every microphone
Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class SilenceAugmentation:
    """Milliseconds of quiet before and after a sound, besides what the synthesizer leaves."""

    before: tuple[float, float] = (0.0, 0.0)
    after: tuple[float, float] = (0.0, 0.0)


NONE = SilenceAugmentation()
LIVE = SilenceAugmentation(before=(0.0, 330.0), after=(0.0, 250.0))


class CodeExtractor:
    """An ear, and a corpus on its device."""

    def __init__(self, encoder: SpeechEncoder, corpus: Corpus, device: torch.device | str) -> None:
        self.encoder = encoder.to(device).eval()
        self.sounds = Sounds(corpus, encoder.config, device)
        self.mel = BatchMel(encoder.config.num_mel_bins, device)
        self.device = torch.device(device)

    @torch.no_grad()
    def codes(
        self,
        chosen: NDArray[np.int64],
        silence: SilenceAugmentation,
        seed: int,
        change: Change | None = None,
        batch: int = 256,
    ) -> list[NDArray[np.int16]]:
        """Codes of the chosen sounds, in their order."""
        generator = torch.Generator(self.device).manual_seed(seed)
        found: dict[int, NDArray[np.int16]] = {}
        wanted = set(chosen.tolist())
        for group in self.sounds.alike(batch):
            here = np.array([index for index in group if int(index) in wanted], dtype=np.int64)
            if len(here):
                samples, lengths = self._surrounded(here, silence, generator)
                if change is not None:
                    samples, lengths = change(functional.pad(samples, (0, self._spare(samples))), lengths)
                found.update(zip(here.tolist(), self._encode(samples, lengths, change), strict=True))
        return [found[index] for index in chosen.tolist()]

    def _surrounded(
        self, chosen: NDArray[np.int64], silence: SilenceAugmentation, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Sounds with quiet around them and a rush under all.  # [row, time], [row]"""
        samples, _ = self.sounds.rows(chosen)
        lengths = torch.from_numpy(self.sounds.lengths[chosen]).to(self.device)
        before, after = (self._uniform(len(chosen), *span, generator) for span in (silence.before, silence.after))
        before, after = (before * RATE / 1000).long(), (after * RATE / 1000).long()
        total = before + lengths + after
        place = torch.arange(self._whole(int(total.max())), device=self.device) - before[:, None]
        heard = samples.gather(1, place.clamp(0, samples.shape[1] - 1))
        heard = heard.masked_fill((place < 0) | (place >= lengths[:, None]), 0.0)
        if silence is NONE:
            return heard, total
        level = 10 ** (self._uniform(len(chosen), *FLOOR_DB, generator) / 20)
        return heard + level[:, None] * torch.randn(heard.shape, generator=generator, device=self.device), total

    def _encode(self, samples: Tensor, lengths: Tensor, change: Change | None) -> list[NDArray[np.int16]]:
        per_code = self.sounds.samples_per_code
        whole = ((lengths + per_code - 1) // per_code * per_code).clamp(max=samples.shape[1])
        there = torch.arange(samples.shape[1], device=self.device) < lengths[:, None]
        mel, frames = self.mel(samples * there, whole, running=True), whole // WhisperMel.HOP
        if isinstance(change, Elsewhere):
            mel = change.of_mel(mel, frames)
        codes = encode_batch(self.encoder, mel, frames)
        flat = torch.cat(codes).to(torch.int16).cpu().numpy()
        return np.split(flat, np.cumsum([len(row) for row in codes])[:-1])

    def _whole(self, samples: int) -> int:
        return -(-samples // self.sounds.samples_per_code) * self.sounds.samples_per_code

    def _spare(self, samples: Tensor) -> int:
        return self._whole(int(samples.shape[1] * SLOWEST)) - samples.shape[1]

    def _uniform(self, count: int, low: float, high: float, generator: torch.Generator) -> Tensor:
        return torch.rand(count, generator=generator, device=self.device) * (high - low) + low


class Elsewhere(Augmenter):
    """Changes of sounds, and of the mels made from them: other throats, and sounds that last longer or shorter."""

    def of_mel(self, mel: Tensor, frames: Tensor) -> Tensor:
        """Mels of rows of so many frames.  # [batch, band, frame], [batch]"""
        uneven = taken_at(mel, other_lengths(frames, mel.shape[2], 0.5, self.generator))
        return self.chance(0.5, warp_bands(uneven, self.generator), uneven)


def elsewhere(device: torch.device | str, seed: int, strength: float = 1.0) -> Change:
    """What makes each sound another person's, in another place."""
    return Elsewhere(device, seed, strength)


def over_noise(device: torch.device | str, seed: int, decibels: float) -> Change:
    """What lays a noise under each sound, of all kinds by turns, at one distance."""
    generator = torch.Generator(device).manual_seed(seed)
    turn = iter(range(1_000_000))

    def change(samples: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        bed = noise(NOISES[next(turn) % len(NOISES)], samples, generator)
        return at_snr(samples, bed, decibels, lengths).clamp(-1, 1), lengths

    return change


@dataclass(frozen=True)
class DialoguePlan:
    """How much is made. `spoken` dialogues come as speech and text, `written` more of them as text alone."""

    spoken: int = 20_000
    written: int = 20_000
    general: int = 2_500
    """Sentences of no concern to the desk, spoken by guests: each is declined."""
    valued: int = 0
    """More single questions whose answers say a number, time, name or dish back; half of them reckon with the time."""
    read: int = 2_000
    """Sentences read by the desk's voice besides its replies."""
    versions: int = 8
    voices: int = 1
    """Voices that say a sentence, at least; one that is often said has more."""
    held_out: int = 320
    held_out_general: int = 60
    seed: int = 0


TINY = DialoguePlan(spoken=12, written=6, general=4, read=4, versions=2, held_out=6, held_out_general=2)


def train_dialogues(plan: DialoguePlan) -> tuple[list[list[Exchange]], list[str]]:
    """The dialogues to learn from, and the sentences in them that guests speak, in order of first use."""
    spoken = dialogues("train", plan.spoken, plan.seed, (1, 4))
    spoken += [_declined(text) for text in general_sentences(plan.general, plan.seed)]
    reckoned = single_questions(RECKONED, plan.valued // 2, plan.seed, saying=RECKONED_TIME)
    spoken += [[each] for each in (*reckoned, *single_questions(VALUED, plan.valued - len(reckoned), plan.seed))]
    sentences = list(dict.fromkeys(exchange.user for line in spoken for exchange in line))
    return spoken + dialogues("train", plan.written, plan.seed + 1, (1, 6)), sentences


def held_out_dialogues(plan: DialoguePlan) -> list[list[Exchange]]:
    """Phrasings that were never learned: single questions, whole conversations, and what the desk cannot answer."""
    half = plan.held_out // 2
    lines = dialogues("held_out", half, EXAM_SEED + 100, (1, 1))
    lines += dialogues("held_out", plan.held_out - half, EXAM_SEED + 101, (2, 4))
    learned = set(general_sentences(plan.general, plan.seed))
    others = general_sentences(4 * plan.held_out_general + plan.general, EXAM_SEED + 100)
    fresh = [text for text in others if text not in learned]
    return lines + [_declined(text) for text in fresh[-plan.held_out_general :]]


def voices_of(dialogue_lines: Sequence[Sequence[Exchange]], sentences: Sequence[str], least: int = 1) -> dict[str, int]:
    """In how many voices each sentence is spoken: the least, and one more for every four times it is said, up to 8."""
    uses = Counter(exchange.user for line in dialogue_lines for exchange in line)
    return {sentence: min(max(8, least), least + uses[sentence] // 4) for sentence in sentences}


def spelled_data(plan: DialoguePlan, code_count: int) -> tuple[SpokenDialogues, SpokenDialogues]:
    """Train and held-out data where no ear is at hand: every word has codes of its own, the noisy ones a few wrong."""
    lines, sentences = train_dialogues(plan)
    spoken = [sentence for sentence in sentences for _ in range(plan.versions)]
    heard = _spelled(spoken, code_count, CLEAN, plan.seed)
    replies = _spelled([*_replies(lines), *general_sentences(plan.read, plan.seed + 2)], code_count, CLEAN, plan.seed)
    tests = held_out_dialogues(plan)
    asked = list(dict.fromkeys(exchange.user for line in tests for exchange in line))
    both = joined([_spelled(asked, code_count, condition, plan.seed) for condition in (CLEAN, NOISY)])
    answers = _spelled(_replies(tests), code_count, CLEAN, plan.seed)
    return SpokenDialogues(lines, heard, replies, code_count), SpokenDialogues(tests, both, answers, code_count)


def speech_plan(plan: DialoguePlan, voices: Sequence[SyntheticVoice] = TRAINING) -> list[tuple[str, SyntheticVoice]]:
    """Who says what: guests, guests held out, the desk. Nobody but the desk has its voice."""
    random_source = np.random.default_rng(EXAM_SEED)
    lines, sentences = train_dialogues(plan)
    tests = held_out_dialogues(plan)
    asked = dict.fromkeys(exchange.user for line in tests for exchange in line)
    replies = dict.fromkeys([*_replies(lines), *_replies(tests), *general_sentences(plan.read, plan.seed + 2)])
    said = [
        (sentence, voice)
        for sentence, count in voices_of(lines, sentences, plan.voices).items()
        for voice in _guests(random.Random(f"{plan.seed} {sentence}"), count, voices)
    ]
    said += [(sentence, voice) for sentence in asked for voice in _some(UNHEARD, 1, random_source)]
    return said + [(sentence, TEACHER) for sentence in replies]


def heard_data(
    plan: DialoguePlan, corpus: Corpus, encoder: SpeechEncoder, device: str
) -> tuple[SpokenDialogues, SpokenDialogues]:
    """Train and held-out data: the spoken plan, changed in many ways and heard by the ear."""
    listener = CodeExtractor(encoder, corpus, device)
    code_count = encoder.config.quantize_vocab_size
    unheard = {voice.name for voice in UNHEARD}
    kinds = np.array([1 if name in unheard else 2 if name == TEACHER.name else 0 for name in corpus.voices])
    guests, tested, desk = (np.flatnonzero(kinds == kind) for kind in range(3))

    def hear(
        chosen: NDArray[np.int64], condition: int, silence: SilenceAugmentation, change: Change | None, seed: int
    ) -> Utterances:
        texts = [corpus.texts[index] for index in chosen]
        _say(f"hears {len(chosen)} sounds")
        return utterances(texts, listener.codes(chosen, silence, seed, change), condition)

    seeds = range(plan.seed + 1, plan.seed + plan.versions)
    versions = [hear(guests, CLEAN, LIVE, None, plan.seed)]
    versions += [hear(guests, NOISY, LIVE, elsewhere(device, seed), seed) for seed in seeds]
    replies = hear(desk, CLEAN, NONE, None, plan.seed)
    tests = [hear(tested, CLEAN, LIVE, None, EXAM_SEED + 200)]
    tests += [hear(tested, NOISY, LIVE, over_noise(device, EXAM_SEED, HELD_OUT_SNR_DB), EXAM_SEED + 201)]
    lines, asked = held_out_dialogues(plan), joined(tests)
    whole = [line for line in lines if all(len(asked.of(e.user)) and len(replies.of(e.reply)) for e in line)]
    train = SpokenDialogues(train_dialogues(plan)[0], joined(versions), replies, code_count)
    answers = {exchange.reply for line in whole for exchange in line}
    return train, SpokenDialogues(whole, asked, only(replies, answers), code_count)


def only(spoken: Utterances, sentences: Container[str]) -> Utterances:
    """The utterances of some sentences."""
    chosen = [i for i, number in enumerate(spoken.sentence) if spoken.sentences[number] in sentences]
    texts = [spoken.sentences[spoken.sentence[index]] for index in chosen]
    return utterances(texts, [spoken.codes[index] for index in chosen], CLEAN)


def joined(parts: Sequence[Utterances]) -> Utterances:
    """Utterances of the same sentences, together."""
    arrays = [part.codes[index] for part in parts for index in range(len(part.codes))]
    sentence = np.concatenate([part.sentence for part in parts])
    return Utterances(
        parts[0].sentences, Ragged.of(arrays), sentence, np.concatenate([part.condition for part in parts])
    )


def utterances(texts: Sequence[str], codes: Sequence[NDArray[np.integer]], condition: int) -> Utterances:
    """Codes and the sentence that each of them says."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    sentence = np.array([numbers[text] for text in texts], dtype=np.int32)
    return Utterances(list(numbers), Ragged.of(codes), sentence, np.full(len(texts), condition, dtype=np.uint8))


def _spelled(texts: Sequence[str], code_count: int, condition: int, seed: int) -> Utterances:
    random_source = np.random.default_rng([seed, condition])
    codes = [
        np.array([code for word in text.lower().split() for code in _word_codes(word, code_count)]) for text in texts
    ]
    if condition == NOISY:
        codes = [
            np.where(random_source.random(len(c)) < 0.1, random_source.integers(code_count, size=len(c)), c)
            for c in codes
        ]
    return utterances(texts, codes, condition)


def _word_codes(word: str, code_count: int) -> list[int]:
    """A code for every two letters, the same wherever the word stands."""
    digest = hashlib.sha256(word.strip(".,?!").encode()).digest()
    return [int.from_bytes(digest[2 * i : 2 * i + 2]) % code_count for i in range(math.ceil(len(word) / 2))]


def _replies(lines: Sequence[Sequence[Exchange]]) -> list[str]:
    return list(dict.fromkeys(exchange.reply for line in lines for exchange in line))


def _declined(text: str) -> list[Exchange]:
    return [Exchange("decline", text, DECLINE)]


def _guests(source: random.Random, count: int, voices: Sequence[SyntheticVoice]) -> list[SyntheticVoice]:
    """Different voices of these, none of them the desk's."""
    return [voice for voice in draw(source, count + 1, voices) if voice != TEACHER][:count]


def _some(voices: Sequence[Any], count: int, random_source: np.random.Generator) -> list[Any]:
    chosen = random_source.choice(len(voices), size=min(count, len(voices)), replace=False)
    return [voices[int(index)] for index in chosen]


def _say(line: str) -> None:
    print(line, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="where the spoken sentences are, or shall be")
    parser.add_argument("--ear", type=Path, help="folder of a trained speech encoder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--synthesizers", type=Path, help="folder that voices.bundle wrote; default: this machine's")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spoken", type=int, help="dialogues that are spoken")
    parser.add_argument("--general", type=int, help="sentences of no concern to the desk, which it declines")
    parser.add_argument("--valued", type=int, help="more single questions with numbers, times, names and dishes")
    parser.add_argument("--versions", type=int, help="hearings of each utterance of a guest")
    parser.add_argument("--voices", type=int, help="voices that say each sentence of a guest, at least")
    parser.add_argument("--spelled", type=int, nargs="?", const=256, metavar="CODES", help="no speech, so many codes")
    parser.add_argument("--tiny", action="store_true", help="a few dialogues")
    given = parser.parse_args(arguments)
    names = ("spoken", "general", "valued", "versions", "voices", "seed")
    changes = {name: value for name in names if (value := getattr(given, name)) is not None}
    plan = dataclasses.replace(TINY if given.tiny else DialoguePlan(), **changes)
    if (given.corpus is None) == (given.spelled is None):
        parser.error("either --corpus or --spelled is needed")
    if given.out is None and (given.spelled or given.ear):
        parser.error("--out is needed")
    if given.spelled:
        data = spelled_data(plan, given.spelled)
    else:
        corpus = _corpus(given.corpus, plan, given.workers, given.synthesizers)
        if given.ear is None:
            return
        data = heard_data(plan, corpus, SpeechEncoder.load(given.ear, given.device), given.device)
    for name, part in zip((TRAIN, HELD_OUT), data, strict=True):
        part.save(given.out / name)
        counts = f"{len(part.dialogues)} dialogues, {len(part.heard.codes)} + {len(part.replies.codes)} utterances"
        _say(f"{given.out / name}: {counts}, {len(part.heard.codes.values) + len(part.replies.codes.values)} codes")


def _corpus(path: Path, plan: DialoguePlan, workers: int, root: Path | None) -> Corpus:
    if path.with_suffix(".npz").is_file():
        return Corpus.load(path)
    begun = time.monotonic()
    corpus = build(speech_plan(plan, guests(programs(root))), workers, plan.seed, _progress(), root)
    path.parent.mkdir(parents=True, exist_ok=True)
    corpus.save(path)
    _say(f"spoke {len(corpus)} sentences, {corpus.seconds / 3600:.1f} h, in {time.monotonic() - begun:.0f} s")
    return corpus


def _progress() -> Callable[[int, int], None]:
    """A line every ten seconds."""
    told = [time.monotonic()]

    def progress(done: int, total: int) -> None:
        if time.monotonic() - told[0] > 10:
            told[0] = time.monotonic()
            _say(f"spoke {done} of {total}")

    return progress


if __name__ == "__main__":
    main()
