"""`viva train turn-end --data DIR --out DIR`: fine-tune the encoder of a Whisper to tell ends of turns from pauses.

The data are made by `viva train turn-end-data`; `viva bench turn-end` measures the model. Matrices are rounded to the
bits that they are packed with, so that the packed model is the one that was trained.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from vivavoce.audio.mel import WhisperMel
from vivavoce.models.quantised import pack_file
from vivavoce.models.turn_end import CONFIG, MELS, TurnEndConfig, TurnEndNetwork, load_network, save_network
from vivavoce.models.whisper.model import Whisper
from vivavoce.nn.attention import sinusoids
from vivavoce.train.asr.train import Rounding
from vivavoce.train.augment import mask_mel, warp_bands
from vivavoce.train.loop import Batch, Budget, Learner, TrainingRun
from vivavoce.train.turn_end.corpus import TurnUtterance, read_shards
from vivavoce.train.turn_end.examples import Examples, derived

WEIGHTS = "model.safetensors"
POSITIONS = "embed_positions.weight"
SMOOTHING = 0.02
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
    seed: int = 0,
    device: str = "cpu",
    evaluated: int = EVALUATED,
) -> dict[str, float]:
    """Train the network, write it, and return figures of the held-out voices."""
    network = network.to(device).train().requires_grad_(True)
    network.encoder.embed_positions.requires_grad_(False)
    mel = WhisperMel(MELS).to(device)
    parts = {part: [each for each in utterances if each.part == part] for part in ("train", "held_out")}
    examples = Examples(parts["train"], network.config.samples, device)
    print(json.dumps({"places": examples.counts}), flush=True)

    rounding = Rounding(network, bits)

    def loss(batch: Batch) -> dict[str, Tensor]:
        odds = functional_call(network, rounding(batch["roundness"]), (batch["mel"],)).float()
        wanted = batch["finished"] * (1 - 2 * SMOOTHING) + SMOOTHING
        return {
            "loss": functional.binary_cross_entropy_with_logits(odds, wanted),
            "wrong": ((odds > 0) != (batch["finished"] > 0.5)).float().mean(),
        }

    learner = Learner({"network": network}, loss, rate, weight_decay=0.02, average=0.999)
    run = TrainingRun(out, {"network": learner}, budget, seed)
    for step in run:
        with torch.no_grad():
            sounds, finished = examples.batch(batch, derived(step.seed, 2))
            generator = step.generator(device)
            features = mask_mel(warp_bands(mel(sounds), generator), generator, span=12)
        roundness = torch.tensor(min(1.0, 2 * step.progress), device=device)
        run.record(learner.step({"mel": features, "finished": finished, "roundness": roundness}, step.rate_share))
    learner.swap_average()
    save_network(network.eval(), out)
    return evaluate(network, parts["held_out"], device, evaluated) if parts["held_out"] else {}


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
    parser.add_argument("--bits", type=int, default=6)
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
    budget = Budget(options.steps, options.seconds)
    figures = train(
        network, read_shards(options.data), options.out, budget,
        batch=options.batch, rate=options.rate, bits=options.bits, seed=options.seed, device=options.device,
        evaluated=options.evaluated,
    )  # fmt: skip
    package(options.out, options.out / "packed", options.bits)
    print(json.dumps(figures), flush=True)
