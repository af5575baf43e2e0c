"""A codec as a separate deployment: runs the jobs of `s2s/remote_codec.py` and stores their streaming states."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from vivavoce import hub
from vivavoce.device import pick
from vivavoce.errors import VivaError
from vivavoce.log import log_failure
from vivavoce.models.flow.state import FlowVoice
from vivavoce.s2s.local_codec import LocalCodec
from vivavoce.s2s.moss_speech import chunk_policy, chunk_unit, codec_voices
from vivavoce.s2s.moss_speech import load_codec as load_moss_codec
from vivavoce.s2s.options import MossSpeechOptions, checkpoint_options
from vivavoce.s2s.remote_codec import SPEECH_ENCODER, unpack
from vivavoce.server.auth import Keys, request_key
from vivavoce.server.config import ServerOptions
from vivavoce.server.metrics import ExceptionCounter
from vivavoce.server.uvicorn_settings import uvicorn_config
from vivavoce.server.wire import WireError

logger = logging.getLogger(__name__)

STATE_SECONDS = 600.0  # a state unused for longer is dropped: its client is lost


class CodecDescription(TypedDict):
    """What the client of a remote codec must know of it."""

    chunk: int
    lookahead: int
    samples_per_code: int
    encoder_samples_per_code: int
    voices: list[str]


@dataclass
class CodecHost:
    """The speech encoder and the vocoder for language models in other processes."""

    local: LocalCodec
    voices: Mapping[str, FlowVoice]
    _states: dict[str, tuple[Any, float]] = field(default_factory=dict)
    started: int = 0
    """Turns and replies started."""

    def description(self) -> CodecDescription:
        """What the client of this codec must know of it."""
        codec = self.local.codec
        return {
            "chunk": codec.flow.config.chunk,
            "lookahead": codec.flow.config.lookahead,
            "samples_per_code": codec.samples_per_code,
            "encoder_samples_per_code": codec.speech_encoder.samples_per_code,
            "voices": list(self.voices),
        }

    @property
    def states(self) -> int:
        """Streaming states of turns and replies that are stored."""
        return len(self._states)

    @property
    def waiting(self) -> int:
        """Jobs that are queued."""
        return self.local.speech_encoder.waiting + self.local.vocoder.waiting

    async def do(self, what: str, request: bytes) -> bytes:
        """Run one job. Its header names the state it continues and the state after it."""
        header, payload = unpack(request)
        self._forget(header["left"])
        state = self._state(what, header)
        following: Any
        if what == SPEECH_ENCODER:
            samples = torch.from_numpy(np.frombuffer(payload, np.float32).copy())
            codes, following = await self.local.speech_encoder.do(
                (state, samples, header["is_last"]), header["urgency"]
            )
            result = np.asarray(codes, np.int64).tobytes()
        else:
            tokens = torch.from_numpy(np.frombuffer(payload, np.int64).copy())
            sound, following = await self.local.vocoder.do((state, tokens, header["is_last"]), header["urgency"])
            result = sound.numpy().tobytes()
        self._states[header["next"]] = (following, time.monotonic())
        return result

    def _state(self, what: str, header: Mapping[str, Any]) -> Any:
        if not header["state"]:
            self.started += 1
            if what == SPEECH_ENCODER:
                return self.local.codec.speech_encoder.initial_state()
            return self.voices.get(header["voice"]) or next(iter(self.voices.values()))
        if header["state"] not in self._states:
            raise VivaError(f"the state {header['state']} is unknown")
        return self._states[header["state"]][0]

    def _forget(self, released: list[str]) -> None:
        oldest = time.monotonic() - STATE_SECONDS
        gone = {*released, *(name for name, (_, used_at) in self._states.items() if used_at < oldest)}
        self._states = {name: state for name, state in self._states.items() if name not in gone}


class _CodecGauges:
    """The gauges of a codec, read when the metrics are collected; a replica reports its load by them."""

    def __init__(self, host: CodecHost) -> None:
        self._host = host

    def collect(self) -> Iterable[Any]:
        yield GaugeMetricFamily("viva_audio_requests", "Streaming states stored.", self._host.states)
        yield GaugeMetricFamily("viva_audio_requests_begun", "Turns and replies started.", self._host.started)
        yield GaugeMetricFamily("viva_queue_depth", "Jobs that are queued.", self._host.waiting)


def load_codec(codec: str, device: str = "auto", voice: Path | None = None) -> CodecHost:
    """The codec of a bundled name, folder or hub id; of a model that contains one, that one."""
    folder = hub.resolve(codec)
    options = checkpoint_options(folder, MossSpeechOptions())
    if (folder / hub.CODEC_FOLDER).is_dir():
        folder = folder / hub.CODEC_FOLDER
    loaded = load_moss_codec(folder, pick(device))
    return CodecHost(LocalCodec(loaded, options.left_chunks), codec_voices(loaded, folder, voice))


async def serve_codec(host: CodecHost, options: ServerOptions) -> None:
    """Warm up and serve until interrupted."""
    codec = host.local.codec
    sizes = chunk_policy(chunk_unit(codec), codec.speech_encoder.device.type, is_graphed=False).sizes()
    await asyncio.to_thread(host.local.warm_up, list(host.voices.values()), MossSpeechOptions().warm_batches, sizes)
    host.local.speech_encoder.start()
    host.local.vocoder.start()
    try:
        await uvicorn.Server(uvicorn_config(codec_app(host, options), options)).serve()
    finally:
        await asyncio.gather(host.local.speech_encoder.close(), host.local.vocoder.close())


def codec_app(host: CodecHost, options: ServerOptions) -> Starlette:
    """The ASGI application of a codec."""
    keys = Keys(options)
    registry = CollectorRegistry()
    registry.register(_CodecGauges(host))
    exceptions = ExceptionCounter(registry)

    async def job(request: Request) -> Response:
        try:
            keys.admit(request_key(request.headers))
            return Response(await host.do(request.path_params["what"], await request.body()))
        except WireError as error:
            return PlainTextResponse(str(error), error.status)
        except VivaError as error:
            log_failure(logger, error, "a job of the codec failed")
            return PlainTextResponse(str(error), 404)

    async def description(request: Request) -> Response:
        return JSONResponse(host.description())

    async def ready(request: Request) -> Response:
        return JSONResponse({"status": "ready"})

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        with exceptions.counting():
            yield

    return Starlette(
        routes=[
            Route("/v1/codec", description),
            Route("/v1/codec/{what}", job, methods=["POST"]),
            Route("/readyz", ready),
            Route("/healthz", ready),
            Route("/metrics", metrics),
        ],
        lifespan=lifespan,
    )
