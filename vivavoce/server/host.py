"""The interfaces between the server and the models it serves."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from vivavoce.audio.io import Sound
from vivavoce.dialogue.backend import RecognitionAbilities
from vivavoce.dialogue.conversation import Conversation
from vivavoce.dialogue.items import Samples
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.server.rest.transcripts import WireSegment

STOCK_VOICES = (
    *("alloy", "ash", "ballad", "coral", "echo", "fable", "onyx", "nova", "sage", "shimmer", "verse", "marin", "cedar"),
)
"""OpenAI's voice names, which stock clients send; each stands for one of the voices that there are."""


def stand_in(name: str, voices: Sequence[str]) -> str | None:
    """The voice that one of OpenAI's names stands for; None: the default voice."""
    if name not in STOCK_VOICES or not voices:
        return None
    return voices[STOCK_VOICES.index(name) % len(voices)]


@dataclass(frozen=True)
class ModelCard:
    """A model in `/v1/models` and, with what a visitor wants to know of it, in `/about`."""

    id: str
    created: int = 0
    owned_by: str = "vivavoce"
    parameters: int | None = None
    """How many it has; None: not known, as of a chat model at an address."""
    languages: tuple[str, ...] = ()
    """Codes such as `en`; empty: not known."""
    introduction: Mapping[str, str] = field(default_factory=dict)
    """What it is and may be asked, by the language of the page (`en`, `zh-Hant`, `zh-Hans`)."""
    examples: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Questions that it may be asked, by language as well."""
    stack: str = ""
    """The name of the stack that answers; empty: models that were named one by one."""
    parts: tuple[str, ...] = ()
    """Its models, in the order in which a turn passes them."""


@dataclass(frozen=True)
class ModelAbilities:
    """Which optional parameters of sessions the served model honours; the others are refused."""

    tools: bool = True
    reasoning: bool = True
    retention_ratio: bool = True
    """Whether the server truncates histories itself; a chat endpoint does it otherwise."""
    images: bool = True
    json_schema: bool = True
    """Whether written replies can follow a JSON schema."""
    recognition: RecognitionAbilities = field(default_factory=RecognitionAbilities)
    """What the transcription of the user's speech follows."""


def abilities_of(host: "Host") -> ModelAbilities:
    """The abilities of a host's model; all of them where the host does not say."""
    abilities = getattr(host, "abilities", None)
    return abilities if isinstance(abilities, ModelAbilities) else ModelAbilities()


class Host(Protocol):
    """What the server needs of its models. The first model is served when a client names an unknown one."""

    @property
    def models(self) -> Sequence[ModelCard]:
        """The conversation models."""
        ...

    @property
    def voices(self) -> Sequence[str]:
        """Names of the voices, the default first."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether models are loaded and warm."""
        ...

    @property
    def settings(self) -> ConversationSettings:
        """The session settings of a client that sends none."""
        ...

    def open(self, settings: ConversationSettings, model: str) -> Conversation:
        """A new conversation; `CapacityError` where the models cannot take one more."""
        ...

    def gauges(self) -> Mapping[str, float]:
        """Current values for /metrics, such as queue_depth and kv_used_ratio."""
        ...


@runtime_checkable
class Announcer(Protocol):
    """A host that can speak given words in its conversations."""

    def announce(self, text: str, voice: str | None, speed: float) -> AsyncGenerator[Samples, None]:
        """The sound of a text, at the output rate of its conversations."""
        ...


class SpeechMaker(Protocol):
    """A text-to-speech model behind `/v1/audio/speech`."""

    @property
    def model(self) -> str:
        """Its name in `/v1/models`."""
        ...

    @property
    def rate(self) -> int:
        """Sample rate of its audio."""
        ...

    @property
    def voices(self) -> Sequence[str]:
        """Names of its voices, the default first."""
        ...

    @property
    def languages(self) -> Sequence[str]:
        """Codes of the languages it speaks; empty: not known."""
        ...

    async def load(self) -> None:
        """Return when it can be used; a model may be loaded when it is first needed."""
        ...

    def speak(self, text: str, voice: str | None, speed: float, instructions: str) -> AsyncIterator[Samples]:
        """The audio, chunk by chunk as it is generated; closing the iterator cancels the generation."""
        ...

    def count_tokens(self, text: str, seconds: float) -> tuple[int, int]:
        """The tokens of a text, and the frames of its audio."""
        ...


@runtime_checkable
class VoiceRegistry(Protocol):
    """Stores voices made of recordings."""

    def add_voice(self, name: str, sound: Sound, consent: str, text: str) -> None:
        """Store a voice; `text` is the transcript of the recording, where it is known."""
        ...

    def remove_voice(self, name: str) -> None:
        """Remove a stored voice."""
        ...


@dataclass(frozen=True)
class SpeakerReference:
    """A speaker's name and a sample of their voice."""

    name: str
    samples: Samples = field(repr=False, compare=False)


@dataclass(frozen=True)
class TranscriptionRequest:
    """How a recording is to be transcribed."""

    languages: tuple[str, ...] = ()
    """Codes of those that may be spoken; of several the likeliest is detected, of none any."""
    prompt: str = ""
    keywords: tuple[str, ...] = ()
    temperature: float = 0.0
    with_words: bool = False
    """Whether words get timestamps."""
    with_segments: bool = True
    """Whether segments are told beside them."""
    translates: bool = False
    """Into English."""
    with_logprobs: bool = False
    """Whether segments have the log-probabilities of their tokens."""
    by_speaker: bool = False
    """Whether segments are of one speaker each, and say of whom."""
    known_speakers: tuple[SpeakerReference, ...] = ()


class FileTranscriber(Protocol):
    """A recogniser behind `/v1/audio/transcriptions`."""

    @property
    def model(self) -> str:
        """Its name in `/v1/models`."""
        ...

    @property
    def rate(self) -> int:
        """Sample rate of the audio it takes."""
        ...

    async def load(self) -> None:
        """Return when it can be used; a model may be loaded when it is first needed."""
        ...

    def transcribe(self, samples: Samples, request: TranscriptionRequest) -> AsyncIterator[WireSegment]:
        """The transcript, segment by segment; times in seconds."""
        ...
