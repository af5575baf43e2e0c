"""`viva verify` passes equal outputs, fails different ones, and counts an absent device as a failure."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.asr import test_transcribe
from tests.models.test_bigvgan import TINY as TINY_BIGVGAN
from tests.tts.conftest import folder  # noqa: F401 - a fixture
from vivavoce.audio.io import Sound
from vivavoce.audio.level import buzz
from vivavoce.bench import verify
from vivavoce.bench.verify_subjects import KINDS, Question, SpeechSubject, VerifyOutput
from vivavoce.cli import app
from vivavoce.device import available, pick
from vivavoce.errors import InputError, VivaError
from vivavoce.models.bigvgan import BigVGAN
from vivavoce.models.checkpoint import published_tensors
from vivavoce.nn.modules import fill_randomly
from vivavoce.tts import NanoTTS

whisper = test_transcribe.folder
AVAILABLE_KINDS = {device.kind for device in available()}


@pytest.fixture(scope="module")
def vocoder_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("bigvgan")
    config = replace(TINY_BIGVGAN, sampling_rate=24_000, num_mels=20, n_fft=256)
    vocoder = BigVGAN(config)
    fill_randomly(vocoder)
    torch.save(published_tensors(vocoder), root / "bigvgan_generator.pt")
    (root / "config.json").write_text(json.dumps(asdict(config)))
    return root


def checks(result: dict, device: int = 0) -> dict[str, dict]:
    return {check["name"]: check for check in result["devices"][device]["checks"]}


@pytest.fixture(scope="module")
def passed(folder, tmp_path_factory):  # noqa: F811
    out = tmp_path_factory.mktemp("report") / "report.json"
    return verify.run(str(folder), ["cpu"], ask=Question("Two, please."), out=out), out


def test_a_model_passes_where_it_is_itself(passed):
    result, out = passed
    assert result["passed"] and result["kind"] == "text to speech"
    found = checks(result)
    assert found["first logits"]["value"] == pytest.approx(0, abs=1e-5)
    assert found["spectrum, dB apart"]["value"] < 0.1
    assert {"samples are numbers", "duration, share apart", "same seed, same result"} <= found.keys()
    device = result["devices"][0]
    assert device["rtf"] > 0 and device["load_seconds"] > 0 and device["first_ms"] > 0
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    assert out.with_suffix(".png").stat().st_size > 0


def test_an_absent_device_fails_unless_it_may_be_absent(folder):  # noqa: F811
    absent = next(kind for kind in ("npu", "mps", "cuda") if kind not in AVAILABLE_KINDS)
    command = ["verify", str(folder), "--devices", absent, "--text", "Yes.", "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert json.loads(done.stdout)["devices"][0]["status"] == "absent"
    assert CliRunner().invoke(app, [*command, "--skip-absent"]).exit_code == 0


def test_an_unknown_device_is_a_mistake_and_no_absence(folder):  # noqa: F811
    with pytest.raises(InputError, match="is not known"):
        verify.run(str(folder), ["tpu"], ask=Question("Yes."))


class Broken(SpeechSubject):
    """A device that computes something else."""

    def make(self, ask: Question, seed: int | None) -> VerifyOutput:
        output = super().make(ask, seed)
        assert output.sound is not None
        noise = np.random.default_rng(None if seed else 0).normal(0, 0.1, output.sound.samples.shape)
        return VerifyOutput(
            Sound(noise.astype(np.float32), output.sound.rate), None, output.first_seconds, output.seconds
        )

    def first_logits(self, ask: Question) -> np.ndarray | None:
        logits = super().first_logits(ask)
        return None if logits is None else logits + np.float32(0.1) * np.arange(len(logits), dtype=np.float32)


def test_a_device_that_computes_something_else_fails(folder):  # noqa: F811
    kind = KINDS["tts"]
    reference = verify._reference(kind, folder, Question("Yes."))
    verdict = verify.VerifyVerdict("cpu", "failed")
    verify._run_checks(verdict, Broken(folder, pick("cpu"), "float32"), pick("cpu"), Question("Yes."), reference)
    failed = {check.name for check in verdict.checks if not check.passed}
    assert {"first logits", "spectrum, dB apart", "same seed, same result"} <= failed


def test_logits_that_are_no_numbers_fail():
    wanted = np.ones(4, np.float32)
    (check,) = verify._logit_checks(np.array([1, np.nan, 1, 1], np.float32), wanted, verify.EXACT)
    assert not check.passed


def test_silence_is_no_sound(folder, monkeypatch):  # noqa: F811
    silent = lambda self, *_, **__: iter([np.zeros((1, 1600), np.float32)])  # noqa: E731
    monkeypatch.setattr(NanoTTS, "stream", silent)
    with pytest.raises(VivaError, match="already fails: loudness"):
        verify.run(str(folder), ["cpu"])


def test_an_error_on_a_device_is_reported_and_fails(folder):  # noqa: F811
    result = verify.run(str(folder), ["cpu"], dtype="int3", ask=Question("Yes."))
    assert not result["passed"] and "int3" in result["devices"][0]["why"]


def test_a_conversation_is_verified_by_its_reply():
    result = verify.run("mini-speech", ["cpu"])
    assert result["passed"] and result["kind"] == "speech to speech", result["devices"]
    assert checks(result)["first logits"]["passed"]


def test_a_recogniser_is_verified_by_its_text(whisper):
    result = verify.run(str(whisper), ["cpu"])
    assert result["passed"] and result["kind"] == "recognition", result["devices"]
    assert {"first logits", "same text", "same seed, same result"} <= checks(result).keys()


def test_a_vocoder_is_verified_by_its_sound(vocoder_folder):
    result = verify.run(str(vocoder_folder), ["cpu"])
    assert result["passed"] and result["kind"] == "codec", result["devices"]
    assert checks(result)["spectrum, dB apart"]["value"] < 0.1


def test_loudness_and_spectrum_are_in_decibels():
    sound = buzz(1.0, 16_000)
    half = Sound(sound.samples / 2, sound.rate)
    assert verify._loudness(sound) - verify._loudness(half) == pytest.approx(6.02, abs=0.01)
    difference = np.array(verify._spectrum(sound)) - np.array(verify._spectrum(half))
    assert np.median(difference) == pytest.approx(6.02, abs=0.1)


@pytest.mark.gpu
def test_a_gpu_does_what_the_cpu_does(folder):  # noqa: F811
    result = verify.run(str(folder), ["cuda"], ask=Question("Two, please."))
    assert result["passed"], result["devices"]
    assert verify.run(str(folder), ["cuda"], "float32", Question("Two, please."))["passed"]
