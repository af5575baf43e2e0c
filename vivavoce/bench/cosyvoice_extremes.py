"""Whether CosyVoice 3 stays finite in half precision on inputs that no sound has."""

import time
from collections.abc import Sequence
from itertools import product

import torch

from vivavoce.bench.cosyvoice_shapes import LEFT_CHUNKS, CosyVoiceBenchSetup
from vivavoce.models.flow_speech import FlowSpeech
from vivavoce.models.flow_state import FlowVoice

LOUD = 30.0  # a log-mel beyond any sound
FAR = 1e4  # times a speaker's vector
PROMPT_SECONDS = 2.0
HOPS = ((28, False), (10, True))  # codes, and whether they are the last
AT_ONCE = 16


def finite(setup: CosyVoiceBenchSetup) -> dict[str, int]:
    """How many of some runs gave a value that is not finite, by precision."""
    counts, runs = {}, range(setup.extreme_runs)
    for dtype in (torch.float16, torch.bfloat16):
        if dtype not in setup.device.dtypes:
            continue
        name, began, failed = str(dtype).removeprefix("torch."), time.perf_counter(), 0
        speech = setup.speech(dtype)
        voices = _voices(setup, speech)
        for first in runs[::AT_ONCE]:
            batch = runs[first : first + AT_ONCE]
            failed += _are_finite(setup, speech, voices, batch).count(False)
            print(f"  {name}: {batch.stop} runs, {failed} not finite, {time.perf_counter() - began:.1f} s", flush=True)
        counts[f"{name}_not_finite_of_{len(runs)}"] = failed
    return counts


def _voices(setup: CosyVoiceBenchSetup, speech: FlowSpeech) -> list[FlowVoice]:
    """Voices that nobody has: as loud or as silent as can be, of no speaker or one far from all, two of each."""
    voices = []
    for seed, is_loud, is_far in product(range(2), (True, False), (True, False)):
        prompt = setup.prompt(speech.flow, PROMPT_SECONDS, seed)
        prompt.mel = prompt.mel.sign() * LOUD if is_loud else torch.full_like(prompt.mel, -LOUD)
        prompt.speaker = prompt.speaker * (FAR if is_far else 0.0)
        voices.append(speech.flow.voice(prompt))
    return voices


def _are_finite(
    setup: CosyVoiceBenchSetup, speech: FlowSpeech, voices: Sequence[FlowVoice], numbers: Sequence[int]
) -> list[bool]:
    """Whether the sound of each of these runs is, from its first hop to its last; every third repeats one code."""
    states = [speech.start(voices[number % len(voices)], LEFT_CHUNKS, number) for number in numbers]
    is_finite = torch.ones(len(numbers), dtype=torch.bool, device=setup.device.torch_device)
    for size, is_last in HOPS:
        codes = [setup.codes(size, number) if number % 3 else torch.zeros(size).long() for number in numbers]
        sounds, states = speech.step_batch(states, codes, [is_last] * len(numbers))
        is_finite &= torch.stack([sound.isfinite().all() for sound in sounds])
    made: list[bool] = is_finite.tolist()
    return made
