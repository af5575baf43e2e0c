"""A fleet whose day is simulated: callers and machines by region, prices, and what goes wrong."""

from dataclasses import dataclass
from typing import Literal

HOURLY = (  # calls by hour of the local day, against the busiest
    *(0.10, 0.07, 0.05, 0.05, 0.06, 0.10, 0.20, 0.38, 0.60, 0.82, 0.95, 1.00),
    *(0.92, 0.88, 0.90, 0.94, 0.96, 0.93, 0.85, 0.72, 0.55, 0.40, 0.27, 0.17),
)


@dataclass(frozen=True)
class Region:
    """Where callers and machines are."""

    name: str
    share: float
    """Of the calls at the busiest hour, which comes at its own time of day."""
    utc_offset: float = 0.0


REGIONS = (Region("Asia", 0.45, 8.0), Region("Europe", 0.30, 1.0), Region("America", 0.25, -5.0))


@dataclass(frozen=True)
class Fleet:
    """What is simulated."""

    calls: float = 1000.0
    """Calls at once, in the busiest hour of each region, all regions together."""
    regions: tuple[Region, ...] = REGIONS
    hours: float = 24.0
    is_flat: bool = False
    """The same traffic all day."""
    call_seconds: float = 240.0
    lengths: Literal["exponential", "lognormal"] = "lognormal"

    places: int = 24
    """Sessions of one card."""
    machines: int | None = None
    """Cards of each region, fixed; None: as many as the traffic asks for."""
    spare: float = 0.12
    """Share of places that is kept free for what comes next, and for those whose machine fails."""
    least_machines: int = 2
    boot_seconds: float = 180.0
    """Until a new machine takes calls: it is found, started, and the model read and warmed."""
    look_seconds: float = 30.0
    overflows: bool = True
    """A full region sends calls to the emptiest other."""

    failures_a_year: float = 12.0
    """Of one machine."""
    outage_hour: float | None = None
    """When the largest region is gone for an hour (hours since midnight UTC)."""

    edge_calls: int = 2000
    """Calls that one edge machine carries (SFU and TURN)."""
    turn_share: float = 0.15
    """Of calls that must be relayed."""
    kilobits: float = 48.0
    """Of a call, one way: Opus with its headers."""

    card_price: float = 3.50
    edge_price: float = 0.40
    gigabyte_price: float = 0.05
    seed: int = 0
