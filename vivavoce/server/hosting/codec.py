"""A codec as a deployment of its own: what `s2s/remote_codec.py` asks is done here, and states are kept."""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vivavoce import hub
from vivavoce.device import pick
from vivavoce.errors import VivaError
from vivavoce.log import log_failure
from vivavoce.models.flow.state import FlowVoice
from vivavoce.s2s.loading import CODEC_FOLDER, codec_voices, own_options
from vivavoce.s2s.loading import load_codec as load_moss_codec
from vivavoce.s2s.local_codec import LocalCodec
from vivavoce.s2s.moss_speech import MossSpeechOptions
from vivavoce.s2s.remote_codec import EAR, unpacked
from vivavoce.server.app import uvicorn_config
from vivavoce.server.auth import Keys, key_of
from vivavoce.server.config import ServerOptions
from vivavoce.server.wire_error import WireError

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

logger = logging.getLogger(__name__)

FORGOTTEN_SECONDS = 600.0  # a state that nobody went on from: its holder is gone


@dataclass
class CodecHost:
    """Ears and voices for language models elsewhere."""

    here: LocalCodec
    voices: Mapping[str, FlowVoice]
    _states: dict[str, tuple[Any, float]] = field(default_factory=dict)
    begun: int = 0

    def description(self) -> dict[str, Any]:
        """What a pipeline must know of it."""
        codec = self.here.codec
        grain = {"chunk": codec.flow.config.chunk, "lookahead": codec.flow.config.lookahead}
        sizes = {"samples_per_code": codec.samples_per_code, "ear_samples_per_code": codec.ear.samples_per_code}
        return {**grain, **sizes, "voices": list(self.voices)}

    @property
    def states(self) -> int:
        """Turns and replies that stand here."""
        return len(self._states)

    async def do(self, what: str, request: bytes) -> bytes:
        """One job: the state it goes on from, its numbers, and what the state after it is to be called."""
        head, numbers = unpacked(request)
        self._forget(head["left"])
        state = self._state(what, head)
        following: Any
        if what == EAR:
            samples = torch.from_numpy(np.frombuffer(numbers, np.float32).copy())
            codes, following = await self.here.ear.do((state, samples, head["is_last"]), head["urgency"])
            answer = np.asarray(codes, np.int64).tobytes()
        else:
            given = torch.from_numpy(np.frombuffer(numbers, np.int64).copy())
            sound, following = await self.here.voice.do((state, given, head["is_last"]), head["urgency"])
            answer = sound.numpy().tobytes()
        self._states[head["next"]] = (following, time.monotonic())
        return answer

    def _state(self, what: str, head: Mapping[str, Any]) -> Any:
        if not head["state"]:
            self.begun += 1
            if what == EAR:
                return self.here.codec.ear.initial_state()
            return self.voices.get(head["voice"]) or next(iter(self.voices.values()))
        if head["state"] not in self._states:
            raise VivaError(f"there is no state {head['state']} here")
        return self._states[head["state"]][0]

    def _forget(self, left: list[str]) -> None:
        oldest = time.monotonic() - FORGOTTEN_SECONDS
        gone = {*left, *(name for name, (_, touched) in self._states.items() if touched < oldest)}
        self._states = {name: kept for name, kept in self._states.items() if name not in gone}


def load_codec(codec: str, device: str = "auto", voice: Path | None = None) -> CodecHost:
    """The codec of a bundled name, folder or hub id; of a model that carries one, that one."""
    folder, place = hub.resolve(codec), pick(device)
    options = own_options(folder, MossSpeechOptions())
    if (folder / CODEC_FOLDER).is_dir():
        folder = folder / CODEC_FOLDER
    loaded = load_moss_codec(folder, place)
    return CodecHost(LocalCodec(loaded, options.left_chunks), codec_voices(loaded, folder, voice))


async def serve_codec(host: CodecHost, options: ServerOptions) -> None:
    """Serve until interrupted."""
    import uvicorn

    host.here.ear.start()
    host.here.voice.start()
    try:
        await uvicorn.Server(uvicorn_config(codec_app(host, options), options)).serve()
    finally:
        await asyncio.gather(host.here.ear.close(), host.here.voice.close())


def codec_app(host: CodecHost, options: ServerOptions) -> "Starlette":
    """The ASGI application of a codec."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    keys = Keys(options)

    async def job(request: "Request") -> "Response":
        try:
            keys.admit(key_of(request.headers))
            return Response(await host.do(request.path_params["what"], await request.body()))
        except WireError as error:
            return PlainTextResponse(str(error), error.status)
        except VivaError as error:
            log_failure(logger, error, "a job of the codec failed")
            return PlainTextResponse(str(error), 404)

    async def description(request: "Request") -> "Response":
        return JSONResponse(host.description())

    async def ready(request: "Request") -> "Response":
        return JSONResponse({"status": "ready"})

    async def figures(request: "Request") -> "Response":
        waiting = host.here.ear.waiting + host.here.voice.waiting
        told = {"viva_audio_requests": host.states, "viva_audio_requests_begun": host.begun}
        told["viva_queue_depth"] = waiting
        return PlainTextResponse("".join(f"{name} {value}\n" for name, value in told.items()))

    return Starlette(
        routes=[
            Route("/v1/codec", description),
            Route("/v1/codec/{what}", job, methods=["POST"]),
            Route("/readyz", ready),
            Route("/healthz", ready),
            Route("/metrics", figures),
        ]
    )
