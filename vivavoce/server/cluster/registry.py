"""The replica registry of a fleet: which replicas there are, how full they are, and which one has a session.

Reports are repeated with every heartbeat, so a restarted registry is complete within one or two heartbeats.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from vivavoce.server.realtime.session_types import SessionParams

STALE_SECONDS = 3.0  # a replica whose last report is older gets no sessions
PENDING_SECONDS = 5.0  # a reservation that is not used is released
FORGET_SECONDS = 60.0
MAX_PLACEMENTS = 200_000
MAX_KEYS = 10_000


@dataclass(frozen=True)
class ReplicaReport:
    """The state that a replica reports several times a second."""

    replica: str
    role: str
    url: str
    key: str
    """The API key of its private port."""
    capacity: int
    sessions: int
    opened: int
    """Sessions opened since it started."""
    late_share: float = 0.0
    is_draining: bool = False
    pid: int = 0
    slack: float | None = None
    """Minimum seconds by which its latest audio was ahead of an underrun."""


@dataclass(frozen=True)
class Placement:
    """Where a session is. `session` and `token` are those of the client; the replica's own may differ after a move."""

    session: str
    token: str
    replica: str
    replica_session: str
    replica_token: str
    restore_event: str = ""
    """The last event of this replica that was not forwarded, because it only restored the session there."""


@dataclass
class Member:
    """A replica in the registry."""

    report: ReplicaReport
    last_seen: float
    pending: deque[float] = field(default_factory=deque)
    """When capacity was reserved that the replica has not reported as used yet."""
    last_request: int = 0
    """Number of the last single request it was picked for: replicas with equal load take turns."""

    def occupied(self, now: float) -> int:
        """Sessions and reservations."""
        while self.pending and now - self.pending[0] > PENDING_SECONDS:
            self.pending.popleft()
        return self.report.sessions + len(self.pending)


class ReplicaRegistry:
    """Replicas, placements of sessions and browser keys of one fleet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._requests = clock, 0
        self._members: dict[str, Member] = {}
        self._placements: OrderedDict[str, Placement] = OrderedDict()
        self._keys: OrderedDict[str, tuple[SessionParams, float]] = OrderedDict()

    def report(self, report: ReplicaReport) -> None:
        """Update a replica; sessions it opened use up its reservations."""
        member = self._members.setdefault(report.replica, Member(report, self._clock()))
        for _ in range(min(report.opened - member.report.opened, len(member.pending))):
            member.pending.popleft()
        member.report, member.last_seen = report, self._clock()
        self._members = {
            name: each for name, each in self._members.items() if self._clock() - each.last_seen < FORGET_SECONDS
        }

    def mark_lost(self, replica: str) -> None:
        """Remove a replica that does not answer."""
        self._members.pop(replica, None)

    def admit(self, role: str, avoid: Iterable[str] = ()) -> ReplicaReport | None:
        """Reserve one session at the least occupied replica; None where all are full."""
        now = self._clock()
        free = [each for each in self._available(role, set(avoid)) if each.occupied(now) < each.report.capacity]
        if not free:
            return None
        chosen = min(free, key=lambda each: each.occupied(now) / each.report.capacity)
        chosen.pending.append(now)
        return chosen.report

    def pick(self, role: str) -> ReplicaReport | None:
        """A replica for a single request, without a reservation."""
        available = self._available(role, set())
        if not available:
            return None
        chosen = min(available, key=lambda each: (each.occupied(self._clock()), each.last_request))
        self._requests += 1
        chosen.last_request = self._requests
        return chosen.report

    def replicas(self) -> list[ReplicaReport]:
        """All live replicas, those that drain included."""
        return [each.report for each in self._members.values() if self._is_alive(each)]

    def place(self, placement: Placement) -> None:
        """Record which replica has a session or a call."""
        self._placements[placement.session] = placement
        self._placements.move_to_end(placement.session)
        if len(self._placements) > MAX_PLACEMENTS:
            self._placements.popitem(last=False)

    def locate(self, session: str) -> tuple[Placement, ReplicaReport] | None:
        """The placement of a session and its replica, if that is alive."""
        placement = self._placements.get(session)
        member = None if placement is None else self._members.get(placement.replica)
        if placement is None or member is None or not self._is_alive(member):
            return None
        return placement, member.report

    def store_key(self, digest: str, session: SessionParams, expires_at: float) -> None:
        """Bind a browser key, of which only the hash is known, to a session."""
        self._keys[digest] = (session, expires_at)
        if len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)

    def session_of_key(self, digest: str) -> SessionParams | None:
        """The session that a browser key is bound to, until the key expires."""
        session, expires_at = self._keys.get(digest, (None, 0.0))
        return session if expires_at > time.time() else None

    def _available(self, role: str, avoid: set[str]) -> list[Member]:
        return [
            each
            for each in self._members.values()
            if each.report.role == role
            and each.report.replica not in avoid
            and not each.report.is_draining
            and self._is_alive(each)
        ]

    def _is_alive(self, member: Member) -> bool:
        return self._clock() - member.last_seen < STALE_SECONDS


class RegistryActor:
    """A registry whose calls run one at a time on one event loop; a Ray Serve deployment, or part of a process."""

    def __init__(self, registry: ReplicaRegistry | None = None) -> None:
        self._registry = registry or ReplicaRegistry()

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of `ReplicaRegistry`."""
        return getattr(self._registry, method)(*args)


@dataclass(frozen=True)
class RegistryClient:
    """The methods of `ReplicaRegistry`, called through `RegistryActor.call` or through a Ray handle of it."""

    call: Callable[..., Awaitable[Any]]

    async def report(self, report: ReplicaReport) -> None:
        await self.call("report", report)

    async def mark_lost(self, replica: str) -> None:
        await self.call("mark_lost", replica)

    async def admit(self, role: str, avoid: Iterable[str] = ()) -> ReplicaReport | None:
        result: ReplicaReport | None = await self.call("admit", role, list(avoid))
        return result

    async def pick(self, role: str) -> ReplicaReport | None:
        result: ReplicaReport | None = await self.call("pick", role)
        return result

    async def replicas(self) -> list[ReplicaReport]:
        return list(await self.call("replicas"))

    async def place(self, placement: Placement) -> None:
        await self.call("place", placement)

    async def locate(self, session: str) -> tuple[Placement, ReplicaReport] | None:
        result: tuple[Placement, ReplicaReport] | None = await self.call("locate", session)
        return result

    async def store_key(self, digest: str, session: SessionParams, expires_at: float) -> None:
        await self.call("store_key", digest, session, expires_at)

    async def session_of_key(self, digest: str) -> SessionParams | None:
        result: SessionParams | None = await self.call("session_of_key", digest)
        return result
