"""Make the language model's data: dialogues spoken in many voices, heard by a trained ear, as codes.

    viva train lm-data --corpus SPEECH                          # speak, no ear needed yet
    viva train lm-data --corpus SPEECH --ear EAR --out DATA     # hear (and speak, if it was not done)
    viva train lm-data --spelled --out DATA [--tiny]            # no speech: every word has its codes

DATA gets `train.npz` and `held_out.npz`: dialogues, guests' speech, the desk's replies.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vivavoce.errors import InputError
from vivavoce.models.speech_encoder.model import SpeechEncoder
from vivavoce.train.corpus import Corpus, build
from vivavoce.train.front_desk import DECLINE, Exchange, dialogues, general_sentences, single_questions
from vivavoce.train.lm.augment import LIVE, NONE, Change, CodeExtractor, SilenceAugmentation, elsewhere, over_noise
from vivavoce.train.voices import HELD_OUT as UNHEARD
from vivavoce.train.voices import TEACHER, TRAINING, SyntheticVoice, draw, guests, programs

Codes = NDArray[np.int32]


@dataclass(frozen=True)
class Ragged:
    """Many arrays of codes in one."""

    values: NDArray[np.uint16]
    starts: NDArray[np.int64]  # one more than there are arrays

    @classmethod
    def of(cls, arrays: Sequence[NDArray[np.integer]]) -> "Ragged":
        """Put arrays one behind the other."""
        starts = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(array) for array in arrays], out=starts[1:])
        flat = np.concatenate(arrays) if arrays else np.zeros(0)
        return cls(flat.astype(np.uint16), starts)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Codes:
        return self.values[self.starts[index] : self.starts[index + 1]].astype(np.int32)


@dataclass(frozen=True)
class Utterances:
    """Sentences as codes; `sentence` and `condition` of each say which words these are, and how they were heard."""

    sentences: list[str]
    codes: Ragged
    sentence: NDArray[np.int32]  # [utterance]
    condition: NDArray[np.uint8]  # [utterance]: 0 clean, 1 augmented or noisy

    @cached_property
    def _by_sentence(self) -> dict[str, NDArray[np.int64]]:
        order = np.argsort(self.sentence, kind="stable")
        bounds = np.searchsorted(self.sentence[order], np.arange(len(self.sentences) + 1))
        return {text: order[bounds[i] : bounds[i + 1]] for i, text in enumerate(self.sentences)}

    def of(self, sentence: str, condition: int | None = None) -> NDArray[np.int64]:
        """The utterances of a sentence; none where it was never spoken."""
        found = self._by_sentence.get(sentence, np.zeros(0, dtype=np.int64))
        return found if condition is None else found[self.condition[found] == condition]

    def pick(self, sentence: str, random_source: np.random.Generator, condition: int | None = None) -> Codes | None:
        """The codes of one utterance of a sentence, or None where it was never spoken."""
        found = self.of(sentence, condition)
        return self.codes[int(found[random_source.integers(len(found))])] if len(found) else None


@dataclass(frozen=True)
class SpokenDialogues:
    """Dialogues with what of them was spoken: guests in many voices and conditions, replies and reading in one."""

    dialogues: list[list[Exchange]]
    heard: Utterances
    replies: Utterances
    code_count: int

    @property
    def written(self) -> Iterable[str]:
        """Every sentence that a reader of these dialogues meets."""
        spoken = dict.fromkeys([*self.heard.sentences, *self.replies.sentences])
        return dict.fromkeys([*spoken, *(text for line in self.dialogues for e in line for text in (e.user, e.reply))])

    def save(self, file: str | Path) -> None:
        """Write one compressed file."""
        lines = json.dumps([[asdict(exchange) for exchange in line] for line in self.dialogues])
        arrays: dict[str, NDArray[np.generic]] = {"code_count": np.array(self.code_count)}
        arrays["dialogues"] = np.frombuffer(lines.encode(), dtype=np.uint8)
        for name, utterances in (("heard", self.heard), ("replies", self.replies)):
            arrays[f"{name}_sentences"] = np.frombuffer(json.dumps(utterances.sentences).encode(), dtype=np.uint8)
            arrays[f"{name}_values"], arrays[f"{name}_starts"] = utterances.codes.values, utterances.codes.starts
            arrays[f"{name}_sentence"], arrays[f"{name}_condition"] = utterances.sentence, utterances.condition
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, file: str | Path) -> "SpokenDialogues":
        """Read what `save` wrote."""
        if not Path(file).is_file():
            raise InputError(f"{file} does not exist; make it with: viva train lm-data")
        with np.load(file) as kept:
            lines = [[_exchange(given) for given in line] for line in json.loads(kept["dialogues"].tobytes())]
            heard, replies = (_utterances(kept, name) for name in ("heard", "replies"))
            return cls(lines, heard, replies, int(kept["code_count"]))


def _exchange(given: dict[str, object]) -> Exchange:
    slots = given["slots"]
    assert isinstance(slots, list)
    return Exchange(str(given["intent"]), str(given["user"]), str(given["reply"]), tuple((a, b) for a, b in slots))


def _utterances(kept: "np.lib.npyio.NpzFile", name: str) -> Utterances:
    codes = Ragged(kept[f"{name}_values"], kept[f"{name}_starts"])
    sentences = json.loads(kept[f"{name}_sentences"].tobytes())
    return Utterances(sentences, codes, kept[f"{name}_sentence"], kept[f"{name}_condition"])


CLEAN, NOISY = 0, 1
TRAIN, HELD_OUT = "train.npz", "held_out.npz"
HELD_OUT_SNR_DB = 15.0
VALUED = ("table", "room", "wake_up", "price", "order")  # intents whose answers carry what the guest said
RECKONED, RECKONED_TIME = ("table", "wake_up"), "forty five"  # the desk says "a quarter to", and the next hour
EXAM_SEED = 0  # whatever is learned from, the exam asks the same questions


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
