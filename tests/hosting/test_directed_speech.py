"""A small CosyVoice that is told how to speak: over `/v1/audio/speech`, and by what is said in a conversation."""

import numpy as np
import openai
import pytest

from tests.models.tiny_cosyvoice import write_folder
from tests.server.harness import RunningServer
from tests.server.scripted import ScriptedHost
from vivavoce.audio.io import Sound
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.interfaces import ChatEnd, ChatText
from vivavoce.cascade.local_synthesiser import TTSSynthesiser
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.dialogue.backend import Ended, ReplyPlan, Spoke
from vivavoce.dialogue.items import Item, Message, TextPart
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.errors import InputError
from vivavoce.server.app import build_app
from vivavoce.server.config import ServerOptions
from vivavoce.server.hosting.endpoints import TTSEndpoint
from vivavoce.tts.cosyvoice import CosyVoiceSettings, CosyVoiceTTS
from vivavoce.tts.interface import SpeakingStyle, VoiceStore
from vivavoce.tts.style import DirectedStyle, with_instructions, with_user_requests

ANSWER = "Hello."


@pytest.fixture(scope="module")
def speakers(tmp_path_factory):
    made = {}
    for version in (2, 3):
        root = tmp_path_factory.mktemp(f"cosyvoice{version}")
        folder, settings = write_folder(root / "model", version), CosyVoiceSettings(left_chunks=2, prompt_seconds=3.0)
        made[version] = CosyVoiceTTS.load(str(folder), "cpu", "float32", root / "voices", settings)
        tone = 0.2 * np.sin(2 * np.pi * 180 * np.arange(72_000) / 24_000)
        made[version].add_voice("ann", Sound(tone.astype(np.float32), 24_000), "asked", "hello world hello there")
    return made


@pytest.fixture(scope="module")
def speaker(speakers):
    return speakers[3]


@pytest.fixture(scope="module")
def said(speaker):
    """The answer as it is said in each of the manners that tests compare with."""
    styles = {
        "usual": DirectedStyle(),
        "happy": DirectedStyle(style="happy"),
        "weary": DirectedStyle(instruction="Speak like a weary teacher."),
        "slower": DirectedStyle(speed=1 / 1.2),
    }
    return {name: speaker.say(ANSWER, "ann", style).samples[0] for name, style in styles.items()}


def assert_only(ours, name, said, tolerance=4e-3):
    """It is said in this manner and in no other."""
    near = [
        other for other, sound in said.items() if sound.shape == ours.shape and np.abs(sound - ours).max() < tolerance
    ]
    assert near == [name]


class Chat:
    """Answers the same to everything."""

    async def reply(self, messages, settings):
        yield ChatText(ANSWER)
        yield ChatEnd("stop", 1, 1)


class Listener:
    """Hears the same in everything."""

    def __init__(self, words):
        self.words = words

    async def transcribe(self, samples, rate, language=None):
        return self.words


async def reply_to(speaker, written=(), spoken=None):
    """The sound of a cascade's reply to what was written before, and spoken now."""
    pipeline = CascadeBackend(WholeTurns(Listener(spoken)), Chat(), TTSSynthesiser(speaker))
    backend, settings = pipeline.open(lambda item, words, is_over: None), ConversationSettings(voice="ann")
    past = [Item(str(number), Message("user", (TextPart(words),))) for number, words in enumerate(written)]
    backend.set_history(past, settings)
    if spoken is not None:
        backend.listen(np.zeros(16_000, np.float32))
    reply = backend.reply(ReplyPlan("reply", settings, lambda: 0.0, includes_turn=spoken is not None))
    pieces = [piece async for piece in reply.pieces()]
    assert pieces[-1] == Ended("completed")
    await backend.close()
    return np.concatenate([piece.samples for piece in pieces if isinstance(piece, Spoke)])


class TestConversation:
    @pytest.mark.parametrize(
        ("written", "spoken", "style"),
        [
            (["When is breakfast?"], None, "usual"),
            (["When is breakfast?", "More cheerful, please."], None, "happy"),
            (["When is breakfast?"], "More cheerful, please.", "happy"),
            (["More cheerful, please.", "When is breakfast?"], "And lunch?", "happy"),
            (["More cheerful, please."], "Speak normally again, please.", "usual"),
            ([], "Slow down, please.", "slower"),
        ],
    )
    async def test_a_style_request_applies_from_the_next_reply(self, speaker, said, written, spoken, style):
        assert_only(await reply_to(speaker, written, spoken), style, said)

    async def test_what_a_version_was_not_taught_does_not_silence_it(self, speakers):
        usual = speakers[2].say(ANSWER, "ann").samples[0]
        assert_only(await reply_to(speakers[2], ["More cheerful, please."]), "usual", {"usual": usual})


class TestSpeechApi:
    @pytest.fixture
    async def client(self, speaker):
        host, options = ScriptedHost(), ServerOptions()
        server = RunningServer(host, options)
        server.use(build_app(host, options, TTSEndpoint("cosyvoice", TTSSynthesiser(speaker))))
        async with server, openai.AsyncOpenAI(base_url=f"{server.http}/v1", api_key="any", max_retries=0) as client:
            yield client

    @pytest.mark.parametrize(
        ("instructions", "style"),
        [
            ("", "usual"),
            ("happy", "happy"),
            ("Sound more cheerful.", "happy"),
            ("Speak like a weary teacher.", "weary"),
            ("Speak slowly.", "slower"),
        ],
    )
    async def test_instructions_say_how(self, client, said, instructions, style):
        speech = await client.audio.speech.create(
            model="cosyvoice", voice="ann", input=ANSWER, instructions=instructions, response_format="pcm"
        )
        assert_only(np.frombuffer(speech.content, "<i2") / np.float32(32768), style, said)

    async def test_instructions_too_long_are_refused_in_one_line(self, client):
        with pytest.raises(openai.BadRequestError, match="201 characters"):
            await client.audio.speech.create(model="x", voice="ann", input=ANSWER, instructions="a" * 201)


async def test_a_model_can_be_served_before_it_has_a_voice(speaker, tmp_path):
    before = speaker.voices
    speaker.voices = VoiceStore(None, tmp_path)
    try:
        await TTSSynthesiser(speaker).warm_up()
        with pytest.raises(InputError, match="viva voices add"):
            speaker.say(ANSWER)
    finally:
        speaker.voices = before
    await TTSSynthesiser(speaker).warm_up()
    speaker.synthesizer.warm_up(speaker.prepared_voices.placeholder(), [1, 2])


def test_what_a_model_cannot_do_is_refused_by_name(speakers):
    with pytest.raises(InputError, match="CosyVoice 2 has no style 'happy'; it has cantonese, "):
        with_instructions(speakers[2], "More cheerful, please.", SpeakingStyle())
    assert with_instructions(speakers[2], "in Cantonese, please", SpeakingStyle()).style == "cantonese"


class TestAModelThatOnlySpeaks:
    """Any that is no CosyVoice: it can still be faster or slower."""

    def test_the_speed_can_be_set(self):
        assert with_instructions(object(), "Speak slowly, please.", SpeakingStyle(seed=3)) == SpeakingStyle(
            1 / 1.2, seed=3
        )
        assert with_instructions(object(), "  ", SpeakingStyle(0.7)) == SpeakingStyle(0.7)

    def test_other_instructions_are_refused(self):
        with pytest.raises(InputError, match=r"takes no instructions such as 'More cheerful, please\.'"):
            with_instructions(object(), "More cheerful, please.", SpeakingStyle())

    def test_other_requests_of_the_user_change_nothing(self):
        heard = ["faster please", "More cheerful, please.", "what is for lunch?", "louder please"]
        assert with_user_requests(object(), heard, SpeakingStyle()) == SpeakingStyle(1.2)
