"""`viva serve --devices`: a replica of the same models on each device, and optionally its codec on another one."""

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from vivavoce.device import pick
from vivavoce.dialogue.backend import Address
from vivavoce.errors import InputError, VivaError
from vivavoce.s2s.remote_codec import RemoteCodec
from vivavoce.server.cluster.local_fleet import FleetServer, LocalFleet
from vivavoce.server.cluster.options import PoolOptions
from vivavoce.server.cluster.registry import ReplicaReport
from vivavoce.server.hosting.codec import CodecDescription
from vivavoce.server.hosting.config import ServingOptions
from vivavoce.server.hosting.hosts import AudioHost, SpeechHost, load_models

VISIBLE = "CUDA_VISIBLE_DEVICES"
CUDA = re.compile(r"^(?:cuda:)?(\d+)$")


def placed(device: str) -> tuple[str, dict[str, str]]:
    """The device of a replica, and the environment in which it is that: the only CUDA device where it is one."""
    number = CUDA.match(device)
    if number is None:
        return str(pick(device)), {}
    index, count = int(number[1]), torch.cuda.device_count()  # makes no context here
    if index >= count:
        raise InputError(f"there is no CUDA device {index}; this machine has {count}")
    visible = [each for each in os.environ.get(VISIBLE, "").split(",") if each]
    return "cuda", {VISIBLE: visible[index] if visible else str(index)}


def load_with_codec(options: ServingOptions, codec: Address, description: CodecDescription) -> SpeechHost | AudioHost:
    """The host of these options, whose codec is a replica of its own."""
    return load_models(replace(options, codec=RemoteCodec.from_description(codec, dict(description))))


async def serve_devices(
    options: ServingOptions,
    devices: Sequence[str],
    codec_devices: Sequence[str] = (),
    announce: Callable[[str], None] | None = None,
) -> None:
    """Serve by a replica on each device until interrupted; `announce` gets the address when all are ready."""
    server = options.server
    if server.media_streams or server.audiosocket is not None or server.sip.listen:
        raise InputError("telephone calls are not routed to replicas; serve them without --devices")
    if codec_devices and (options.model is None or options.chat is not None):
        raise InputError("--codec-devices needs a speech-to-speech --model, whose codec it runs")
    for device in (*devices, *codec_devices):
        placed(device)  # refuses what is none
    async with LocalFleet(server) as fleet:
        running = FleetServer(fleet)
        starting = asyncio.create_task(_start(fleet, options, devices, codec_devices))

        def started(task: asyncio.Task[None]) -> None:
            if task.cancelled() or task.exception() is not None:
                running.should_exit = True
            elif announce is not None:
                announce(server.address(server.port))

        starting.add_done_callback(started)
        try:
            await running.serve()
        finally:
            starting.cancel()
            await asyncio.wait([starting])
        if not starting.cancelled() and (error := starting.exception()) is not None:
            raise VivaError(f"the server ends: {error}") from error


async def _start(
    fleet: LocalFleet, options: ServingOptions, devices: Sequence[str], codec_devices: Sequence[str]
) -> None:
    """Start all replicas, those of the codec first."""
    sessions = options.server.max_sessions
    codecs = await asyncio.gather(*(_start_codec(fleet, options, device) for device in codec_devices))
    replicas = []
    for number, device in enumerate(devices):
        name, environment = placed(device)
        model: dict[str, object] = {"options": replace(options, device=name)}
        load = f"{__name__}:{load_models.__name__}"
        if codecs:
            model["codec"], model["description"] = codecs[number % len(codecs)]
            load = f"{__name__}:{load_with_codec.__name__}"
        pool = PoolOptions(model, load=load, sessions=sessions)
        replicas.append(fleet.start("speech", pool, environment))
    await asyncio.gather(*replicas)


async def _start_codec(fleet: LocalFleet, options: ServingOptions, device: str) -> tuple[Address, CodecDescription]:
    name, environment = placed(device)
    codec = options.codec if isinstance(options.codec, str) else options.model
    model = {"codec": codec, "device": name, "voice": options.voice}
    report: ReplicaReport = await fleet.start("codec", PoolOptions(model), environment)
    address = Address(f"{report.url}/v1", report.key)
    async with fleet.http.get(f"{address.url}/codec", headers={"Authorization": f"Bearer {report.key}"}) as response:
        description: CodecDescription = await response.json()
    return address, description
