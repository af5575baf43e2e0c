"""A cascade by the names of its parts: a recogniser, a chat model and a synthesiser, each local or at an address."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

from vivavoce.asr.backends import BackendName
from vivavoce.cascade.backend import CascadeBackend, WholeTurns
from vivavoce.cascade.chat_endpoint import ChatEndpoint, ChatModel
from vivavoce.cascade.local_chat import BUNDLED, LocalChat
from vivavoce.cascade.parts import LocalRecogniser, TTSSynthesiser
from vivavoce.cascade.remote import RemoteRecogniser, RemoteSynthesiser
from vivavoce.dialogue.backend import Address, ReplyTranscriber, Resolver, is_address
from vivavoce.dialogue.events import ConversationSettings
from vivavoce.nn.process_settings import serving_pace
from vivavoce.tts.interface import open_speech_model

DEFAULT_CHAT_MODEL = "default"


@dataclass(frozen=True)
class CascadeParts:
    """The parts of a cascade by name."""

    asr: str | Resolver = "mini-asr"
    """Bundled name, folder or hub id of a recogniser; or where one is."""
    chat: str = BUNDLED
    """An address such as http://localhost:11434/v1, `smollm2`, a .gguf file or a folder."""
    tts: str | Resolver = "mini-tts"
    """Bundled name, folder or hub id of a text-to-speech model; or where one is."""
    chat_model: str = DEFAULT_CHAT_MODEL
    """The model's name at the address."""
    chat_key: str | None = None
    asr_backend: BackendName = "auto"
    asr_gate: bool = True
    """Whether recordings are written down only where speech is detected."""


class LoadedCascade(CascadeBackend):
    """A cascade that owns its parts. Use as `async with`."""

    def __init__(
        self, asr: LocalRecogniser | RemoteRecogniser, chat: ChatModel, voice: TTSSynthesiser | RemoteSynthesiser
    ) -> None:
        super().__init__(WholeTurns(asr), chat, voice)
        self.asr, self.voice = asr, voice
        self._open_parts = AsyncExitStack()

    @property
    def words(self) -> ReplyTranscriber:
        """The transcriber for speech over a reply."""
        return self.asr

    @property
    def waiting(self) -> int:
        """Turns queued for the recogniser."""
        return self.asr.waiting

    @property
    def voices(self) -> list[str]:
        """Names of the voices, the default first."""
        return self.voice.voices

    async def __aenter__(self) -> Self:
        on_cpu = isinstance(self.asr, LocalRecogniser) and self.asr.device.kind == "cpu"
        self._open_parts.enter_context(serving_pace(on_cpu))  # its parts work at the same time
        await self._open_parts.enter_async_context(self.asr)
        if isinstance(self.chat, LocalChat):
            await self._open_parts.enter_async_context(self.chat)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._open_parts.aclose()

    async def warm_up(self, settings: ConversationSettings | None = None) -> None:
        """Run each local part once; a local chat model reads the instructions."""
        tasks = [self.asr.warm_up(), self.voice.warm_up()]
        if isinstance(self.chat, LocalChat) and settings is not None and settings.instructions:
            tasks.append(self.chat.read([{"role": "system", "content": settings.instructions}]))
        await asyncio.gather(*tasks)


def load_cascade(parts: CascadeParts, device: str = "auto") -> LoadedCascade:
    """A cascade of these parts, all that are local on one device."""
    return LoadedCascade(open_recogniser(parts, device), open_chat(parts, device), open_synthesiser(parts, device))


def open_recogniser(parts: CascadeParts, device: str = "auto") -> LocalRecogniser | RemoteRecogniser:
    """The recogniser: at an address, or local."""
    if isinstance(parts.asr, str) and not is_address(parts.asr):
        return LocalRecogniser.load(parts.asr, parts.asr_backend, device, parts.asr_gate)
    return RemoteRecogniser(Address(parts.asr) if isinstance(parts.asr, str) else parts.asr)


def open_synthesiser(parts: CascadeParts, device: str = "auto") -> TTSSynthesiser | RemoteSynthesiser:
    """The speaking part: at an address, or here."""
    if isinstance(parts.tts, str) and not is_address(parts.tts):
        return TTSSynthesiser(open_speech_model(parts.tts, device))
    return RemoteSynthesiser(Address(parts.tts) if isinstance(parts.tts, str) else parts.tts)


def open_chat(parts: CascadeParts, device: str = "auto") -> ChatModel:
    """The thinking part: at an address, or here."""
    if is_address(parts.chat):
        return ChatEndpoint(parts.chat, parts.chat_model, parts.chat_key)
    return LocalChat.load(parts.chat, device)
