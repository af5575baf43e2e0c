"""Recognisers, voices and codecs on other machines: their results equal those of local ones."""

import gc
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import numpy as np
import pytest
import torch

from tests.s2s.small_parts import small_asr, small_chat, small_tts
from tests.server.harness import RunningServer, connected, eventually
from vivavoce.audio.io import Sound
from vivavoce.audio.level import buzz
from vivavoce.cascade.remote import RemoteRecogniser, RemoteSynthesiser
from vivavoce.device import pick
from vivavoce.dialogue.backend import Address, EndpointRef
from vivavoce.dialogue.events import ReplyAudio, ReplyDone
from vivavoce.dialogue.items import AudioPart, Message, TextPart
from vivavoce.dialogue.session import LiveConversation
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.errors import CapacityError, InputError, VivaError
from vivavoce.minis.untrained import untrained_codec, write_untrained
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.models.moss_speech.prompt import MossSpeechPrompt
from vivavoce.models.tokenizers import TextTokenizer
from vivavoce.s2s.local_codec import LocalCodec
from vivavoce.s2s.moss_speech import MossSpeechBackend, RemoteCodecPipeline
from vivavoce.s2s.options import MossSpeechOptions
from vivavoce.s2s.remote_codec import RemoteCodec, RemoteSpeechEncoder, RemoteState, RemoteVocoder
from vivavoce.server.app import build_app
from vivavoce.server.cluster.registry import RegistryActor, RegistryClient, ReplicaRegistry, ReplicaReport
from vivavoce.server.cluster.replica import PoolResolver, resolve_pools
from vivavoce.server.cluster.replica_server import ReplicaMetrics
from vivavoce.server.config import ServerOptions
from vivavoce.server.hosting import load_audio, load_host
from vivavoce.server.hosting.codec import CodecHost, codec_app

KEY = "key-of-a-pool"
OPTIONS = ServerOptions(api_keys=(KEY,), port=0)


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> dict[str, str]:
    asr, chat, tts = (tmp_path_factory.mktemp(name) for name in ("asr", "chat", "tts"))
    return {"asr": str(small_asr(asr)), "chat": str(small_chat(chat)), "tts": str(small_tts(tts))}


@asynccontextmanager
async def served(host):
    """A host without conversations on a port of its own."""
    server = RunningServer(host, OPTIONS)
    server.use(build_app(host, OPTIONS, host.speech, host.transcriber))
    async with AsyncExitStack() as stack:
        for part in host.parts:
            await stack.enter_async_context(part)
        await host.warm_up()
        yield await stack.enter_async_context(server)


def at(server: RunningServer) -> Address:
    return Address(f"{server.http}/v1", KEY)


async def test_a_cascade_hears_and_speaks_through_servers_that_do_nothing_else(parts):
    hears, speaks = load_audio(asr=parts["asr"], device="cpu"), load_audio(tts=parts["tts"], device="cpu")
    turn = buzz(1.0, 16_000).samples[0]
    async with served(hears) as asr_server, served(speaks) as voice_server:
        host = load_host(chat=parts["chat"], asr=at(asr_server), tts=at(voice_server), device="cpu")
        assert host.speech is None and host.transcriber is None  # its fleet's others answer for these
        async with host.pipeline:
            await host.warm_up()
            assert host.is_ready and host.voices == ["buzz"]
            said = "".join([piece async for piece in transcribed(hears.transcriber, turn)]).strip()
            assert await host.pipeline.asr.transcribe(turn, 16_000) == said
            remote = np.concatenate([piece async for piece in host.pipeline.voice.speak("Good evening.", None, 1.0)])
            pieces = [piece async for piece in speaks.speech.voice.speak("Good evening.", None, 1.0)]
            local = Sound(np.concatenate(pieces), speaks.speech.rate).resampled(24_000).samples[0]
            assert len(remote) == pytest.approx(len(local), abs=240)
            shared = min(len(remote), len(local))
            assert np.abs(remote[:shared] - local[:shared]).max() < 0.02 * max(1.0, np.abs(local).max())
        assert hears.gauges()["audio_requests_begun"] >= 1 and hears.gauges()["audio_requests"] == 0
        assert speaks.gauges()["audio_requests_begun"] == 1 and speaks.gauges()["audio_requests"] == 0


async def transcribed(transcriber, samples):
    from vivavoce.server.host import TranscriptionRequest

    async for segment in transcriber.transcribe(samples, TranscriptionRequest()):
        yield segment.text


async def test_asr_servers_have_transcription_sessions_and_tts_servers_have_none(parts):
    async with (
        served(load_audio(asr=parts["asr"], device="cpu")) as listens,
        connected(listens, "?intent=transcription", key=KEY) as client,
    ):
        await client.until("session.created")
        await client.send(
            "session.update", session={"type": "transcription", "audio": {"input": {"turn_detection": None}}}
        )
        await client.speak(buzz(1.0, 24_000).samples[0])
        await client.send("input_audio_buffer.commit")
        heard = await client.until("conversation.item.input_audio_transcription.completed")
        assert isinstance(heard["transcript"], str)
    async with served(load_audio(tts=parts["tts"], device="cpu")) as speaks, connected(speaks, key=KEY) as client:
        assert "has no sessions" in (await client.error())["message"]


class Pool:
    """Finds one after the other."""

    def __init__(self, *places: EndpointRef) -> None:
        self.places, self.gone = list(places), []

    async def __call__(self, gone: EndpointRef | None = None) -> EndpointRef:
        if gone is not None:
            self.gone.append(gone)
            self.places.remove(gone)
        if not self.places:
            raise CapacityError("no asr replica is ready")
        return self.places[0]


async def test_a_turn_goes_to_the_next_where_the_first_has_gone(parts):
    turn = buzz(1.0, 16_000).samples[0]
    async with served(load_audio(asr=parts["asr"], device="cpu")) as server:
        dead, alive = EndpointRef("http://127.0.0.1:9/v1", KEY, "dead"), await at(server)()
        pool = Pool(dead, alive)
        assert isinstance(await RemoteRecogniser(pool).transcribe(turn, 16_000), str)
        assert pool.gone == [dead]
        with pytest.raises(VivaError, match="401"):
            await RemoteRecogniser(Address(f"{server.http}/v1", "no key of its")).transcribe(turn, 16_000)
    with pytest.raises(ConnectionError, match="cannot be reached"):
        await anext(RemoteSynthesiser(Address("http://127.0.0.1:9/v1")).speak("Hello.", None, 1.0))
    with pytest.raises(InputError, match="http://"):
        Address("nowhere")
    with pytest.raises(InputError, match="only a cascade"):
        load_host(model="mini-speech", asr="http://127.0.0.1:9/v1")


@pytest.fixture(scope="module")
def codec():
    made = untrained_codec()
    with torch.no_grad():
        voice = made.voice(buzz(2.0, 24_000, seed=1), torch.linspace(-1, 1, 192))
    return made, {"buzz": voice}


@asynccontextmanager
async def codec_server(codec):
    host = CodecHost(LocalCodec(codec[0], 10), codec[1])
    server = RunningServer(host, OPTIONS)
    server.use(codec_app(host, OPTIONS))
    host.local.speech_encoder.start()
    host.local.vocoder.start()
    try:
        async with server:
            yield host, server
    finally:
        await host.local.speech_encoder.close()
        await host.local.vocoder.close()


async def test_states_stay_with_a_codec_elsewhere_and_are_given_back(codec):
    local_codec = LocalCodec(codec[0], 10)
    sound, codes = torch.from_numpy(buzz(0.6, 16_000).samples[0]), torch.arange(16) % 5
    local_codec.speech_encoder.start()
    local_codec.vocoder.start()
    async with codec_server(codec) as (host, server):
        encoders, voices = RemoteSpeechEncoder(at(server), "encoder"), RemoteVocoder(at(server), "voice")
        encoders.start()
        voices.start()
        remote, local = RemoteState(), codec[0].speech_encoder.initial_state()
        for start, is_last in (
            (0, False),
            (4800, True),
            (4800, False),
        ):  # a turn may go on after it was heard to its end
            heard, next_remote = await encoders.do((remote, sound[start : start + 4800], is_last))
            expected, next_local = await local_codec.speech_encoder.do((local, sound[start : start + 4800], is_last))
            assert heard == expected
            if not is_last:
                remote, local = next_remote, next_local
        reply, spoken = RemoteState(voice="buzz"), codec[1]["buzz"]
        for start in (0, 8):
            made, reply = await voices.do((reply, codes[start : start + 8], start == 8), urgency=0.1)
            wanted, spoken = await local_codec.vocoder.do((spoken, codes[start : start + 8], start == 8))
            assert torch.equal(made, wanted)
        assert host.started == 2 and host.states > 0
        del remote, next_remote, reply
        gc.collect()
        last, _ = (
            await encoders.do((RemoteState(), sound[:1280], True)),
            await voices.do((RemoteState(), codes[:8], True)),
        )
        del last
        assert host.states == 2  # of these two jobs, which released the states of the others
        with pytest.raises(VivaError, match="is unknown"):
            await encoders.do((RemoteState(await at(server)(), "nobody"), sound[:1280], True))
        for batcher in (encoders, voices, local_codec.speech_encoder, local_codec.vocoder):
            await batcher.close()


async def test_a_codec_counts_its_jobs_and_the_exceptions_of_those_that_fail(codec):
    async with codec_server(codec) as (_, server), aiohttp.ClientSession() as http:
        encoder = RemoteSpeechEncoder(at(server), "encoder")
        encoder.start()
        _, state = await encoder.do((RemoteState(), torch.zeros(1280), False))
        with pytest.raises(VivaError, match="is unknown"):
            await encoder.do((RemoteState(state.endpoint, "nobody"), torch.zeros(1280), True))
        await encoder.close()
        async with http.get(f"{server.http}/metrics") as response:
            page = await response.text()
    assert ReplicaMetrics.read(page).sessions == 1 and ReplicaMetrics.read(page).opened == 1
    assert "viva_queue_depth 0.0" in page
    assert 'viva_exceptions_total{where="vivavoce.server.hosting.codec"} 1.0' in page


async def test_a_language_model_alone_answers_as_with_its_codec_beside_it(codec, tmp_path):
    write_untrained(tmp_path)
    model, tokenizer = MossSpeech.load(tmp_path), TextTokenizer.load(tmp_path)
    prompt, options = MossSpeechPrompt(model.config, tokenizer), MossSpeechOptions(seed=7, threads=1)

    def core() -> Engine:
        return Engine(model, pick("cpu"), limits=EngineLimits(cache_rows=2048))

    async with codec_server(codec) as (host, server):
        remote = RemoteCodecPipeline(
            core(), RemoteCodec.from_description(at(server), host.description()), prompt, tokenizer, options
        )
        local = MossSpeechBackend(core(), codec[0], prompt, tokenizer, codec[1], options)
        one, other = await reply(local), await reply(remote)
        assert len(one) > 0 and np.array_equal(one, other)
        await eventually(lambda: host.started >= 2, "ear and voice were asked elsewhere")


async def test_a_replica_finds_its_parts_in_other_pools_of_its_fleet(codec):
    registry = ReplicaRegistry()
    remote = RegistryClient(RegistryActor(registry).call)
    with pytest.raises(CapacityError, match="no codec replica is ready"):
        await PoolResolver(remote, "codec")()
    async with codec_server(codec) as (host, server), aiohttp.ClientSession() as http:
        registry.report(ReplicaReport("one", "codec", server.http, KEY, 4, 0, 0))
        options = await resolve_pools({"model": "mini-speech", "codec": "pool", "device": "cpu"}, remote, http)
        resolver, description = options.pop("codec")
        assert options == {"model": "mini-speech", "device": "cpu"} and description == host.description()
        assert RemoteCodec.from_description(resolver, description).samples_per_code == codec[0].samples_per_code
        assert await resolver() == EndpointRef(f"{server.http}/v1", KEY, "one")
        registry.report(ReplicaReport("two", "codec", server.http, KEY, 4, 0, 0))
        assert {(await resolver()).name for _ in range(2)} == {"one", "two"}  # equals take turns
        assert (await resolver(EndpointRef("", None, "one"))).name == "two"


async def reply(pipeline) -> np.ndarray:
    """The sound of an answer to a spoken and a written word."""
    async with pipeline:
        conversation = LiveConversation(pipeline, ConversationSettings(max_output_tokens=12), input_rate=16_000)
        spoken = AudioPart(buzz(0.5, 16_000).samples[0], 16_000)
        conversation.add(Message("user", (spoken, TextPart("hello"))))
        conversation.reply()
        pieces = []
        async for event in conversation.events():
            if isinstance(event, ReplyAudio):
                pieces.append(event.samples)
            if isinstance(event, ReplyDone):
                assert event.reason != "failed", event.error
                break
        await conversation.close()
        return np.concatenate(pieces)
