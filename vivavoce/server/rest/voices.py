"""`/v1/audio/voices`: which there are, and, where a voice can be made of a recording, adding and removing them."""

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from vivavoce.audio.io import Sound, read
from vivavoce.server.auth import Identity
from vivavoce.server.config import ServerOptions
from vivavoce.server.host import Host
from vivavoce.server.rest.audio import SpeechMaker
from vivavoce.server.rest.http import json_answer, uploaded
from vivavoce.server.wire_error import WireError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

Wire = dict[str, Any]


@runtime_checkable
class VoiceRegistry(Protocol):
    """Keeps voices of people who agreed to it."""

    def add_voice(self, name: str, sound: Sound, consent: str, text: str) -> None:
        """Keep a voice; `text` is what the recording says, where that is known."""
        ...

    def remove_voice(self, name: str) -> None:
        """Forget a voice that was added."""
        ...


class VoicesApi:
    """The voices of a server."""

    def __init__(self, host: Host, speech: SpeechMaker | None, options: ServerOptions) -> None:
        self.host, self.speech, self.options = host, speech, options

    async def list(self, request: "Request", caller: Identity) -> "Response":
        """The voices of conversations by name, and those of all models."""
        spoken = [(card.id, name) for card in self.host.models[:1] for name in self.host.voices]
        if self.speech is not None:
            spoken += [(self.speech.model, name) for name in self.speech.voices]
        data = [_wire_voice(name) | {"model": model} for model, name in spoken]
        return json_answer({"object": "list", "data": data, "voices": [*self.host.voices]})

    async def create(self, request: "Request", caller: Identity) -> "Response":
        """A new voice, of a recording whose speaker has agreed."""
        keeper = self._keeper(caller)
        async with request.form(max_files=1, max_part_size=self.options.most_upload_bytes) as form:
            asked = {name: value for name, value in form.multi_items() if isinstance(value, str)}
            data = await uploaded(form, "audio_sample", self.options.most_upload_bytes)
        name, consent = asked.get("name", "").strip(), asked.get("consent", "").strip()
        if not name:
            raise WireError("a voice needs a name", param="name")
        if not consent:
            raise WireError(
                "a voice is kept only with its speaker's consent: say which it is, in words or by its id",
                "consent_required",
                "consent",
            )
        sound = await asyncio.to_thread(read, data)
        await asyncio.to_thread(keeper.add_voice, name, sound, consent, asked.get("text", ""))
        return json_answer(_wire_voice(name))

    async def delete(self, request: "Request", caller: Identity) -> "Response":
        """Forget a voice that was added."""
        keeper, name = self._keeper(caller), request.path_params["id"]
        await asyncio.to_thread(keeper.remove_voice, name)
        return json_answer({"id": name, "object": "audio.voice.deleted", "deleted": True})

    def _keeper(self, caller: Identity) -> VoiceRegistry:
        if caller.is_browser:
            raise WireError("a browser key cannot change voices; use an API key", "invalid_api_key", status=403)
        keeper: object = self.speech
        if not isinstance(keeper, VoiceRegistry):
            raise WireError("no model here keeps voices; serve one with --tts", "not_found", status=404)
        return keeper


def _wire_voice(name: str) -> Wire:
    return {"id": name, "object": "audio.voice", "name": name}
