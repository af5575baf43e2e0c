"""Training of drafts for a frozen ASR model: they learn its output, and the model is unchanged."""

import json
from dataclasses import replace

import pytest
import torch

from tests.train.test_asr import RECIPE, beeps
from vivavoce.audio.mel import WhisperMel
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.whisper.decoding import decode
from vivavoce.models.whisper.drafts import PieceGuesser, WhisperHeads, distilled, draft_kind, load_decoder
from vivavoce.models.whisper.steps import TranscriptionOptions
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.train.asr import Vocabulary, draft
from vivavoce.train.asr.batches import DraftRecipe, WindowShape
from vivavoce.train.asr.draft import DecoderStudent, DraftTraining, HeadsStudent, PiecesStudent
from vivavoce.train.asr.train import Training
from vivavoce.train.corpus import Corpus

RECIPE_OF_DRAFT = DraftRecipe(
    shapes=(WindowShape(1.6, 8, 1, 24), WindowShape(2.0, 6, 2, 24)),
    steps=30,
    warmup=5,
    average=0.9,
    augmentation=0.0,
    log_every=5,
    distinct_batches=4,
)


@pytest.fixture(scope="module")
def trained_model(tmp_path_factory):
    """An ASR model of beeps, its vocabulary, and its folder."""
    folder = tmp_path_factory.mktemp("taught")
    recipe = replace(RECIPE, config=replace(RECIPE.config, decoder_layers=3), steps=20)
    training = Training(beeps(24), folder, recipe, report=lambda line: None)
    training.run()
    training.save(folder)
    transcriber = WhisperTranscriber.load(folder)
    transcriber.settings = replace(transcriber.settings, min_logprob=None, max_compression=None)  # its texts are poor
    return transcriber, Vocabulary.read(folder), folder


def students(model, vocabulary):
    return {
        "heads": lambda: HeadsStudent(model, places=3),
        "decoder": lambda: DecoderStudent(model, layers=1),
        "pieces": lambda: PiecesStudent(model, vocabulary.tokens.endoftext),
    }


def training_run(trained_model, folder, kind, recipe=RECIPE_OF_DRAFT):
    transcriber, vocabulary, _ = trained_model
    torch.manual_seed(0)
    student = students(transcriber.model, vocabulary)[kind]()
    return DraftTraining(transcriber, vocabulary, student, beeps(64), folder, recipe, report=lambda line: None)


@pytest.mark.parametrize("kind", ["heads", "decoder", "pieces"])
def test_a_draft_learns_and_the_model_is_unchanged(trained_model, tmp_path, kind):
    before = {name: tensor.clone() for name, tensor in trained_model[0].model.state_dict().items()}
    training = training_run(trained_model, tmp_path, kind)
    training.run()
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < 0.75 * log[0]["loss"]
    for name in log[0]:
        if name.startswith("agreed"):
            assert log[-1][name] >= log[0][name] and log[-1][name] > 0.5
    assert all(torch.equal(tensor, before[name]) for name, tensor in trained_model[0].model.state_dict().items())


@pytest.mark.parametrize("kind", ["heads", "decoder", "pieces"])
def test_a_resumed_run_equals_an_uninterrupted_one(trained_model, tmp_path, kind):
    recipe = replace(RECIPE_OF_DRAFT, steps=6, augmentation=1.0)
    whole = training_run(trained_model, tmp_path / "whole", kind, recipe)
    whole.run()
    interrupted = training_run(trained_model, tmp_path / "killed", kind, recipe)
    batch = interrupted.batches.batch

    def interrupted_batch(step):
        if step == 3:
            raise KeyboardInterrupt
        return batch(step)

    interrupted.batches.batch = interrupted_batch
    with pytest.raises(KeyboardInterrupt):
        interrupted.run()
    interrupted.training_run.save()
    resumed = training_run(trained_model, tmp_path / "killed", kind, recipe)
    assert resumed.training_run.number == 3
    resumed.run()
    for name, tensor in whole.student.module.state_dict().items():
        assert torch.equal(tensor, resumed.student.module.state_dict()[name]), name


def test_windows_are_transcribed_once_and_the_texts_are_targets(trained_model, tmp_path):
    training = training_run(trained_model, tmp_path, "heads", replace(RECIPE_OF_DRAFT, steps=5))
    training.run()
    batch, transcriber = training.batches.batch(0), trained_model[0]
    assert training.batches.batch(RECIPE_OF_DRAFT.distinct_batches) is batch and training.batches.batch(1) is not batch
    states = batch["states"].float()
    prompt = transcriber.tokens.prompt("en")
    rules = transcriber.rules(TranscriptionOptions(language="en", timestamps=False))
    max_tokens = RECIPE_OF_DRAFT.shapes[0].positions - len(prompt)
    texts = decode(
        transcriber.model,
        transcriber.tokens,
        transcriber.model.decoder.cross_kv(states),
        [prompt] * len(states),
        rules,
        max_tokens=max_tokens,
    )
    rows = zip(batch["tokens"].tolist(), batch["counts"].sum(1).tolist(), texts, strict=True)
    same = [
        row[len(prompt) : len(prompt) + len(text.tokens)] == text.tokens and count == len(text.tokens) + text.is_ended
        for row, count, text in rows
    ]
    assert sum(same) > len(same) / 2  # states were rounded
    assert training.student.heads.start.abs().max() > 0


def test_saved_drafts_load(trained_model, tmp_path):
    transcriber, vocabulary, folder = trained_model
    model, sounds = transcriber.model, beeps(24)
    pieces = [
        (sounds.samples[start : start + length].numpy(), text, "beep")
        for start, length, text in zip(sounds.starts, sounds.lengths, sounds.texts, strict=True)
    ]
    Corpus.of(pieces).save(tmp_path / "train")
    shared = ["--asr", str(folder), "--corpus", str(tmp_path), "--tiny", "--device", "cpu"]
    draft.medusa_main([*shared, "--out", str(tmp_path / "heads"), "--heads", "2"])
    draft.main([*shared, "--out", str(tmp_path / "decoder")])
    draft.main([*shared, "--out", str(tmp_path / "pieces"), "--pieces"])
    assert [draft_kind(tmp_path / name) for name in ("heads", "decoder", "pieces")] == ["heads", "decoder", "pieces"]
    heads = WhisperHeads.load(tmp_path / "heads", model.config)
    assert heads.places == 2
    small = load_decoder(tmp_path / "decoder", model.decoder)
    assert len(small.stack) == 2 and small.embed_tokens is model.decoder.embed_tokens
    states = model.encoder(WhisperMel(80)(torch.zeros(1, 32_000)))
    tokens = torch.tensor([vocabulary.tokens.prompt("en")])
    assert small.logits(small(tokens, small.cross_kv(states))).shape == (1, tokens.shape[1], vocabulary.size)
    (guess,) = PieceGuesser.load(tmp_path / "pieces", model.config).guess(states)
    assert all(0 <= token < vocabulary.tokens.endoftext for token in guess)
    assert json.loads((tmp_path / "heads" / "metrics.json").read_text())["steps"] == 4


def test_a_draft_of_another_model_is_refused(trained_model, tmp_path):
    transcriber, _, folder = trained_model
    model = transcriber.model
    WhisperHeads.for_decoder(model.decoder, 2).save(tmp_path, model.config)
    with pytest.raises(CheckpointError, match="d_model 48, not 64"):
        WhisperHeads.load(tmp_path, replace(model.config, d_model=64))
    with pytest.raises(CheckpointError, match="pieces"):
        PieceGuesser.load(tmp_path, model.config)
    assert draft_kind(folder) is None


def test_untrained_heads_are_the_identity_and_a_draft_starts_as_layers_of_the_model(trained_model):
    decoder = trained_model[0].model.decoder
    heads = WhisperHeads.for_decoder(decoder, 4)
    hidden = torch.randn(3, decoder.config.d_model)
    assert torch.equal(heads(hidden, torch.randn_like(hidden), torch.zeros_like), hidden[:, None].expand(-1, 4, -1))
    small = distilled(decoder, 2)
    for layer, source in zip(small.stack, (decoder.stack[0], decoder.stack[2]), strict=True):
        assert all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in layer.state_dict().items())
    with pytest.raises(InputError, match="3 layers"):
        distilled(decoder, 3)


def test_pieces_are_decoded_as_ctc():
    guesser = PieceGuesser(4, 3)
    wanted = torch.tensor([0, 1, 1, 0, 1, 3, 3, 0])  # blank is 0
    guesser.pieces.weight.data = torch.eye(4)
    guesser.pieces.bias.data.zero_()
    states = torch.eye(4)[wanted].repeat_interleave(2, dim=0)[None]
    assert guesser.guess(states) == [[0, 0, 2]]
