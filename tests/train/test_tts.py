"""Training of the TTS language model: rows, layout and outputs equal those of inference."""

import json

import numpy as np
import pytest
import torch

from tests.models.tiny_nano import CONFIG, LetterTokenizer, tiny_nano
from tests.train.buzz_corpora import VOICES, buzzes_with_texts
from vivavoce.device import pick
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import GREEDY, Generation
from vivavoce.errors import InputError
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.models.moss_tts_nano.model import MossTTSNano
from vivavoce.models.moss_tts_nano.prompt import MossTTSNanoPrompt
from vivavoce.models.tokenizers import SentencePieceTokenizer
from vivavoce.train import package
from vivavoce.train.loop import Learner
from vivavoce.train.tts import codec as tts_codec
from vivavoce.train.tts import corrupt, frame_logits, global_states, initialise_lm
from vivavoce.train.tts import initialise as initialise_codec
from vivavoce.train.tts.batches import IGNORED, BatchShape, CodedSentences, NanoBatches, PromptLayout, write_tokenizer
from vivavoce.train.tts.codec import TINY_CODEC
from vivavoce.train.tts.train import LM, TINY, TINY_LM, NanoLoss, main
from vivavoce.tts.interface import SpeakingStyle, SpeechSettings, open_speech_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> SentencePieceTokenizer:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), TINY_LM.vocab_size)


@pytest.fixture(scope="module")
def sequences(tokenizer) -> NanoBatches:
    torch.manual_seed(0)
    codec = MossAudioTokenizerNano(TINY_CODEC)
    initialise_codec(codec)
    corpus = buzzes_with_texts()
    learned = [index for index in range(len(corpus)) if corpus.voices[index] != VOICES[2]]
    return NanoBatches(
        CodedSentences.of(corpus, learned, codec, tokenizer), TINY_LM, tokenizer, VOICES[0], rows_a_batch=1200
    )


def frames_of(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.audio_vocab_size, (count, CONFIG.n_vq))


def as_tuples(rows: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(row) for row in rows.tolist()]


def test_examples_have_the_layout_of_prompts():
    tokenizer, prompt = LetterTokenizer(), MossTTSNanoPrompt(CONFIG, LetterTokenizer())
    layout, text, reference = PromptLayout(CONFIG, tokenizer), "Good evening.", frames_of(7)
    ids = np.array(tokenizer.encode(text))
    assert as_tuples(layout.clone(ids, reference)) == prompt.clone(text, reference.tolist())
    assert as_tuples(layout.continuation(ids)) == prompt.continuation(text)
    continued = np.concatenate([layout.continuation(ids), layout.frames(9, reference)])
    assert as_tuples(continued) == prompt.continuation("evening.", "Good ", reference.tolist())


def test_greedy_codes_of_the_engine_are_the_likeliest_in_training():
    model = tiny_nano(dtype=torch.float32)
    prompt = MossTTSNanoPrompt(CONFIG, LetterTokenizer()).clone("Hello.", frames_of(5).tolist())
    engine = Engine(model, pick("cpu"), torch.float32, EngineLimits(cache_rows=512))
    generated = engine.complete(engine.open(prompt), Generation(GREEDY, max_new_rows=12, min_new_rows=12))
    assert len(generated) == 12
    rows = torch.tensor([*prompt, *generated])[None]
    with torch.no_grad():
        hidden = global_states(model, rows)[0, len(prompt) - 1 : -1]
        _, logits = frame_logits(model, hidden, rows[0, len(prompt) :, 1:])
    assert torch.equal(logits.argmax(-1), rows[0, len(prompt) :, 1:])


def test_training_stops_where_the_engine_does():
    model = tiny_nano(seed=3, dtype=torch.float32)
    model.transformer.wte.weight[CONFIG.audio_end_token_id] += 0.5
    prompt = MossTTSNanoPrompt(CONFIG, LetterTokenizer()).continuation("Hello.")
    engine = Engine(model, pick("cpu"), torch.float32, EngineLimits(cache_rows=512))
    generated = engine.complete(engine.open(prompt), Generation(GREEDY, max_new_rows=40))
    rows = torch.tensor([*prompt, *generated])[None]
    with torch.no_grad():
        hidden = global_states(model, rows)[0, len(prompt) - 1 : -1]
        stops, _ = frame_logits(model, hidden, rows[0, len(prompt) :, 1:].clamp(max=CONFIG.audio_vocab_size - 1))
    ended = [row[0] == CONFIG.audio_end_token_id for row in generated]
    assert stops.argmax(-1).bool().tolist() == ended


def test_every_weight_gets_a_gradient(sequences):
    model = MossTTSNano(TINY_LM)
    initialise_lm(model)
    NanoLoss(model, TINY)(sequences.batch(np.random.default_rng(0), "cpu"))["loss"].backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_only_the_sentence_of_an_example_has_a_loss(sequences):
    shape = BatchShape(3, 256, 64)
    batch = sequences.lay_out([0, 1, 2], shape, np.random.default_rng(1), "cpu")
    for row in range(3):
        ends = batch["stops"][row].eq(1).nonzero()
        assert len(ends) == 1
        count = int(ends[0])
        assert batch["codes"][row, count:].eq(IGNORED).all() and batch["codes"][row, :count].ge(0).all()
        after = batch["heads"][row, :count] + 1
        assert torch.equal(batch["rows"][row, after, 1:], batch["codes"][row, :count])
        assert batch["rows"][row, after, 0].eq(TINY_LM.audio_assistant_slot_token_id).all()
        assert batch["rows"][row, int(after[0]) - 1, 0] == TINY_LM.audio_start_token_id


def test_prompts_without_a_reference_are_of_the_reply_voice_or_two_sentences_of_one_voice(sequences):
    spoken, random = sequences.spoken, np.random.default_rng(0)
    seen = {tuple(frames.flatten()): voice for frames, voice in zip(spoken.frames, spoken.voices, strict=True)}
    alone, continued = set(), set()
    for index in list(range(len(spoken))) * 6:
        prompt, frames = sequences._example(index, BatchShape(1, 1000, 100), random)
        if (prompt[:, 0] == TINY_LM.audio_user_slot_token_id).any():
            assert np.array_equal(frames, spoken.frames[index])
        elif tuple(frames.flatten()) in seen:
            alone.add(spoken.voices[index])
        else:
            first = next(n for n in range(1, len(frames)) if tuple(frames[:n].flatten()) in seen)
            assert (
                seen[tuple(frames[:first].flatten())] == seen[tuple(frames[first:].flatten())] == spoken.voices[index]
            )
            continued.add(spoken.voices[index])
    assert alone == {VOICES[0]} and continued == set(VOICES[:2])


def test_corruption_changes_only_codes_of_frames():
    rows = torch.zeros(8, 20, 6, dtype=torch.long)
    rows[:, :10, 1:] = CONFIG.audio_pad_token_id
    torch.manual_seed(0)
    wrong = corrupt(rows, 0.5, CONFIG.audio_vocab_size)
    assert torch.equal(wrong[:, :10], rows[:, :10]) and torch.equal(wrong[..., 0], rows[..., 0])
    assert 0.1 < wrong[:, 10:, 1:].ne(0).float().mean() < 0.4


def test_the_loss_falls(sequences):
    torch.manual_seed(0)
    model = MossTTSNano(TINY_LM)
    initialise_lm(model)
    learner = Learner({"model": model}, NanoLoss(model, TINY), 1e-2)
    batch = sequences.batch(np.random.default_rng(0), "cpu")
    losses = [learner.step(batch, 1.0)["loss"].item() for _ in range(25)]
    assert losses[-1] < 0.75 * losses[0]


def test_the_miniature_fits_its_budget():
    assert sum(parameter.numel() for parameter in MossTTSNano(LM).parameters()) < 5_200_000


def test_an_empty_voice_is_an_error_of_one_line(tokenizer):
    codec = MossAudioTokenizerNano(TINY_CODEC)
    with pytest.raises(InputError, match="no sentence of the trained voices"):
        CodedSentences.of(buzzes_with_texts(8), [], codec, tokenizer)


def test_the_commands_train_save_and_speak(tmp_path):
    buzzes_with_texts().save(tmp_path / "corpus")
    common = ["--corpus", str(tmp_path / "corpus"), "--tiny", "--device", "cpu"]
    tts_codec.main([*common, "--out", str(tmp_path / "codec"), "--steps", "2"])
    main([*common, "--codec", str(tmp_path / "codec"), "--out", str(tmp_path / "lm")])
    figures = json.loads((tmp_path / "lm" / "metrics.json").read_text())
    assert figures["steps"] == 12 and len(figures["accuracy"]) == 8
    assert MossTTSNano.load(tmp_path / "lm").config == TINY_LM
    assert SentencePieceTokenizer.load(tmp_path / "lm").size <= TINY_LM.vocab_size
    assert json.loads((tmp_path / "lm" / "samples.json").read_text())["rate"] == 16_000
    trained, packaged = tmp_path / "lm", tmp_path / "packaged"
    package.main(["--tts", str(trained), "--codec", str(tmp_path / "codec"), "--out", str(packaged)])
    assert (packaged / "model.safetensors").stat().st_size < (trained / "model.safetensors").stat().st_size
    tts = open_speech_model(str(packaged), "cpu")
    assert tts.say("Good evening.", None, SpeakingStyle(greedy=True)).seconds > 0
    assert set(tts.voices.names()) == set(SpeechSettings.read(trained).voices)
