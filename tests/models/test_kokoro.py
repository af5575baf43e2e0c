"""Kokoro in small: batches, the CPU generator, windows, published torch names, voices."""

import copy

import pytest
import torch

from tests.models.tiny_kokoro import CONFIG, text, tiny_kokoro, write_folder
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.kokoro.cpu import CpuGenerator, FrequencyConv
from vivavoce.models.kokoro.cuda import GraphedGenerator
from vivavoce.models.kokoro.model import Kokoro, PreparedSpeech
from vivavoce.models.kokoro.voices import VoiceTables
from vivavoce.models.kokoro.windows import FADE, Break, WindowLengths, cuts, sound_in_windows
from vivavoce.models.registry import family_of


@pytest.fixture(scope="module")
def model():
    return tiny_kokoro()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return write_folder(model, tmp_path_factory.mktemp("kokoro"))


def similarity(one: torch.Tensor, other: torch.Tensor) -> float:
    """Correlation; rounding may turn single angles of the excitation's spectrum from π to -π."""
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1])


def loudest(sound: torch.Tensor) -> float:
    return float(sound.abs().max())


def test_texts_of_a_batch_sound_as_they_do_alone(model):
    texts = [text(6, 1), text(3, 2), text(9, 3)]
    batch = model.prepare(texts)
    for index, (together, each) in enumerate(zip(model(texts), texts, strict=True)):
        row, single = batch.row(index), model.prepare([each])
        assert row.durations == single.durations
        assert loudest(row.features - single.features) <= 1e-4 * loudest(single.features)
        assert similarity(together, model([each])[0]) > 0.9999


def test_padded_rows_of_the_graphed_generator_sound_as_they_do_alone(model):
    texts = [text(6, 1), text(3, 2), text(9, 3)]
    prepared = model.prepare(texts)
    together = GraphedGenerator(model.decoder.generator)(prepared)
    for index in range(len(texts)):
        alone = model.generate(prepared.row(index))[0]
        assert loudest(together[index, : len(alone)] - alone) <= 1e-4 * loudest(alone)


def test_the_cpu_generator_equals_the_plain_one(model):
    prepared = model.prepare([text(12, 4)])
    plain = model.generate(prepared)
    assert loudest(CpuGenerator(model.decoder.generator)(prepared) - plain) <= 1e-4 * loudest(plain)


@pytest.mark.parametrize(("taps", "dilation", "time"), [(7, 1, 5), (7, 3, 100), (11, 1, 333), (11, 5, 2500)])
def test_convolutions_in_the_frequency_domain_are_exact(taps, dilation, time):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(time, 6), torch.randn(4, 6, taps), torch.randn(4)
    expected = torch.nn.functional.conv1d(x.T[None], weight, bias, padding=taps // 2 * dilation, dilation=dilation)
    torch.testing.assert_close(FrequencyConv(weight, bias, dilation)(x), expected[0].T, atol=1e-4, rtol=1e-4)


def test_noise_is_drawn_from_the_seed_alone(model):
    assert torch.equal(model([text(6, 1)])[0], model([text(6, 1)])[0])
    assert not torch.equal(model([text(6, 1)])[0], model([text(6, 1, noise=1)])[0])


def test_speed_shortens_every_phoneme_to_no_less_than_a_frame(model):
    each = text(6, 1)
    slow = model.prepare([each])
    fast = model.prepare([type(each)(each.ids, each.style, 2.0, each.seed)])
    assert sum(fast.durations[0]) < sum(slow.durations[0])
    assert min(fast.durations[0]) >= 1


def test_the_published_torch_file_gives_the_same_sound(model, folder):
    loaded = Kokoro.load(folder)
    assert loaded.config == CONFIG
    expected = model([text(8, 5)])[0]
    assert similarity(loaded([text(8, 5)])[0], expected) > 0.9999
    family = family_of(folder, "tts")
    assert family is not None
    assert family.name == "kokoro"


def test_a_file_that_is_not_kokoros_is_refused(tmp_path):
    torch.save({"bert": {}}, tmp_path / "kokoro-v1_0.pth")
    with pytest.raises(CheckpointError, match="not a Kokoro file"):
        Kokoro.load(tmp_path)
    (tmp_path / "kokoro-v1_0.pth").unlink()
    (tmp_path / "model_quantized.onnx").write_bytes(b"")
    with pytest.raises(CheckpointError, match="fetch kokoro-82m"):
        Kokoro.load(tmp_path)


def test_too_many_phonemes_are_refused(model):
    with pytest.raises(InputError, match="more than 126"):
        model([text(127)])


def test_windows_of_a_sentence_join_where_they_were_cut(model):
    """With the statistics of the whole sentence, every sample away from the joins is that of the whole sentence."""
    prepared = model.prepare([text(60, 6)])
    whole = model.generate(prepared)[0]
    length = prepared.features.shape[-1]
    ends = [length // 3, length // 2, length]

    def cut_from_whole(part):
        starts = [
            start
            for start in range(length)
            if torch.equal(prepared.features[..., start : start + part.features.shape[-1]], part.features)
        ]
        return whole[None, starts[0] * 300 : (starts[0] + part.features.shape[-1]) * 300]

    pieces = list(sound_in_windows(cut_from_whole, prepared, ends))
    assert len(pieces) == len(ends)
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-6, rtol=1e-5)
    assert len(pieces[0]) == ends[0] * 300 - FADE // 2


def test_a_window_has_the_whole_receptive_field(model, monkeypatch):
    """A window with the norms' statistics held fixed makes the samples of the whole sentence."""
    monkeypatch.setattr(
        "vivavoce.models.kokoro.layers.channel_statistics",
        lambda x, mask: (torch.zeros_like(x[..., :1]), 9 * torch.ones_like(x[..., :1])),
    )
    prepared = model.prepare([text(40, 7)])
    whole = model.generate(prepared)[0]
    length = prepared.features.shape[-1]
    joined = torch.cat(list(sound_in_windows(model.generate, prepared, [length // 3, length // 2, length])))
    assert loudest(joined - whole) <= 1e-4 * loudest(whole)


def test_cuts_are_made_in_pauses_and_only_then_between_words():
    lengths = WindowLengths(first=1.0, later=2.0, limit=4.0)
    assert cuts([], 1000, lengths) == [1000]
    assert cuts([Break(100, True)], 150, lengths) == [150]  # too little would be left
    assert cuts([Break(60, True), Break(100, True), Break(200, True)], 400, lengths) == [100, 400]
    assert cuts([Break(100, True), Break(290, True)], 500, lengths) == [100, 290, 500]
    assert cuts([Break(at, False) for at in range(0, 700, 50)], 300, lengths) == [300]
    assert cuts([Break(at, False) for at in range(0, 700, 50)], 700, lengths) == [300, 600, 700]


def test_voices_mix_by_weight(folder):
    tables = VoiceTables(folder, 2 * CONFIG.style)
    heart, bella = tables.style("af_heart", 5), tables.style("af_bella", 5)
    torch.testing.assert_close(tables.style("af_heart:0.7+af_bella:0.3", 5), 0.7 * heart + 0.3 * bella)
    torch.testing.assert_close(tables.style("af_heart:7+af_bella:3", 5), 0.7 * heart + 0.3 * bella)
    torch.testing.assert_close(tables.style("af_heart+af_bella", 5), 0.5 * heart + 0.5 * bella)
    assert torch.equal(tables.style("af_heart", 400), tables.style("af_heart", 40))


@pytest.mark.parametrize("voice", ["ann", "af_heart:-1", "af_heart:0", "af_heart:x", "+", "af_heart+ann:2"])
def test_bad_mixtures_are_refused(folder, voice):
    with pytest.raises(InputError):
        VoiceTables(folder, 2 * CONFIG.style).style(voice, 5)


@pytest.mark.gpu
def test_captured_batches_on_cuda_sound_as_plain_ones_on_the_cpu(model):
    texts = [text(6, 1), text(3, 2), text(9, 3)]
    prepared = model.prepare(texts)
    expected = model.generate(prepared)
    generator = copy.deepcopy(model.decoder.generator).cuda()
    lengths = None if prepared.lengths is None else prepared.lengths.cuda()
    on_device = PreparedSpeech(
        prepared.features.cuda(), prepared.spectrum.cuda(), prepared.style.cuda(), lengths, prepared.durations
    )
    graphed = GraphedGenerator(generator)
    for _ in range(2):  # the second call replays what the first captured
        made = graphed(on_device).cpu()
        for index in range(len(texts)):
            samples = prepared.row(index).features.shape[-1] * 300
            assert similarity(made[index, :samples], expected[index, :samples]) > 0.9999
    assert graphed.graphs.captured == 1
