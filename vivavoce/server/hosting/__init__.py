"""`viva serve`: loads models by name and serves them, in this process or as replicas on Ray."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from vivavoce.cascade.parts import DEFAULT_CHAT_MODEL
from vivavoce.device import pick
from vivavoce.dialogue.backend import Resolver
from vivavoce.errors import InputError, optional_packages
from vivavoce.nn.process_settings import frozen_heap
from vivavoce.s2s.remote_codec import RemoteCodec
from vivavoce.server.app import build_app
from vivavoce.server.config import ServerOptions
from vivavoce.server.doors.supervisor import new_server
from vivavoce.server.drain import DrainingServer
from vivavoce.server.hosting.codec import CodecDescription
from vivavoce.server.hosting.config import ServingOptions, read_serving_options
from vivavoce.server.hosting.hosts import AudioHost, SpeechHost, load_models

__all__ = [
    "ServingOptions",
    "SpeechHost",
    "load",
    "load_audio",
    "load_host",
    "read_serving_options",
    "serve",
    "serve_fleet",
]

logger = logging.getLogger(__name__)

Served = SpeechHost | AudioHost
FORMER_NAMES = {"ServingChoices": "ServingOptions", "read_choices": "read_serving_options"}


def __getattr__(name: str) -> object:
    """Former names, for one release."""
    if name not in FORMER_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    logger.warning("%s.%s is deprecated, it is now called %s", __name__, name, FORMER_NAMES[name])
    present: object = globals()[FORMER_NAMES[name]]
    return present


def load_host(
    model: str | None = None,
    codec: str | tuple[Resolver, CodecDescription] | None = None,
    voice: Path | None = None,
    device: str = "auto",
    asr: str | Resolver | None = None,
    chat: str | None = None,
    tts: str | Resolver | None = None,
    chat_model: str = DEFAULT_CHAT_MODEL,
    chat_key: str | None = None,
) -> Served:
    """The host of a model by name, folder or hub id (`mini-speech` by default), or of a cascade.

    A cascade's `asr` and `tts` may be addresses; a remote `codec` is given as its resolver and its description.
    """
    return load(
        ServingOptions(
            model=model,
            codec=RemoteCodec.from_description(codec[0], dict(codec[1])) if isinstance(codec, tuple) else codec,
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
    """A host without conversations: `asr` transcribes, `tts` speaks, or both."""
    return load(ServingOptions(asr=asr, tts=tts, device=device, audio_only=True))


def load(options: ServingOptions) -> Served:
    """The host of these options, its models loaded; it is ready once its parts are entered and warm."""
    return load_models(options)


def serve_fleet(options: ServingOptions, replicas: int, address: str | None = None) -> None:
    """Serve by replicas on Ray, at a cluster's address or on this machine, until interrupted."""
    server = options.server
    if server.media_streams or server.audiosocket is not None or server.sip.listen:
        raise InputError("telephone calls are not routed to replicas; serve them without --ray")
    with optional_packages():
        from vivavoce.server.cluster.app import run
        from vivavoce.server.cluster.options import FleetOptions, PoolOptions

    pool = PoolOptions(
        {"options": options},
        load=f"{__name__}:{load.__name__}",
        sessions=options.server.max_sessions,
        max_replicas=replicas,
        gpus=float(pick(options.device).kind == "cuda"),
    )
    run(FleetOptions({"speech": pool}, options.server), address)


async def serve(host: Served, options: ServerOptions, announce: Callable[[str], None] | None = None) -> None:
    """Serve until interrupted; `/readyz` says when the models are warm, and `announce` gets the address then."""
    app = build_app(host, options, host.speech, host.transcriber)
    server = new_server(app, options)
    async with AsyncExitStack() as stack:
        for part in host.parts:
            await stack.enter_async_context(part)
        warming = asyncio.create_task(_warm_up(host, stack, server))
        warming.add_done_callback(partial(_warmed_up, server, announce, options))
        try:
            await server.serve()
        finally:
            warming.cancel()
            await asyncio.wait([warming])
        if not warming.cancelled():
            warming.result()  # raises where it failed


async def _warm_up(host: Served, stack: AsyncExitStack, server: DrainingServer) -> None:
    """Warm up, then exclude loaded objects from garbage collection: a full collection would stall every session."""
    started = time.monotonic()
    logger.info("warming up the models")
    await host.warm_up()
    logger.info("warm in %.1f s", time.monotonic() - started)
    stack.enter_context(frozen_heap())
    while not server.started:
        await asyncio.sleep(0.02)


def _warmed_up(
    server: DrainingServer,
    announce: Callable[[str], None] | None,
    options: ServerOptions,
    warming: asyncio.Task[None],
) -> None:
    """Tell the address of a server that is ready; end one that cannot be. One that was stopped before is neither."""
    if warming.cancelled():
        return
    if warming.exception() is not None:
        server.should_exit = True
    elif announce is not None:
        announce(options.address(server.port))
