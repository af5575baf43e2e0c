"""Make the language model's data: dialogues spoken in many voices, augmented, and encoded by a speech encoder.

    viva train lm-data --corpus SPEECH                                 # synthesize only
    viva train lm-data --corpus SPEECH --speech-encoder DIR --out DATA # encode; synthesize first if needed
    viva train lm-data --pseudo-codes --out DATA [--tiny]              # codes derived from words, no speech

DATA gets `train.npz` and `held_out.npz`: dialogues with the codes of user turns and replies.
"""

import argparse
import dataclasses
import hashlib
import math
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
from vivavoce.cores import usable_cores
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.train import add_option
from vivavoce.train.augment import NOISES, Augmenter, at_positions, at_snr, noise, stretched_positions, warp_bands
from vivavoce.train.corpus import Corpus, build
from vivavoce.train.front_desk import DECLINE, Exchange, dialogues, general_sentences, single_questions
from vivavoce.train.lm.batches import Ragged, SpokenDialogues, Utterances
from vivavoce.train.speech_encoder import BatchMel, Sounds, encode_batch
from vivavoce.train.voices import HELD_OUT as HELD_OUT_VOICES
from vivavoce.train.voices import TEACHER, TRAINING, SyntheticVoice, draw, programs, training_voices

CLEAN, NOISY = 0, 1
TRAIN, HELD_OUT = "train.npz", "held_out.npz"
HELD_OUT_SNR_DB = 15.0
SLOT_INTENTS = ("table", "room", "wake_up", "price", "order")  # intents whose replies repeat slots
CONVERTED_TIME_INTENTS = ("table", "wake_up")
CONVERTED_TIME = "forty five"  # the reply says "a quarter to" the next hour instead
EVALUATION_SEED = 0  # the questions do not depend on the training data
RATE = 16_000
MAX_STRETCH = 1.3  # factor by which an augmenter may lengthen audio
FLOOR_DB = (-100.0, -66.0)  # level of microphone noise
Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class SilenceAugmentation:
    """Extra silence before and after an utterance in milliseconds."""

    lead: tuple[float, float] = (0.0, 0.0)
    tail: tuple[float, float] = (0.0, 0.0)


NONE = SilenceAugmentation()
LIVE = SilenceAugmentation(lead=(0.0, 330.0), tail=(0.0, 250.0))


class CodeExtractor:
    """Extracts codes of a corpus with a speech encoder, under augmentation."""

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
        """Codes of the chosen utterances, in their order."""
        generator = torch.Generator(self.device).manual_seed(seed)
        codes_by_index: dict[int, NDArray[np.int16]] = {}
        wanted = set(chosen.tolist())
        for group in self.sounds.length_batches(batch):
            rows = np.array([index for index in group if int(index) in wanted], dtype=np.int64)
            if len(rows):
                samples, lengths = self._surrounded(rows, silence, generator)
                if change is not None:
                    samples, lengths = change(functional.pad(samples, (0, self._spare(samples))), lengths)
                codes_by_index.update(zip(rows.tolist(), self._encode(samples, lengths, change), strict=True))
        return [codes_by_index[index] for index in chosen.tolist()]

    def _surrounded(
        self, chosen: NDArray[np.int64], silence: SilenceAugmentation, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Utterances with silence around them and a noise floor.  # [row, time], [row]"""
        samples, _ = self.sounds.rows(chosen)
        lengths = torch.from_numpy(self.sounds.lengths[chosen]).to(self.device)
        lead, tail = (self._uniform(len(chosen), *span, generator) for span in (silence.lead, silence.tail))
        lead, tail = (lead * RATE / 1000).long(), (tail * RATE / 1000).long()
        total = lead + lengths + tail
        position = torch.arange(self._whole(int(total.max())), device=self.device) - lead[:, None]
        placed = samples.gather(1, position.clamp(0, samples.shape[1] - 1))
        placed = placed.masked_fill((position < 0) | (position >= lengths[:, None]), 0.0)
        if silence is NONE:
            return placed, total
        level = 10 ** (self._uniform(len(chosen), *FLOOR_DB, generator) / 20)
        return placed + level[:, None] * torch.randn(placed.shape, generator=generator, device=self.device), total

    def _encode(self, samples: Tensor, lengths: Tensor, change: Change | None) -> list[NDArray[np.int16]]:
        per_code = self.sounds.samples_per_code
        whole = ((lengths + per_code - 1) // per_code * per_code).clamp(max=samples.shape[1])
        is_inside = torch.arange(samples.shape[1], device=self.device) < lengths[:, None]
        mel, frames = self.mel(samples * is_inside, whole, running=True), whole // WhisperMel.HOP
        if isinstance(change, SpeakerAugmenter):
            mel = change.of_mel(mel, frames)
        codes = encode_batch(self.encoder, mel, frames)
        flat = torch.cat(codes).to(torch.int16).cpu().numpy()
        return np.split(flat, np.cumsum([len(row) for row in codes])[:-1])

    def _whole(self, samples: int) -> int:
        return -(-samples // self.sounds.samples_per_code) * self.sounds.samples_per_code

    def _spare(self, samples: Tensor) -> int:
        return self._whole(int(samples.shape[1] * MAX_STRETCH)) - samples.shape[1]

    def _uniform(self, count: int, low: float, high: float, generator: torch.Generator) -> Tensor:
        return torch.rand(count, generator=generator, device=self.device) * (high - low) + low


class SpeakerAugmenter(Augmenter):
    """An Augmenter that also varies vocal tract length and phone durations in the mel."""

    def of_mel(self, mel: Tensor, frames: Tensor) -> Tensor:
        """Augment mels of rows with these lengths.  # [batch, band, frame], [batch]"""
        uneven = at_positions(mel, stretched_positions(frames, mel.shape[2], 0.5, self.generator))
        return self.apply_to_share(0.5, warp_bands(uneven, self.generator), uneven)


def speaker_augmenter(device: torch.device | str, seed: int, strength: float = 1.0) -> Change:
    return SpeakerAugmenter(device, seed, strength)


def noise_augmenter(device: torch.device | str, seed: int, decibels: float) -> Change:
    """An augmenter that adds all kinds of noise in turn at one SNR."""
    generator = torch.Generator(device).manual_seed(seed)
    turn = iter(range(1_000_000))

    def change(samples: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        bed = noise(NOISES[next(turn) % len(NOISES)], samples, generator)
        return at_snr(samples, bed, decibels, lengths).clamp(-1, 1), lengths

    return change


@dataclass(frozen=True)
class DialoguePlan:
    """Amounts of data: `spoken` dialogues have speech and text, `written` ones text only."""

    spoken: int = 20_000
    written: int = 20_000
    general: int = 2_500
    """Spoken sentences outside the domain, which are declined."""
    slot_questions: int = 0
    """More single questions whose replies repeat a slot; half of them convert a time."""
    read: int = 2_000
    """Sentences other than replies, read by the reply voice."""
    versions: int = 8
    voices: int = 1
    """Minimum number of voices of a sentence; frequent ones have more."""
    held_out: int = 320
    held_out_general: int = 60
    seed: int = 0


TINY = DialoguePlan(spoken=12, written=6, general=4, read=4, versions=2, held_out=6, held_out_general=2)


def train_dialogues(plan: DialoguePlan) -> tuple[list[list[Exchange]], list[str]]:
    """Training dialogues, and their spoken user sentences in order of first use."""
    spoken = dialogues("train", plan.spoken, plan.seed, (1, 4))
    spoken += [_declined(text) for text in general_sentences(plan.general, plan.seed)]
    converted = single_questions(CONVERTED_TIME_INTENTS, plan.slot_questions // 2, plan.seed, containing=CONVERTED_TIME)
    spoken += [
        [each]
        for each in (*converted, *single_questions(SLOT_INTENTS, plan.slot_questions - len(converted), plan.seed))
    ]
    sentences = list(dict.fromkeys(exchange.user for line in spoken for exchange in line))
    return spoken + dialogues("train", plan.written, plan.seed + 1, (1, 6)), sentences


def held_out_dialogues(plan: DialoguePlan) -> list[list[Exchange]]:
    """Dialogues of held-out phrasings: single questions, conversations, and out-of-domain sentences."""
    half = plan.held_out // 2
    lines = dialogues("held_out", half, EVALUATION_SEED + 100, (1, 1))
    lines += dialogues("held_out", plan.held_out - half, EVALUATION_SEED + 101, (2, 4))
    learned = set(general_sentences(plan.general, plan.seed))
    others = general_sentences(4 * plan.held_out_general + plan.general, EVALUATION_SEED + 100)
    fresh = [text for text in others if text not in learned]
    return lines + [_declined(text) for text in fresh[-plan.held_out_general :]]


def voices_of(
    dialogue_lines: Sequence[Sequence[Exchange]], sentences: Sequence[str], min_voices: int = 1
) -> dict[str, int]:
    """Number of voices of each sentence: the minimum, and one more for every four uses, up to 8."""
    uses = Counter(exchange.user for line in dialogue_lines for exchange in line)
    return {sentence: min(max(8, min_voices), min_voices + uses[sentence] // 4) for sentence in sentences}


def pseudo_data(plan: DialoguePlan, code_count: int) -> tuple[SpokenDialogues, SpokenDialogues]:
    """Training and held-out data without speech: pseudo-codes derived from the words, with errors in noise."""
    lines, sentences = train_dialogues(plan)
    spoken = [sentence for sentence in sentences for _ in range(plan.versions)]
    user_speech = _pseudo_utterances(spoken, code_count, CLEAN, plan.seed)
    replies = _pseudo_utterances(
        [*_replies(lines), *general_sentences(plan.read, plan.seed + 2)], code_count, CLEAN, plan.seed
    )
    tests = held_out_dialogues(plan)
    questions = list(dict.fromkeys(exchange.user for line in tests for exchange in line))
    both = joined([_pseudo_utterances(questions, code_count, condition, plan.seed) for condition in (CLEAN, NOISY)])
    answers = _pseudo_utterances(_replies(tests), code_count, CLEAN, plan.seed)
    return SpokenDialogues(lines, user_speech, replies, code_count), SpokenDialogues(tests, both, answers, code_count)


def speech_plan(plan: DialoguePlan, voices: Sequence[SyntheticVoice] = TRAINING) -> list[tuple[str, SyntheticVoice]]:
    """Sentences and voices to synthesize: users, held-out users, replies. Only replies have the reply voice."""
    random_source = np.random.default_rng(EVALUATION_SEED)
    lines, sentences = train_dialogues(plan)
    tests = held_out_dialogues(plan)
    questions = dict.fromkeys(exchange.user for line in tests for exchange in line)
    replies = dict.fromkeys([*_replies(lines), *_replies(tests), *general_sentences(plan.read, plan.seed + 2)])
    plan_entries = [
        (sentence, voice)
        for sentence, count in voices_of(lines, sentences, plan.voices).items()
        for voice in _training_voices(random.Random(f"{plan.seed} {sentence}"), count, voices)
    ]
    plan_entries += [
        (sentence, voice) for sentence in questions for voice in _sample(HELD_OUT_VOICES, 1, random_source)
    ]
    return plan_entries + [(sentence, TEACHER) for sentence in replies]


def encoded_data(
    plan: DialoguePlan, corpus: Corpus, encoder: SpeechEncoder, device: str
) -> tuple[SpokenDialogues, SpokenDialogues]:
    """Training and held-out data: the synthesized plan, augmented and encoded."""
    extractor = CodeExtractor(encoder, corpus, device)
    code_count = encoder.config.quantize_vocab_size
    held_out_names = {voice.name for voice in HELD_OUT_VOICES}
    kinds = np.array([1 if name in held_out_names else 2 if name == TEACHER.name else 0 for name in corpus.voices])
    train_rows, test_rows, reply_rows = (np.flatnonzero(kinds == kind) for kind in range(3))

    def encode(
        chosen: NDArray[np.int64], condition: int, silence: SilenceAugmentation, change: Change | None, seed: int
    ) -> Utterances:
        texts = [corpus.texts[index] for index in chosen]
        _print(f"encoding {len(chosen)} utterances")
        return utterances(texts, extractor.codes(chosen, silence, seed, change), condition)

    seeds = range(plan.seed + 1, plan.seed + plan.versions)
    versions = [encode(train_rows, CLEAN, LIVE, None, plan.seed)]
    versions += [encode(train_rows, NOISY, LIVE, speaker_augmenter(device, seed), seed) for seed in seeds]
    replies = encode(reply_rows, CLEAN, NONE, None, plan.seed)
    tests = [encode(test_rows, CLEAN, LIVE, None, EVALUATION_SEED + 200)]
    tests += [
        encode(test_rows, NOISY, LIVE, noise_augmenter(device, EVALUATION_SEED, HELD_OUT_SNR_DB), EVALUATION_SEED + 201)
    ]
    lines, questions = held_out_dialogues(plan), joined(tests)
    complete = [line for line in lines if all(len(questions.of(e.user)) and len(replies.of(e.reply)) for e in line)]
    train = SpokenDialogues(train_dialogues(plan)[0], joined(versions), replies, code_count)
    answers = {exchange.reply for line in complete for exchange in line}
    return train, SpokenDialogues(complete, questions, only(replies, answers), code_count)


def only(spoken: Utterances, sentences: Container[str]) -> Utterances:
    chosen = [i for i, number in enumerate(spoken.sentence) if spoken.sentences[number] in sentences]
    texts = [spoken.sentences[spoken.sentence[index]] for index in chosen]
    return utterances(texts, [spoken.codes[index] for index in chosen], CLEAN)


def joined(parts: Sequence[Utterances]) -> Utterances:
    """Concatenate utterances that share a list of sentences."""
    arrays = [part.codes[index] for part in parts for index in range(len(part.codes))]
    sentence = np.concatenate([part.sentence for part in parts])
    return Utterances(
        parts[0].sentences, Ragged.of(arrays), sentence, np.concatenate([part.condition for part in parts])
    )


def utterances(texts: Sequence[str], codes: Sequence[NDArray[np.integer]], condition: int) -> Utterances:
    """Utterances from parallel texts and codes."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    sentence = np.array([numbers[text] for text in texts], dtype=np.int32)
    return Utterances(list(numbers), Ragged.of(codes), sentence, np.full(len(texts), condition, dtype=np.uint8))


def _pseudo_utterances(texts: Sequence[str], code_count: int, condition: int, seed: int) -> Utterances:
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
    """Pseudo-codes of a word: one for every two letters, from a hash."""
    digest = hashlib.sha256(word.strip(".,?!").encode()).digest()
    return [int.from_bytes(digest[2 * i : 2 * i + 2]) % code_count for i in range(math.ceil(len(word) / 2))]


def _replies(lines: Sequence[Sequence[Exchange]]) -> list[str]:
    return list(dict.fromkeys(exchange.reply for line in lines for exchange in line))


def _declined(text: str) -> list[Exchange]:
    return [Exchange("decline", text, DECLINE)]


def _training_voices(source: random.Random, count: int, voices: Sequence[SyntheticVoice]) -> list[SyntheticVoice]:
    """Distinct random voices other than the reply voice."""
    return [voice for voice in draw(source, count + 1, voices) if voice != TEACHER][:count]


def _sample(voices: Sequence[Any], count: int, random_source: np.random.Generator) -> list[Any]:
    chosen = random_source.choice(len(voices), size=min(count, len(voices)), replace=False)
    return [voices[int(index)] for index in chosen]


def _print(line: str) -> None:
    print(line, flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="corpus of the synthesized sentences; created if missing")
    add_option(parser, "--speech-encoder", "--ear", type=Path, help="folder of a trained speech encoder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--synthesizers", type=Path, help="written by voices.bundle; default: the installed ones")
    parser.add_argument("--workers", type=int, default=usable_cores())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spoken", type=int, help="number of spoken dialogues")
    parser.add_argument("--general", type=int, help="number of out-of-domain sentences")
    add_option(parser, "--slot-questions", "--valued", type=int, help="number of extra single questions with slots")
    parser.add_argument("--versions", type=int, help="augmented versions of each user utterance")
    parser.add_argument("--voices", type=int, help="minimum number of voices per user sentence")
    add_option(
        parser,
        "--pseudo-codes",
        "--spelled",
        type=int,
        nargs="?",
        const=256,
        metavar="CODES",
        help="codes derived from words instead of speech",
    )
    parser.add_argument("--tiny", action="store_true", help="a few dialogues")
    options = parser.parse_args(arguments)
    names = ("spoken", "general", "slot_questions", "versions", "voices", "seed")
    changes = {name: value for name in names if (value := getattr(options, name)) is not None}
    plan = dataclasses.replace(TINY if options.tiny else DialoguePlan(), **changes)
    if (options.corpus is None) == (options.pseudo_codes is None):
        parser.error("either --corpus or --pseudo-codes is needed")
    if options.out is None and (options.pseudo_codes or options.speech_encoder):
        parser.error("--out is needed")
    if options.pseudo_codes:
        data = pseudo_data(plan, options.pseudo_codes)
    else:
        corpus = _corpus(options.corpus, plan, options.workers, options.synthesizers)
        if options.speech_encoder is None:
            return
        data = encoded_data(plan, corpus, SpeechEncoder.load(options.speech_encoder, options.device), options.device)
    for name, part in zip((TRAIN, HELD_OUT), data, strict=True):
        part.save(options.out / name)
        users, replies = part.user_speech.codes, part.replies.codes
        counts = f"{len(part.dialogues)} dialogues, {len(users)} + {len(replies)} utterances"
        _print(f"{options.out / name}: {counts}, {len(users.values) + len(replies.values)} codes")


def _corpus(path: Path, plan: DialoguePlan, workers: int, root: Path | None) -> Corpus:
    if path.with_suffix(".npz").is_file():
        return Corpus.load(path)
    started = time.monotonic()
    corpus = build(speech_plan(plan, training_voices(programs(root))), workers, plan.seed, _progress(), root)
    path.parent.mkdir(parents=True, exist_ok=True)
    corpus.save(path)
    _print(f"synthesized {len(corpus)} sentences, {corpus.seconds / 3600:.1f} h, in {time.monotonic() - started:.0f} s")
    return corpus


def _progress() -> Callable[[int, int], None]:
    """Print progress every ten seconds."""
    last_print = [time.monotonic()]

    def progress(done: int, total: int) -> None:
        if time.monotonic() - last_print[0] > 10:
            last_print[0] = time.monotonic()
            _print(f"synthesized {done} of {total} sentences")

    return progress


if __name__ == "__main__":
    main()
