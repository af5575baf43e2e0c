"""`viva train turn-end --data DIR --out DIR`: fine-tune the encoder of a Whisper to tell ends of turns from pauses.

The data are made by `viva train turn-end-data`; `viva bench turn-end` measures the model. Matrices are rounded to the
bits that they are packed with, so that the packed model is the one that was trained.

For a CPU: `--frozen` leaves the convolutions and the first layers as they are, and with `--windows` the states that
these make of so many windows are computed once, so that a step costs the last layers alone.
"""

import argparse
import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from vivavoce.audio.mel import WhisperMel
from vivavoce.cpu_speed import is_bfloat16_fast
from vivavoce.errors import InputError
from vivavoce.models.quantised import pack_file
from vivavoce.models.turn_end import CONFIG, MELS, TurnEndConfig, TurnEndNetwork, load_network, save_network
from vivavoce.models.whisper.model import Whisper
from vivavoce.nn.attention import sinusoids
from vivavoce.train.asr.train import Rounding
from vivavoce.train.augment import mask_mel, warp_bands
from vivavoce.train.loop import Batch, Budget, Learner, TrainingRun
from vivavoce.train.turn_end.corpus import TurnUtterance, is_program, read_shards
from vivavoce.train.turn_end.examples import Examples, derived

WEIGHTS = "model.safetensors"
POSITIONS = "embed_positions.weight"
SMOOTHING = 0.02
KOKORO = 1  # the group of windows of its voices; 0 is that of programs
EVALUATED = 40  # batches of each kind of place
PAUSES_TAKEN = 0.05  # share of pauses that may be taken for ends


def initialised(config: TurnEndConfig, whisper: Path | None) -> TurnEndNetwork:
    """A network whose encoder begins as the first layers of a Whisper's, if one is given."""
    network = TurnEndNetwork(config)
    encoder = network.encoder
    if whisper is not None:
        published = Whisper.load(whisper).encoder.state_dict()
        own = {name: published[name] for name in encoder.state_dict() if name != POSITIONS}
        encoder.load_state_dict(own, strict=False)
    positions = sinusoids(encoder.config.max_source_positions, config.d_model)
    encoder.embed_positions.weight.data.copy_(positions)
    return network


def train(
    network: TurnEndNetwork,
    utterances: list[TurnUtterance],
    out: Path,
    budget: Budget,
    *,
    batch: int = 256,
    rate: float = 2e-4,
    bits: int = 6,
    frozen: int = 0,
    windows: int = 0,
    kept: float = 0.0,
    seed: int = 0,
    device: str = "cpu",
    evaluated: int = EVALUATED,
) -> dict[str, float]:
    """Train the network, write it, and return figures of the held-out voices.

    The first `frozen` layers stay as they are. `windows`: so many are made once, instead of new ones for each step.
    `kept`: how far windows of Kokoro's voices are to be answered as the network answers them now, between 0 and 1.
    """
    network = network.to(device).train().requires_grad_(True)
    network.encoder.embed_positions.requires_grad_(False)
    trained = LastLayers(network, frozen)
    parts = {part: [each for each in utterances if each.part == part] for part in ("train", "held_out")}
    source = PauseWindows(network, parts["train"], device, frozen, kept)
    print(json.dumps({"places": source.counts}), flush=True)
    rounding = Rounding(trained, bits)

    def loss(batch: Batch) -> dict[str, Tensor]:
        odds = functional_call(trained, rounding(batch["roundness"]), (batch["inputs"],)).float()
        return {
            "loss": functional.binary_cross_entropy_with_logits(odds, batch["finished"]),
            "wrong": ((odds > 0) != (batch["finished"] > 0.5)).float().mean(),
        }

    learner = Learner({"network": network}, loss, rate, weight_decay=0.02, average=0.999, half_on_cpu=True)
    made = source.many(windows, batch, seed) if windows else None
    run = TrainingRun(out, {"network": learner}, budget, seed)
    for step in run:
        if made is None:
            example = source.batch(batch, step.seed)
        else:
            rows = torch.randint(windows, (batch,), generator=step.generator())
            example = {name: values[rows].to(device, torch.float32) for name, values in made.items()}
        roundness = torch.tensor(min(1.0, 2 * step.progress), device=device)
        run.record(learner.step({**example, "roundness": roundness}, step.rate_share))
    learner.swap_average()
    save_network(network.eval(), out)
    return evaluate(network, parts["held_out"], device, evaluated) if parts["held_out"] else {}


class LastLayers(nn.Module):
    """What of a network is trained: all of it, or what follows its first layers, which are frozen."""

    def __init__(self, network: TurnEndNetwork, frozen: int) -> None:
        super().__init__()
        if not 0 <= frozen <= network.config.layers:
            raise InputError(f"{frozen} layers cannot be frozen of an encoder of {network.config.layers}")
        self.network, self.frozen = network, frozen
        if frozen:
            encoder = network.encoder
            for module in (encoder.conv1, encoder.conv2, *encoder.layers[:frozen]):
                module.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Log-odds, from log-mels where nothing is frozen, else from the states of the frozen layers."""
        if not self.frozen:
            odds: Tensor = self.network(inputs)
            return odds
        return self.network.decided(self.network.encoder.finished(inputs, self.frozen))


class PauseWindows:
    """What is trained on: the inputs of `LastLayers` and the wanted answers, from windows of random places.

    Where the utterances are those of programs and of Kokoro, half of the windows are of either.
    """

    def __init__(
        self,
        network: TurnEndNetwork,
        utterances: Sequence[TurnUtterance],
        device: str,
        frozen: int = 0,
        kept: float = 0.0,
    ) -> None:
        self.device, self.frozen, self.kept = device, frozen, kept
        self.start = deepcopy(network).eval().requires_grad_(False)
        self.last = LastLayers(self.start, frozen)
        self.mel = WhisperMel(MELS).to(device)
        kind = torch.device(device).type
        self.half = torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda" or is_bfloat16_fast())
        groups = [[each for each in utterances if is_program(each) == wanted] for wanted in (True, False)]
        self.groups = {
            index: Examples(group, network.config.samples, device) for index, group in enumerate(groups) if group
        }

    @property
    def counts(self) -> list[dict[str, int]]:
        """Places of each kind, of the programs and of Kokoro."""
        return [examples.counts for examples in self.groups.values()]

    @torch.no_grad()
    def batch(self, size: int, seed: int) -> dict[str, Tensor]:
        """Inputs and the wanted probabilities; deterministic for a seed."""
        parts = [
            self._of(index, examples, size * (place + 1) // len(self.groups) - size * place // len(self.groups), seed)
            for place, (index, examples) in enumerate(self.groups.items())
        ]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def many(self, count: int, size: int, seed: int) -> dict[str, Tensor]:
        """So many windows, made in batches, in host memory."""
        inputs, finished = list[Tensor](), list[Tensor]()
        while sum(map(len, inputs)) < count:
            made = self.batch(size, derived(seed, 3 + len(inputs)))
            inputs.append(made["inputs"].to("cpu", torch.bfloat16 if self.frozen else torch.float32))
            finished.append(made["finished"].cpu())
        return {"inputs": torch.cat(inputs)[:count], "finished": torch.cat(finished)[:count]}

    def _of(self, index: int, examples: Examples, size: int, seed: int) -> dict[str, Tensor]:
        sounds, finished, is_paused = examples.drawn(size, derived(seed, 2 + index))
        generator = torch.Generator(self.device).manual_seed(derived(seed, 4 + index))
        inputs = mask_mel(warp_bands(self.mel(sounds), generator), generator, span=12)
        wanted = finished * (1 - 2 * SMOOTHING) + SMOOTHING
        with self.half:
            if self.frozen:
                inputs = self.start.encoder.embedded(inputs)
                for layer in self.start.encoder.layers[: self.frozen]:
                    inputs = layer(inputs)
            if self.kept > 0 and index == KOKORO:
                kept = torch.lerp(wanted, self.last(inputs).float().sigmoid(), self.kept)
                wanted = torch.where(is_paused, wanted, kept)  # the start may not know pauses within a turn
        return {"inputs": inputs.float(), "finished": wanted}


@torch.inference_mode()
def evaluate(
    network: TurnEndNetwork, utterances: list[TurnUtterance], device: str, batches: int = EVALUATED
) -> dict[str, float]:
    """Per language: ends found while few pauses are taken for ends, and the pauses of each kind taken then."""
    figures: dict[str, float] = {}
    mel = WhisperMel(MELS).to(device)
    for code in sorted({each.language for each in utterances}):
        examples = Examples([each for each in utterances if each.language == code], network.config.samples, device)
        by_kind: dict[str, Tensor] = {}
        for kind in examples.places:
            sounds = [examples.batch(64, seed, (kind,))[0] for seed in range(batches)]
            by_kind[kind] = torch.cat([network(mel(sound)) for sound in sounds])
        pauses = torch.cat([odds for kind, odds in by_kind.items() if kind != "end"])
        threshold = pauses.quantile(1 - PAUSES_TAKEN)
        figures[f"{code} threshold"] = float(threshold.sigmoid())
        figures |= {f"{code} {kind}": float((odds > threshold).float().mean()) for kind, odds in by_kind.items()}
        figures |= {f"{code} {kind} over 0.5": float((odds > 0).float().mean()) for kind, odds in by_kind.items()}
    return {name: round(value, 4) for name, value in figures.items()}


def package(trained: Path, out: Path, bits: int) -> None:
    """Write a trained model with its matrices in few bits."""
    out.mkdir(parents=True, exist_ok=True)
    pack_file(trained / WEIGHTS, out / WEIGHTS, low_bits={"": bits})
    (out / CONFIG).write_bytes((trained / CONFIG).read_bytes())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; `packed` in it has the model")
    parser.add_argument("--init", type=Path, help="a Whisper whose encoder to begin with")
    parser.add_argument("--start", type=Path, help="a turn-end model to go on from")
    parser.add_argument("--layers", type=int, default=TurnEndConfig.layers)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--warmup", type=int, default=Budget.warmup, help="steps until the rate is reached")
    parser.add_argument("--bits", type=int, default=6)
    parser.add_argument("--frozen", type=int, default=0, help="encoder layers that stay as they are")
    parser.add_argument("--windows", type=int, default=0, help="make so many once; default: new ones for each step")
    parser.add_argument(
        "--kept", type=float, default=0.0, help="how far Kokoro's windows are to be answered as by the start, 0 to 1"
    )
    parser.add_argument("--shift", type=float, default=1.6, help="log-odds subtracted from the answers")
    parser.add_argument("--evaluated", type=int, default=EVALUATED, help="batches of each kind; few for a CPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    network = (
        load_network(options.start)
        if options.start
        else initialised(TurnEndConfig(layers=options.layers), options.init)
    )
    network.config = replace(network.config, shift=options.shift)
    budget = Budget(options.steps, options.seconds, options.warmup)
    figures = train(
        network, read_shards(options.data), options.out, budget,
        batch=options.batch, rate=options.rate, bits=options.bits, seed=options.seed, device=options.device,
        frozen=options.frozen, windows=options.windows, kept=options.kept, evaluated=options.evaluated,
    )  # fmt: skip
    package(options.out, options.out / "packed", options.bits)
    print(json.dumps(figures), flush=True)
