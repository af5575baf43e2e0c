"""The parts of a cascade by their names: opening each, local or remote, and loading a cascade that owns them."""

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Self

from vivavoce.asr.backends import BackendName
from vivavoce.cascade.backend import CascadeBackend
from vivavoce.cascade.interfaces import ChatModel
from vivavoce.cascade.live_turns import LiveTurns
from vivavoce.cascade.local_chat import BUNDLED, LocalChat
from vivavoce.cascade.local_recogniser import LocalRecogniser
from vivavoce.cascade.local_synthesiser import TTSSynthesiser
from vivavoce.cascade.remote import ChatEndpoint, RemoteRecogniser, RemoteSynthesiser
from vivavoce.cascade.whole_turns import WholeTurns
from vivavoce.cores import usable_cores
from vivavoce.dialogue.backend import Address, ReplyTranscriber, Resolver, is_address
from vivavoce.dialogue.settings import ConversationSettings
from vivavoce.nn.process_settings import serving_pace
from vivavoce.tts.interface import open_speech_model

DEFAULT_CHAT_MODEL = "default"
FEW_CORES = 2


@dataclass(frozen=True)
class CascadeParts:
    """The parts of a cascade by name."""

    asr: str | Resolver = "mini-asr"
    """Bundled name, folder or hub id of a recogniser; or the resolver of a remote one."""
    chat: str = BUNDLED
    """An address such as http://localhost:11434/v1, `smollm2`, a .gguf file or a folder."""
    tts: str | Resolver = "mini-tts"
    """Bundled name, folder or hub id of a text-to-speech model; or the resolver of a remote one."""
    chat_model: str = DEFAULT_CHAT_MODEL
    """The model's name at a remote endpoint."""
    chat_key: str | None = None
    asr_backend: BackendName = "auto"
    asr_gate: bool = True
    """Whether recordings are transcribed only where speech is detected."""


class LoadedCascade(CascadeBackend):
    """A cascade that owns its parts. Use as `async with`."""

    def __init__(
        self, asr: LocalRecogniser | RemoteRecogniser, chat: ChatModel, voice: TTSSynthesiser | RemoteSynthesiser
    ) -> None:
        if isinstance(asr, LocalRecogniser) and asr.writes_drafts:
            super().__init__(LiveTurns(asr, lambda: not self.awaited), chat, voice)
        else:
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
        cores = usable_cores()
        # Its parts run concurrently, but on few cores a reply is not there in time unless each part has all of them.
        self._open_parts.enter_context(serving_pace(on_cpu, cores if cores <= FEW_CORES else None))
        await self._open_parts.enter_async_context(self.asr)
        if isinstance(self.chat, LocalChat):
            await self._open_parts.enter_async_context(self.chat)
        elif isinstance(self.chat, ChatEndpoint):
            self._open_parts.callback(self.chat.close)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._open_parts.aclose()

    async def warm_up(self, settings: ConversationSettings | None = None) -> None:
        """Run each local part once, so that no reply waits for what is done only once."""
        settings = settings or ConversationSettings()
        tasks: list[Awaitable[object]] = [self.asr.warm_up()]
        voice = self.voice
        tasks.append(voice.warm_up(settings.voice) if isinstance(voice, TTSSynthesiser) else voice.warm_up())
        if isinstance(self.chat, LocalChat) and settings.instructions:
            tasks.append(self.chat.read([{"role": "system", "content": settings.instructions}]))
        if isinstance(self.chat, LocalChat) and self.chat.offers_tools:
            tasks.append(self.chat.load_compiler())
        await asyncio.gather(*tasks)


def load_cascade(parts: CascadeParts, device: str = "auto") -> LoadedCascade:
    """A cascade of these parts, the local ones on one device."""
    return LoadedCascade(open_recogniser(parts, device), open_chat(parts, device), open_synthesiser(parts, device))


def open_recogniser(parts: CascadeParts, device: str = "auto") -> LocalRecogniser | RemoteRecogniser:
    """The recogniser: at an address, or local."""
    if isinstance(parts.asr, str) and not is_address(parts.asr):
        return LocalRecogniser.load(parts.asr, parts.asr_backend, device, parts.asr_gate)
    return RemoteRecogniser(Address(parts.asr) if isinstance(parts.asr, str) else parts.asr)


def open_synthesiser(parts: CascadeParts, device: str = "auto") -> TTSSynthesiser | RemoteSynthesiser:
    """The synthesiser: at an address, or local."""
    if isinstance(parts.tts, str) and not is_address(parts.tts):
        return TTSSynthesiser(open_speech_model(parts.tts, device))
    return RemoteSynthesiser(Address(parts.tts) if isinstance(parts.tts, str) else parts.tts)


def open_chat(parts: CascadeParts, device: str = "auto") -> ChatModel:
    """The chat model: at an address, or local."""
    if is_address(parts.chat):
        return ChatEndpoint(parts.chat, parts.chat_model, parts.chat_key)
    return LocalChat.load(parts.chat, device)
