"""Make the language model's data: dialogues spoken in many voices, augmented, and encoded by a speech encoder.

    viva train lm-data --corpus SPEECH                                 # synthesize only
    viva train lm-data --corpus SPEECH --speech-encoder DIR --out DATA # encode; synthesize first if needed
    viva train lm-data --kokoro DIR --speech-encoder DIR --out DATA    # callers and replies in Kokoro's voices
    viva train lm-data --pseudo-codes --out DATA [--tiny]              # codes derived from words, no speech

With `--kokoro` and `--corpus` the callers have voices of both, and the replies Kokoro's (or those of `--replies-by`).
The options of the dialogues have to be those of the plan that Kokoro has spoken (`viva train plan --dialogues`).

DATA gets `train.npz` and `held_out.npz`: dialogues with the codes of user turns and replies.
"""

import argparse
import hashlib
import math
import random
import time
from collections.abc import Callable, Container, Iterable, Sequence
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
from vivavoce.train.front_desk import general_sentences, language_of
from vivavoce.train.lm.dialogue_data import Ragged, SpokenDialogues, Utterances
from vivavoce.train.lm.dialogue_plan import (
    EVALUATION_SEED,
    DialoguePlan,
    add_plan_options,
    held_out_dialogues,
    plan_of,
    replies_of,
    train_dialogues,
    voices_of,
)
from vivavoce.train.lm.dialogue_speech import CALLERS, QUESTIONS, REPLIES, DialogueSpeech, kinds_of, kokoro_speech
from vivavoce.train.speech_encoder import BatchMel, Sounds, encode_batch
from vivavoce.train.voices import HELD_OUT as HELD_OUT_VOICES
from vivavoce.train.voices import TEACHER, TRAINING, SyntheticVoice, draw, programs, training_voices

CLEAN, NOISY = 0, 1
TRAIN, HELD_OUT = "train.npz", "held_out.npz"
HELD_OUT_SNR_DB = 15.0
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


def pseudo_data(plan: DialoguePlan, code_count: int) -> tuple[SpokenDialogues, SpokenDialogues]:
    """Training and held-out data without speech: pseudo-codes derived from the words, with errors in noise."""
    lines, sentences = train_dialogues(plan)
    spoken = [sentence for sentence in sentences for _ in range(plan.versions)]
    user_speech = _pseudo_utterances(spoken, code_count, CLEAN, plan.seed)
    replies = _pseudo_utterances(
        [*replies_of(lines), *general_sentences(plan.read, plan.seed + 2)], code_count, CLEAN, plan.seed
    )
    tests = held_out_dialogues(plan)
    questions = list(dict.fromkeys(exchange.user for line in tests for exchange in line))
    both = joined([_pseudo_utterances(questions, code_count, condition, plan.seed) for condition in (CLEAN, NOISY)])
    answers = _pseudo_utterances(replies_of(tests), code_count, CLEAN, plan.seed)
    return SpokenDialogues(lines, user_speech, replies, code_count), SpokenDialogues(tests, both, answers, code_count)


def speech_plan(
    plan: DialoguePlan, voices: Sequence[SyntheticVoice] = TRAINING, has_replies: bool = True
) -> list[tuple[str, SyntheticVoice]]:
    """Sentences and voices to synthesize: users, held-out users, replies. Only replies have the reply voice."""
    random_source = np.random.default_rng(EVALUATION_SEED)
    lines, sentences = train_dialogues(plan)
    tests = held_out_dialogues(plan)
    questions = dict.fromkeys(exchange.user for line in tests for exchange in line)
    replies = dict.fromkeys([*replies_of(lines), *replies_of(tests), *general_sentences(plan.read, plan.seed + 2)])
    plan_entries = [
        (sentence, voice)
        for sentence, count in voices_of(lines, _english(sentences), plan.voices).items()
        for voice in _training_voices(random.Random(f"{plan.seed} {sentence}"), count, voices)
    ]
    plan_entries += [
        (sentence, voice) for sentence in _english(questions) for voice in _sample(HELD_OUT_VOICES, 1, random_source)
    ]
    return plan_entries + [(sentence, TEACHER) for sentence in _english(replies) if has_replies]


def _english(sentences: Iterable[str]) -> list[str]:
    """What the synthesizers can speak."""
    return [sentence for sentence in sentences if language_of(sentence).code == "en"]


def encoded_data(
    plan: DialoguePlan, corpus: Corpus, encoder: SpeechEncoder, device: str, kinds: NDArray[np.int64] | None = None
) -> tuple[SpokenDialogues, SpokenDialogues]:
    """Training and held-out data: the synthesized plan, augmented and encoded."""
    extractor = CodeExtractor(encoder, corpus, device)
    code_count = encoder.config.quantize_vocab_size
    kinds = kinds_of(corpus.voices) if kinds is None else kinds
    train_rows, test_rows, reply_rows = (np.flatnonzero(kinds == kind) for kind in (CALLERS, QUESTIONS, REPLIES))

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
    parser.add_argument("--kokoro", type=Path, help="folder of Kokoro's corpora: more callers, and the replies")
    parser.add_argument(
        "--replies-by", choices=("kokoro", "synthesizers"), help="default: Kokoro, where --kokoro is given"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--synthesizers", type=Path, help="written by voices.bundle; default: the installed ones")
    parser.add_argument("--workers", type=int, default=usable_cores())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_plan_options(parser)
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
    options = parser.parse_args(arguments)
    plan = plan_of(options)
    if (options.corpus is None and options.kokoro is None) == (options.pseudo_codes is None):
        parser.error("either --corpus or --kokoro, or --pseudo-codes is needed")
    if options.out is None and (options.pseudo_codes or options.speech_encoder):
        parser.error("--out is needed")
    if options.pseudo_codes:
        data = pseudo_data(plan, options.pseudo_codes)
    else:
        speech = []
        by_kokoro = options.kokoro is not None and options.replies_by != "synthesizers"
        if options.kokoro is not None and options.speech_encoder is not None:
            speech.append(kokoro_speech(options.kokoro, by_kokoro))
        if options.corpus is not None:
            corpus = _corpus(options.corpus, plan, options.workers, options.synthesizers, not by_kokoro)
            speech.append(DialogueSpeech(corpus, kinds_of(corpus.voices)))
        if options.speech_encoder is None:
            return
        torch.set_float32_matmul_precision("high")  # a GPU's TF32: about no code changes
        encoder = SpeechEncoder.load(options.speech_encoder, options.device)
        both = DialogueSpeech.joined(speech)
        data = encoded_data(plan, both.corpus, encoder, options.device, both.kinds)
    for name, part in zip((TRAIN, HELD_OUT), data, strict=True):
        part.save(options.out / name)
        users, replies = part.user_speech.codes, part.replies.codes
        counts = f"{len(part.dialogues)} dialogues, {len(users)} + {len(replies)} utterances"
        _print(f"{options.out / name}: {counts}, {len(users.values) + len(replies.values)} codes")


def _corpus(path: Path, plan: DialoguePlan, workers: int, root: Path | None, has_replies: bool) -> Corpus:
    if path.with_suffix(".npz").is_file():
        return Corpus.load(path)
    started = time.monotonic()
    entries = speech_plan(plan, training_voices(programs(root)), has_replies)
    corpus = build(entries, workers, plan.seed, _progress(), root)
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
