"""`/v1/audio/speech` and `/v1/audio/transcriptions` through the unmodified `openai` package."""

import base64
import io
import json

import httpx
import numpy as np
import openai
import pytest

from tests.server.harness import RunningServer
from tests.server.scripted import ScriptedHost, pitch, tone, watermark
from vivavoce.audio.io import Sound, read, write
from vivavoce.errors import InputError
from vivavoce.server.app import build_app
from vivavoce.server.config import ServerOptions
from vivavoce.server.host import TranscriptionRequest
from vivavoce.server.rest.transcripts import WireSegment, WireWord

RATE = 16_000


class ToneMaker:
    """Says a text as a tone of its pitch, half a second long, in five pieces."""

    model, rate, voices, languages = "tone-tts", RATE, ("ada", "ben"), ("en",)

    def __init__(self) -> None:
        self.asked: list[tuple] = []

    async def load(self) -> None:
        """It is there."""

    def count_tokens(self, text: str, seconds: float) -> tuple[int, int]:
        return len(text.split()), round(10 * seconds)

    async def speak(self, words, voice, speed, instructions):
        self.asked.append((words, voice, speed, instructions))
        if words == "unspeakable":
            raise InputError("there is no way to say this")
        for piece in np.split(tone(watermark(words), 0.5, RATE), 5):
            yield piece


class ToneListener:
    """Hears pitches, one segment for each half second."""

    model, rate = "tone-asr", RATE

    def __init__(self) -> None:
        self.asked = []

    async def load(self) -> None:
        """It is there."""

    async def transcribe(self, samples, listening):
        self.asked.append(listening)
        for index in range(len(samples) // (RATE // 2)):
            start, end = index / 2, (index + 1) / 2
            heard = f"{round(pitch(samples[index * RATE // 2 : (index + 1) * RATE // 2], RATE), -1):g}"
            word = WireWord(heard, start, end)
            yield WireSegment(f" {heard}", start, end, (word,), next(iter(listening.languages), "en"), f"S{index}")


class AudioServer(RunningServer):
    def __init__(self, host, options) -> None:
        super().__init__(host, options)
        self.maker, self.listener = ToneMaker(), ToneListener()
        self.use(build_app(host, self.options, self.maker, self.listener))


@pytest.fixture
async def audio():
    async with AudioServer(ScriptedHost(), ServerOptions(max_upload_bytes=1 << 20)) as server:
        yield server


@pytest.fixture
async def client(audio):
    async with openai.AsyncOpenAI(base_url=f"{audio.http}/v1", api_key="unused", max_retries=0) as client:
        yield client


def recording() -> tuple[str, bytes]:
    file = io.BytesIO()
    sound = np.concatenate([tone(400, 0.5, 24_000), tone(800, 0.5, 24_000)])
    write(file, Sound(sound, 24_000), "wav")
    return "question.wav", file.getvalue()


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus", "aac", "pcm"])
async def test_speech_in_every_format(client, format):
    speech = await client.audio.speech.create(model="tts-1", voice="ada", input="hello", response_format=format)
    data = speech.content
    sound = Sound(np.frombuffer(data, "<i2") / np.float32(32768), 24_000) if format == "pcm" else read(data)
    assert sound.rate == (48_000 if format == "opus" else 24_000)  # Opus files are always decoded to 48 kHz
    assert sound.seconds == pytest.approx(0.5, abs=0.08)  # encoders pad
    assert abs(pitch(sound.samples[0], sound.rate) - watermark("hello")) < 10


async def test_speech_as_it_is_made(audio, client):
    kind = {"model": "x", "voice": "alloy", "input": "hi", "response_format": "pcm"}
    async with client.audio.speech.with_streaming_response.create(**kind, speed=1.5, instructions="Gently.") as speech:
        data = b"".join([piece async for piece in speech.iter_bytes()])
    assert len(data) == 24_000
    assert audio.maker.asked == [("hi", "ada", 1.5, "Gently.")]
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{audio.http}/v1/audio/speech", json=kind | {"stream_format": "sse"})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events] == ["speech.audio.delta"] * (len(events) - 1) + ["speech.audio.done"]
    assert len(events) > 4
    assert events[-1]["usage"] == {"input_tokens": 1, "output_tokens": 5, "total_tokens": 6}


async def test_openais_voice_names_are_spread_over_ours(audio, client):
    names = ("alloy", "ash", "ballad", "coral", "echo", "fable", "onyx", "nova", "sage", "shimmer", "verse", "marin")
    for name in (*names, "cedar"):
        await client.audio.speech.create(model="tts-1", voice=name, input="hello", response_format="pcm")
    voices = [voice for _, voice, *_ in audio.maker.asked]
    assert voices == ["ada", "ben"] * 6 + ["ada"]


@pytest.mark.parametrize(("text", "language"), [("今天天氣很好。", "chinese"), ("Доброе утро", "russian")])
async def test_a_language_that_is_not_spoken_is_refused_by_name(client, text, language):
    with pytest.raises(openai.BadRequestError, match=f"{language}; tone-tts speaks english") as refused:
        await client.audio.speech.create(model="tts-1", voice="ada", input=text)
    assert (refused.value.code, refused.value.param) == ("unsupported_language", "input")
    await client.audio.speech.create(model="tts-1", voice="ada", input="Order the 粥, please: π is 3.14.")


async def test_fields_are_honoured_or_refused_by_name(client):
    transcribe = client.audio.transcriptions.create
    refused = {
        "include": {"include": ["logprobs"], "response_format": "verbose_json"},
        "known_speaker_names": {"known_speaker_names": ["ann"]},
        "chunking_strategy": {"chunking_strategy": {"type": "server_vad"}},
        "beam": {"extra_body": {"beam": 5}},
    }
    for name, field in refused.items():
        with pytest.raises(openai.BadRequestError, match=name):
            await transcribe(model="x", file=recording(), **field)
    assert (await transcribe(model="x", file=recording(), chunking_strategy="auto")).text == "400 800"
    with pytest.raises(openai.BadRequestError, match="pitch"):
        await client.audio.speech.create(model="x", voice="ada", input="hello", extra_body={"pitch": 2})


@pytest.mark.parametrize(
    "wrong",
    [
        {"input": ""},
        {"input": "x" * 4097},
        {"voice": "nobody"},
        {"response_format": "midi"},
        {"stream_format": "telegraph"},
        {"speed": 9.0},
        {"speed": 0},
        {"input": "unspeakable"},
    ],
)
async def test_speech_that_cannot_be_made_is_an_error_and_no_half_file(client, wrong):
    with pytest.raises(openai.BadRequestError):
        await client.audio.speech.create(**({"model": "x", "voice": "ada", "input": "hello"} | wrong))


async def test_transcripts_in_every_form(client):
    async def transcript(**options):
        return await client.audio.transcriptions.create(model="whisper-1", file=recording(), **options)

    assert (await transcript()).text == "400 800"
    assert await transcript(response_format="text") == "400 800\n"
    srt = await transcript(response_format="srt")
    assert srt == "1\n00:00:00,000 --> 00:00:00,500\n400\n\n2\n00:00:00,500 --> 00:00:01,000\n800\n"
    assert (await transcript(response_format="vtt")).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.500\n400\n")
    verbose = await transcript(
        response_format="verbose_json", timestamp_granularities=["word", "segment"], language="fr"
    )
    assert (verbose.task, verbose.language) == ("transcribe", "french")
    assert verbose.duration == pytest.approx(1.0)
    assert [(word.word, word.start) for word in verbose.words] == [("400", 0.0), ("800", 0.5)]
    assert [segment.text for segment in verbose.segments] == [" 400", " 800"]
    measures = {"tokens", "avg_logprob", "no_speech_prob", "compression_ratio", "temperature", "seek"}
    assert not measures & set(verbose.segments[0].to_dict())  # this recogniser has none
    only_words = await transcript(response_format="verbose_json", timestamp_granularities=["word"])
    assert only_words.words and only_words.segments is None
    assert (await transcript(response_format="verbose_json", language="French")).language == "french"
    diarized = await transcript(response_format="diarized_json")
    assert [segment.speaker for segment in diarized.segments] == ["S0", "S1"]


def data_url(seconds: float) -> str:
    file = io.BytesIO()
    write(file, Sound(tone(300, seconds, 16_000), 16_000), "wav")
    return "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode()


async def test_known_speakers_reach_the_listener(audio, client):
    known = {"known_speaker_names": ["agent", "customer"], "known_speaker_references": [data_url(2.0), data_url(3.0)]}
    await client.audio.transcriptions.create(
        model="gpt-4o-transcribe-diarize", file=recording(), response_format="diarized_json", extra_body=known
    )
    (asked,) = audio.listener.asked
    assert asked.by_speaker
    assert [(each.name, len(each.samples)) for each in asked.known_speakers] == [
        ("agent", 32_000),
        ("customer", 48_000),
    ]


@pytest.mark.parametrize(
    ("names", "references", "said"),
    [
        (["a"], [], "as many samples"),
        (list("abcde"), [data_url(2.0)] * 5, "up to 4"),
        (["a", "a"], [data_url(2.0)] * 2, "different names"),
        (["a"], ["https://example.org/a.wav"], "data URL"),
        (["a"], ["data:audio/wav;base64,AAAA"], "data URL"),
        (["a"], [data_url(1.0)], "2 to 10"),
    ],
    ids=["no reference", "five", "twice", "an address", "no sound", "too short"],
)
async def test_speakers_that_cannot_be_known_are_refused(client, names, references, said):
    known = {"known_speaker_names": names, "known_speaker_references": references}
    with pytest.raises(openai.BadRequestError, match=said):
        await client.audio.transcriptions.create(
            model="x", file=recording(), response_format="diarized_json", extra_body=known
        )


async def test_what_is_asked_of_a_recording_reaches_the_listener(audio, client):
    asked = {"prompt": "Tones.", "temperature": 0.4, "timestamp_granularities": ["word"], "language": "fr"}
    await client.audio.transcriptions.create(
        model="x", file=recording(), response_format="verbose_json", extra_body={"keywords": ["A", "B"]}, **asked
    )
    async with httpx.AsyncClient() as http:
        await http.post(f"{audio.http}/v1/audio/translations", files={"file": recording()})
    assert audio.listener.asked == [
        TranscriptionRequest(("fr",), "Tones.", ("A", "B"), 0.4, True, with_segments=False),
        TranscriptionRequest(translates=True),
    ]
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.audio.transcriptions.create(model="x", file=recording(), temperature=7)
    with pytest.raises(openai.BadRequestError, match="word, segment"):
        await client.audio.transcriptions.create(model="x", file=recording(), timestamp_granularities=["letter"])


async def test_the_voices_of_all_models_are_listed(audio):
    async with httpx.AsyncClient() as http:
        listed = (await http.get(f"{audio.http}/v1/audio/voices")).json()
    assert listed["voices"] == list(audio.host.voices)
    assert [(voice["model"], voice["id"]) for voice in listed["data"]] == [
        *(("scripted-1", name) for name in audio.host.voices),
        *(("tone-tts", name) for name in audio.maker.voices),
    ]


async def test_a_transcript_as_it_is_heard(client):
    stream = await client.audio.transcriptions.create(model="x", file=recording(), stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    assert "".join(event.delta for event in events[:2]) == events[2].text == "400 800"


@pytest.mark.parametrize("file", [("x.wav", b"no sound"), ("x.wav", b""), ("x.wav", b"\x00" * (2 << 20))])
async def test_what_is_no_sound_is_refused(client, file):
    with pytest.raises(openai.APIStatusError) as refused:
        await client.audio.transcriptions.create(model="x", file=file)
    assert refused.value.status_code in (400, 413)


async def test_without_tts_and_asr_models_the_routes_do_not_exist(server):
    async with openai.AsyncOpenAI(base_url=f"{server.http}/v1", api_key="unused", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError):
            await client.audio.speech.create(model="x", voice="ada", input="hello")
        with pytest.raises(openai.NotFoundError):
            await client.audio.transcriptions.create(model="x", file=recording())


async def test_their_models_are_listed(client):
    listed = {model.id: model.viva["kind"] async for model in client.models.list()}
    expected = {"scripted-1": "realtime", "scripted-2": "realtime", "tone-tts": "speech", "tone-asr": "transcription"}
    assert listed == expected
    assert (await client.models.retrieve("tone-asr")).id == "tone-asr"


async def test_a_browser_key_opens_sessions_and_nothing_else(official):
    key = "sk-test-1234567890"
    async with AudioServer(ScriptedHost(), ServerOptions(api_keys=(key,))) as server:
        owner = official(f"{server.http}/v1", key)
        browser = official(f"{server.http}/v1", (await owner.realtime.client_secrets.create()).value)
        refused = (
            browser.models.list,
            lambda: browser.audio.speech.create(model="tts-1", voice="alloy", input="hello"),
            lambda: browser.audio.transcriptions.create(model="whisper-1", file=recording()),
            lambda: browser.audio.translations.create(model="whisper-1", file=recording()),
            lambda: browser.get("/audio/voices", cast_to=object),
            lambda: browser.delete("/audio/voices/ada", cast_to=object),
            lambda: browser.get(f"{server.http}/metrics", cast_to=object),
            browser.realtime.client_secrets.create,
        )
        for request in refused:
            with pytest.raises(openai.PermissionDeniedError, match="only opens sessions"):
                await request()
        async with browser.realtime.connect(model="any") as connection:
            assert (await connection.recv()).type == "session.created"
        about = await browser.get(f"{server.http}/about", cast_to=object)  # for the page
        assert about["models"][0]["id"] == "scripted-1"
