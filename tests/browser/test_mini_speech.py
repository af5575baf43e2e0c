"""The real thing, all of it: Chromium's microphone asks `mini-speech` a bundled question, its loudspeaker answers."""

import base64
import json

import numpy as np
import pytest
import soundfile

from tests.browser.chromium import MICROPHONE_RATE, sounding, visiting
from tests.server.harness import RunningServer
from vivavoce import hub
from vivavoce.audio.io import read
from vivavoce.server.config import ServerOptions
from vivavoce.server.hosting import load_host
from vivavoce.server.realtime.audio_formats import WireFormat, decode

pytestmark = pytest.mark.debian("chromium")


def question(intent: str) -> tuple[np.ndarray, dict]:
    folder = hub.BUNDLED / "questions"
    listed = json.loads((folder / "questions.json").read_text(encoding="utf8"))
    about = next(entry for entry in listed if entry["intent"] == intent)
    return read(folder / about["file"], rate=MICROPHONE_RATE).mono().samples[0], about


@pytest.mark.full
async def test_a_question_to_mini_speech_is_heard_answered_and_played(tmp_path):
    asked, about = question("wifi")
    host = load_host("mini-speech", device="cpu")
    async with host.pipeline:
        await host.pipeline.warm_up()
        host.is_ready = True
        says = np.pad(asked, (2 * MICROPHONE_RATE, 0))
        says += 1e-3 * np.random.default_rng(0).standard_normal(len(says))  # a room: in none, browsers suppress speech
        async with RunningServer(host, ServerOptions()) as server, visiting(server, tmp_path, says=says) as visit:
            await visit.page.click("#talk")
            await visit.shows(".assistant .latency", "answered after")
            await visit.is_in("listening")
            # On a busy machine the microphone stutters, and a question may arrive as two turns.
            heard = " ".join(await visit.page.locator(".user .words").all_inner_texts()).lower()
            said = (await visit.page.locator(".assistant .words").last.inner_text()).lower()
            sound, rate = await visit.heard()
            await visit.page.screenshot(path=tmp_path / "mini-speech.png", full_page=True)
            assert visit.complaints == [] and visit.places == {f"127.0.0.1:{server.port}"}
            deltas = [event["delta"] for event in visit.received if event["type"] == "response.output_audio.delta"]
    soundfile.write(tmp_path / "reply.wav", sound, rate)
    assert "wifi" in heard and said == about["reply"].lower()
    sent = decode(b"".join(map(base64.b64decode, deltas)), WireFormat())
    assert len(sent) / 24_000 > 1
    assert len(sound) / rate == pytest.approx(len(sounding(sent, 24_000)) / 24_000, rel=0.05)
    assert np.sqrt(np.mean(sound**2)) == pytest.approx(np.sqrt(np.mean(sounding(sent, 24_000) ** 2)), rel=0.1)
