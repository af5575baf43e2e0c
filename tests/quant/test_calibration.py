"""Input ranges from calibration, and the accuracy of static int8 with them."""

import json

import numpy as np
import pytest
import torch

from tests.quant.checkpoints import write
from vivavoce.audio.io import Sound
from vivavoce.audio.io import write as write_sound
from vivavoce.cpu_speed import is_int8_fast
from vivavoce.errors import InputError
from vivavoce.models.checkpoint import Checkpoint
from vivavoce.nn.quantised import RangedInt8Linear, quantised_linear
from vivavoce.nn.quantised_weight import quantise
from vivavoce.quant.calibration import OBSERVERS, calibrate, input_range, observer
from vivavoce.quant.convert import Findings, quantise_folder
from vivavoce.quant.measure import closeness, log_probabilities
from vivavoce.quant.policy import METHODS, policy_for
from vivavoce.quant.speech_sets import project_set, read_set
from vivavoce.quant.subjects import SUBJECTS, CalibrationBatch

needs_int8 = pytest.mark.skipif(not is_int8_fast(), reason="this processor has no int8 products")


def seen_by(name: str, *batches: torch.Tensor):
    observing_inputs = observer(name)
    for batch in batches:
        observing_inputs.observe(batch)
    return input_range(*observing_inputs.span())


def rounding_error(x: torch.Tensor, span) -> float:
    rounded = ((x / span.scale).round() + span.zero).clamp(0, 255)
    return float((((rounded - span.zero) * span.scale) - x).norm() / x.norm())


def test_minmax_covers_everything_ever_seen():
    span = seen_by("minmax", torch.tensor([-1.0, 0.5]), torch.tensor([3.0]))
    assert span.scale == pytest.approx(4 / 255) and span.zero == round(255 / 4)


@pytest.mark.parametrize("name", OBSERVERS)
def test_zero_is_a_step_and_one_sided_inputs_are_covered(name):
    span = seen_by(name, torch.rand(1000) + 2)
    assert span.zero == 0 and span.scale * 255 >= 2.5


def test_an_outlier_ruins_minmax_and_not_the_others():
    """The bulk of a layer whose inputs hold one huge value keeps its precision only where that value is clipped."""
    generator = torch.Generator().manual_seed(0)
    bulk = torch.randn(20_000, generator=generator)
    given = torch.cat([bulk, torch.tensor([300.0])])
    errors = {name: rounding_error(bulk, seen_by(name, given)) for name in OBSERVERS}
    assert errors["minmax"] > 0.3
    assert errors["percentile"] < 0.02
    assert errors["mse"] <= errors["minmax"]


def test_a_range_does_not_depend_on_how_inputs_were_cut():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    for name in OBSERVERS:
        once, often = seen_by(name, x), seen_by(name, *x.split(256))
        assert often.scale == pytest.approx(once.scale, rel=0.02)


@needs_int8
def test_a_static_layer_rounds_each_row_independently():
    weight = quantise(torch.randn(32, 64), "int8", activations="static", input_range=input_range(-4, 4))
    layer = quantised_linear(weight, torch.ones(32), torch.float32)
    assert isinstance(layer, RangedInt8Linear)
    x = torch.randn(5, 64)
    beside = x.clone()
    beside[1:] *= 100
    assert torch.equal(layer(x)[0], layer(beside)[0])
    expected = x @ layer.weight.T + 1
    assert (layer(x) - expected).norm() / expected.norm() < 0.03


@needs_int8
@pytest.mark.parametrize("kind", ["whisper", "cosyvoice"])
def test_static_int8_has_ranges_and_is_near_float(kind, tmp_path):
    source, out = write(kind, tmp_path / "source"), tmp_path / "out"
    subject, policy = SUBJECTS[kind], policy_for(source)
    examples = subject.examples(source, project_set().items[:3])
    ranges = calibrate(subject, source, examples, "mse")
    quantise_folder(source, out, METHODS["int8-static"], policy, Findings(ranges=ranges))
    kept = Checkpoint(out if kind == "whisper" else out / "llm.pt").quantised
    assert {read().input_range is not None: read().activations for read in kept.values()}[True] == "static"
    assert all(read().activations in ("static", "dynamic") for read in kept.values())
    exact = log_probabilities(subject, subject.load(source), examples)
    near = closeness(exact, log_probabilities(subject, subject.load(out), examples))
    assert near.divergence < 0.02 and near.agreement > 0.8


class LikeAndUnlike:
    """A subject of two layers, of which one meets rows of one size, the other of many."""

    def load(self, folder):
        torch.manual_seed(0)
        return torch.nn.ModuleDict({name: torch.nn.Linear(64, 32) for name in ("like", "unlike")})

    def logits(self, model, example):
        sizes = torch.logspace(0, 3, len(example.rows))[:, None]
        return model["like"](example.rows) + model["unlike"](example.rows * sizes)


def test_a_layer_whose_rows_differ_in_size_has_no_static_range(tmp_path):
    examples = [CalibrationBatch(torch.randn(200, 64, generator=torch.Generator().manual_seed(1)), 1)]
    assert list(calibrate(LikeAndUnlike(), tmp_path, examples)) == ["lm:like.weight"]


def test_a_users_set_is_read_and_hashed(tmp_path):
    tone = Sound(0.1 * np.sin(np.arange(8000) / 20).astype(np.float32), 16_000)
    write_sound(tmp_path / "a.wav", tone)
    (tmp_path / "a.txt").write_text("a tone")
    (tmp_path / "set.jsonl").write_text(json.dumps({"audio": "a.wav", "text": "a tone"}) + "\n\n")
    folder, listed = read_set(tmp_path), read_set(tmp_path / "set.jsonl")
    assert folder.hash == listed.hash and folder.items[0].text == "a tone"
    (tmp_path / "a.txt").write_text("another")
    assert read_set(tmp_path).hash != folder.hash


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("empty", "holds nothing to calibrate with"),
        ("absent", "neither a folder"),
        ("silent", "are silent"),
        ("not json", "line 1"),
        ("{}", "neither audio nor text"),
        ("", "holds nothing"),
    ],
)
def test_a_set_that_cannot_be_used_says_why(content, complaint, tmp_path):
    if content == "silent":
        write_sound(tmp_path / "quiet.wav", Sound(np.zeros(16_000, np.float32), 16_000))
    source = {"empty": tmp_path, "silent": tmp_path, "absent": tmp_path / "absent"}.get(content, tmp_path / "set.jsonl")
    if source.suffix == ".jsonl":
        source.write_text(content + "\n")
    with pytest.raises(InputError, match=complaint):
        read_set(source)


def test_nan_inputs_and_missing_examples_are_refused(tmp_path):
    with pytest.raises(InputError, match="NaN"):
        input_range(float("nan"), 1.0)
    with pytest.raises(InputError, match="nothing to calibrate"):
        calibrate(SUBJECTS["whisper"], tmp_path, [])
    with pytest.raises(InputError, match="no observer 'best'"):
        observer("best")
