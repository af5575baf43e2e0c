"""Train the language model of `mini-tts`: `viva train tts --corpus DIR --codec DIR --out DIR`.

Two voices are trained: with a reference, continuing speech of known text, and without either, which is the reply voice.
`viva train evaluate-tts --model DIR --moonshine DIR` transcribes sentences of a TTS model by an independent ASR model
and scores them by DNSMOS.
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

from vivavoce.asr.backends import Moonshine
from vivavoce.device import pick
from vivavoce.evaluation.scoring import DNSMOS, word_errors
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano.model import MossTTSNano
from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoConfig, NanoSampling
from vivavoce.models.tokenizers import SentencePieceTokenizer
from vivavoce.nn.modules import allocating
from vivavoce.nn.process_settings import torch_threads
from vivavoce.train.corpus import Corpus, split_held_out
from vivavoce.train.front_desk import general_sentences, normalise, reply_sentences
from vivavoce.train.loop import Batch, Budget, Learner, TrainingRun, plot_curves
from vivavoce.train.reply_voice import NAMES, reply_voice_of, short_name
from vivavoce.train.tts import corrupt, frame_logits, global_states, initialise_lm, save_half, write_samples
from vivavoce.train.tts.batches import IGNORED, BatchShape, CodedSentences, NanoBatches, write_tokenizer
from vivavoce.tts.interface import SpeakingStyle, SpeechModel, SpeechSettings, StoredVoice, open_speech_model
from vivavoce.tts.nano import NanoTTS

LM = MossTTSNanoConfig(
    vocab_size=384,
    hidden_size=256,
    intermediate_size=384,
    num_layers=4,
    num_heads=4,
    max_positions=2048,
    n_vq=8,
    audio_vocab_size=512,
    audio_pad_token_id=512,
    local_transformer_layers=1,
)
TINY_LM = MossTTSNanoConfig(
    vocab_size=384,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    max_positions=2048,
    n_vq=8,
    audio_vocab_size=32,
    audio_pad_token_id=32,
)
VOICES = (*NAMES, "flite-slt-1.0")  # the trained voices: reply voices, and a second one
EVALUATION_BATCH = 8
EVALUATE_EVERY = 300
SAMPLING = NanoSampling(audio_temperature=0.3, audio_top_p=0.8, audio_repetition_penalty=1.0, max_new_frames=250)
MAX_TEXT_CHARACTERS = 110  # characters of a text synthesized in one sequence, as in training
FRAMES_PER_LETTER = 2.5
REFERENCE_FRAMES = 40


@dataclass(frozen=True)
class NanoRecipe:
    """Hyperparameters."""

    config: MossTTSNanoConfig = LM
    rows: int = 16_384
    """Rows per batch, summed over sequences."""
    max_frames: int = 120
    rate: float = 1.5e-3
    warmup: int = 300
    dropout: float = 0.1
    corrupted: float = 0.15
    """Maximum share of wrong input codes."""
    average: float | None = 0.999
    evaluated: int = 256
    """Number of held-out sentences evaluated."""


TINY = NanoRecipe(TINY_LM, rows=1024, max_frames=40, warmup=2, average=None, evaluated=4)


class NanoLoss:
    """Cross entropy of codes and of the end of speech."""

    def __init__(self, model: MossTTSNano, recipe: NanoRecipe) -> None:
        self.model, self.recipe = model, recipe

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        """Cross entropy, codebooks weighted equally."""
        stops, logits = self._logits(batch, self.recipe.dropout, self.recipe.corrupted)
        codes = batch["codes"].flatten(0, 1)
        cross_entropy = functional.cross_entropy(
            logits.flatten(0, 1), codes.flatten(), ignore_index=IGNORED, reduction="none"
        ).unflatten(0, codes.shape)
        by_book = cross_entropy.sum(0) / (codes != IGNORED).sum(0)
        end = functional.cross_entropy(stops, batch["stops"].flatten(), ignore_index=IGNORED)
        return {"loss": by_book.mean() + end, "first": by_book[0], "last": by_book[-1], "end": end}

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        """Cross entropy and accuracy of each codebook, and accuracy of stopping, on a batch."""
        stops, logits = self._logits(batch, 0.0, 0.0)
        codes, ends = batch["codes"].flatten(0, 1), batch["stops"].flatten()
        counted = codes[:, 0] != IGNORED
        hits = (logits[counted].argmax(-1) == codes[counted]).float().mean(0)
        cross_entropy = functional.cross_entropy(
            logits[counted].flatten(0, 1), codes[counted].flatten(), reduction="none"
        )
        at_end = ends == 1
        return {
            "accuracy": hits,
            "surprise": cross_entropy.unflatten(0, codes[counted].shape).mean(0),
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
        indices = batch["heads"][..., None].expand(-1, -1, hidden.shape[-1])
        return frame_logits(self.model, hidden.gather(1, indices).flatten(0, 1), codes, dropout)


def train_tts(
    corpus: Corpus,
    codec: MossAudioTokenizerNano,
    out: Path,
    recipe: NanoRecipe,
    budget: Budget,
    device: torch.device,
    seed: int = 0,
    init: Path | None = None,
) -> dict[str, float | list[float]]:
    """Train, save and evaluate a language model, or continue the one in `init`; returns the metrics."""
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(out, recipe.config.vocab_size)
    reply_voice = reply_voice_of(corpus.voices)
    training, held_out = (
        [index for index in indices if _is_trained_on(corpus, index, recipe, codec)]
        for indices in split_held_out(corpus)
    )
    batches = NanoBatches(
        CodedSentences.of(corpus, training, codec, tokenizer), recipe.config, tokenizer, reply_voice, recipe.rows
    )
    print(f"{len(batches.spoken)} sentences in {len(batches.shapes)} sizes: {batches.shapes}", flush=True)
    with allocating(device, torch.float32):
        model = MossTTSNano(recipe.config)
    initialise_lm(model, seed)
    if init is not None:
        model.load_state_dict(MossTTSNano.load(init, device).state_dict())
    loss = NanoLoss(model, recipe)
    learner = Learner(
        {"model": model},
        loss,
        recipe.rate,
        betas=(0.9, 0.95),
        weight_decay=0.05,
        average=recipe.average,
        orthogonal=True,
    )
    training_run = TrainingRun(out, {"model": learner}, budget, seed, log_every=max(1, budget.steps // 400))
    held_out_sentences = CodedSentences.of(corpus, held_out[: recipe.evaluated], codec, tokenizer)
    held_out_batches = NanoBatches(held_out_sentences, recipe.config, tokenizer, reply_voice, recipe.rows, 1)
    for step in training_run:
        batch = batches.batch(np.random.default_rng(step.seed), device)
        training_run.record(learner.step(batch, step.rate_share))
        if step.number % EVALUATE_EVERY == EVALUATE_EVERY - 1:
            surprise = loss.evaluate(held_out_batches.batch(np.random.default_rng(0), device))["surprise"]
            training_run.record({"held_out": surprise.mean(), "held_out_first": surprise[0]})
    if learner.averaged:
        learner.swap_average()
    model.requires_grad_(False).eval()
    save_half(model, out)
    recipe.config.write(out)
    figures: dict[str, float | list[float]] = {"steps": training_run.number, "seconds": training_run.elapsed}
    figures["parameters"] = sum(each.numel() for each in model.parameters())
    figures |= evaluate_tts(loss, held_out_batches, device)
    settings_of(batches.spoken).write(out)
    figures |= synthesize_samples(out, codec.to("cpu"), tokenizer, [corpus.texts[index] for index in held_out])
    (out / "metrics.json").write_text(json.dumps(figures, indent=2), encoding="utf8")
    plot_curves(out)
    return figures


def _is_trained_on(corpus: Corpus, index: int, recipe: NanoRecipe, codec: MossAudioTokenizerNano) -> bool:
    samples = corpus.starts[index + 1] - corpus.starts[index]
    fits = samples <= recipe.max_frames * codec.config.frame_samples
    return bool(fits) and corpus.voices[index] in VOICES


def evaluate_tts(loss: NanoLoss, batches: NanoBatches, device: torch.device) -> dict[str, float | list[float]]:
    """Teacher-forced metrics on held-out sentences."""
    random = np.random.default_rng(0)
    values_by_name: dict[str, list[Tensor]] = {}
    for first in range(0, len(batches.spoken), EVALUATION_BATCH):
        chosen = list(range(first, min(len(batches.spoken), first + EVALUATION_BATCH)))
        shape = BatchShape(len(chosen), batches.shapes[0].rows, batches.shapes[0].frames)
        for name, value in loss.evaluate(batches.lay_out(chosen, shape, random, device)).items():
            values_by_name.setdefault(name, []).append(value.cpu())
    return {name: torch.stack(values).mean(0).tolist() for name, values in values_by_name.items()}


def settings_of(spoken: CodedSentences) -> SpeechSettings:
    """Inference settings, with a reference of each trained voice."""
    voices: dict[str, StoredVoice] = {}
    for trained in VOICES:
        frames_of_voice = [
            frames for frames, voice in zip(spoken.frames, spoken.voices, strict=True) if voice == trained
        ]
        if frames_of_voice:
            name = short_name(trained)
            voices[name] = StoredVoice(name, max(frames_of_voice, key=len)[:REFERENCE_FRAMES].tolist())
    own_voice = short_name(reply_voice_of(spoken.voices))
    return SpeechSettings(
        SAMPLING,
        MAX_TEXT_CHARACTERS,
        FRAMES_PER_LETTER,
        spells_numbers=True,
        own_voice=own_voice,
        languages=("en",),
        voices=voices,
    )


def synthesize_samples(
    folder: Path,
    codec: MossAudioTokenizerNano,
    tokenizer: SentencePieceTokenizer,
    texts: Sequence[str],
    max_sentences: int = 2,
) -> dict[str, float | list[float]]:
    """Synthesize held-out sentences as in inference, and write them."""
    tts = NanoTTS(MossTTSNano.load(folder), codec, tokenizer, pick("cpu"), SpeechSettings.read(folder))
    samples: list[tuple[str, np.ndarray]] = []
    started = time.monotonic()
    for index, text in enumerate(texts[:max_sentences]):
        for voice in (None, *tts.settings.voices):
            for greedy in (False, True):
                sound = tts.say(text, voice, SpeakingStyle(seed=index, greedy=greedy))
                name = f"{voice or 'own'}{' greedy' if greedy else ''}: {text}"
                samples.append((name, sound.samples[0]))
    seconds = sum(len(sound) for _, sound in samples) / codec.config.sample_rate
    write_samples(folder, samples, codec.config.sample_rate)
    return {"real_time_factor_of_samples": (time.monotonic() - started) / seconds}


SEED = 1000  # of general sentences not used in training; all replies were


def evaluate_voice(
    tts: SpeechModel,
    texts: Sequence[str],
    moonshine: Moonshine,
    dnsmos: DNSMOS,
    voice: str | None = None,
) -> dict[str, float]:
    """Word error rate, DNSMOS and real-time factor of synthesized sentences."""
    errors, words, seconds, scores = 0, 0, 0.0, []
    started = time.perf_counter()
    sounds = [tts.say(text, voice, SpeakingStyle(seed=seed)) for seed, text in enumerate(texts)]
    synthesis_seconds = time.perf_counter() - started
    for text, sound in zip(texts, sounds, strict=True):
        reference = normalise(text)
        errors += word_errors(reference, normalise(moonshine.transcribe(sound)))
        words += len(reference.split())
        seconds += sound.seconds
        scores.append(dnsmos.overall(sound))
    figures = {
        "word_error_rate": errors / words,
        "dnsmos": float(np.mean(scores)),
        "real_time_factor": synthesis_seconds / seconds,
    }
    return {name: round(value, 3) for name, value in figures.items()}


@torch_threads.held(1)  # CPU work is small, and the machine may be shared
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of a corpus")
    parser.add_argument("--codec", type=Path, required=True, help="folder of a trained codec")
    parser.add_argument("--out", type=Path, required=True, help="folder for model, metrics and samples")
    parser.add_argument("--seconds", type=float, default=400.0, help="seconds of training, without evaluation")
    parser.add_argument("--steps", type=int, default=60_000, help="maximum steps")
    parser.add_argument("--init", type=Path, help="folder of an earlier run to continue")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a few steps of a tiny model, to test the pipeline")
    options = parser.parse_args(arguments)
    recipe = TINY if options.tiny else NanoRecipe()
    steps = min(options.steps, 12) if options.tiny else options.steps
    device = torch.device(options.device)
    started = time.monotonic()
    figures = train_tts(
        Corpus.load(options.corpus),
        MossAudioTokenizerNano.load(options.codec, device),
        options.out,
        recipe,
        Budget(steps, options.seconds, recipe.warmup),
        device,
        options.seed,
        options.init,
    )
    print(json.dumps(figures | {"seconds_in_all": round(time.monotonic() - started, 1)}))


def evaluate_main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini-tts", help="a bundled name or a folder")
    parser.add_argument("--moonshine", type=Path, required=True, help="unpacked npm package of Moonshine")
    parser.add_argument("--voice", help="one of the model's voices; default: its own")
    parser.add_argument("--count", type=int, default=20, help="sentences of each kind")
    options = parser.parse_args(arguments)
    tts, moonshine, dnsmos = (
        open_speech_model(options.model, "cpu"),
        Moonshine(options.moonshine),
        DNSMOS(),
    )
    for kind, texts in (
        ("front desk", reply_sentences(options.count, SEED)[: options.count]),
        ("anything", general_sentences(options.count, SEED)[: options.count]),
    ):
        print(json.dumps({"sentences": kind, **evaluate_voice(tts, texts, moonshine, dnsmos, options.voice)}))


if __name__ == "__main__":
    main()
