"""`python -m vivavoce.bench.ipc`: overhead of running the codec in another process than the language model.

The same jobs (80 ms of audio to encode, a chunk of codes to decode) run in this process and on a codec server on this
machine, alternating. The difference is the IPC overhead; network latency would come on top.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch

from vivavoce.audio.level import buzz
from vivavoce.cascade.remote import get_json
from vivavoce.dialogue.backend import Address
from vivavoce.evaluation.machine import free_port
from vivavoce.models.moss_speech.codec import ENCODER_RATE
from vivavoce.nn.process_settings import torch_threads
from vivavoce.s2s.remote_codec import SPEECH_ENCODER, VOCODER, RemoteSpeechEncoder, RemoteState, RemoteVocoder
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
Step = Callable[[Any], Awaitable[tuple[Any, Any]]]


@torch_threads.held(1)
def run(model: str, rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of each job in this process and on the server."""
    port = free_port()
    server = subprocess.Popen([sys.executable, "-c", SERVER, model, str(port), KEY], env={**os.environ})
    try:
        return asyncio.run(_measure(load_codec(model, "cpu"), Address(f"http://127.0.0.1:{port}/v1", KEY), rounds))
    finally:
        server.terminate()
        server.wait()


async def _measure(host: CodecHost, address: Address, rounds: int) -> dict[str, dict[str, float]]:
    await _wait_until_ready(address)
    remote_encoder, remote_vocoder = RemoteSpeechEncoder(address, SPEECH_ENCODER), RemoteVocoder(address, VOCODER)
    local, codec = host.local, host.local.codec
    for worker in (remote_encoder, remote_vocoder, local.speech_encoder, local.vocoder):
        worker.start()
    chunk = codec.flow.config.chunk + codec.flow.config.lookahead
    sound = torch.from_numpy(buzz(0.08, ENCODER_RATE).samples[0])
    codes = torch.zeros(chunk, dtype=torch.long)
    voice = next(iter(host.voices.values()))
    jobs: dict[str, tuple[Step, Any, Step, Any, torch.Tensor]] = {
        SPEECH_ENCODER: (
            local.speech_encoder.do,
            codec.speech_encoder.initial_state(),
            remote_encoder.do,
            RemoteState(),
            sound,
        ),
        VOCODER: (local.vocoder.do, voice, remote_vocoder.do, RemoteState(voice=next(iter(host.voices))), codes),
    }
    figures = {name: await _compare(*job, rounds) for name, job in jobs.items()}
    for worker in (remote_encoder, remote_vocoder, local.speech_encoder, local.vocoder):
        await worker.close()
    return figures


async def _compare(
    local: Step, local_state: Any, remote: Step, remote_state: Any, numbers: torch.Tensor, rounds: int
) -> dict[str, float]:
    """Time the first job of a stream, alternating between local and remote."""
    times: dict[str, list[float]] = {"here": [], "elsewhere": []}
    for _ in range(rounds):
        for name, do, state in (("here", local, local_state), ("elsewhere", remote, remote_state)):
            started = time.perf_counter()
            await do((state, numbers, False))
            times[name].append(1e3 * (time.perf_counter() - started))
    medians = {f"{name}_ms": sorted(taken)[rounds // 2] for name, taken in times.items()}
    return medians | {"hand_over_ms": medians["elsewhere_ms"] - medians["here_ms"]}


async def _wait_until_ready(address: Address) -> None:
    while True:
        try:
            await asyncio.to_thread(get_json, await address(), "/codec")
        except ConnectionError:
            await asyncio.sleep(0.1)
        else:
            return


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m vivavoce.bench.ipc", description=__doc__)
    parser.add_argument("--model", default="mini-speech")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args(arguments)
    print(json.dumps(run(options.model, options.rounds), indent=2))


if __name__ == "__main__":
    main()
