"""`/v1/audio/voices`: the voices of the served models, and voices made of recordings."""

import asyncio
from typing import Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from vivavoce.server.auth import Identity
from vivavoce.server.config import ServerOptions
from vivavoce.server.host import Host, SpeechMaker, VoiceRegistry
from vivavoce.server.rest.audio_files import decoded
from vivavoce.server.rest.http import json_response, read_upload
from vivavoce.server.wire import WireError


class VoiceObject(Struct):
    """A voice in responses."""

    id: str
    object: Literal["audio.voice"]
    name: str
    model: str | UnsetType = UNSET
    """The model that has it."""


class VoiceList(Struct):
    """The response of GET `/v1/audio/voices`; `voices` are the names of the voices of conversations."""

    object: Literal["list"]
    data: list[VoiceObject]
    voices: list[str]


class VoiceDeleted(Struct):
    """The response of DELETE `/v1/audio/voices/{id}`."""

    id: str
    object: Literal["audio.voice.deleted"]
    deleted: bool


class VoicesApi:
    """`/v1/audio/voices`: lists voices, and adds and removes them where the TTS model can clone recordings."""

    def __init__(self, host: Host, speech: SpeechMaker | None, options: ServerOptions) -> None:
        self.host, self.speech, self.options = host, speech, options

    async def list(self, request: Request, caller: Identity) -> Response:
        """The voices of the conversation model and of the TTS model."""
        named = [(card.id, name) for card in self.host.models[:1] for name in self.host.voices]
        if self.speech is not None:
            await self.speech.load()
            named += [(self.speech.model, name) for name in self.speech.voices]
        data = [VoiceObject(name, "audio.voice", name, model) for model, name in named]
        return json_response(VoiceList("list", data, [*self.host.voices]))

    async def create(self, request: Request, caller: Identity) -> Response:
        """Create a voice from a recording whose speaker has consented."""
        registry = self._registry()
        async with request.form(max_files=1, max_part_size=self.options.max_upload_bytes) as form:
            fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
            data = await read_upload(form, "audio_sample", self.options.max_upload_bytes)
        name, consent = fields.get("name", "").strip(), fields.get("consent", "").strip()
        if not name:
            raise WireError("a voice needs a name", param="name")
        if not consent:
            raise WireError(
                "a voice is stored only with the consent of its speaker: send the consent as text or as its id",
                "consent_required",
                "consent",
            )
        sound = await decoded(data, None, self.options)
        await asyncio.to_thread(registry.add_voice, name, sound, consent, fields.get("text", ""))
        return json_response(VoiceObject(name, "audio.voice", name))

    async def delete(self, request: Request, caller: Identity) -> Response:
        """Remove a voice that was added."""
        registry, name = self._registry(), request.path_params["id"]
        await asyncio.to_thread(registry.remove_voice, name)
        return json_response(VoiceDeleted(name, "audio.voice.deleted", True))

    def _registry(self) -> VoiceRegistry:
        registry: object = self.speech
        if not isinstance(registry, VoiceRegistry):
            raise WireError("no served model can store voices; serve one with --tts", "not_found", status=404)
        return registry
