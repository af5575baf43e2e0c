"""A person asks `mini-speech` over the telephone: baresip plays a recorded question, and hears the right answer."""

import json

import numpy as np
import pytest
import soundfile

from tests.server.harness import RunningServer, connected, eventually
from tests.server.sip.programs import Baresip
from vivavoce import hub
from vivavoce.audio.io import Sound, read
from vivavoce.server.config import ServerOptions
from vivavoce.server.hosting import load_host
from vivavoce.server.sip.options import SipOptions
from vivavoce.train.front_desk import Exchange, judge

pytestmark = [pytest.mark.debian, pytest.mark.full]

LINE_RATE = 8_000


def question(intent: str) -> tuple[np.ndarray, Exchange]:
    folder = hub.BUNDLED / "questions"
    entries = json.loads((folder / "questions.json").read_text(encoding="utf8"))
    entry = next(each for each in entries if each["intent"] == intent)
    slots = tuple(tuple(pair) for pair in entry["slots"])
    sound = read(folder / entry["file"], rate=LINE_RATE).mono().samples[0]
    return sound, Exchange(entry["intent"], entry["text"], entry["reply"], slots)


@pytest.mark.parametrize("codec", ["PCMU/8000/1", "PCMA/8000/1"])
async def test_a_question_over_g711_is_answered_rightly(tmp_path, codec):
    asked, exchange = question("wifi")
    host = load_host("mini-speech", device="cpu")
    async with host.pipeline:
        await host.pipeline.warm_up()
        host.is_ready = True
        sip = SipOptions(listen=("127.0.0.1:0",), rtp_ports="20000-29999")
        options = ServerOptions(sip=sip, max_lag_ms=60_000.0)
        async with RunningServer(host, options) as server, Baresip(tmp_path, codec) as phone:
            room = 3e-4 * np.random.default_rng(0).standard_normal(LINE_RATE * 120)  # the call ends with its file
            room[2 * LINE_RATE : 2 * LINE_RATE + len(asked)] += asked
            soundfile.write(tmp_path / "question.wav", room, LINE_RATE, subtype="PCM_16")
            agent = server.app.state.server.sip
            address = "{}:{}".format(*agent.signalling.transports.local("udp"))
            await phone.command("dial", f"sip:viva@{address}")
            await phone.event("CALL_ESTABLISHED")
            (call,) = agent.calls.values()
            async with connected(server, f"?call_id={call.id}") as client:
                await client.until("session.created")
                done = await client.until("response.output_audio_transcript.done")
                await client.until("output_audio_buffer.stopped")
                item = call.media.session.conversation.items[-1]
                await phone.command("hangup")
            await eventually(lambda: not agent.calls, "the call has ended")
            heard, rate = phone.heard()
    assert judge(done["transcript"], exchange), done["transcript"]
    part = item.content.parts[0]
    said = Sound(part.samples, part.rate).resampled(rate).samples[0]
    # piece by piece: on a busy machine there are gaps between them
    pieces = [said[begin : begin + rate // 3] for begin in range(0, len(said) - rate // 3, rate // 3)]
    loud = [piece for piece in pieces if np.abs(piece).max() > 0.05]
    assert np.median([similarity(heard, piece) for piece in loud]) > 0.8, "baresip has heard what was said"


def similarity(heard: np.ndarray, said: np.ndarray) -> float:
    """The largest normalised correlation of a sound with a part of another."""
    size = len(heard) + len(said)
    correlation = np.fft.irfft(np.fft.rfft(heard, size) * np.conj(np.fft.rfft(said, size)), size)
    at = int(np.argmax(correlation))
    part = heard[at : at + len(said)]
    return float(correlation[at] / (np.linalg.norm(part) * np.linalg.norm(said) + 1e-9))
