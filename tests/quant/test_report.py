"""The report holds the measurements, and its verdict follows from its thresholds."""

import contextlib
import io
import json
from dataclasses import replace

import pytest
import torch

from tests.quant.checkpoints import write
from vivavoce.cli import app
from vivavoce.errors import InputError
from vivavoce.models.moss_speech.model import MossSpeech, MossSpeechConfig
from vivavoce.quant.convert import quantise_folder
from vivavoce.quant.losses import Effort, losses
from vivavoce.quant.plan import byte_count, plan, weight_bytes
from vivavoce.quant.policy import METHODS, ModelPart, policy_for
from vivavoce.quant.report import write_report
from vivavoce.quant.report_page import outliers, thresholds, training_lines, verdict
from vivavoce.quant.run import QuantizeOptions, tabulate
from vivavoce.quant.speech_sets import project_set, scene_set
from vivavoce.quant.subjects import SUBJECTS, CalibrationBatch
from vivavoce.quant.voices import TextSpan, code_agreement, voice_of


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """A model, the figures of two methods, the folder of their reports, and the printed text."""
    root, printed = tmp_path_factory.mktemp("every"), io.StringIO()
    source = write("cosyvoice", root / "source")
    with contextlib.redirect_stdout(printed):
        found = tabulate(str(source), root / "out", ["int8-static", "qat"], QuantizeOptions(items=2))
    return source, found, root / "out", printed.getvalue()


def test_a_report_is_written_whole(every, tmp_path):
    source, found, out, _ = every
    figures, report = found["int8-static"], out / "int8-static"
    assert json.loads((report / "report.json").read_text()) == json.loads(json.dumps(figures))
    page = (report / "report.md").read_text()
    assert figures["verdict"] in page and "step, batch 8, ms" in page
    assert (report / "summary.png").stat().st_size > 3000
    assert figures["disk_bytes"]["quantised"] < figures["disk_bytes"]["float"]
    assert set(figures["step_ms"]["float"]) == {"1", "8"}
    assert 0.9 < figures["logits"]["agreement"] <= 1
    assert set(figures["static"]) == {"int8-static", "int8-dynamic"} and "## Static beside dynamic" in page
    assert figures["static"]["int8-static"]["divergence"] == pytest.approx(figures["logits"]["divergence"])
    assert (
        set(figures["outliers"]["errors"]) == {"minmax", "percentile", "mse"} and figures["outliers"]["layer"] in page
    )
    with pytest.raises(InputError, match="manifest"):
        write_report(source, source, tmp_path / "again", scene_set())


class TwoLayers:
    """A subject of two layers, the second of which meets one row of outliers."""

    def logits(self, model, example):
        spread = example.rows.clone()
        spread[0, 7] = 300.0
        return model["block"]["plain"](example.rows) + model["block"]["spread"](spread)


def test_the_layer_with_outliers_is_found_and_each_observer_judged_there():
    torch.manual_seed(0)
    block = torch.nn.ModuleDict({"plain": torch.nn.Linear(64, 32), "spread": torch.nn.Linear(64, 32)})
    model = torch.nn.ModuleDict({"block": block})
    found = outliers(TwoLayers(), model, ModelPart("lm", ".", r"weight$"), [CalibrationBatch(torch.randn(200, 64), 1)])
    assert found.layer == "block.spread" and found.largest == 300.0 and found.usual < 10.0
    assert found.errors["percentile"] < 0.02 and found.errors["minmax"] > 0.3
    assert found.worst["minmax"] < found.worst["percentile"]  # whose range cuts the outlier off


def test_fine_tuning_reports_whether_it_recovered_half():
    training = {"steps": 9, "lessons": 4, "held_out": 2, "agreement_before": 0.9, "agreement_after": 0.95}
    half = " ".join(training_lines(training | {"divergence_before": 0.02, "divergence_after": 0.01}))
    less = " ".join(training_lines(training | {"divergence_before": 0.02, "divergence_after": 0.015}))
    assert "50 %" in half and "at least half" in half and "25 %" in less and "less than half" in less


def test_aligned_sounds_of_both_versions_have_the_same_positions(tmp_path):
    source, out = write("moss_speech", tmp_path), tmp_path / "out"
    quantise_folder(source, out, METHODS["fp16"], policy_for(source))
    subject = SUBJECTS["moss_speech"]
    spoken, written = subject.examples(source, project_set().items[26:27])
    voice = voice_of("moss_speech", source)
    exact = voice.aligned(subject, subject.load(source), spoken)
    other = voice_of("moss_speech", out).aligned(subject, subject.load(out), spoken)
    assert exact.samples.shape == other.samples.shape
    assert abs(exact.samples - other.samples).max() < 0.05
    assert voice.aligned(subject, subject.load(source), written) is None
    assert code_agreement([spoken], [spoken]) == 1.0


def figures(**changed):
    base = {
        "logits": {"agreement": 0.99},
        "aligned": {"visqol": 4.4, "ceiling": {"visqol": 4.5}},
        "alone": {"float": {"wer": 0.10, "right": 0.80}, "quantised": {"wer": 0.11, "right": 0.79}},
        "step_ms": {"float": {"1": 10.0}, "quantised": {"1": 5.0}},
        "loading": {"float": {"memory": 100}, "quantised": {"memory": 30}},
    }
    return base | changed


def test_the_verdict_names_every_threshold_that_fails():
    assert verdict(figures()).startswith("as good as float; 2.00×")
    assert len(thresholds(figures())) == 4
    worse = figures(
        logits={"agreement": 0.9},
        alone={"float": {"wer": 0.1, "right": 0.8}, "quantised": {"wer": 0.2, "right": 0.7}},
    )
    printed = verdict(worse)
    assert (
        printed.startswith("not as good")
        and "likeliest id" in printed
        and "word errors" in printed
        and "right" in printed
    )


def test_the_plan_counts_the_published_model_as_it_is():
    fits = {fit.method: fit for fit in plan(24_000_000_000)}
    published = fits["bf16 (as published)"]
    assert published.weights == pytest.approx(18.19e9, rel=0.002)  # as loaded by others in bfloat16
    assert published.kv_a_minute == 2 * 40 * 8 * 128 * 2 * 750
    assert fits["int4-weight"].weights < fits["int8-weight"].weights < 0.6 * published.weights
    assert all(fit.is_possible for fit in fits.values())
    assert not plan(12_000_000_000)[0].is_possible
    with torch.device("meta"):
        model = MossSpeech(MossSpeechConfig())
    assert weight_bytes(model, None) == sum(2 * parameter.numel() for parameter in model.parameters())


def test_sizes_are_read_as_people_write_them():
    assert (byte_count("9GB"), byte_count("1.5 gb"), byte_count("512MiB")) == (9 * 10**9, 15 * 10**8, 2**29)
    with pytest.raises(InputError, match="not a size"):
        byte_count("much")


def test_the_command_converts_verifies_and_plans(tmp_path):
    from typer.testing import CliRunner

    runner, source = CliRunner(), write("whisper", tmp_path / "source")
    made = runner.invoke(app, ["quantize", str(source), "--method", "fp8", "--out", str(tmp_path / "out"), "--json"])
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["tensors"] == {"float8": 32}
    checked = runner.invoke(app, ["quantize", str(tmp_path / "out"), "--verify", "--json"])
    assert json.loads(checked.stdout)["method"] == "fp8"
    planned = runner.invoke(app, ["quantize", "--plan", "24GB", "--json"])
    assert len(json.loads(planned.stdout)) == 9
    refused = runner.invoke(app, ["quantize", str(source), "--method", "fp8"])
    assert isinstance(refused.exception, InputError) and "--out" in str(refused.exception)


def test_every_method_has_a_row_in_one_table(every):
    _, found, out, printed = every
    table = (out / "table.md").read_text()
    assert list(found) == ["int8-static"] and found["int8-static"]["verdict"].partition(";")[0] in table
    assert "| qat | refused: qat is not for cosyvoice models" in table and table.strip() in printed


def test_losses_are_reported_beside_float(tmp_path):
    (loss,) = losses("mini-asr", ["fp16"], effort=Effort(items=1))
    assert loss.of == len(project_set().items[0].text.split())
    assert (loss.lost, loss.alone, loss.visqol, loss.verdict) == (TextSpan(0.0, 0.0, 0.0), None, None, "yes")
    assert replace(loss, lost=TextSpan(1.9, -1.0, 5.0), alone=TextSpan(5.0, 1.0, 9.0), visqol=0.97).verdict == "yes"
    assert replace(loss, lost=TextSpan(2.5, -1.0, 6.0)).verdict == "not told from chance"
    for worse in (
        replace(loss, visqol=0.9),
        replace(loss, lost=TextSpan(5.0, 2.1, 8.0)),
        replace(loss, alone=TextSpan(5, 2, 8)),
    ):
        assert worse.verdict == worse.cells()[-1] == "no"
    with pytest.raises(InputError, match="cosyvoice model; losses can be measured for moss_speech"):
        losses(str(write("cosyvoice", tmp_path / "source")), ["fp16"])
