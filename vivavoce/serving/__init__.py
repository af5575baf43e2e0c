"""`viva serve`: models loaded by name, hosted on the wire."""

import asyncio
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path

from vivavoce.device import pick
from vivavoce.errors import MissingDependencyError
from vivavoce.pipelines.cascade_loading import DEFAULT_CHAT_MODEL
from vivavoce.server.app import build_app, uvicorn_config
from vivavoce.server.options import ServerOptions
from vivavoce.serving.choices import ServingChoices, read_choices
from vivavoce.serving.hosts import SpeechHost, host_of

__all__ = ["ServingChoices", "SpeechHost", "load", "load_host", "read_choices", "serve", "serve_fleet"]


def load_host(
    model: str | None = None,
    codec: str | None = None,
    voice: Path | None = None,
    device: str = "auto",
    asr: str | None = None,
    chat: str | None = None,
    tts: str | None = None,
    chat_model: str = DEFAULT_CHAT_MODEL,
    chat_key: str | None = None,
) -> SpeechHost:
    """The host of a model by name, folder or hub id (`mini-speech` unless named), or of a cascade."""
    return load(
        ServingChoices(
            model=model,
            codec=codec,
            voice=voice,
            device=device,
            asr=asr,
            chat=chat,
            tts=tts,
            chat_model=chat_model,
            chat_key=chat_key,
        )
    )


def load(choices: ServingChoices) -> SpeechHost:
    """The host that is chosen; it is ready once its pipeline is entered and warm."""
    if find_spec("uvicorn") is None:
        raise MissingDependencyError("serving needs uvicorn: pip install 'vivavoce[server]'")
    return host_of(choices)


def serve_fleet(choices: ServingChoices, replicas: int, address: str | None = None) -> None:
    """Serve by replicas on Ray, at a cluster's address or on this machine, until interrupted."""
    from vivavoce.server.ray_app import run
    from vivavoce.server.ray_options import FleetOptions, PoolOptions

    pool = PoolOptions(
        {"choices": choices},
        load=f"{__name__}:{load.__name__}",
        sessions=choices.server.most_sessions,
        most=replicas,
        gpus=float(pick(choices.device).kind == "cuda"),
    )
    run(FleetOptions({"speech": pool}, choices.server), address)


async def serve(host: SpeechHost, options: ServerOptions) -> None:
    """Serve until interrupted; `/readyz` says when the models are warm."""
    import uvicorn

    app = build_app(host, options, host.speech, host.transcriber)
    server = uvicorn.Server(uvicorn_config(app, options))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(host.pipeline)
        if host.ear is not None:
            await stack.enter_async_context(host.ear)
        warming = asyncio.create_task(host.warm_up())
        try:
            await server.serve()
        finally:
            warming.cancel()
