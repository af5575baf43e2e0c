"""What a pass of the voice and a step of the ear cost by how many are in it, in the pipeline that is about to serve."""

from collections.abc import Sequence
from typing import Any

import torch

from vivavoce.bench.memory import median_seconds
from vivavoce.device import Device
from vivavoce.models.moss_speech_codec import EAR_RATE, SpokenState
from vivavoce.pipelines.moss_speech import MossSpeechBackend

REPEATS = 5
SETTLING = 2  # hops after which a reply has the shapes it keeps
HEARD_SECONDS = 2.0


@torch.inference_mode()
def stages(pipeline: MossSpeechBackend, device: Device, batches: Sequence[int]) -> dict[str, Any]:
    """Milliseconds of hops by their codes and replies, of ear steps by streams, and of a first sound alone."""
    grain = pipeline.policy.grain
    sizes = pipeline.policy.sizes()
    return {
        "how": f"median of {REPEATS}, wall time, sound and codes read back",
        "hop_ms": {size: {count: _hop_ms(pipeline, device, count, size) for count in batches} for size in sizes},
        "first_codes": grain.frames + grain.lookahead,
        "first_sound_ms": _first_ms(pipeline, device),
        "ear_ms": {count: _ear_ms(pipeline, device, count) for count in batches},
        "speaking_bytes": _begun(pipeline, 1)[0].nbytes,
        "voice_bytes": pipeline.voice_of(None).cache.nbytes,
    }


def _begun(pipeline: MossSpeechBackend, count: int) -> list[SpokenState]:
    voice, left = pipeline.voice_of(None), pipeline.options.left_chunks
    return [pipeline.codec.start(voice, left, seed) for seed in range(count)]


def _codes(count: int) -> torch.Tensor:
    return torch.arange(count) % 64


def _hop_ms(pipeline: MossSpeechBackend, device: Device, count: int, size: int) -> float:
    grain, live = pipeline.policy.grain, [False] * count
    states = _begun(pipeline, count)
    for given in (grain.frames + grain.lookahead, *[grain.frames] * 3):
        _, states = pipeline.codec.step_batch(states, [_codes(given)] * count, live)

    def hop() -> None:
        nonlocal states
        sounds, states = pipeline.codec.step_batch(states, [_codes(size)] * count, live)
        torch.cat(sounds).cpu()

    return median_seconds(hop, device, REPEATS, SETTLING) * 1e3


def _first_ms(pipeline: MossSpeechBackend, device: Device) -> float:
    grain = pipeline.policy.grain

    def speak() -> None:
        sound, _ = pipeline.codec.step(_begun(pipeline, 1)[0], _codes(grain.frames + grain.lookahead))
        sound.cpu()

    return median_seconds(speak, device, REPEATS, SETTLING) * 1e3


def _ear_ms(pipeline: MossSpeechBackend, device: Device, count: int) -> float:
    ear = pipeline.codec.ear
    noise = 0.1 * torch.randn(round(HEARD_SECONDS * EAR_RATE), generator=torch.Generator().manual_seed(0))
    _, states = ear.step_batch([ear.initial_state()] * count, [noise] * count)
    piece = noise[: ear.samples_per_code]

    def step() -> None:
        nonlocal states
        codes, states = ear.step_batch(states, [piece] * count)
        torch.cat(codes).cpu()

    return median_seconds(step, device, REPEATS, SETTLING) * 1e3
