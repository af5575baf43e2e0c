"""Input of a plan: model sizes, times measured on an H200, data of other accelerators, and load assumptions."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from vivavoce.errors import InputError

FRAME_SECONDS = 0.08


@dataclass(frozen=True)
class Curve:
    """Milliseconds by batch size: linear between measured points, extrapolated beyond the last two."""

    points: tuple[tuple[float, float], ...]

    def __call__(self, count: float) -> float:
        """Milliseconds at a batch size; below the first point proportional, for fractional load."""
        if count <= self.points[0][0]:
            return self.points[0][1] * count / self.points[0][0]
        (left, low), (right, high) = next(
            ((a, b) for a, b in pairwise(self.points) if count <= b[0]), (self.points[-2], self.points[-1])
        )
        return low + (high - low) * (count - left) / (right - left)

    def scaled(self, factor: float) -> "Curve":
        """Scale the cost beyond the first item; the first is dominated by launch latency."""
        first = self.points[0][1]
        return Curve(tuple((count, first + (milliseconds - first) * factor) for count, milliseconds in self.points))


@dataclass(frozen=True)
class Measured:
    """Times of one accelerator from `viva bench lm` and `viva bench serve`."""

    device: str
    step: Curve
    """Language model step by sequences, at `context` rows each."""
    hop: Curve
    """Largest vocoder hop by replies, up to the maximum batch."""
    hop_codes: int
    """Codes of that hop."""
    encoder: Curve
    """Speech encoder step of 80 ms by speaking users."""
    first_codes: int
    first_sound_ms: float
    prefill_rows_ms: float
    """Prefill milliseconds per row of history."""
    context: int

    @property
    def written_together(self) -> int:
        """Replies with double-buffered windows: full batches of both vocoder batchers."""
        return 2 * round(self.hop.points[-1][0])

    def voice_share(self, replies: float) -> float:
        """Share of time spent on the vocoder for this many replies, in full batches."""
        max_count = self.hop.points[-1][0]
        return (
            self.hop(min(replies, max_count)) * max(1.0, replies / max_count) / (1e3 * FRAME_SECONDS * self.hop_codes)
        )

    def encoder_share(self, users: float) -> float:
        """Share of time spent on the speech encoder."""
        max_count = self.encoder.points[-1][0]
        return self.encoder(min(users, max_count)) * max(1.0, users / max_count) / (1e3 * FRAME_SECONDS)


@dataclass(frozen=True)
class PlanSizes:
    """Sizes of a speech-to-speech model."""

    name: str
    layers: int
    layer_parameters: int
    """Total of all layers."""
    tail_layers: int
    """Layers of the audio tail, which stay at 8 bits when the others have 4."""
    heads_parameters: int
    embedding_parameters: int
    kv_row_bytes: int
    """In bfloat16."""
    codec_bytes: float
    voice_bytes: float
    """Of one voice, shared by all its sessions."""
    speaking_bytes: float
    """Of one active reply."""

    def weights(self, method: "PlanMethod") -> float:
        """Bytes of the language model's weights."""
        tail = self.layer_parameters * self.tail_layers / self.layers
        rounded = (self.layer_parameters - tail) * method.bits + tail * method.tail_bits
        return rounded / 8 + 2.0 * (self.heads_parameters + self.embedding_parameters)

    def read_each_step(self, method: "PlanMethod") -> float:
        """Bytes of weights that a step reads."""
        return self.weights(method) - 2.0 * self.embedding_parameters


@dataclass(frozen=True)
class PlanMethod:
    """Weight and KV cache format; the audio tail may have more bits."""

    name: str
    bits: float
    tail_bits: float
    kv_share: float = 1.0
    note: str = ""
    prefill_bytes: float = 0.0
    """Beyond the reserve, to dequantise the largest matrix for prefill."""


INT4_PREFILL = 0.4e9  # two copies of the largest matrix in 16 bits, more than the other kinds need
METHODS = {
    method.name: method
    for method in (
        PlanMethod("bf16", 16, 16, note="as published"),
        PlanMethod("int8", 8, 8, note="a scale per row; no audible loss"),
        PlanMethod("fp8", 8, 8, note="e4m3; needs Ada, Hopper or newer"),
        PlanMethod("int4", 4.5, 8, note="groups of 64; the audio tail keeps 8 bits", prefill_bytes=INT4_PREFILL),
        PlanMethod("int8+kv8", 8, 8, 84_480 / 163_840, "and an fp8 cache with a scale per head and row"),
        PlanMethod(
            "int4+kv8", 4.5, 8, 84_480 / 163_840, "and an fp8 cache with a scale per head and row", INT4_PREFILL
        ),
    )
}


@dataclass(frozen=True)
class Accelerator:
    """One card from its data sheet; the price is an assumption to be replaced (`--price`)."""

    name: str
    memory: float
    bandwidth: float
    """Gigabytes a second."""
    compute: float
    """Dense 16-bit teraflops."""
    price: float
    """Dollars an hour."""


ACCELERATORS = {
    card.name: card
    for card in (
        Accelerator("H200", 141e9, 4800, 989, 3.50),
        Accelerator("H100", 80e9, 3350, 989, 2.50),
        Accelerator("A100", 80e9, 2039, 312, 1.60),
        Accelerator("L40S", 48e9, 864, 362, 1.00),
        Accelerator("RTX5090", 32e9, 1792, 210, 0.70),
        Accelerator("RTX4090", 24e9, 1008, 165, 0.40),
        Accelerator("L4", 24e9, 300, 121, 0.60),
        Accelerator("Ascend910B", 64e9, 1600, 320, 1.50),
    )
}

MOSS_SPEECH = PlanSizes(
    name="MOSS-Speech",
    layers=40,
    layer_parameters=7_717_865_472,
    tail_layers=4,
    heads_parameters=688_914_432,
    embedding_parameters=688_914_432,
    kv_row_bytes=163_840,
    codec_bytes=1.3e9,
    voice_bytes=1_107_082_240,
    speaking_bytes=369_474_560,
)

SIZES = {MOSS_SPEECH.name: MOSS_SPEECH}

H200_MEASURED = Measured(
    device="NVIDIA H200",
    step=Curve(((1, 4.29), (8, 5.62), (16, 6.44), (32, 7.00), (64, 8.83), (128, 12.55))),
    hop=Curve(((1, 28.64), (4, 49.74), (16, 89.97), (32, 148.96))),
    hop_codes=20,
    encoder=Curve(((1, 2.67), (4, 3.31), (16, 5.17), (32, 5.99))),
    first_codes=8,
    first_sound_ms=22.25,
    prefill_rows_ms=15.56 / 512,
    context=1024,
)


def read_measured(lm: Mapping[str, Any], serve: Mapping[str, Any]) -> Measured:
    """From the JSON of `viva bench lm` and `viva bench serve`."""
    try:
        stages = serve["stages"]
        largest_hop = max(stages["hop_ms"], key=int)
        return Measured(
            device=lm["device"],
            step=Curve(tuple((each["batch"], each["step_ms"]) for each in lm["steps"])),
            hop=_by_count(stages["hop_ms"][largest_hop]),
            hop_codes=int(largest_hop),
            encoder=_by_count(stages["encoder_ms"]),
            first_codes=stages["first_codes"],
            first_sound_ms=stages["first_sound_ms"],
            prefill_rows_ms=lm["prefill"]["ms"] / lm["prefill"]["rows"],
            context=lm["context"],
        )
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise InputError(f"the figures lack {error}; give the files of viva bench lm and viva bench serve") from error


def _by_count(milliseconds: Mapping[str, float]) -> Curve:
    return Curve(tuple(sorted((int(count), each) for count, each in milliseconds.items())))


def project_to(card: Accelerator, measured: Measured, sizes: PlanSizes, method: PlanMethod) -> Measured:
    """Estimated times on another card and weight format, scaled by bandwidth and compute."""
    home = ACCELERATORS["H200"]
    if card.name == home.name and method.name == "bf16":
        return measured
    reading = sizes.read_each_step(method) / sizes.read_each_step(METHODS["bf16"])
    slower_memory, slower_compute = home.bandwidth / card.bandwidth, home.compute / card.compute
    first = measured.step(1)
    step = Curve(tuple((n, (first * reading + (ms - first)) * slower_memory) for n, ms in measured.step.points))
    return replace(
        measured,
        device=f"{card.name}, estimated from {measured.device}",
        step=step,
        hop=measured.hop.scaled(slower_compute),
        encoder=measured.encoder.scaled(slower_compute),
        prefill_rows_ms=measured.prefill_rows_ms * slower_compute,
    )


@dataclass(frozen=True)
class TalkPattern:
    """Shares of speech and silence of a call."""

    user_share: float = 0.45
    """Share of a call in which the user speaks."""
    machine_share: float = 0.45
    silence_ms: int = 240
    """That end a turn (`viva serve --silence-ms 240`)."""
    network_ms: int = 60
    """Round trip including both jitter buffers."""
    call_seconds: float = 240.0

    @property
    def rows_a_second(self) -> float:
        """Rows added to the history per second of a call."""
        return (self.user_share + self.machine_share) / FRAME_SECONDS


@dataclass(frozen=True)
class QuestionLoad:
    """What is to be planned: card, model, format and load."""

    card: Accelerator = field(default_factory=lambda: ACCELERATORS["H200"])
    sizes: PlanSizes = MOSS_SPEECH
    measured: Measured = H200_MEASURED
    method: PlanMethod = field(default_factory=lambda: METHODS["bf16"])
    context: int = 4096
    """Context rows per session."""
    sessions: int | None = None
    talk: TalkPattern = field(default_factory=TalkPattern)
    reserve_bytes: float = 1.5e9
    """For driver, CUDA graphs and activations."""
    busy: float = 0.85
    """Usable share of a card's time; the rest is headroom for deadlines."""


ASSUMED = (
    "language model, vocoder and speech encoder share a card's time; overlap is not counted as a gain",
    "on other cards and weights a step is scaled by bandwidth, the cost of further replies in a hop by compute",
    "a history is half full on average; prices are typical rents, not offers",
)


def named(table: Mapping[str, Any], name: str, what: str) -> Any:
    """Look up an entry, ignoring case and spaces."""
    found = {key.lower().replace(" ", ""): value for key, value in table.items()}.get(name.lower().replace(" ", ""))
    if found is None:
        raise InputError(f"there is no {what} {name!r} here; there are {', '.join(table)}")
    return found
