"""The Python API, the command line and the server write the same text for the same sound, and none for a hum."""

import io
import threading

import httpx
import numpy as np
import pytest
import soundfile
import torch
from typer.testing import CliRunner

import vivavoce
from tests.server.harness import RunningServer
from vivavoce.asr import Transcriber
from vivavoce.audio.io import read
from vivavoce.bench.asr import BUNDLED
from vivavoce.cli import app
from vivavoce.models.whisper.steps import TranscriptionOptions
from vivavoce.server.app import build_app
from vivavoce.server.config import ServerOptions
from vivavoce.server.hosting.config import ServingOptions
from vivavoce.server.hosting.hosts import load_models

RATE = 16_000


def hum() -> np.ndarray:
    """A steady tone with harmonics, such as a motor's, which a recogniser takes for a voice."""
    time = np.arange(3 * RATE) / RATE
    return sum(np.sin(2 * np.pi * 110 * k * time) / k for k in range(1, 12)) / 5


@pytest.fixture(scope="module")
def recordings() -> dict[str, bytes]:
    made = {
        "hum": hum(),
        "silence": np.zeros(3 * RATE),
        "noise": 0.1 * np.random.default_rng(0).standard_normal(3 * RATE),
        "speech": read(BUNDLED / "09-order.opus", rate=RATE).samples[0],
    }
    files = {}
    for name, samples in made.items():
        buffer = io.BytesIO()
        soundfile.write(buffer, samples.astype(np.float32), RATE, format="WAV", subtype="FLOAT")
        files[name] = buffer.getvalue()
    return files


async def by_server(recordings: dict[str, bytes], gate: bool = True) -> dict[str, str]:
    host = load_models(ServingOptions(device="cpu", asr="mini-asr", audio_only=True, asr_gate=gate))
    server = RunningServer(host, ServerOptions())
    server.use(build_app(host, server.options, host.speech, host.transcriber))
    texts = {}
    async with host.recogniser, server, httpx.AsyncClient(timeout=60) as http:
        for name, data in recordings.items():
            reply = await http.post(f"{server.http}/v1/audio/transcriptions", files={"file": ("a.wav", data)})
            texts[name] = reply.json()["text"]
    return texts


def by_command(data: bytes, *flags: str) -> str:
    result = CliRunner().invoke(app, ["transcribe", "-", "--model", "mini-asr", "--device", "cpu", *flags], input=data)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


@pytest.mark.full
async def test_the_three_interfaces_write_the_same_text(recordings):
    by_api = {name: vivavoce.transcribe(data, model="mini-asr", device="cpu").text for name, data in recordings.items()}
    assert by_api["speech"] and not (by_api["hum"] or by_api["silence"] or by_api["noise"])
    assert {name: by_command(data) for name, data in recordings.items()} == by_api
    assert await by_server(recordings) == by_api


async def test_without_the_gate_all_three_write_words_for_a_hum(recordings):
    only = {"hum": recordings["hum"]}
    text = vivavoce.transcribe(only["hum"], model="mini-asr", device="cpu", gate=False).text
    assert text  # else the gate would have nothing to do in the test above
    assert by_command(only["hum"], "--no-gate") == text
    assert await by_server(only, gate=False) == {"hum": text}


def test_threads_share_one_transcriber():
    transcriber = Transcriber.load("mini-asr", "ours", "cpu", parallel=2)
    samples = torch.from_numpy(read(BUNDLED / "09-order.opus", rate=RATE).samples[0].copy())
    alone = [segment.tokens for segment in transcriber.segments(samples, TranscriptionOptions(temperatures=(0.0,)))]
    texts: list[list[tuple[int, ...]]] = []

    def work() -> None:
        texts.append(
            [segment.tokens for segment in transcriber.segments(samples, TranscriptionOptions(temperatures=(0.0,)))]
        )

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert alone and texts == [alone] * 3
