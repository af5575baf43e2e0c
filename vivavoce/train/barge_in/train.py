"""`viva train barge-in --data DIR --noises DIR --out DIR`: train the barge-in model on the CPU.

The speech is made by `viva train barge-in-data`; `--noises` names a folder of recorded coughs and other sounds that are
no words, `--people` one with a folder of recordings for each person who speaks. `viva bench overlap` measures the
model. Half an hour of one core is enough, most of it for the examples, which are kept beside the model.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vivavoce.dialogue.overlap_model import (
    CONTEXT,
    DISTANCES,
    FLOOR_DB,
    INPUTS,
    LEVEL,
    MELS,
    SCALARS,
    OverlapNetwork,
    SoundKind,
)
from vivavoce.train.barge_in.corpus import people_utterances, read_overlaps
from vivavoce.train.barge_in.examples import Example, make_examples, read_examples, write_examples
from vivavoce.train.barge_in.sounds import recorded

MODEL = "model.safetensors"
CALLS_A_FILE = 64
BAND_LIMITED = 0.25  # share of spectra that lose their upper bands
MASKED = 8  # mels that a masked band has at most
FORGOTTEN = 0.15  # share of calls where it is not known how the user usually sounds
SMOOTHING = 0.05
USUAL_ERROR_DB = (-1.0, 2.5)  # mean and deviation of what a sound is louder than the user's level says
CURVE_DB, SOUND_CURVE_DB = 2.5, 1.0  # deviation of the slope of a call's spectra, and more of the sound's own
EARLY, LATE = 1, 10  # windows: what comes before the first does not count, from the second on it counts fully
Report = Callable[[dict[str, float]], None]


@dataclass(frozen=True)
class BargeInTraining:
    """How long and on how much to train."""

    calls: int = 2560
    check_calls: int = 128
    recordings: int = 600
    recordings_a_person: int = 160
    epochs: int = 12
    batch: int = 64
    rate: float = 2e-3
    decay: float = 0.1
    dropout: float = 0.3
    hidden: int = 80
    state: int = 80
    seed: int = 0


class OverlapModule(nn.Module):
    """`OverlapNetwork` in torch."""

    def __init__(self, hidden: int, state: int) -> None:
        super().__init__()
        self.input = nn.Linear(INPUTS, hidden)
        self.recurrent = nn.GRU(hidden, state, batch_first=True)
        self.output = nn.Linear(state, len(SoundKind))

    def forward(self, inputs: Tensor, drop: float = 0.0) -> Tensor:
        """# [batch, window, INPUTS] → [batch, window, kind]"""
        hidden = functional.dropout(self.input(inputs).relu(), drop)
        states, _ = self.recurrent(hidden)
        return self.output(functional.dropout(states, drop))

    def network(self) -> OverlapNetwork:
        """The weights as arrays."""
        parts = (self.input.weight, self.input.bias, *self.recurrent.all_weights[0], self.output.weight)
        return OverlapNetwork(*[part.detach().half().float().numpy() for part in (*parts, self.output.bias)])


def write_overlap_network(network: OverlapNetwork, path: Path) -> None:
    """Write the weights in 16 bits."""
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({each.name: getattr(network, each.name).astype(np.float16) for each in fields(network)}, path)


def padded(examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, kinds and the weight of each window.  # [example, window, INPUTS], [example], [example, window]"""
    max_windows = max(len(each.inputs) for each in examples)
    inputs = torch.zeros(len(examples), max_windows, INPUTS)
    weights = torch.zeros(len(examples), max_windows)
    window = torch.arange(max_windows) - (CONTEXT + EARLY)
    ramp = (0.3 + 0.7 * window / (LATE - EARLY)).clamp_max(1.0) * (window >= 0)
    for index, each in enumerate(examples):
        inputs[index, : len(each.inputs)] = torch.from_numpy(each.inputs)
        weights[index, : len(each.inputs)] = ramp[: len(each.inputs)]
    return inputs, torch.tensor([int(each.kind) for each in examples]), weights


def fit(examples: Sequence[Example], options: BargeInTraining, report: Report = lambda _: None) -> OverlapModule:
    """Train on examples; deterministic for its arguments."""
    torch.manual_seed(options.seed)
    generator = torch.Generator().manual_seed(options.seed)
    module = OverlapModule(options.hidden, options.state)
    inputs, kinds, weights = padded(examples)
    balance = torch.bincount(kinds, minlength=len(SoundKind)).clamp_min(1).float().rsqrt()
    weights = weights * (balance / balance[kinds].mean())[kinds, None]
    optimiser = torch.optim.AdamW(module.parameters(), lr=options.rate, weight_decay=options.decay)
    batches = max(1, len(kinds) // options.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, options.rate, total_steps=options.epochs * batches, pct_start=0.15
    )
    started = time.monotonic()
    for epoch in range(options.epochs):
        losses = []
        for rows in torch.randperm(len(kinds), generator=generator)[: batches * options.batch].split(options.batch):
            varied = _varied(inputs[rows], generator)
            loss = _loss(module(varied, drop=options.dropout), kinds[rows], weights[rows], SMOOTHING)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
        report({"epoch": epoch, "loss": sum(losses) / len(losses), "seconds": time.monotonic() - started})
    return module.eval()


def _varied(inputs: Tensor, generator: torch.Generator) -> Tensor:
    """With another usual level of the user, random curves, edges and masks of the spectra, and a little noise."""
    size = len(inputs)

    def draw() -> Tensor:
        return torch.rand(size, 1, 1, generator=generator)

    gain_db = USUAL_ERROR_DB[0] + USUAL_ERROR_DB[1] * torch.randn(size, 1, 1, generator=generator)
    call = (gain_db + _curves(size, CURVE_DB, generator)) / 20
    own = _curves(size, SOUND_CURVE_DB, generator) / 20
    mel, edge, first, width = torch.arange(MELS), 0.6 + 0.3 * draw(), draw() * MELS, draw() * MASKED
    is_lost = (draw() < BAND_LIMITED) & (mel / (MELS - 1) > edge) | (mel >= first) & (mel < first + width)

    def changed(spectrum: Tensor, curve: Tensor) -> Tensor:
        return torch.where(is_lost, (spectrum + curve).clamp_max(FLOOR_DB / 20), spectrum + curve)

    sizes = [MELS, MELS, SCALARS, MELS, DISTANCES]
    is_known = inputs.split(sizes, -1)[3].any(-1, keepdim=True) & (draw() >= FORGOTTEN)
    noisy = inputs + 0.05 * torch.randn(inputs.shape, generator=generator)
    one, two, scalars, usual, distances = noisy.split(sizes, -1)
    scalars[..., LEVEL] += gain_db[..., 0] / 10
    distances[..., 1:] *= is_known
    usual = changed(usual, call) * is_known
    return torch.cat([changed(one, call + own), changed(two, call + own), scalars, usual, distances], -1)


def _curves(size: int, deviation_db: float, generator: torch.Generator) -> Tensor:
    """Smooth random curves over the mels: the slope deviates by so much, finer waves by less.  # [size, 1, MELS]"""
    orders = torch.arange(1, 6)
    waves = torch.cos(torch.pi * orders[:, None] * torch.linspace(0, 1, MELS))
    return (deviation_db * torch.randn(size, 1, len(orders), generator=generator) / orders) @ waves


def _loss(outputs: Tensor, kinds: Tensor, weights: Tensor, smoothing: float = 0.0) -> Tensor:
    """Of the kinds, and once more of turn or not, which is what decides."""
    log_odds = outputs.log_softmax(-1)
    of_kind = log_odds.gather(-1, kinds[:, None, None].expand(-1, outputs.shape[1], 1))[..., 0]
    kind_loss = -(1 - smoothing) * of_kind - smoothing * log_odds.mean(-1)
    others = torch.cat([outputs[..., : SoundKind.TURN], outputs[..., SoundKind.TURN + 1 :]], -1).logsumexp(-1)
    is_turn = (kinds == SoundKind.TURN).float()[:, None].expand_as(others)
    turn_loss = functional.binary_cross_entropy_with_logits(
        outputs[..., SoundKind.TURN] - others, is_turn * (1 - 2 * smoothing) + smoothing, reduction="none"
    )
    return ((0.5 * kind_loss + turn_loss) * weights).sum() / weights.sum()


@torch.no_grad()
def turn_odds(module: OverlapModule, examples: Sequence[Example]) -> list[Tensor]:
    """Log-odds of a turn, window by window from the start of each overlap on."""
    inputs, _, _ = padded(examples)
    outputs = module(inputs)
    others = torch.cat([outputs[..., : SoundKind.TURN], outputs[..., SoundKind.TURN + 1 :]], -1).logsumexp(-1)
    odds = outputs[..., SoundKind.TURN] - others
    return [row[CONTEXT : len(each.inputs)] for row, each in zip(odds, examples, strict=True)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--noises", type=Path, help="a folder of recorded sounds that are no words")
    parser.add_argument("--people", type=Path, help="a folder with a folder of recordings for each person")
    parser.add_argument("--out", type=Path, required=True)
    for option in fields(BargeInTraining):
        parser.add_argument(f"--{option.name.replace('_', '-')}", type=type(option.default), default=option.default)
    given = parser.parse_args(arguments)
    options = BargeInTraining(**{option.name: getattr(given, option.name) for option in fields(BargeInTraining)})
    given.out.mkdir(parents=True, exist_ok=True)
    made = {
        part: examples_of(given.data, given.noises, given.people, given.out, part, calls, options)
        for part, calls in (("train", options.calls), ("check", options.check_calls))
    }
    module = fit(made["train"], options, _print)
    write_overlap_network(module.network(), given.out / MODEL)
    _print(stopped(module, made["check"]))


def examples_of(
    data: Path,
    noises: Path | None,
    people: Path | None,
    out: Path,
    part: str,
    calls: int,
    options: BargeInTraining,
) -> list[Example]:
    """The examples of so many calls, in files of `CALLS_A_FILE`; those that are there are read."""
    found: list[Example] = []
    utterances, sounds, spoken = None, None, None
    for number in range(-(-calls // CALLS_A_FILE)):
        path = out / f"{part}-{number:03d}.npz"
        if not path.is_file():
            utterances = utterances or read_overlaps(data)
            sounds = sounds or ([] if noises is None else recorded(noises, options.recordings))
            spoken = spoken or ([] if people is None else people_utterances(people, options.recordings_a_person))
            seed = options.seed + 1000 * number
            write_examples(path, make_examples(utterances, sounds, spoken, part, CALLS_A_FILE, seed))
        found += read_examples(path)
        _print({f"{part} overlaps": len(found)})
    return found


def stopped(module: OverlapModule, examples: Sequence[Example], enough: float = 1.0) -> dict[str, float]:
    """The share of the overlaps of each kind whose odds pass a threshold, and the milliseconds of turns (p50)."""
    by_kind: dict[SoundKind, list[int | None]] = {}
    for odds, each in zip(turn_odds(module, examples), examples, strict=True):
        passed = torch.nonzero(odds[EARLY:] > enough)
        by_kind.setdefault(each.kind, []).append(int(passed[0]) + EARLY + 1 if len(passed) else None)
    figures = {
        f"{kind.name.lower()} stopped": float(np.mean([each is not None for each in found]))
        for kind, found in sorted(by_kind.items())
    }
    times = [32 * each for each in by_kind.get(SoundKind.TURN, []) if each is not None]
    return figures | {"turn ms p50": float(np.median(times)) if times else 0.0}


def _print(values: dict[str, float]) -> None:
    print(json.dumps(values), flush=True)
