"""Training of the TTS codec: whole sequences equal streams, and codebooks follow their inputs."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.models.tiny_nano import tiny_nano_codec
from tests.train.buzz_corpora import VOICES, buzzes_with_texts
from vivavoce.audio.level import buzz
from vivavoce.models.moss_audio_tokenizer.model import MossAudioTokenizerNano
from vivavoce.train.corpus import Corpus, split_held_out
from vivavoce.train.loop import Learner
from vivavoce.train.losses import Discriminators, SpectralDistance
from vivavoce.train.tts import (
    CodebookMeans,
    codes_of,
    decode_features,
    encode_features,
    initialise,
    quantise,
    sounds_of,
)
from vivavoce.train.tts import codec as codec_training
from vivavoce.train.tts.batches import Crops
from vivavoce.train.tts.codec import CODEC, TINY, TINY_CODEC, CodecLosses, main


@pytest.fixture(scope="module")
def codec() -> MossAudioTokenizerNano:
    return tiny_nano_codec()


@pytest.fixture(scope="module")
def sounds() -> torch.Tensor:
    """Longer than every window of the tiny codec.  # [sound, channel, sample]"""
    return 0.3 * torch.randn(3, 2, 80 * 9, generator=torch.Generator().manual_seed(0))


def test_whole_sequences_equal_streams(codec, sounds):
    codes = codec.encode(sounds)
    assert torch.equal(codes_of(codec, sounds), codes)
    torch.testing.assert_close(sounds_of(codec, codes), codec.decode(codes), rtol=0, atol=1e-5)


def test_quantisation_in_training_equals_inference(codec, sounds):
    codes = codec.encode(sounds)
    for used in (1, 4, 6):
        result = quantise(codec.quantizer, encode_features(codec, sounds), torch.full((3,), used))
        expected = codec.quantizer.decode(codes[:, :used])
        torch.testing.assert_close(result.hidden, expected, rtol=0, atol=1e-5)


def test_the_number_of_codebooks_is_set_by_row(codec, sounds):
    hidden = encode_features(codec, sounds)
    mixed = quantise(codec.quantizer, hidden, torch.tensor([1, 3, 6])).hidden
    for row, used in enumerate((1, 3, 6)):
        torch.testing.assert_close(mixed[row], quantise(codec.quantizer, hidden, torch.full((3,), used)).hidden[row])


def test_every_weight_but_the_codebooks_gets_a_gradient(sounds):
    codec = tiny_nano_codec()
    initialise(codec)
    rounded = quantise(
        codec.quantizer, encode_features(codec, sounds), torch.full((3,), 6), CodebookMeans(codec.config)
    )
    (decode_features(codec, rounded.hidden).square().mean() + rounded.commitment).backward()
    still = {name for name, parameter in codec.named_parameters() if parameter.grad is None}
    assert still == {f"quantizer.quantizers.{index}.codebook.weight" for index in range(6)}


def test_codebooks_find_the_clusters_of_their_inputs():
    codec = MossAudioTokenizerNano(TINY_CODEC)
    initialise(codec)
    book, means = codec.quantizer.quantizers[0], CodebookMeans(TINY_CODEC)
    generator = torch.Generator().manual_seed(0)
    centres = torch.nn.functional.normalize(torch.randn(8, 4, generator=generator), dim=-1)
    for _ in range(100):
        inputs = centres[torch.randint(8, (256,), generator=generator)]
        inputs = inputs + 0.01 * torch.randn(inputs.shape, generator=generator)
        nearness = torch.nn.functional.normalize(inputs, dim=-1) @ torch.nn.functional.normalize(book.codebook.weight).T
        means.update(0, book, inputs, nearness.argmax(-1))
    assert torch.cdist(centres, book.codebook.weight).amin(1).max() < 0.1


def test_an_unused_code_is_reset_to_an_input():
    codec = MossAudioTokenizerNano(TINY_CODEC)
    initialise(codec)
    book, means = codec.quantizer.quantizers[0], CodebookMeans(TINY_CODEC)
    inputs = torch.full((64, 4), 0.5)
    means.update(0, book, inputs, torch.zeros(64, dtype=torch.long))
    torch.testing.assert_close(book.codebook.weight, torch.full((32, 4), 0.5))


def test_the_distance_is_the_difference_of_levels():
    recorded = 0.1 * torch.randn(1, 8000, generator=torch.Generator().manual_seed(0))
    distance = SpectralDistance(16_000)
    assert distance(recorded, recorded).item() == pytest.approx(
        0, abs=1e-8
    )  # a transform's last bit may hang on its place
    assert distance(recorded * 0.5, recorded).item() == pytest.approx(0.30, abs=0.01)
    assert distance(recorded * 0.1, recorded).item() == pytest.approx(1.0, abs=0.05)


def test_crops_are_of_one_sentence_and_silence_by_the_shares_of_voices():
    loud = {voice: level for level, voice in enumerate(VOICES, start=1)}
    corpus = Corpus.of(
        [(np.full(800, 4000 * loud[voice], np.int16), f"{n}", voice) for n in range(4) for voice in VOICES]
    )
    crops = Crops(corpus, np.arange(len(corpus)), 1600, {VOICES[0]: 0.75, "": 0.25}, "cpu")
    batch = crops.batch(400, torch.Generator().manual_seed(0))[:, 0]
    levels = [row[row != 0].unique() for row in batch]
    assert all(len(level) <= 1 for level in levels)
    assert batch.ne(0).sum(1).max() == 800
    chosen = crops.weights.view(4, 3).sum(0)
    torch.testing.assert_close(chosen, torch.tensor([0.75, 0.125, 0.125]))


def test_no_text_is_in_training_and_evaluation():
    corpus = buzzes_with_texts(24)
    twice = Corpus.of([((corpus[i][0] * 32767).astype(np.int16), *corpus[i][1:]) for i in [*range(24), *range(24)]])
    learn, held_out = split_held_out(twice, 0.2)
    assert len(learn) + len(held_out) == 48 and len(held_out) >= 2
    assert not {twice.texts[i] for i in learn} & {twice.texts[i] for i in held_out}


def test_the_loss_falls():
    torch.manual_seed(0)
    codec = MossAudioTokenizerNano(TINY_CODEC)
    initialise(codec)
    losses = CodecLosses(codec, Discriminators((4, 8), 4), TINY)
    learner = Learner({"codec": codec}, losses.of_codec, 3e-3)
    batch = {"sounds": torch.from_numpy(np.stack([buzz(0.48, 16_000, seed).samples for seed in range(4)]))}
    distances = [learner.step(batch, 1.0)["mel"].item() for _ in range(30)]
    assert distances[-1] < 0.6 * distances[0]


def test_the_miniature_has_the_frames_of_the_original_and_fits_its_budget():
    codec = MossAudioTokenizerNano(CODEC)
    assert CODEC.frame_rate == 12.5 and CODEC.channels == 1
    assert sum(parameter.numel() for parameter in codec.parameters()) < 4_300_000


def test_the_command_trains_saves_and_measures(tmp_path, monkeypatch):
    monkeypatch.setattr(codec_training, "TINY", dataclasses.replace(TINY, batch=2))
    buzzes_with_texts().save(tmp_path / "corpus")
    main(["--corpus", str(tmp_path / "corpus"), "--out", str(tmp_path / "codec"), "--tiny", "--device", "cpu"])
    figures = json.loads((tmp_path / "codec" / "metrics.json").read_text())
    assert figures["steps"] == 12 and figures["mel_distance_8_codebooks"] > 0
    codec = MossAudioTokenizerNano.load(tmp_path / "codec")
    assert codec.decode(codec.encode(torch.zeros(1, 1, 12_800))).shape == (1, 1, 12_800)
    continued = ["--corpus", str(tmp_path / "corpus"), "--out", str(tmp_path / "again"), "--tiny", "--device", "cpu"]
    main([*continued, "--init", str(tmp_path / "codec"), "--steps", "4"])
    later, sound = MossAudioTokenizerNano.load(tmp_path / "again"), torch.from_numpy(buzz(0.8, 16_000, 0).samples)[None]
    codes = codec.encode(sound)
    torch.testing.assert_close(later.encode(sound), codes)  # a language model knows them
    assert (later.decode(codes) - codec.decode(codes)).abs().max() > 0
    new_codes = ["--corpus", str(tmp_path / "corpus"), "--out", str(tmp_path / "anew"), "--tiny", "--device", "cpu"]
    main([*new_codes, "--init", str(tmp_path / "codec"), "--new-codes", "--steps", "4"])
    other = MossAudioTokenizerNano.load(tmp_path / "anew")
    before, after = (each.quantizer.quantizers[0].codebook.weight for each in (codec, other))
    assert 0.3 < functional.cosine_similarity(before, after).mean() < 0.9999  # moved on from where they were
    names = {file.name for file in (tmp_path / "codec").iterdir()}
    assert {"samples.wav", "samples.json", "log.jsonl", "curves.png", "model.safetensors"} <= names
