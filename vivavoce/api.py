"""The Python API: `load` any model, and `converse` with a speech-to-speech model or a cascade."""

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from vivavoce import hub
from vivavoce.audio.io import Sound, read
from vivavoce.cascade.parts import CascadeParts, LoadedCascade, load_cascade
from vivavoce.device import pick
from vivavoce.dialogue.events import Event, InputTranscript, InputTranscriptFailed, ReplyAudio, ReplyDone, ReplyText
from vivavoce.dialogue.items import Message, Samples, TextPart
from vivavoce.dialogue.reply import SpeakingOptions
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.dialogue.settings import ConversationSettings, TurnSettings
from vivavoce.errors import CheckpointError, InputError, VivaError
from vivavoce.models.codecs import Codec, open_codec
from vivavoce.models.registry import family_of, model_type
from vivavoce.models.whisper.transcriber import WhisperTranscriber
from vivavoce.s2s.moss_speech import MossSpeechBackend, load_speech
from vivavoce.tts.interface import SpeechModel

Model = MossSpeechBackend | SpeechModel | WhisperTranscriber | Codec


def load(name: str | Path, device: str = "auto", *, codec: str | None = None, voice: Path | None = None) -> Model:
    """Load a model by bundled name, folder or hub id.

    A speech-to-speech model is a `MossSpeechBackend`, a text-to-speech model a `SpeechModel`, a Whisper a
    `WhisperTranscriber`, a codec a `Codec`. `codec` and `voice` are for a speech-to-speech model without its own.
    """
    folder = hub.resolve(str(name))
    if (family := family_of(folder, "s2s", "tts", "asr")) is not None:
        options = {"codec": codec, "voice": voice} if family.task == "s2s" else {}
        model: Model = family.load(str(name), device, **options)
        return model
    try:
        return open_codec(folder, pick(device).torch_device)
    except CheckpointError as error:
        kind = model_type(folder)
        found = f"its config.json has model_type {kind!r}" if kind else "its config.json names no model_type"
        raise CheckpointError(f"{folder} holds no model that this version supports: {found}") from error


RATE = 16_000
Result = TypeVar("Result")
Question = str | Sound | PathLike[str] | BinaryIO | bytes | NDArray[np.float32]


@dataclass(frozen=True)
class Answer:
    """One turn: the recognised question (`heard`), and the reply as text (`said`) and as audio."""

    heard: str
    said: str
    sound: Sound


@dataclass
class _Turn:
    """A turn in progress, collected from the conversation's events."""

    item_id: str
    """Of the question."""
    question: str | None
    """None: not transcribed yet."""
    reply: str = ""
    pieces: list[Samples] = field(default_factory=list)
    is_done: bool = False

    def take(self, event: Event) -> None:
        """Add an event; VivaError if the reply failed."""
        match event:
            case InputTranscript(item=self.item_id, text=text, is_final=True):
                self.question = text
            case InputTranscriptFailed(item=self.item_id):
                self.question = ""
            case ReplyText(delta=delta):
                self.reply += delta
            case ReplyAudio(samples=samples):
                self.pieces.append(samples)
            case ReplyDone(reason="failed", error=error):
                raise VivaError(error or "the reply failed")
            case ReplyDone():
                self.is_done = True


class Talk:
    """A conversation that runs on its own thread. To be used as `with`, from one thread."""

    def __init__(
        self, pipeline: MossSpeechBackend | LoadedCascade, settings: ConversationSettings | None = None
    ) -> None:
        self._pipeline, self._settings = pipeline, settings or ConversationSettings()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="viva-talk", daemon=True)
        self._conversation: LiveConversation | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._conversation = self._do(self._open())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._conversation is not None:
            self._do(self._close(self._conversation))
            self._conversation = None
        self._stop()

    def ask(self, question: Question) -> Answer:
        """The answer to a question: a `str` is text; a `Path`, bytes, a `Sound` or 16 kHz samples are speech."""
        if self._conversation is None:
            raise InputError("the conversation is not open; use it as `with vivavoce.converse() as talk:`")
        return self._do(self._ask(self._conversation, question))

    async def _open(self) -> LiveConversation:
        await self._pipeline.__aenter__()
        settings = replace(self._settings, turn=TurnSettings(detector="none"), transcribe_input=True)
        speaking = SpeakingOptions(max_ahead=None)
        options = DialogueOptions(speaking=speaking, echo=None, transcriber=self._pipeline.words)
        return LiveConversation(self._pipeline, settings, options, input_rate=RATE)

    async def _close(self, conversation: LiveConversation) -> None:
        await conversation.close()
        await self._pipeline.__aexit__()

    async def _ask(self, conversation: LiveConversation, question: Question) -> Answer:
        if isinstance(question, str):
            item, _ = conversation.add(Message("user", (TextPart(question),)))
        else:
            conversation.hear(_samples(question))
            item = conversation.commit()
        conversation.reply()
        turn = _Turn(item.id, question if isinstance(question, str) else None)
        async for event in conversation.events():
            turn.take(event)
            if turn.is_done and turn.question is not None:
                break
        sound = np.concatenate([np.zeros(0, np.float32), *turn.pieces])
        return Answer((turn.question or "").strip(), turn.reply.strip(), Sound(sound, conversation.output_rate))

    def _do(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def converse(
    model: str = "mini-speech",
    device: str = "auto",
    *,
    instructions: str = "",
    voice: str | Path | None = None,
    codec: str | None = None,
    cascade: CascadeParts | None = None,
) -> Talk:
    """A conversation with a speech-to-speech model, or with a cascade.

    `voice` is the name of a voice, or the path of a recording of the voice to imitate.
    """
    recording = voice if isinstance(voice, Path) else None
    settings = ConversationSettings(instructions=instructions, voice=voice if isinstance(voice, str) else None)
    if cascade is not None:
        return Talk(load_cascade(cascade, device), settings)
    return Talk(load_speech(model, device, codec, recording), settings)


def _samples(sound: Sound | PathLike[str] | BinaryIO | bytes | NDArray[np.float32]) -> Samples:
    if isinstance(sound, np.ndarray):
        sound = Sound(sound, RATE)
    if not isinstance(sound, Sound):
        sound = read(sound, rate=RATE)
    return sound.mono().resampled(RATE).samples[0]
