"""What the documentation of version 0.1 showed in Python still works, and says what it is called now."""

import ast
import importlib
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from vivavoce import _deprecated, hub
from vivavoce.audio.io import read, write
from vivavoce.models.moss_speech.model import MossSpeech
from vivavoce.runtime.async_engine import AsyncEngine
from vivavoce.tts.interface import SpeakingStyle
from vivavoce.tts.nano import NanoTTS

# The examples as they were printed. Those that need no download, no further package and no end are run.
RUN = {
    "README, the three calls": """
import vivavoce

print(vivavoce.transcribe("question.wav").text)  # mini-asr
with vivavoce.converse() as talk:  # mini-speech; it remembers what was said
    answer = talk.ask("What time is breakfast?")  # or a Path, bytes, samples: then it is speech
    print(answer.said)  # answer.sound is how it said it
sound = vivavoce.say("Good evening.")  # mini-tts
""",
    "conversation.md, asked by a file": """
from pathlib import Path

import vivavoce

with vivavoce.converse("mini-speech") as talk:
    answer = talk.ask(Path("question.wav"))  # a str is written words
    print(answer.heard, "→", answer.said)
""",
    "conversation.md, live": """
import asyncio

from vivavoce import hub
from vivavoce.audio.files import read
from vivavoce.dialogue.interface import ReplyDone, ReplyText
from vivavoce.dialogue.session import LiveConversation
from vivavoce.pipelines.loading import load_moss_speech


async def main() -> None:
    question = read(hub.BUNDLED / "questions" / "15-breakfast.opus", rate=16_000).samples[0]
    async with load_moss_speech(hub.resolve("mini-speech")) as pipeline:
        conversation = LiveConversation(pipeline, input_rate=16_000)
        conversation.hear(question)  # a microphone would bring it in pieces, and go on with silence
        conversation.commit()
        conversation.reply()
        async for event in conversation.events():
            if isinstance(event, ReplyText):
                print(event.delta)
            if isinstance(event, ReplyDone):
                break
        await conversation.close()


asyncio.run(main())
""",
    "README, the engine (with the bundled model)": """
import asyncio

from vivavoce import hub
from vivavoce.device import pick
from vivavoce.engine.engine import Engine
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.engine.streaming import StreamingEngine
from vivavoce.models.moss_speech import MossSpeech
from vivavoce.models.moss_speech_prompt import MossSpeechPrompt, Turn
from vivavoce.models.tokenizer import TextTokenizer


async def main() -> None:
    folder = hub.resolve("mini-speech")
    device = pick("auto")
    model = MossSpeech.load(folder, device.torch_device, device.dtype)
    prompt = MossSpeechPrompt(model.config, TextTokenizer.load(folder))
    async with StreamingEngine(Engine(model, device)) as engine:
        sequence = await engine.open(prompt.rows([Turn("user", "What is on the menu today?")], "speech"))
        generation = Generation(Sampling(temperature=0.6, top_k=20, top_p=0.95), max_new_rows=50, seed=1)
        async with await engine.generate(sequence, generation) as reply:
            async for row in reply:
                print(row)  # (text id, audio code); model.spoken_codes(rows) gives the codes of the speech


asyncio.run(main())
""",
    "tts.md (with the bundled model)": """
from vivavoce.speech import Manner, Speaker

speaker = Speaker.load("mini-tts", device="auto")
for piece in speaker.stream("A long text …", manner=Manner(speed=1.2, seed=3)):
    print(piece.shape)
""",
}
IMPORTED = {
    "tts.md, onnx": "from vivavoce.speech.onnx_backend import OnnxSpeaker",
    "serving.md": """
from vivavoce.server.options import ServerOptions
from vivavoce.serving import ServingChoices, load, serve

choices = ServingChoices(model="mini-speech", server=ServerOptions(idle_seconds=60, log_content=True))
""",
    "cascade.md": """
from vivavoce.pipelines.cascade_loading import CascadeParts

parts = CascadeParts(asr="mini-asr", chat="smollm2", tts="mini-tts")
""",
    "export.md": "from vivavoce.export.trtllm.runner import MossSpeechEngine",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("examples")
    write(made / "question.wav", read(hub.BUNDLED / "questions" / "15-breakfast.opus"))
    return made


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("source", RUN.values(), ids=RUN)
@pytest.mark.full
def test_an_example_of_before_runs(source, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("VIVA_OFFLINE", "1")
    exec(compile(source, "an example", "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("source", IMPORTED.values(), ids=IMPORTED)
def test_an_example_of_before_finds_its_names(source):
    exec(compile(source, "an example", "exec"), {})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("old", _deprecated.MODULES)
def test_every_old_module_has_what_the_table_says(old):
    new, renamed = _deprecated.MODULES[old]
    module, moved = importlib.import_module(f"vivavoce.{old}"), importlib.import_module(f"vivavoce.{new}")
    for name, now in renamed.items():
        assert getattr(module, name) is getattr(moved, now)
    with pytest.raises(AttributeError):
        _ = module.nothing_of_that_name


def test_an_old_name_warns_and_is_the_new_thing():
    code = "import warnings; warnings.simplefilter('error'); import vivavoce.speech"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "DeprecationWarning: vivavoce.speech is now vivavoce.tts" in done.stderr
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        speech, streaming = (importlib.import_module(f"vivavoce.{name}") for name in ("speech", "engine.streaming"))
    assert (speech.Speaker, speech.Manner, streaming.StreamingEngine) == (NanoTTS, SpeakingStyle, AsyncEngine)


def test_a_module_that_became_a_package_has_its_names_still():
    package = importlib.import_module("vivavoce.models.moss_speech")
    assert package.MossSpeech is MossSpeech
    assert not hasattr(package, "nothing_of_that_name")


@pytest.mark.full
def test_an_old_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "vivavoce.bench.handover", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def test_the_package_itself_uses_no_old_name():
    root = Path(_deprecated.__file__).parent
    old = {f"vivavoce.{name}" for name in _deprecated.MODULES}
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in old, file
