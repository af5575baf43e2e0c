"""`viva serve`: a pipeline loaded by name, hosted on the wire."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from vivavoce import hub
from vivavoce.dialogue.interface import Conversation, ConversationSettings
from vivavoce.dialogue.session import DialogueOptions, LiveConversation
from vivavoce.errors import MissingDependencyError
from vivavoce.pipelines.loading import load_moss_speech
from vivavoce.pipelines.moss_speech import MossSpeechPipeline
from vivavoce.server.app import build_app, uvicorn_config
from vivavoce.server.host import ModelCard
from vivavoce.server.options import ServerOptions


@dataclass
class SpeechHost:
    """One speech-to-speech pipeline for all who connect; a `Host`."""

    name: str
    pipeline: MossSpeechPipeline
    options: DialogueOptions = field(default_factory=DialogueOptions)
    settings: ConversationSettings = field(default_factory=ConversationSettings)
    is_ready: bool = False

    @property
    def models(self) -> Sequence[ModelCard]:
        """The one model."""
        return [ModelCard(self.name)]

    @property
    def voices(self) -> Sequence[str]:
        """Its voices, the default first."""
        return list(self.pipeline.voices)

    def open(self, settings: ConversationSettings, model: str) -> Conversation:
        """A new conversation; the model hears the user's words itself where nobody else does."""
        options = self.options
        if options.transcriber is None:
            options = replace(options, transcriber=self.pipeline.words)
        return LiveConversation(self.pipeline, settings, options)

    def gauges(self) -> Mapping[str, float]:
        """How full the engine's cache is."""
        pool = self.pipeline.core.scheduler.pool
        return {"kv_used_ratio": (pool.size - pool.free) / pool.size}


def load_host(
    model: str = "mini-speech", codec: str | None = None, voice: Path | None = None, device: str = "auto"
) -> SpeechHost:
    """The host of a model by name, folder or hub id; it is ready once its pipeline is entered and warm."""
    if find_spec("uvicorn") is None:
        raise MissingDependencyError("serving needs uvicorn: pip install 'vivavoce[server]'")
    folder = hub.resolve(model)
    carried = None if codec is None else hub.resolve(codec)
    return SpeechHost(Path(model).name, load_moss_speech(folder, carried, voice, device))


async def serve(host: SpeechHost, options: ServerOptions) -> None:
    """Serve until interrupted; `/readyz` says when the model is warm."""
    import uvicorn

    server = uvicorn.Server(uvicorn_config(build_app(host, options), options))
    async with host.pipeline:
        warming = asyncio.create_task(_warm_up(host))
        try:
            await server.serve()
        finally:
            warming.cancel()


async def _warm_up(host: SpeechHost) -> None:
    await host.pipeline.warm_up()
    host.is_ready = True
