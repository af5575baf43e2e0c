"""Training of the vocoder: the training forward equals inference, and training lowers the loss."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.train.buzz_corpora import equal_buzzes
from vivavoce.audio.level import buzz
from vivavoce.audio.mel import MATCHA_24KHZ, VocoderMel
from vivavoce.models.hift.model import HiFT
from vivavoce.train.flow_vocoder import TeacherSpeech, segment_starts, upsampled, vocoder
from vivavoce.train.flow_vocoder.vocoder import (
    LOUDNESS,
    TINY,
    VOCODER,
    Segments,
    VocoderLosses,
    main,
    measure,
    untrained,
)
from vivavoce.train.loop import Learner
from vivavoce.train.losses import (
    Discriminators,
    HarmonicDistance,
    SpectralDistance,
    discriminator_loss,
    feature_distance,
    generator_loss,
)

SHORT = dataclasses.replace(TINY, frames=8)  # longer than the longest window of a loss


@pytest.fixture(scope="module")
def speech():
    return TeacherSpeech.of(equal_buzzes(6), np.arange(6), "cpu")


@pytest.fixture
def losses():
    torch.manual_seed(0)
    discriminators = Discriminators(SHORT.period_channels, SHORT.spectrum_channels)
    return VocoderLosses(untrained(SHORT.config, "cpu", seed=0), discriminators, SHORT, "cpu")


def _batch(speech, progress=1.0, seed=0):
    all_utterances = torch.ones(len(speech), dtype=torch.bool)
    return Segments(speech, all_utterances, SHORT).batch(torch.Generator().manual_seed(seed), progress)


def test_the_resampler_is_that_of_the_engine():
    low = buzz(1.0, 16_000, 3)
    expected = low.resampled(24_000).samples[0]
    result = upsampled(torch.from_numpy(low.samples))[0].numpy()
    assert result.shape == expected.shape
    assert np.abs(result - expected)[200:-200].max() < 2e-4


def test_speech_keeps_sound_mel_and_pitch_in_step(speech):
    corpus = equal_buzzes(6)
    for index in (0, 5):
        begin, end = speech.starts[index : index + 2].tolist()
        assert end - begin == 100
        sound = speech.sound(torch.arange(begin, end)[None])
        torch.testing.assert_close(sound, upsampled(torch.from_numpy(corpus[index][0])[None]), atol=1e-4, rtol=0)
        computed, stored = VocoderMel(MATCHA_24KHZ)(sound)[0].T, speech.mel[begin:end]
        loud = stored > -6  # what is quieter is the rounding of samples
        torch.testing.assert_close(computed[loud], stored[loud], atol=0.05, rtol=0)
        voiced = speech.f0[begin:end] > 0
        assert voiced.float().mean() > 0.9
        assert ((speech.f0[begin:end] >= 85) & (speech.f0[begin:end] <= 155))[voiced].all()


def test_segments_never_cross_from_one_utterance_into_the_next(speech):
    starts = segment_starts(speech, 30)
    assert len(starts) == 6 * 71
    assert ((starts % 100) <= 70).all()
    assert len(segment_starts(speech, 101)) == 0, "longer than any utterance"


def test_the_training_forward_equals_inference(speech, losses):
    batch = _batch(speech) | {"seed": torch.full((SHORT.batch,), 7)}
    assert batch["trusted"].all()
    trained, f0 = losses.synthesize(batch)
    used = losses.hift(batch["mel"].transpose(1, 2), seed=7)
    torch.testing.assert_close(losses.hift.limit(trained), used, rtol=0, atol=0)
    torch.testing.assert_close(f0, losses.hift.f0_predictor(batch["mel"].transpose(1, 2)), rtol=0, atol=0)


def test_measured_pitch_makes_the_excitation_at_first(speech, losses):
    batch = _batch(speech, progress=0.0)
    assert not batch["trusted"].any()
    before, _ = losses.synthesize(batch)
    with torch.no_grad():
        losses.hift.f0_predictor.classifier.bias.add_(50)
    torch.testing.assert_close(losses.synthesize(batch)[0], before, rtol=0, atol=0)


def test_every_weight_of_the_vocoder_learns_but_the_mixture_of_harmonics(speech, losses):
    loss = losses.of_vocoder(_batch(speech) | {"adversarial": torch.ones(())})["loss"]
    names = {name: weight for name, weight in losses.hift.named_parameters() if weight.requires_grad}
    frozen = {name for name, _ in losses.hift.named_parameters()} - set(names)
    assert frozen == {"m_source.l_linear.weight", "m_source.l_linear.bias"}
    for name, gradient in zip(names, torch.autograd.grad(loss, list(names.values())), strict=True):
        assert torch.isfinite(gradient).all() and gradient.abs().max() > 0, name


def test_the_loss_falls(speech, losses):
    learner = Learner({"hift": losses.hift}, losses.of_vocoder, 2e-3, betas=(0.8, 0.99), clip=500.0)
    values = [float(learner.step(_batch(speech, seed=step), 1.0)["loss"]) for step in range(25)]
    assert np.mean(values[-5:]) < 0.75 * np.mean(values[:5])


def test_the_harmonic_distance_detects_sidebands_of_low_harmonics():
    clock = torch.arange(24_000) / 24_000
    harmonics = [torch.sin(2 * torch.pi * 100 * number * clock) / number for number in range(1, 9)]
    voice = 0.05 * torch.stack(harmonics).sum(0)[None]
    rough = voice * (1 + 0.3 * torch.sin(2 * torch.pi * 50 * clock))
    apart = HarmonicDistance(24_000)(rough, voice)
    assert HarmonicDistance(24_000)(voice, voice) == 0 and apart > 2 * SpectralDistance(24_000)(rough, voice)


def test_discriminators_learn(speech, losses):
    learner = Learner({"judges": losses.discriminators}, losses.of_discriminators, 2e-3, betas=(0.8, 0.99))
    values = []
    for step in range(15):
        batch = _batch(speech, seed=step)
        with torch.no_grad():
            losses.of_vocoder(batch)
        values.append(float(learner.step(batch, 1.0)["loss"]))
    assert values[-1] < 0.7 * values[0]


def test_discriminators_train_on_the_audio_of_the_last_step(speech, losses):
    batch = _batch(speech)
    losses.of_vocoder(batch)
    torch.testing.assert_close(losses.generated, losses.synthesize(batch)[0])


def test_discriminator_outputs_of_a_pair_equal_those_of_each():
    torch.manual_seed(0)
    discriminators = Discriminators((4, 8), 4)
    one, other = torch.randn(2, 3, 4000)
    recorded, result = discriminators.of_pair(one, other)
    alone = discriminators(other)
    for together, apart in zip(result, alone, strict=True):
        torch.testing.assert_close(together.score, apart.score, rtol=1e-4, atol=1e-5)
    assert feature_distance(recorded, recorded) == 0
    assert feature_distance(recorded, result) > 0
    assert discriminator_loss(recorded, result) > 0 and generator_loss(result) > 0


@torch.no_grad()
def test_an_untrained_vocoder_passes_the_excitation():
    hift = untrained(VOCODER, "cpu", seed=0)
    mel = torch.full((1, VOCODER.mels, 50), -4.0)
    excitation = hift.m_source(torch.full((1, 50), 120.0), hift.m_source.start(1, None))
    given, result = (torch.fft.rfft(sound[0, 2400:-2400]) for sound in (excitation, hift.decode(mel, excitation)))
    spacing = 24_000 / (48 * 400)  # Hz of a bin, so that harmonics are whole bins
    harmonics = [round(120.0 * number / spacing) for number in range(1, 11)]
    assert ((result / given)[harmonics] / LOUDNESS - 1).abs().max() < 0.5
    assert result[harmonics[0] // 2].abs() < 0.02 * result[harmonics[0]].abs()  # nothing between them


def test_the_command_writes_a_vocoder_that_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(vocoder, "TINY", dataclasses.replace(SHORT, batch=2, max_steps=5))
    equal_buzzes(6).save(tmp_path / "corpus")
    main(["--corpus", str(tmp_path / "corpus"), "--out", str(tmp_path / "out"), "--seconds", "60", "--tiny"])
    out = tmp_path / "out"
    hift = HiFT.load(out / "hift.safetensors", config=TINY.config)
    low, high = (hift.m_source(torch.full((1, 20), pitch), hift.m_source.start(1, None)) for pitch in (100.0, 150.0))
    assert low.std() > 0.05 and (low - high).std() > 0.05  # the excitation lives, and follows the pitch
    assert not any(name.endswith(("_g", "_v")) for name in load_file(out / "hift.safetensors"))
    assert json.loads((out / "sizes.json").read_text())["vocoder"]["channels"] == TINY.config.channels
    figures = json.loads((out / "metrics.json").read_text())
    again = measure(hift, TeacherSpeech.of(equal_buzzes(1), np.arange(1), "cpu"))
    assert set(figures) == set(again) and all(np.isfinite(list(figures.values())))
    assert "judge_loss" in (out / "log.jsonl").read_text()
    again = ["--corpus", str(tmp_path / "corpus"), "--out", str(tmp_path / "again"), "--seconds", "60", "--tiny"]
    main([*again, "--f0", str(out), "--seed", "1"])
    later = HiFT.load(tmp_path / "again" / "hift.safetensors", config=TINY.config)
    initial, learned, fresh = (
        each.f0_predictor.classifier.weight for each in (hift, later, untrained(TINY.config, "cpu", seed=1))
    )
    assert (learned - initial).norm() < 0.1 * (learned - fresh).norm()


@pytest.mark.gpu
def test_steps_are_captured_before_and_after_the_discriminators_join(tmp_path):
    equal_buzzes(6).save(tmp_path / "corpus")
    main(["--corpus", str(tmp_path / "corpus"), "--out", str(tmp_path / "out"), "--seconds", "60", "--tiny"])
    assert (tmp_path / "out" / "hift.safetensors").is_file()
