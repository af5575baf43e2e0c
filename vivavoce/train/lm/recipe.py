"""Hyperparameters of the language model."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LMRecipe:
    """Hyperparameters; `--set` changes them, and `metrics.json` lists them."""

    hidden: int = 320
    inner: int = 640
    shared_layers: int = 5
    modality_layers: int = 2
    heads: int = 5
    kv_heads: int = 1
    head_dim: int = 64
    text_entries: int = 1024
    lines: int = 16
    length: int = 1024
    dropout: float = 0.15
    heard_noise: float = 0.15
    """Maximum share of user codes replaced or masked, drawn for each line."""
    heard_stray: float = 0.06
    """Maximum probability that a dimension of a user code moves one step, per row and per voice."""
    lattice: tuple[int, ...] = (4, 4, 4, 4, 3, 3)
    """Levels of the encoder's lattice; codebooks of another size have no jitter."""
    said_noise: float = 0.03
    heard_weight: float = 0.1
    weight_decay: float = 0.05
    average: float = 0.998
    """Decay of the weight average of the last stage."""
    warmup: int = 200
    log_every: int = 100
    use_graph: bool = True
    evaluation_seconds: float = 45.0
    steps: tuple[int, int, int] = (100_000, 100_000, 1_000_000)
    """Maximum steps of each stage."""


TINY = LMRecipe(
    hidden=64, inner=128, shared_layers=1, modality_layers=1, heads=2, head_dim=32, text_entries=320, lines=4,
    length=256, average=0.8, dropout=0.0, heard_noise=0.0, said_noise=0.0, heard_stray=0.0, warmup=5, log_every=10,
    evaluation_seconds=0.0, steps=(40, 20, 120),
)  # fmt: skip
