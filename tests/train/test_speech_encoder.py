"""Training of the speech encoder: the lattice is the codebook, and training, batches and streams give equal codes."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional

from vivavoce.audio.mel import WhisperMel
from vivavoce.errors import InputError
from vivavoce.evaluation.scoring import error_rate
from vivavoce.models.speech_encoder.model import SpeechEncoder, SpeechEncoderConfig, SpeechStream
from vivavoce.models.whisper.config import WhisperConfig
from vivavoce.models.whisper.model import WhisperEncoder
from vivavoce.nn.modules import fill_randomly
from vivavoce.train.augment import AcousticAugmentation, at_positions, stretched_positions, warp_bands
from vivavoce.train.corpus import Corpus
from vivavoce.train.losses import ctc_loss
from vivavoce.train.speech_encoder import (
    Lattice,
    encode_corpus,
    features,
    new_encoder,
)
from vivavoce.train.speech_encoder import train as encoder_training
from vivavoce.train.speech_encoder.batches import EncoderBatches, EncoderBatchOptions, EncoderBatchShape, EncoderSpeech
from vivavoce.train.speech_encoder.causal_whisper import causal_encoder, quietest_first, reorder
from vivavoce.train.speech_encoder.letters import LETTERS, letter_symbols, read_symbols, spelled, words
from vivavoce.train.voices import TEACHER

LEVELS = (4, 3, 2, 3)
CONFIG = SpeechEncoderConfig(
    d_model=32, encoder_attention_heads=2, encoder_ffn_dim=64, num_mel_bins=80, max_source_positions=400,
    quantize_position=2, quantize_vocab_size=72,
)  # fmt: skip
SENTENCES = (
    ("A table for three, please.", "guest", 1.3),
    ("At seven thirty?", "guest", 0.71),
    ("Thank you.", "guest", 0.4),
    ("Good evening.", TEACHER.name, 0.9),
    ("We open at nine.", TEACHER.name, 1.8),
    ("Of course.", "guest", 1.0),
)


@pytest.fixture
def corpus():
    """Tones of changing pitch in place of speech, different for each sentence."""
    random = np.random.default_rng(0)
    sounds = []
    for _, _, seconds in SENTENCES:
        clock = np.arange(round(seconds * 16000)) / 16000
        pitch = 200 + 150 * np.sin(2 * np.pi * random.uniform(1, 3) * clock)
        sound = np.sin(2 * np.pi * np.cumsum(pitch) / 16000) * (0.2 + 0.1 * np.sin(9 * clock))
        sounds.append(((sound + 0.01 * random.standard_normal(len(clock))) * 20000).astype(np.int16))
    return Corpus.of([(sound, text, voice) for sound, (text, voice, _) in zip(sounds, SENTENCES, strict=True)])


def _whole(corpus):
    return torch.from_numpy(corpus.samples).float()[None, : 72 * 1280] / 32768


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    result = new_encoder(CONFIG, Lattice(LEVELS)).eval().requires_grad_(False)
    result.layers[1].fc2.weight.mul_(6.0)  # so that the codes vary
    return result


def test_ctc_equals_torch_in_value_and_gradient():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 40, 8, generator=generator).requires_grad_()
    targets = torch.randint(1, 8, (6, 12), generator=generator)
    targets[0, 3] = targets[0, 4]  # a double letter needs a blank
    lengths, counts = torch.tensor([40, 33, 40, 12, 5, 1]), torch.tensor([12, 9, 1, 3, 11, 1])
    ours = ctc_loss(logits.log_softmax(-1), targets, lengths, counts)
    theirs = functional.ctc_loss(
        logits.log_softmax(-1).transpose(0, 1), targets, lengths, counts, reduction="none", zero_infinity=True
    )
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)
    weight = torch.rand(6, generator=generator)
    gradients = [torch.autograd.grad((loss * weight).sum(), logits)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, atol=2e-5, rtol=1e-4)


def test_ctc_stays_finite_where_letters_are_next_to_impossible():
    logits = torch.zeros(1, 300, 29)
    logits[..., 0] = 40.0
    loss = ctc_loss(
        logits.log_softmax(-1), torch.arange(1, 29).repeat(3)[None], torch.tensor([300]), torch.tensor([84])
    )
    assert 3000 < loss.item() < 3400


@pytest.mark.parametrize("levels", [(2, 2, 2), (3, 3, 3), (4, 4), LEVELS])
def test_the_nearest_row_of_the_codebook_is_the_rounding(levels):
    lattice = Lattice(levels)
    encoder = SpeechEncoder(
        SpeechEncoderConfig(16, 2, 32, 80, 100, quantize_position=1, quantize_vocab_size=lattice.size)
    )
    encoder.codebook.weight.data.copy_(lattice.codebook(16))
    x = torch.randn(40, 50, 16, generator=torch.Generator().manual_seed(0)) * 1.5
    codes = lattice.codes(x)
    assert torch.equal(encoder.nearest(x), codes)
    assert len(codes.unique()) == lattice.size
    assert torch.equal(lattice.values(codes), lattice.rounded(lattice.bounded(x)))


def test_the_training_forward_is_the_encoders(encoder):
    mel = torch.randn(3, 80, 160, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        features(encoder, mel, torch.zeros(3, dtype=torch.int64), 0.0), encoder.features(mel), atol=1e-5, rtol=1e-5
    )
    moved = features(encoder, mel, torch.tensor([0, 8, 100]), 0.0)
    assert (moved - encoder.features(mel)).abs().amax((1, 2))[1:].min() > 1e-3


def test_codes_of_a_corpus_equal_streamed_codes(encoder, corpus):
    fill_randomly(encoder, seed=3)
    encoder.codebook.weight.copy_(encoder.features(WhisperMel(80)(_whole(corpus)))[0, :72])  # rows that are used
    result = encode_corpus(encoder, corpus, "cpu", batch=2)
    stream = SpeechStream(encoder)
    for index, codes in enumerate(result):
        samples = torch.from_numpy(corpus[index][0])
        state, streamed = stream.initial_state(), []
        for piece in samples.split(1000):
            new, state = stream.step(state, piece)
            streamed.append(new)
        streamed.append(stream.finish(state)[0])
        assert codes.dtype == np.int16
        assert codes.tolist() == torch.cat(streamed).tolist()
    assert len(np.unique(np.concatenate(result))) > 10


def test_clean_and_augmented_mels_are_aligned_and_end_with_a_whole_code(corpus):
    speech = EncoderSpeech.of(corpus, TEACHER.name, "cpu")
    shapes = (EncoderBatchShape(1.6, 6), EncoderBatchShape(3.2, 4, sentences=3))
    batches = EncoderBatches(
        speech, shapes, CONFIG, AcousticAugmentation("cpu", 0.0), EncoderBatchOptions(warped=0.0, tail=0.0)
    )
    sizes = set()
    for seed in range(8):
        batch = batches.batch(seed)
        sizes.add(batch["clean"].shape)
        ends = [int((row > row.min() + 0.05).any(0).nonzero().max()) // 8 + 1 for row in batch["clean"]]
        assert all(abs(end - code) <= 1 for end, code in zip(ends, batch["codes"].tolist(), strict=True))
        for row, count in zip(batch["symbols"], batch["counts"], strict=True):
            text = "".join(LETTERS[symbol - 1] for symbol in row[:count])
            assert all(any(part in text.lower().replace(",", "") for text, _, _ in SENTENCES) for part in text.split())
    assert len(sizes) == 2
    again = batches.batch(5)
    assert all(torch.equal(value, again[name]) for name, value in batches.batch(5).items())


def test_acoustic_augmentation_keeps_positions():
    click = torch.zeros(8, 8000)
    click[:, 4000:4200] = 0.5
    augmented = AcousticAugmentation("cpu")(click, torch.full((8,), 8000), seed=2)
    assert not torch.allclose(augmented, click)
    assert ((augmented.abs().argmax(1) - 4100).abs() < 800).float().mean() >= 0.75


def test_bands_are_warped_and_time_is_not():
    mel = torch.zeros(64, 80, 30)
    mel[:, 40, 10] = 1.0
    warped = warp_bands(mel, torch.Generator().manual_seed(0))
    assert (warped.sum(1).argmax(1) == 10).all()
    bands = warped[:, :, 10].argmax(1)
    assert bands.min() < 38 and bands.max() > 42


def test_time_stretching_keeps_the_length_of_rows():
    ends = torch.tensor([30, 50, 64, 64])
    position = stretched_positions(ends, 64, 1.0, torch.Generator().manual_seed(0))
    assert (position.diff() >= 0).all() and not torch.allclose(position[3], torch.arange(64.0))
    assert torch.equal(position[0, 30:], torch.arange(30.0, 64.0))
    assert torch.allclose(position.gather(1, ends[:, None] - 1)[:, 0], ends - 1.0)
    unchanged = stretched_positions(ends, 64, 0.0, torch.Generator().manual_seed(0))
    mel = torch.randn(4, 8, 64)
    assert torch.equal(at_positions(mel, unchanged), mel) and not torch.equal(at_positions(mel, position), mel)


def test_mandarin_is_spelled_as_pinyin_with_tones():
    pytest.importorskip("pypinyin")
    assert spelled("你好，訂兩位。") == "ni2hao3 ding4liang3wei4", "with the tone that 你 has before another third one"
    assert spelled("你好") == spelled("你好。") and spelled("謝謝") == spelled("谢谢"), "both scripts"
    assert words(spelled("我要VIP房")) == ["wo3", "yao4", "vip", "fang2"]
    assert read_symbols(letter_symbols("七點半")) == "qi1dian3ban4"


def test_letter_symbols_and_error_rates():
    assert read_symbols([*letter_symbols("it's 7"), 0]) == "it's seven"
    assert read_symbols([3, 3, 0, 3, 4]) == "aab"
    assert error_rate(["abcd", "ab"], ["abcd", "b"]) == pytest.approx(1 / 6, abs=1e-4)


def test_the_command_trains_an_encoder_that_loads(tmp_path, corpus):
    corpus.save(tmp_path / "corpus")
    command = ["--corpus", str(tmp_path / "corpus"), "--held-out", str(tmp_path / "corpus"), "--seconds", "100"]
    metrics = encoder_training.main([*command, "--out", str(tmp_path / "encoder"), "--tiny", "--device", "cpu"])
    losses = [json.loads(line)["loss"] for line in (tmp_path / "encoder/course/log.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.8 * losses[0]
    assert metrics["held_out"] == json.loads((tmp_path / "encoder/metrics.json").read_text())["held_out"]
    loaded = SpeechEncoder.load(tmp_path / "encoder")
    assert loaded.config.quantize_vocab_size == 81
    assert len(encode_corpus(loaded, corpus, "cpu")) == len(SENTENCES)
    encoder_training.main(
        [
            *command,
            "--out",
            str(tmp_path / "on"),
            "--init",
            str(tmp_path / "encoder"),
            "--tiny",
            "--steps",
            "4",
            "--device",
            "cpu",
        ]
    )
    continued = [json.loads(line)["loss"] for line in (tmp_path / "on/course/log.jsonl").read_text().splitlines()]
    assert continued[0] < 0.8 * losses[0], "the run starts from the earlier encoder"
    with pytest.raises(InputError, match="has 81 codes, this plan 2304"):
        encoder_training.main([*command, "--out", str(tmp_path / "on"), "--init", str(tmp_path / "encoder")])


def test_a_codec_without_a_probe_gets_a_new_one_first(tmp_path, corpus):
    corpus.save(tmp_path / "corpus")
    both = [str(tmp_path / "corpus")] * 2
    command = ["--corpus", *both, "--held-out", *both, "--seconds", "100", "--tiny", "--device", "cpu", "--steps", "4"]
    encoder_training.main([*command, "--out", str(tmp_path / "first"), "--reply-voice", "guest"])
    (tmp_path / "first" / "probe.safetensors").unlink()
    metrics = encoder_training.main([*command, "--out", str(tmp_path / "on"), "--init", str(tmp_path / "first")])
    assert metrics["held_out"]["sentences"] == 2 * len(SENTENCES)
    assert (tmp_path / "on/course/probe/log.jsonl").is_file() and (tmp_path / "on/course/log.jsonl").is_file()
    first, later = (SpeechEncoder.load(tmp_path / name).state_dict() for name in ("first", "on"))
    assert torch.equal(first["codebook.weight"], later["codebook.weight"])
    assert not torch.equal(first["conv1.weight"], later["conv1.weight"])


WHISPER = WhisperConfig(
    d_model=32, encoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=128
)


@torch.no_grad()
def test_new_layers_after_a_whispers_own_change_nothing_and_its_channels_can_be_reordered():
    torch.manual_seed(0)
    whisper, lattice, mel = WhisperEncoder(WHISPER), Lattice((3, 3)), torch.randn(2, 80, 64)
    plain, longer = (causal_encoder(whisper, lattice, layers).features(mel) for layers in (0, 2))
    assert torch.equal(plain, longer)
    encoder = causal_encoder(whisper, lattice, 2)
    order = quietest_first(encoder, mel)
    reorder(encoder, order)
    reordered = encoder.features(mel)
    assert torch.allclose(reordered, plain[..., order], atol=1e-5)
    sizes = reordered.square().mean((0, 1))
    assert torch.allclose(sizes, sizes.sort().values, rtol=1e-4)


@torch.no_grad()
def test_causal_convolutions_give_what_whispers_give_a_frame_later():
    torch.manual_seed(0)
    whisper = WhisperEncoder(WHISPER)
    encoder = causal_encoder(whisper, Lattice((3, 3)), 0)
    mel = torch.randn(1, 80, 64)
    first = torch.nn.functional.gelu(whisper.conv1(mel))
    causal = torch.nn.functional.gelu(encoder.conv1(mel))
    assert torch.allclose(first[..., :-1], causal[..., 1:], atol=1e-5)


def test_a_plan_takes_the_sizes_of_an_encoder_or_says_which_it_cannot():
    plan = encoder_training.EncoderPlan()
    sized = plan.sized_as(SpeechEncoderConfig(384, 6, 1536, 80, quantize_position=6, quantize_vocab_size=2304))
    assert (sized.d_model, sized.heads, sized.layers, sized.bins) == (384, 6, 6, 80)
    with pytest.raises(InputError, match="no plan has the sizes"):
        plan.sized_as(SpeechEncoderConfig(384, 6, 1024, 80, quantize_position=6, quantize_vocab_size=2304))


def test_an_encoder_that_begins_with_whisper_learns_codes(tmp_path, corpus):
    corpus.save(tmp_path / "corpus")
    torch.manual_seed(0)
    lattice = Lattice(encoder_training.EncoderPlan.tiny().levels)
    encoder_training.save_encoder(causal_encoder(WhisperEncoder(WHISPER), lattice, 1), lattice, tmp_path / "begin")
    command = ["--corpus", str(tmp_path / "corpus"), "--held-out", str(tmp_path / "corpus"), "--seconds", "100"]
    begin = ["--begin", str(tmp_path / "begin"), "--out", str(tmp_path / "on")]
    encoder_training.main([*command, *begin, "--tiny", "--device", "cpu", "--set", "peak_rate=0.003"])
    losses = [json.loads(line)["loss"] for line in (tmp_path / "on/course/log.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.9 * losses[0]
    assert not (tmp_path / "on/course/probe").exists(), "codes that mean nothing yet need no probe of their own"
    loaded = SpeechEncoder.load(tmp_path / "on")
    assert (loaded.config.d_model, len(loaded.layers)) == (32, 3)
