"""Speaking a plan of utterances with Kokoro, into shards that survive a kill, and joining them into corpora.

A shard is a `Corpus` of consecutive utterances of the plan. It is renamed into place when it is whole, so a run that
is started again goes on with the first shard that is missing.
"""

import io
import json
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vivavoce.audio.io import Sound, float_to_pcm16, read, write
from vivavoce.train.augment import at_snr, levelled, mu_law, noise, reverberate, telephone
from vivavoce.train.corpus import Corpus
from vivavoce.train.utterances import PARTS, Condition, Utterance, write_plan
from vivavoce.train.voices import RATE, trimmed
from vivavoce.tts.interface import SpeakingStyle

PLAN = "plan.jsonl"
SHARD = "shard-{:05d}"
SIZE = 200  # utterances of a shard
BATCH = 20  # utterances that are spoken together
LEVEL = 0.05  # RMS of an utterance before a codec
BABBLE_VOICES = 6


class Speaker(Protocol):
    """What speaks: `KokoroTTS`."""

    def say_each(self, requests: Sequence[tuple[str, str | None, SpeakingStyle]]) -> list[Sound]:
        """The sounds of texts, each in its voice and style."""
        ...


def speak_plan(
    utterances: Sequence[Utterance],
    out: Path,
    speaker: Speaker,
    size: int = SIZE,
    clean: bool = False,
    report: Callable[[dict[str, object]], None] = lambda _: None,
) -> int:
    """Speak the shards that are missing; returns how many that were. `clean`: without rooms, noise and lines."""
    out.mkdir(parents=True, exist_ok=True)
    write_plan(out / PLAN, utterances)
    shards = range(0, len(utterances), size)
    missing = [number for number in range(len(shards)) if not _file(out, number).with_suffix(".json").is_file()]
    for number in missing:
        chosen = utterances[shards[number] : shards[number] + size]
        sounds = _spoken(chosen, speaker)
        if not clean:
            sounds = [_picked_up(sounds, index, chosen[index]) for index in range(len(chosen))]
        _save(_file(out, number), chosen, sounds)
        report({"shard": number, "of": len(shards), "seconds": sum(map(len, sounds)) / RATE})
    return len(missing)


def join(out: Path, utterances: Sequence[Utterance], size: int = SIZE) -> dict[str, Corpus]:
    """Write the corpora of a plan whose shards are all there; returned by part."""
    parts: dict[str, list[tuple[NDArray[np.int16], str, str]]] = {part: [] for part in PARTS}
    for number, begin in enumerate(range(0, len(utterances), size)):
        shard = Corpus.load(_file(out, number))
        for index, utterance in enumerate(utterances[begin : begin + size]):
            samples = shard.samples[shard.starts[index] : shard.starts[index + 1]]
            parts[utterance.part].append((samples, shard.texts[index], shard.voices[index]))
    corpora = {part: Corpus.of(spoken) for part, spoken in parts.items() if spoken}
    for part, corpus in corpora.items():
        corpus.save(out / part)
    return corpora


def _file(out: Path, number: int) -> Path:
    return out / SHARD.format(number)


def _spoken(utterances: Sequence[Utterance], speaker: Speaker) -> list[NDArray[np.float32]]:
    sounds: list[NDArray[np.float32]] = []
    for begin in range(0, len(utterances), BATCH):
        batch = utterances[begin : begin + BATCH]
        requests = [(each.text, each.voice, SpeakingStyle(speed=each.speed, clean=False)) for each in batch]
        for each, sound in zip(batch, speaker.say_each(requests), strict=True):
            samples = sound.resampled(RATE).samples[0]
            sounds.append(trimmed(samples, f"voice {each.voice} is silent on {each.text!r}"))
    return sounds


def _save(path: Path, utterances: Sequence[Utterance], sounds: Sequence[NDArray[np.float32]]) -> None:
    """Write a shard beside its place, and move it there: its text file last, which makes it whole."""
    names = [f"kokoro-{each.voice}" for each in utterances]
    partial = path.with_name(f"partial-{path.name}")
    spoken = [float_to_pcm16(samples) for samples in sounds]
    Corpus.of(list(zip(spoken, [each.text for each in utterances], names, strict=True))).save(partial)
    for suffix in (".npz", ".json"):
        os.replace(partial.with_suffix(suffix), path.with_suffix(suffix))


def _picked_up(sounds: Sequence[NDArray[np.float32]], index: int, utterance: Utterance) -> NDArray[np.float32]:
    """A sound in its condition; babble is made of the sounds after it in the shard."""
    condition = utterance.condition
    if condition == Condition():
        return sounds[index]
    seed = zlib.crc32(utterance.to_json().encode())
    generator = torch.Generator().manual_seed(seed)
    others = [sounds[(index + offset) % len(sounds)] for offset in range(BABBLE_VOICES)]
    rows = torch.stack([torch.from_numpy(np.resize(other, len(sounds[index]))) for other in others])
    samples = rows[:1]
    if condition.room:
        samples = reverberate(samples, torch.tensor([condition.room]), generator)
    if condition.noise:
        samples = at_snr(samples, noise(condition.noise, rows, generator)[:1], condition.snr)
    if condition.telephone:
        samples = telephone(samples)
    return _coded(levelled(samples, LEVEL).clamp(-1, 1), condition.codec)[0].numpy()


def _coded(samples: Tensor, codec: str) -> Tensor:
    """What a codec leaves of a sound.  # [1, time]"""
    if codec == "g711":
        return mu_law(samples)
    if codec == "opus":
        coded = io.BytesIO()
        write(coded, Sound(samples.numpy(), RATE), "opus")
        decoded = torch.from_numpy(read(coded.getvalue(), RATE).samples)
        return torch.nn.functional.pad(decoded, (0, max(0, samples.shape[1] - decoded.shape[1])))[:, : samples.shape[1]]
    return samples


def print_json(content: dict[str, object]) -> None:
    """Report progress as a JSON line."""
    print(json.dumps(content), flush=True)
