"""Discrete-event simulation of a day of calls on a fleet: arrivals, failures, autoscaling, overflow between regions."""

import heapq
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

HOURLY = (  # calls by local hour, relative to the busiest
    *(0.10, 0.07, 0.05, 0.05, 0.06, 0.10, 0.20, 0.38, 0.60, 0.82, 0.95, 1.00),
    *(0.92, 0.88, 0.90, 0.94, 0.96, 0.93, 0.85, 0.72, 0.55, 0.40, 0.27, 0.17),
)


@dataclass(frozen=True)
class Region:
    """A region of callers and machines."""

    name: str
    share: float
    """Share of calls at the region's busiest hour."""
    utc_offset: float = 0.0


REGIONS = (Region("Asia", 0.45, 8.0), Region("Europe", 0.30, 1.0), Region("America", 0.25, -5.0))


@dataclass(frozen=True)
class Fleet:
    """Parameters of a simulation."""

    calls: float = 1000.0
    """Concurrent calls: the sum over regions of their busiest hours."""
    regions: tuple[Region, ...] = REGIONS
    hours: float = 24.0
    is_flat: bool = False
    """Constant traffic all day."""
    call_seconds: float = 240.0
    lengths: Literal["exponential", "lognormal"] = "lognormal"

    places: int = 24
    """Sessions per card."""
    machines: int | None = None
    """Cards per region; None: autoscaled."""
    spare: float = 0.12
    """Share of places reserved for growth and for calls of failed machines."""
    min_machines: int = 2
    boot_seconds: float = 180.0
    """Until a new machine takes calls: provisioning, start, model load and warm-up."""
    look_seconds: float = 30.0
    overflows: bool = True
    """A full region sends calls to the least loaded other."""

    failures_a_year: float = 12.0
    """Per machine."""
    outage_hour: float | None = None
    """Hour (UTC) at which the largest region fails for an hour."""

    edge_calls: int = 2000
    """Calls per edge machine (SFU and TURN)."""
    turn_share: float = 0.15
    """Share of relayed calls."""
    kilobits: float = 48.0
    """Per call and direction: Opus with headers."""

    card_price: float = 3.50
    edge_price: float = 0.40
    gigabyte_price: float = 0.05
    seed: int = 0


DAY_SECONDS = 86_400.0
SAMPLE_SECONDS = 300.0


@dataclass
class Machine:
    """One card and its calls."""

    id: int
    region: int
    is_ready: bool = False
    is_draining: bool = False
    calls: set[int] = field(default_factory=set)
    since: float = 0.0

    def takes(self, places: int) -> bool:
        """Whether it accepts another call."""
        return self.is_ready and not self.is_draining and len(self.calls) < places


@dataclass
class SimulatedCall:
    """One call."""

    id: int
    home: int
    began: float
    ends: float
    machine: int | None = None
    moves: int = 0


@dataclass
class Tally:
    """Counts; every offered call is completed, refused, dropped or still active."""

    offered: int = 0
    completed: int = 0
    refused: int = 0
    dropped: int = 0
    moved: int = 0
    away: int = 0
    failures: int = 0
    talk_seconds: float = 0.0
    machine_seconds: float = 0.0
    call_integral: float = 0.0
    """Integral of concurrent calls over time."""
    max_calls: int = 0


class Simulation:
    """One run: `run` returns the totals, `samples` holds the time series."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.tally, self.now = fleet, Tally(), 0.0
        self.end = fleet.hours * 3600.0
        self.machines: dict[int, Machine] = {}
        self._by_region: list[dict[int, Machine]] = [{} for _ in fleet.regions]
        self.calls: dict[int, SimulatedCall] = {}
        self.samples: list[dict[str, Any]] = []
        self._random = random.Random(fleet.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._places = [0] * len(fleet.regions)
        self._busy = [0] * len(fleet.regions)
        self._refused_since = [0] * len(fleet.regions)
        self._down: set[int] = set()
        self._sampled_at = 0.0

    def run(self) -> Tally:
        for region in range(len(self.fleet.regions)):
            wanted = self.fleet.machines or self._wanted(self._demand(region, 0.0))
            for _ in range(wanted):
                self._start_machine(region, boot=0.0)
            self._at(self._next_arrival(region), partial(self._arrive, region))
        self._at(0.0, self._autoscale)
        if self.fleet.outage_hour is not None:
            self._at(self.fleet.outage_hour * 3600.0, self._lose_region)
        while self._events and self._events[0][0] <= self.end:
            time, _, event = heapq.heappop(self._events)
            self._advance(time)
            event()
        self._advance(self.end)
        for machine in self.machines.values():
            self.tally.machine_seconds += self.end - machine.since
        return self.tally

    # Traffic

    def rate(self, region: int, time: float) -> float:
        """Arrival rate of a region, in calls per second."""
        fleet, config = self.fleet, self.fleet.regions[region]
        peak = fleet.calls * config.share / fleet.call_seconds
        if fleet.is_flat:
            return peak
        hour = (time / 3600.0 + config.utc_offset) % 24.0
        low, part = int(hour), hour % 1.0
        return peak * (HOURLY[low] * (1 - part) + HOURLY[(low + 1) % 24] * part)

    def _demand(self, region: int, time: float) -> float:
        """Expected concurrent calls at the time a machine started now is ready."""
        return self.rate(region, time + self.fleet.boot_seconds) * self.fleet.call_seconds

    def _next_arrival(self, region: int) -> float:
        """Non-homogeneous Poisson arrivals by thinning."""
        peak = self.fleet.calls * self.fleet.regions[region].share / self.fleet.call_seconds
        time = self.now
        while time <= self.end:
            time += self._random.expovariate(peak)
            if self._random.random() * peak <= self.rate(region, time):
                return time
        return time

    def _length(self) -> float:
        mean = self.fleet.call_seconds
        if self.fleet.lengths == "exponential":
            return self._random.expovariate(1 / mean)
        return self._random.lognormvariate(math.log(mean) - 0.5, 1.0)

    def _arrive(self, region: int) -> None:
        self._at(self._next_arrival(region), lambda: self._arrive(region))
        self.tally.offered += 1
        call = SimulatedCall(self.tally.offered, region, self.now, self.now + self._length())
        if self._place_call(call):
            self.calls[call.id] = call
            self.tally.max_calls = max(self.tally.max_calls, len(self.calls))
            self._at(call.ends, lambda: self._leave(call))
        else:
            self.tally.refused += 1
            self._refused_since[region] += 1

    def _leave(self, call: SimulatedCall) -> None:
        if self.calls.pop(call.id, None) is None:
            return  # dropped when its machine failed
        self._release_call(call)
        self.tally.completed += 1
        self.tally.talk_seconds += self.now - call.began

    # Placement

    def _place_call(self, call: SimulatedCall) -> bool:
        """Place a call in its home region or another; returns whether there was room."""
        for region in self._regions_for(call):
            free = [each for each in self._by_region[region].values() if each.takes(self.fleet.places)]
            if free:
                machine = max(free, key=lambda each: len(each.calls))  # fill machines up, so that others can be drained
                machine.calls.add(call.id)
                call.machine = machine.id
                self._busy[region] += 1
                self.tally.away += region != call.home
                return True
        return False

    def _regions_for(self, call: SimulatedCall) -> Iterator[int]:
        if self._busy[call.home] < self._places[call.home]:
            yield call.home
        if self.fleet.overflows:
            others = [region for region in range(len(self._busy)) if region != call.home]
            yield from sorted(others, key=lambda region: self._busy[region] - self._places[region])

    def _release_call(self, call: SimulatedCall) -> None:
        if call.machine is None:
            return
        machine = self.machines[call.machine]
        machine.calls.discard(call.id)
        self._busy[machine.region] -= 1
        call.machine = None
        if machine.is_draining:
            self._places[machine.region] -= 1
            if not machine.calls:
                self._stop_machine(machine)

    # Machines

    def _start_machine(self, region: int, boot: float | None = None) -> None:
        self._count += 1
        machine = Machine(self._count, region, since=self.now)
        self.machines[machine.id] = self._by_region[region][machine.id] = machine
        self._at(self.now + (self.fleet.boot_seconds if boot is None else boot), lambda: self._ready(machine))

    def _ready(self, machine: Machine) -> None:
        if machine.id not in self.machines:
            return
        machine.is_ready = True
        self._places[machine.region] += self.fleet.places
        if self.fleet.failures_a_year > 0:
            life = self._random.expovariate(self.fleet.failures_a_year / (365 * DAY_SECONDS))
            self._at(self.now + life, lambda: self._fail(machine))

    def _drain(self, machine: Machine) -> None:
        """Take no new calls; only the places in use remain counted."""
        machine.is_draining = True
        self._places[machine.region] -= self.fleet.places - len(machine.calls)
        if not machine.calls:
            self._stop_machine(machine)

    def _stop_machine(self, machine: Machine) -> None:
        if self.machines.pop(machine.id, None) is not None:
            del self._by_region[machine.region][machine.id]
            self.tally.machine_seconds += self.now - machine.since

    def _fail(self, machine: Machine) -> None:
        """Relocate its calls where there is room, and start a replacement."""
        if machine.id not in self.machines:
            return
        self.tally.failures += 1
        held = [self.calls[id] for id in machine.calls]
        self._places[machine.region] -= len(held) if machine.is_draining else self.fleet.places
        self._busy[machine.region] -= len(held)
        self._stop_machine(machine)
        for call in held:
            call.machine = None
            self._relocate(call)
        if machine.region not in self._down:
            self._start_machine(machine.region)

    def _relocate(self, call: SimulatedCall) -> None:
        if self._place_call(call):
            call.moves += 1
            self.tally.moved += 1
        else:
            del self.calls[call.id]
            self.tally.dropped += 1
            self.tally.talk_seconds += self.now - call.began

    def _lose_region(self) -> None:
        region = max(range(len(self.fleet.regions)), key=lambda each: self.fleet.regions[each].share)
        self._down.add(region)
        self._at(self.now + 3600.0, lambda: self._down.discard(region))
        for machine in list(self._by_region[region].values()):
            if machine.is_ready:
                self._fail(machine)
            else:
                self._stop_machine(machine)

    # Autoscaling

    def _autoscale(self) -> None:
        """Start or drain machines, and record samples."""
        self._at(self.now + self.fleet.look_seconds, self._autoscale)
        is_sample_due = not self.samples or self.now - self._sampled_at >= SAMPLE_SECONDS
        for region in range(len(self.fleet.regions)):
            if is_sample_due:
                self._record_sample(region)
            if self.fleet.machines is None and region not in self._down:
                self._scale(region)

    def _scale(self, region: int) -> None:
        in_region = [each for each in self._by_region[region].values() if not each.is_draining]
        expected = max(self._demand(region, self.now) + self._displaced_demand(), float(self._busy[region]))
        change = self._wanted(expected) - len(in_region)
        for _ in range(change):
            self._start_machine(region)
        if change < -1:  # hysteresis: keep one machine too many
            emptiest = sorted((each for each in in_region if each.is_ready), key=lambda each: len(each.calls))
            for machine in emptiest[: -change - 1]:
                self._drain(machine)

    def _wanted(self, calls: float) -> int:
        """Machines for a number of calls: with the spare share, or three standard deviations if larger."""
        places = max(calls * (1 + self.fleet.spare), calls + 3 * math.sqrt(calls))
        return max(self.fleet.min_machines, math.ceil(places / self.fleet.places))

    def _displaced_demand(self) -> float:
        """Demand of failed regions, shared among the others."""
        if not self.fleet.overflows:
            return 0.0
        left = len(self.fleet.regions) - len(self._down)
        return sum(self._demand(region, self.now) for region in self._down) / max(left, 1)

    def _record_sample(self, region: int) -> None:
        self._sampled_at = self.now
        self.samples.append(
            {
                "hour": self.now / 3600.0,
                "region": self.fleet.regions[region].name,
                "calls": self._busy[region],
                "places": self._places[region],
                "refused": self._refused_since[region],
            }
        )
        self._refused_since[region] = 0

    def _advance(self, time: float) -> None:
        self.tally.call_integral += len(self.calls) * (time - self.now)
        self.now = time

    def _at(self, time: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, event))
