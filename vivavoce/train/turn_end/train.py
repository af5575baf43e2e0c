"""`viva train turn-end --data DIR --out DIR`: train the turn-end model on the CPU.

The data are made by `viva train turn-end-data`; `viva bench turn-end` measures the model. A few minutes of one core are
enough.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from vivavoce.audio.turn_model import TurnEndNetwork, TurnFeatures, read_network, write_network
from vivavoce.train.augment import mask_mel
from vivavoce.train.turn_end.corpus import TurnUtterance, read_shards
from vivavoce.train.turn_end.examples import Examples

MODEL = "model.safetensors"


@dataclass(frozen=True)
class TurnTraining:
    """How long and on how much to train. The examples are augmented once, which costs more than a step of training."""

    examples: int = 6000
    epochs: int = 12
    batch: int = 64
    rate: float = 2e-3
    width: int = 64
    seed: int = 0


Report = Callable[[dict[str, float]], None]


@torch.no_grad()
def augmented(
    utterances: Sequence[TurnUtterance], options: TurnTraining, report: Report = lambda _: None
) -> tuple[Tensor, Tensor]:
    """Features and labels of random pauses of the part `train`.  # [example, mel, frame] in float16, [example]"""
    examples = Examples([each for each in utterances if each.part == "train"], options.seed)
    features, found, labels = TurnFeatures(), [], []
    started = time.monotonic()
    for _ in range(max(1, options.examples // options.batch)):
        sounds, label = examples.batch(options.batch)
        found.append(features(sounds).half())
        labels.append(label)
    report({"examples": sum(map(len, found)), "seconds": time.monotonic() - started})
    return torch.cat(found), torch.cat(labels)


def fit(
    network: TurnEndNetwork, features: Tensor, labels: Tensor, options: TurnTraining, report: Report = lambda _: None
) -> TurnEndNetwork:
    """Train a network on augmented examples; deterministic for its arguments."""
    generator = torch.Generator().manual_seed(options.seed)
    optimiser = torch.optim.AdamW(network.parameters(), lr=options.rate, weight_decay=0.02)
    batches = len(labels) // options.batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, options.rate, total_steps=options.epochs * batches, pct_start=0.15
    )
    started = time.monotonic()
    for epoch in range(options.epochs):
        losses = []
        for rows in torch.randperm(len(labels), generator=generator)[: batches * options.batch].split(options.batch):
            mel = mask_mel(features[rows].float(), generator, span=15)
            loss = functional.binary_cross_entropy_with_logits(network(mel), labels[rows] * 0.98 + 0.01)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
        report({"epoch": epoch, "loss": sum(losses) / len(losses), "seconds": time.monotonic() - started})
    return network.eval()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="weights to begin with")
    for option in fields(TurnTraining):
        parser.add_argument(f"--{option.name}", type=type(option.default), default=option.default)
    given = parser.parse_args(arguments)
    options = TurnTraining(**{option.name: getattr(given, option.name) for option in fields(TurnTraining)})
    torch.manual_seed(options.seed)
    network = TurnEndNetwork(options.width) if given.start is None else read_network(given.start).train()
    features, labels = augmented(read_shards(given.data), options, _print)
    write_network(fit(network, features, labels, options, _print), given.out / MODEL)


def _print(values: dict[str, float]) -> None:
    print(json.dumps(values), flush=True)
