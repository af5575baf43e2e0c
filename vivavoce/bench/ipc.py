"""`python -m vivavoce.bench.ipc`: what it costs to have the codec in another process than the language model.

The same jobs here and at a server of this machine, in turns: 80 ms of sound to hear, a chunk of codes to say. The
difference is the hand-over; a network's own delay comes on top.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch

from vivavoce.audio.level import buzz
from vivavoce.cascade.remote import got
from vivavoce.dialogue.backend import Address
from vivavoce.models.moss_speech.codec import EAR_RATE
from vivavoce.nn.process_settings import torch_threads
from vivavoce.s2s.remote_codec import EAR, VOICE, RemoteSpeechEncoder, RemoteState, RemoteVocoder
from vivavoce.server.hosting.codec import CodecHost, load_codec

KEY = "key-for-measuring"
SERVER = """
import asyncio, sys
from vivavoce.server.hosting.codec import load_codec, serve_codec
from vivavoce.server.config import ServerOptions
import torch
torch.set_num_threads(1)
asyncio.run(serve_codec(load_codec(sys.argv[1], "cpu"), ServerOptions(port=int(sys.argv[2]), api_keys=(sys.argv[3],))))
"""
Do = Callable[[Any], Awaitable[tuple[Any, Any]]]


@torch_threads.held(1)
def run(model: str, rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of each job here and elsewhere."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-c", SERVER, model, str(port), KEY], env={**os.environ})
    try:
        return asyncio.run(_measured(load_codec(model, "cpu"), Address(f"http://127.0.0.1:{port}/v1", KEY), rounds))
    finally:
        server.terminate()
        server.wait()


async def _measured(host: CodecHost, there: Address, rounds: int) -> dict[str, dict[str, float]]:
    await _until_there(there)
    ears, voices, here, codec = RemoteSpeechEncoder(there, EAR), RemoteVocoder(there, VOICE), host.here, host.here.codec
    for desk in (ears, voices, here.ear, here.voice):
        desk.start()
    chunk = codec.flow.config.chunk + codec.flow.config.lookahead
    sound = torch.from_numpy(buzz(0.08, EAR_RATE).samples[0])
    codes = torch.zeros(chunk, dtype=torch.long)
    voice = next(iter(host.voices.values()))
    jobs: dict[str, tuple[Do, Any, Do, Any, torch.Tensor]] = {
        EAR: (here.ear.do, codec.ear.initial_state(), ears.do, RemoteState(), sound),
        VOICE: (here.voice.do, voice, voices.do, RemoteState(voice=next(iter(host.voices))), codes),
    }
    found = {name: await _compared(*job, rounds) for name, job in jobs.items()}
    for desk in (ears, voices, here.ear, here.voice):
        await desk.close()
    return found


async def _compared(
    near: Do, begin: Any, far: Do, far_begin: Any, numbers: torch.Tensor, rounds: int
) -> dict[str, float]:
    """The first job of a stream, again and again, in turns."""
    times: dict[str, list[float]] = {"here": [], "elsewhere": []}
    for _ in range(rounds):
        for name, do, state in (("here", near, begin), ("elsewhere", far, far_begin)):
            begun = time.perf_counter()
            await do((state, numbers, False))
            times[name].append(1e3 * (time.perf_counter() - begun))
    middle = {f"{name}_ms": sorted(taken)[rounds // 2] for name, taken in times.items()}
    return middle | {"hand_over_ms": middle["elsewhere_ms"] - middle["here_ms"]}


async def _until_there(there: Address) -> None:
    while True:
        try:
            await asyncio.to_thread(got, await there(), "/codec")
        except ConnectionError:
            await asyncio.sleep(0.1)
        else:
            return


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="python -m vivavoce.bench.ipc", description=__doc__)
    parser.add_argument("--model", default="mini-speech")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args(arguments)
    print(json.dumps(run(options.model, options.rounds), indent=2))


if __name__ == "__main__":
    main()
