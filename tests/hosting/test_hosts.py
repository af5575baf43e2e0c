"""Who stands behind a server: a speech-to-speech model with a recogniser and a voice beside it, or a cascade."""

import contextlib

import httpx
import numpy as np
import pytest

import vivavoce
from tests.hosting.similarity import likeness
from tests.s2s.small_parts import small_asr, small_chat, small_tts
from vivavoce.audio.io import Sound, read
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.errors import CheckpointError, InputError
from vivavoce.evaluation.scoring import word_errors
from vivavoce.server.app import build_app
from vivavoce.server.config import ServerOptions
from vivavoce.server.hosting import load_host
from vivavoce.server.hosting.config import ModerationOptions, ServingOptions
from vivavoce.server.hosting.hosts import load_models

IDLE = dict.fromkeys(("queue_depth", "kv_used_ratio", "audio_requests", "audio_requests_begun"), 0.0)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    asr, chat, tts = (tmp_path_factory.mktemp(name) for name in ("asr", "chat", "tts"))
    return {"asr": str(small_asr(asr)), "chat": str(small_chat(chat)), "tts": str(small_tts(tts))}


async def test_a_recogniser_and_a_voice_beside_speech_to_speech(parts):
    moderation = ModerationOptions(regex=("never",))
    host = load_models(ServingOptions(device="cpu", asr=parts["asr"], tts=parts["tts"], moderation=moderation))
    assert [card.id for card in host.models] == ["mini-speech"]
    assert host.pipeline.options.words_first and host.pipeline.options.captioner is host.recogniser
    assert host.gauges() == IDLE
    app = build_app(host, ServerOptions(), host.speech, host.transcriber)
    transport = httpx.ASGITransport(app)
    async with host.recogniser, httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        conversation = host.open(ConversationSettings(), "mini-speech")
        assert conversation._options.transcriber is host.recogniser
        models = (await http.get("/v1/models")).json()["data"]
        assert [model["viva"]["kind"] for model in models] == ["realtime", "speech", "transcription"]
        speech = await http.post("/v1/audio/speech", json={"input": "Good evening.", "response_format": "wav"})
        assert likeness(read(speech.content), vivavoce.say("Good evening.", model=parts["tts"], device="cpu")) > 0.99
        written = await http.post("/v1/audio/transcriptions", files={"file": ("a.wav", speech.content)})
        assert written.json()["text"] == vivavoce.transcribe(read(speech.content), parts["asr"], device="cpu").text
        assert b"viva_queue_depth 0.0" in (await http.get("/metrics")).content


async def test_a_cascade_is_ready_when_all_its_parts_are_warm(parts):
    host = load_host(**parts, device="cpu")
    assert not host.is_ready and [card.id for card in host.models] == ["cascade"]
    async with host.pipeline:
        await host.warm_up()
        assert host.is_ready and host.gauges() == IDLE


def test_options_that_cannot_be_served_are_refused_before_loading(parts, tmp_path):
    with pytest.raises(InputError, match="not both"):
        load_host(model="mini-speech", chat="smollm2")
    with pytest.raises(InputError, match="no model is called 'nobody'"):
        load_host(chat="http://localhost:1/v1", asr="nobody")
    with pytest.raises(CheckpointError, match="smart-turn"):
        load_models(ServingOptions(smart_turn=str(tmp_path / "absent.onnx")))
    with pytest.raises(InputError, match="instructions file"):
        load_models(ServingOptions(instructions="@" + str(tmp_path / "absent.txt")))
    with pytest.raises(InputError, match="regular expression"):
        load_models(ServingOptions(moderation=ModerationOptions(regex=("(",))))


@pytest.mark.full
async def test_mini_speech_speaks_given_words_in_its_own_voice_where_it_can():
    host = load_models(ServingOptions(model="mini-speech", device="cpu"))
    async with contextlib.AsyncExitStack() as stack:
        for part in host.parts:
            await stack.enter_async_context(part)
        text = "Breakfast is served from seven until ten in the morning."
        for speed in (1.0, 1.25):
            sound = np.concatenate([samples async for samples in host.announce(text, None, speed)])
            assert 2.5 < len(sound) / host.pipeline.output_rate * speed < 5.0
        assert host.speech._part.loaded is None, "no other model was needed"
        heard = vivavoce.transcribe(Sound(sound, host.pipeline.output_rate), "mini-asr", device="cpu").text
        assert word_errors(text.lower().rstrip("."), heard.lower()) <= 3, heard  # of 10, as a small model hears them
        unread = np.concatenate([samples async for samples in host.announce("Zyzzyva quux, Xerxes.", None, 1.0)])
        assert len(unread) and host.speech._part.loaded is not None
