"""Train the language model of `mini-tts`: `viva train tts --corpus DIR --codec DIR --out DIR`.

The reply voice and a second one are learned: in the voice of a reference, going on from speech whose text is known,
and without either, which is the reply voice's.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.asr.backends.moonshine import Moonshine
from vivavoce.device import pick
from vivavoce.evaluation.scoring import Listeners, word_errors
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano.model import MossTTSNano
from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoConfig, NanoSampling
from vivavoce.models.tokenizers import SentencePieceTokenizer
from vivavoce.nn.modules import allocating
from vivavoce.nn.process_settings import torch_threads
from vivavoce.train.corpus import Corpus, split_held_out
from vivavoce.train.front_desk import general_sentences, normalise, reply_sentences
from vivavoce.train.loop import Batch, Budget, Learner, TrainingRun, plot_curves
from vivavoce.train.tts.batches import NOT_JUDGED, CodedSentence, NanoBatches, Room
from vivavoce.train.tts.config import LM, TINY_LM, write_tokenizer
from vivavoce.train.tts.model import corrupt, frame_logits, global_states, initialise_lm, save_half, write_samples
from vivavoce.train.voices import TEACHER
from vivavoce.tts.interface import SpeakingStyle, SpeechModel, SpeechSettings, open_speech_model
from vivavoce.tts.nano import NanoTTS
from vivavoce.tts.voices import StoredVoice

VOICES = ("flite-rms", "flite-slt")  # how the names of the voices that are learned begin
JUDGED_AT_ONCE = 8
EXAM_EVERY = 300
DRAWN = NanoSampling(audio_temperature=0.3, audio_top_p=0.8, audio_repetition_penalty=1.0, max_new_frames=250)
LONGEST_TEXT = 110  # letters said in one breath: what the lessons are made of
FRAMES_A_LETTER = 2.5
REFERENCE_FRAMES = 40


@dataclass(frozen=True)
class SpeakerRecipe:
    """What is trained, on how much a step, and how."""

    config: MossTTSNanoConfig = LM
    rows: int = 16_384
    """Rows of a batch, all lessons together."""
    longest_frames: int = 120
    rate: float = 1.5e-3
    warmup: int = 300
    dropout: float = 0.1
    corrupted: float = 0.15
    """Up to this share of the codes that the model reads is wrong."""
    average: float | None = 0.999
    judged: int = 256
    """Held-out sentences that are judged."""


TINY = SpeakerRecipe(TINY_LM, rows=1024, longest_frames=40, warmup=2, average=None, judged=4)


class SpeakerLoss:
    """What the language model minimises: surprise at codes and at the end of speech."""

    def __init__(self, model: MossTTSNano, recipe: SpeakerRecipe) -> None:
        self.model, self.recipe = model, recipe

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Mean surprise, all codebooks alike."""
        stops, logits = self._logits(batch, self.recipe.dropout, self.recipe.corrupted)
        codes = batch["codes"].flatten(0, 1)
        surprise = functional.cross_entropy(
            logits.flatten(0, 1), codes.flatten(), ignore_index=NOT_JUDGED, reduction="none"
        ).unflatten(0, codes.shape)
        by_book = surprise.sum(0) / (codes != NOT_JUDGED).sum(0)
        end = functional.cross_entropy(stops, batch["stops"].flatten(), ignore_index=NOT_JUDGED)
        return {"loss": by_book.mean() + end, "first": by_book[0], "last": by_book[-1], "end": end}

    @torch.no_grad()
    def judge(self, batch: Batch) -> dict[str, Tensor]:
        """Surprise and hits of each codebook, and how often the end is found, over the lessons of a batch."""
        stops, logits = self._logits(batch, 0.0, 0.0)
        codes, ends = batch["codes"].flatten(0, 1), batch["stops"].flatten()
        judged = codes[:, 0] != NOT_JUDGED
        hits = (logits[judged].argmax(-1) == codes[judged]).float().mean(0)
        surprise = functional.cross_entropy(logits[judged].flatten(0, 1), codes[judged].flatten(), reduction="none")
        at_end = ends == 1
        return {
            "accuracy": hits,
            "surprise": surprise.unflatten(0, codes[judged].shape).mean(0),
            "ends_found": (stops[at_end].argmax(-1) == 1).float().mean(),
            "false_ends": (stops[ends == 0].argmax(-1) == 1).float().mean(),
        }

    def _logits(self, batch: Batch, dropout: float, corrupted: float) -> tuple[Tensor, Tensor]:
        entries = self.model.config.audio_vocab_size
        codes = batch["codes"].clamp(min=0).flatten(0, 1)
        rows = batch["rows"]
        if corrupted:
            rows = corrupt(rows, corrupted, entries)
            is_wrong = torch.rand(codes.shape, device=codes.device) < corrupted / 3
            codes = torch.where(is_wrong, torch.randint_like(codes, entries), codes)
        hidden = global_states(self.model, rows, dropout)
        places = batch["heads"][..., None].expand(-1, -1, hidden.shape[-1])
        return frame_logits(self.model, hidden.gather(1, places).flatten(0, 1), codes, dropout)


def train_speaker(
    corpus: Corpus,
    codec: MossAudioTokenizerNano,
    out: Path,
    recipe: SpeakerRecipe,
    budget: Budget,
    device: torch.device,
    seed: int = 0,
    init: Path | None = None,
) -> dict[str, float | list[float]]:
    """Train, save and judge a language model, or train on the one in `init`; its figures."""
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(out, recipe.config.vocab_size)
    learn, held_out = (
        [index for index in indices if _is_learned(corpus, index, recipe, codec)] for indices in split_held_out(corpus)
    )
    lessons = NanoBatches(
        CodedSentence.of(corpus, learn, codec, tokenizer), recipe.config, tokenizer, TEACHER.name, recipe.rows
    )
    print(f"{len(lessons.spoken)} sentences in {len(lessons.rooms)} sizes: {lessons.rooms}", flush=True)
    with allocating(device, torch.float32):
        model = MossTTSNano(recipe.config)
    initialise_lm(model, seed)
    if init is not None:
        model.load_state_dict(MossTTSNano.load(init, device).state_dict())
    loss = SpeakerLoss(model, recipe)
    learner = Learner(
        {"model": model},
        loss,
        recipe.rate,
        betas=(0.9, 0.95),
        weight_decay=0.05,
        average=recipe.average,
        orthogonal=True,
    )
    course = TrainingRun(out, {"model": learner}, budget, seed, log_every=max(1, budget.steps // 400))
    judged = CodedSentence.of(corpus, held_out[: recipe.judged], codec, tokenizer)
    exam = NanoBatches(judged, recipe.config, tokenizer, TEACHER.name, recipe.rows, 1)
    for step in course:
        batch = lessons.batch(np.random.default_rng(step.seed), device)
        course.record(learner.step(batch, step.rate_share))
        if step.number % EXAM_EVERY == EXAM_EVERY - 1:
            surprise = loss.judge(exam.batch(np.random.default_rng(0), device))["surprise"]
            course.record({"held_out": surprise.mean(), "held_out_first": surprise[0]})
    if learner.averaged:
        learner.swap_average()
    model.requires_grad_(False).eval()
    save_half(model, out)
    recipe.config.write(out)
    figures: dict[str, float | list[float]] = {"steps": course.number, "seconds": course.elapsed}
    figures["parameters"] = sum(each.numel() for each in model.parameters())
    figures |= judge_speaker(loss, exam, device)
    settings_of(lessons.spoken).write(out)
    figures |= say_samples(out, codec.to("cpu"), tokenizer, [corpus.texts[index] for index in held_out])
    (out / "metrics.json").write_text(json.dumps(figures, indent=2), encoding="utf8")
    plot_curves(out)
    return figures


def _is_learned(corpus: Corpus, index: int, recipe: SpeakerRecipe, codec: MossAudioTokenizerNano) -> bool:
    samples = corpus.starts[index + 1] - corpus.starts[index]
    fits = samples <= recipe.longest_frames * codec.config.frame_samples
    return bool(fits) and corpus.voices[index].startswith(VOICES)


def judge_speaker(loss: SpeakerLoss, lessons: NanoBatches, device: torch.device) -> dict[str, float | list[float]]:
    """Figures on sentences not learned from, each codebook given the right ones before it."""
    random = np.random.default_rng(0)
    found: dict[str, list[Tensor]] = {}
    for first in range(0, len(lessons.spoken), JUDGED_AT_ONCE):
        chosen = list(range(first, min(len(lessons.spoken), first + JUDGED_AT_ONCE)))
        room = Room(len(chosen), lessons.rooms[0].rows, lessons.rooms[0].frames)
        for name, value in loss.judge(lessons.lay_out(chosen, room, random, device)).items():
            found.setdefault(name, []).append(value.cpu())
    return {name: torch.stack(values).mean(0).tolist() for name, values in found.items()}


def settings_of(spoken: CodedSentence) -> SpeechSettings:
    """How the trained model is to be used, with a reference of each voice it has learned."""
    voices: dict[str, StoredVoice] = {}
    for prefix in VOICES:
        own = [frames for frames, voice in zip(spoken.frames, spoken.voices, strict=True) if voice == f"{prefix}-1.0"]
        if own:
            name = prefix.removeprefix("flite-")
            voices[name] = StoredVoice(name, max(own, key=len)[:REFERENCE_FRAMES].tolist())
    own_voice = TEACHER.name.removeprefix("flite-").removesuffix("-1.0")
    return SpeechSettings(DRAWN, LONGEST_TEXT, FRAMES_A_LETTER, spells_numbers=True, own_voice=own_voice, voices=voices)


def say_samples(
    folder: Path, codec: MossAudioTokenizerNano, tokenizer: SentencePieceTokenizer, texts: Sequence[str], most: int = 2
) -> dict[str, float | list[float]]:
    """Speak held-out sentences as they will be spoken, and write them down."""
    speaker = NanoTTS(MossTTSNano.load(folder), codec, tokenizer, pick("cpu"), SpeechSettings.read(folder))
    samples: list[tuple[str, np.ndarray]] = []
    started = time.monotonic()
    for index, text in enumerate(texts[:most]):
        for voice in (None, *speaker.settings.voices):
            for greedy in (False, True):
                sound = speaker.say(text, voice, SpeakingStyle(seed=index, greedy=greedy))
                name = f"{voice or 'own'}{' greedy' if greedy else ''}: {text}"
                samples.append((name, sound.samples[0]))
    seconds = sum(len(sound) for _, sound in samples) / codec.config.sample_rate
    write_samples(folder, samples, codec.config.sample_rate)
    return {"real_time_factor_of_samples": (time.monotonic() - started) / seconds}


SEED = 1000  # of sentences about anything that no training drew; the replies of a desk are few, and it drew them all


def judge_voice(
    speaker: SpeechModel, texts: Sequence[str], moonshine: Moonshine, listeners: Listeners, voice: str | None = None
) -> dict[str, float]:
    """Word error rate, DNSMOS and real-time factor of sentences said."""
    errors, words, seconds, scores = 0, 0, 0.0, []
    begun = time.perf_counter()
    sounds = [speaker.say(text, voice, SpeakingStyle(seed=seed)) for seed, text in enumerate(texts)]
    took = time.perf_counter() - begun
    for text, sound in zip(texts, sounds, strict=True):
        meant = normalise(text)
        errors += word_errors(meant, normalise(moonshine.transcribe(sound)))
        words += len(meant.split())
        seconds += sound.seconds
        scores.append(listeners.overall(sound))
    figures = {"word_error_rate": errors / words, "dnsmos": float(np.mean(scores)), "real_time_factor": took / seconds}
    return {name: round(value, 3) for name, value in figures.items()}


@torch_threads.held(1)  # what runs on the CPU is small, and others may be at work there
def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of a corpus")
    parser.add_argument("--codec", type=Path, required=True, help="folder of a trained codec")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, its figures and samples")
    parser.add_argument("--seconds", type=float, default=400.0, help="of training; measuring comes after")
    parser.add_argument("--steps", type=int, default=60_000, help="at most")
    parser.add_argument("--init", type=Path, help="folder of an earlier course, to learn on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a few steps of a tiny model, to try the recipe out")
    given = parser.parse_args(arguments)
    recipe = TINY if given.tiny else SpeakerRecipe()
    steps = min(given.steps, 12) if given.tiny else given.steps
    device = torch.device(given.device)
    started = time.monotonic()
    figures = train_speaker(
        Corpus.load(given.corpus),
        MossAudioTokenizerNano.load(given.codec, device),
        given.out,
        recipe,
        Budget(steps, given.seconds, recipe.warmup),
        device,
        given.seed,
        given.init,
    )
    print(json.dumps(figures | {"seconds_in_all": round(time.monotonic() - started, 1)}))


def evaluate_main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini-tts", help="a bundled name or a folder")
    parser.add_argument("--moonshine", type=Path, required=True, help="unpacked npm package of Moonshine")
    parser.add_argument("--voice", help="one of the model's voices; its own if none is given")
    parser.add_argument("--count", type=int, default=20, help="sentences of each kind")
    given = parser.parse_args(arguments)
    speaker, moonshine, listeners = open_speech_model(given.model, "cpu"), Moonshine(given.moonshine), Listeners()
    for kind, texts in (
        ("front desk", reply_sentences(given.count, SEED)[: given.count]),
        ("anything", general_sentences(given.count, SEED)[: given.count]),
    ):
        print(json.dumps({"sentences": kind, **judge_voice(speaker, texts, moonshine, listeners, given.voice)}))


if __name__ == "__main__":
    main()
