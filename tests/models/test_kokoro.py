"""Kokoro in small: batches, the CPU generator, windows, published torch names, voices."""

import copy
from dataclasses import replace

import pytest
import torch

from tests.models.tiny_kokoro import CONFIG, text, tiny_kokoro, write_folder
from vivavoce.errors import CheckpointError, InputError
from vivavoce.kernels.cpu import synthesis_library
from vivavoce.models.kokoro.config import GeneratorConfig
from vivavoce.models.kokoro.cpu import CpuGenerator, FrequencyConv, PlainSnakeConv, compiled_speedup
from vivavoce.models.kokoro.cuda import GraphedGenerator
from vivavoce.models.kokoro.decoder import Generator
from vivavoce.models.kokoro.layers import RunningStatistics, doubled
from vivavoce.models.kokoro.model import GeneratedSound, Kokoro, PreparedSpeech
from vivavoce.models.kokoro.voices import VoiceTables
from vivavoce.models.kokoro.windows import FADE, Break, WindowLengths, cuts, sound_in_windows
from vivavoce.models.registry import family_of
from vivavoce.nn.snake_conv import CompiledSnakeConv


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
    generated = GraphedGenerator(model.decoder.generator, torch.float32)(prepared)
    for index in range(len(texts)):
        row = prepared.row(index)
        alone = model.generate(row)
        samples = alone.samples[0]
        assert loudest(generated.samples[index, : len(samples)] - samples) <= 1e-4 * loudest(samples)
        for together, single in zip(vars(generated.statistics).values(), vars(alone.statistics).values(), strict=True):
            torch.testing.assert_close(together[index : index + 1], single, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("implementation", ["cpu", "cuda"])
def test_the_statistics_of_earlier_features_are_merged(model, implementation):
    prepared, voice = model.prepare([text(12, 4)]), model.generate(model.prepare([text(9, 8)])).statistics
    with_voice = replace(prepared, earlier=voice)
    expected = model.generate(with_voice)
    kind = {"cpu": CpuGenerator, "cuda": GraphedGenerator}[implementation]
    made = kind(model.decoder.generator, torch.float32)(with_voice)
    assert loudest(made.samples - expected.samples) <= 1e-4 * loudest(expected.samples)
    assert loudest(made.samples - model.generate(prepared).samples) > 1e-2 * loudest(expected.samples)
    for ours, plain in zip(vars(made.statistics).values(), vars(expected.statistics).values(), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-4, rtol=1e-3)


def test_merged_statistics_are_those_of_all_values():
    torch.manual_seed(0)
    values = 3 + torch.randn(1, 4, 100)
    parts = [values[..., :30], values[..., 30:]]
    earlier = None
    for part in parts:
        running = RunningStatistics(torch.tensor([part.shape[-1]]), earlier)
        running.merged(part.mean(-1), part.var(-1, correction=0))
        earlier = running.result()
    torch.testing.assert_close(earlier.means, values.mean(-1))
    torch.testing.assert_close(earlier.variances, values.var(-1, correction=0))


def test_the_cpu_generator_equals_the_plain_one(model):
    prepared = model.prepare([text(12, 4)])
    plain = model.generate(prepared).samples
    assert loudest(CpuGenerator(model.decoder.generator)(prepared).samples - plain) <= 1e-4 * loudest(plain)


@pytest.mark.parametrize(("taps", "dilation", "time"), [(7, 1, 5), (7, 3, 100), (11, 1, 333), (11, 5, 2500)])
def test_convolutions_in_the_frequency_domain_are_exact(taps, dilation, time):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(time, 6), torch.randn(4, 6, taps), torch.randn(4)
    expected = torch.nn.functional.conv1d(x.T[None], weight, bias, padding=taps // 2 * dilation, dilation=dilation)
    torch.testing.assert_close(FrequencyConv(weight, bias, dilation)(x), expected[0].T, atol=1e-4, rtol=1e-4)


def test_doubling_equals_a_transposed_convolution():
    torch.manual_seed(0)
    pool = torch.nn.ConvTranspose1d(6, 6, 3, stride=2, padding=1, output_padding=1, groups=6).requires_grad_(False)
    for time in (1, 2, 9):
        x = torch.randn(2, 6, time)
        torch.testing.assert_close(doubled(x, pool), pool(x))


def test_the_cpu_generator_of_the_published_shape_is_compiled_where_it_can_be():
    generator = Generator(GeneratorConfig(), style=128).requires_grad_(False)
    convs = {type(conv) for block in CpuGenerator(generator).blocks for pair in block.convs for conv in pair}
    compiled = synthesis_library() is not None and compiled_speedup() >= 1
    assert convs == {CompiledSnakeConv if compiled else PlainSnakeConv}


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
    whole, statistics = model.generate(prepared)
    whole = whole[0]
    length = prepared.features.shape[-1]
    ends = [length // 3, length // 2, length]

    def cut_from_whole(part):
        starts = [
            start
            for start in range(length)
            if torch.equal(prepared.features[..., start : start + part.features.shape[-1]], part.features)
        ]
        samples = whole[None, starts[0] * 300 : (starts[0] + part.features.shape[-1]) * 300]
        return GeneratedSound(samples, statistics)

    pieces = list(sound_in_windows(cut_from_whole, prepared, ends, statistics))
    assert len(pieces) == len(ends)
    torch.testing.assert_close(torch.cat(pieces), whole, atol=1e-6, rtol=1e-5)
    assert len(pieces[0]) == ends[0] * 300 - FADE // 2
    later = list(sound_in_windows(cut_from_whole, prepared, ends, statistics, start=20))
    torch.testing.assert_close(torch.cat(later), whole[20 * 300 :], atol=1e-6, rtol=1e-5)


def test_a_window_with_the_statistics_of_the_sentence_is_exact(model):
    """What a window lacks is the statistics alone: with those of the whole sentence, weighted so that its own do not
    count, it makes the samples of the whole sentence."""
    prepared = model.prepare([text(40, 7)])
    whole, statistics = model.generate(prepared)
    length = prepared.features.shape[-1]

    def generate(part):
        endless = replace(statistics, features=torch.full_like(statistics.features, 1e9))
        return model.generate(replace(part, earlier=endless))

    joined = torch.cat(list(sound_in_windows(generate, prepared, [length // 3, length // 2, length], statistics)))
    assert loudest(joined - whole[0]) <= 1e-3 * loudest(whole)


def test_windows_with_the_voices_statistics_are_nearer_to_the_whole_sentence(model):
    """The voice's statistics are those of another text."""
    style = text(60, 6).style
    sentence, other = (replace(text(60, seed), style=style) for seed in (6, 9))
    prepared = model.prepare([sentence])
    whole = model.generate(prepared).samples[0]
    voice = model.generate(model.prepare([other])).statistics
    length = prepared.features.shape[-1]
    ends = [length // 4, length // 2, length]
    alone = torch.cat(
        list(sound_in_windows(lambda part: model.generate(replace(part, earlier=None)), prepared, ends, voice))
    )
    helped = torch.cat(list(sound_in_windows(model.generate, prepared, ends, voice)))
    assert similarity(helped, whole) > similarity(alone, whole)


def test_cuts_are_made_in_pauses_and_only_then_between_words():
    lengths = WindowLengths(first=1.0, first_limit=2.0, limit=4.0, speed=2.0)
    words = [Break(at, False) for at in range(0, 900, 50)]
    assert cuts([], 1000, lengths) == [1000]
    assert cuts([Break(100, True)], 150, lengths) == [150]  # short enough
    assert cuts([Break(100, True)], 170, lengths) == [170]  # too little would be left
    assert cuts([Break(60, True), Break(100, True), Break(150, True)], 250, lengths) == [100, 250]
    assert cuts([Break(100, True), Break(210, True), Break(280, True)], 500, lengths) == [100, 280, 500]
    assert cuts(words, 300, lengths) == [150, 300]
    assert cuts(words, 900, lengths) == [150, 400, 700, 900]  # played for as long as the next takes; four seconds
    assert cuts([Break(350, False)], 600, lengths) == [350, 600]  # no place to cut before
    assert cuts(words, 300, lengths, start=60) == [200, 300]  # lengths count from the start


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
@pytest.mark.parametrize(("dtype", "likeness"), [(torch.float32, 0.9999), (torch.float16, 0.99)])
def test_captured_batches_on_cuda_sound_as_plain_ones_on_the_cpu(model, dtype, likeness):
    texts = [text(6, 1), text(3, 2), text(9, 3)]
    prepared = model.prepare(texts)
    expected = model.generate(prepared).samples
    generator = copy.deepcopy(model.decoder.generator).cuda()
    lengths = None if prepared.lengths is None else prepared.lengths.cuda()
    on_device = PreparedSpeech(
        prepared.features.cuda(), prepared.spectrum.cuda(), prepared.style.cuda(), lengths, prepared.durations
    )
    graphed = GraphedGenerator(generator, dtype)
    for _ in range(2):  # the second call replays what the first captured
        made = graphed(on_device).samples.cpu()
        for index in range(len(texts)):
            samples = prepared.row(index).features.shape[-1] * 300
            assert similarity(made[index, :samples], expected[index, :samples]) > likeness
    assert graphed.graphs.captured == 1
