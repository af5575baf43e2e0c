"""A telephone call with the bundled model: a spoken question in µ-law at 8 kHz, and its answer."""

import json

import numpy as np
import pytest

from tests.server.harness import RunningServer
from tests.server.phones import TwilioPhone
from vivavoce.audio.io import read
from vivavoce.evaluation.questions import QUESTIONS
from vivavoce.server.config import ServerOptions
from vivavoce.server.hosting import load_host


@pytest.mark.full
async def test_a_question_on_the_telephone_is_answered_in_speech():
    entries = json.loads((QUESTIONS / "questions.json").read_text(encoding="utf8"))
    file = next(entry["file"] for entry in entries if entry["intent"] == "breakfast")
    question = read(QUESTIONS / file, rate=8_000).samples[0]
    silence = np.zeros(8_000, np.float32)
    host = load_host("mini-speech", device="cpu")
    async with host.pipeline:
        await host.warm_up()
        options = ServerOptions(media_streams=True, max_lag_ms=60_000.0)
        async with (
            RunningServer(host, options) as server,
            TwilioPhone(server) as phone,
            phone.sideband() as sideband,
        ):
            await phone.speak(np.concatenate([silence[:1_600], question, silence]))
            response = (await sideband.until("response.done"))["response"]
            await sideband.until("output_audio_buffer.stopped")
    assert response["status"] == "completed"
    words = response["output"][0]["content"][0]["transcript"]
    assert "seven until ten" in words, words
    assert 1.0 < len(phone.sound) / 8_000 < 8.0
    assert np.abs(phone.sound).max() > 0.03
    assert phone.marks and not phone.clears
