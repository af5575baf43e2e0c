"""`viva serve`: models loaded by name, hosted on the wire."""

import asyncio
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vivavoce.cascade.loading import DEFAULT_CHAT_MODEL
from vivavoce.device import pick
from vivavoce.dialogue.backend import Resolver
from vivavoce.errors import MissingDependencyError
from vivavoce.nn.process_settings import frozen_heap
from vivavoce.s2s.remote_codec import RemoteCodec
from vivavoce.server.app import build_app, uvicorn_config
from vivavoce.server.config import ServerOptions
from vivavoce.server.hosting.audio import AudioHost
from vivavoce.server.hosting.config import ServingOptions, read_choices
from vivavoce.server.hosting.conversations import SpeechHost, host_of

__all__ = ["ServingChoices", "SpeechHost", "load", "load_audio", "load_host", "read_choices", "serve", "serve_fleet"]


Served = SpeechHost | AudioHost


def load_host(
    model: str | None = None,
    codec: str | tuple[Resolver, dict[str, Any]] | None = None,
    voice: Path | None = None,
    device: str = "auto",
    asr: str | Resolver | None = None,
    chat: str | None = None,
    tts: str | Resolver | None = None,
    chat_model: str = DEFAULT_CHAT_MODEL,
    chat_key: str | None = None,
) -> Served:
    """The host of a model by name, folder or hub id (`mini-speech` unless named), or of a cascade.

    A cascade's `asr` and `tts` may be addresses; a `codec` elsewhere is where it is, and how it describes itself.
    """
    return load(
        ServingOptions(
            model=model,
            codec=RemoteCodec.told(*codec) if isinstance(codec, tuple) else codec,
            voice=voice,
            device=device,
            asr=asr,
            chat=chat,
            tts=tts,
            chat_model=chat_model,
            chat_key=chat_key,
        )
    )


def load_audio(asr: str | None = None, tts: str | None = None, device: str = "auto") -> Served:
    """A host without conversations: it writes down what `asr` hears, says what `tts` is given, or both."""
    return load(ServingOptions(asr=asr, tts=tts, device=device, audio_only=True))


def load(choices: ServingOptions) -> Served:
    """The host that is chosen; it is ready once its pipeline is entered and warm."""
    if find_spec("uvicorn") is None:
        raise MissingDependencyError("serving needs uvicorn: pip install 'vivavoce[server]'")
    return host_of(choices)


def serve_fleet(choices: ServingOptions, replicas: int, address: str | None = None) -> None:
    """Serve by replicas on Ray, at a cluster's address or on this machine, until interrupted."""
    from vivavoce.server.cluster.app import run
    from vivavoce.server.cluster.options import FleetOptions, PoolOptions

    pool = PoolOptions(
        {"choices": choices},
        load=f"{__name__}:{load.__name__}",
        sessions=choices.server.most_sessions,
        most=replicas,
        gpus=float(pick(choices.device).kind == "cuda"),
    )
    run(FleetOptions({"speech": pool}, choices.server), address)


async def serve(host: Served, options: ServerOptions) -> None:
    """Serve until interrupted; `/readyz` says when the models are warm."""
    import uvicorn

    app = build_app(host, options, host.speech, host.transcriber)
    server = uvicorn.Server(uvicorn_config(app, options))
    async with AsyncExitStack() as stack:
        for part in host.parts:
            await stack.enter_async_context(part)
        warming = asyncio.create_task(_warm_up(host, stack))
        try:
            await server.serve()
        finally:
            warming.cancel()


async def _warm_up(host: Served, stack: AsyncExitStack) -> None:
    """Warm up, and then keep what is loaded from the garbage collector: while it walks, every session waits."""
    await host.warm_up()
    stack.enter_context(frozen_heap())
