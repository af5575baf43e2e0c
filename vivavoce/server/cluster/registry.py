"""The roll of a fleet: which replicas there are, how full they are, and where a session sits.

All of it is told again by those who know it, so a roll that is lost fills itself anew within a heartbeat or two.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

SILENT_SECONDS = 3.0  # a replica that reported nothing for so long is not given sessions
PENDING_SECONDS = 5.0  # a place that was given and not taken is free again
GONE_SECONDS = 60.0
MOST_SEATS = 200_000
MOST_KEYS = 10_000


@dataclass(frozen=True)
class ReplicaReport:
    """What a replica says of itself, several times a second."""

    replica: str
    role: str
    url: str
    key: str
    """Opens its private port."""
    capacity: int
    sessions: int
    opened: int
    """Sessions opened since it began."""
    late_share: float = 0.0
    is_draining: bool = False
    pid: int = 0
    slack: float | None = None
    """Seconds by which its last sound came before its listener ran dry, at worst."""


@dataclass(frozen=True)
class Placement:
    """Where a session is, under the id and the token its client knows; what that replica calls it may be another."""

    session: str
    token: str
    replica: str
    sitting: str
    sitting_token: str
    first_event: str = ""
    """The last event of this replica that the client was not told, because it only brought the session there."""


@dataclass
class Member:
    """A replica as the roll knows it."""

    report: ReplicaReport
    seen: float
    pending: deque[float] = field(default_factory=deque)
    """When places were given that the replica has not reported as taken yet."""
    asked: int = 0
    """Which single request it was sent last, so that equals take turns."""

    def taken(self, now: float) -> int:
        """Places that are not free."""
        while self.pending and now - self.pending[0] > PENDING_SECONDS:
            self.pending.popleft()
        return self.report.sessions + len(self.pending)


class ReplicaRegistry:
    """Who is there."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._requests = clock, 0
        self._members: dict[str, Member] = {}
        self._seats: OrderedDict[str, Placement] = OrderedDict()
        self._keys: OrderedDict[str, tuple[dict[str, Any], float]] = OrderedDict()

    def report(self, report: ReplicaReport) -> None:
        """A replica is alive, and this is how it is."""
        member = self._members.setdefault(report.replica, Member(report, self._clock()))
        for _ in range(min(report.opened - member.report.opened, len(member.pending))):
            member.pending.popleft()
        member.report, member.seen = report, self._clock()
        self._members = {name: each for name, each in self._members.items() if self._clock() - each.seen < GONE_SECONDS}

    def lost(self, replica: str) -> None:
        """Somebody found a replica dead."""
        self._members.pop(replica, None)

    def admit(self, role: str, avoid: Iterable[str] = ()) -> ReplicaReport | None:
        """A place for one more session, at the replica that is least full; None where all are full."""
        free = [each for each in self._alive(role, set(avoid)) if each.taken(self._clock()) < each.report.capacity]
        if not free:
            return None
        chosen = min(free, key=lambda each: each.taken(self._clock()) / each.report.capacity)
        chosen.pending.append(self._clock())
        return chosen.report

    def somebody(self, role: str) -> ReplicaReport | None:
        """A replica for a single request, which takes no place."""
        alive = self._alive(role, set())
        if not alive:
            return None
        chosen = min(alive, key=lambda each: (each.taken(self._clock()), each.asked))
        self._requests += 1
        chosen.asked = self._requests
        return chosen.report

    def fleet(self) -> list[ReplicaReport]:
        """Everybody who is alive, also those who are to go."""
        return [each.report for each in self._members.values() if self._is_alive(each)]

    def seat(self, seat: Placement) -> None:
        """A session, or a call, is at this replica."""
        self._seats[seat.session] = seat
        self._seats.move_to_end(seat.session)
        if len(self._seats) > MOST_SEATS:
            self._seats.popitem(last=False)

    def where(self, session: str) -> tuple[Placement, ReplicaReport] | None:
        """The seat of a session and the replica that has it, if it is alive."""
        seat = self._seats.get(session)
        member = None if seat is None else self._members.get(seat.replica)
        if seat is None or member is None or not self._is_alive(member):
            return None
        return seat, member.report

    def keep_key(self, digest: str, session: dict[str, Any], expires_at: float) -> None:
        """A browser key opens this session until it expires; only its hash is known here."""
        self._keys[digest] = (session, expires_at)
        if len(self._keys) > MOST_KEYS:
            self._keys.popitem(last=False)

    def key(self, digest: str) -> dict[str, Any] | None:
        """The session that a browser key opens."""
        session, expires_at = self._keys.get(digest, (None, 0.0))
        return session if expires_at > time.time() else None

    def _alive(self, role: str, avoid: set[str]) -> list[Member]:
        return [
            each
            for each in self._members.values()
            if each.report.role == role
            and each.report.replica not in avoid
            and not each.report.is_draining
            and self._is_alive(each)
        ]

    def _is_alive(self, member: Member) -> bool:
        return self._clock() - member.seen < SILENT_SECONDS


class RegistryActor:
    """The roll as a Ray Serve deployment: asked one thing at a time, in one thread."""

    def __init__(self) -> None:
        self._roll = ReplicaRegistry()

    async def ask(self, method: str, *args: Any) -> Any:
        """What a method of the roll answers."""
        return getattr(self._roll, method)(*args)


@dataclass(frozen=True)
class RemoteRegistry:
    """The roll, asked through a handle of its desk."""

    desk: Any

    async def report(self, report: ReplicaReport) -> None:
        """As `ReplicaRegistry.report`, and so on."""
        await self.desk.ask.remote("report", report)

    async def lost(self, replica: str) -> None:
        await self.desk.ask.remote("lost", replica)

    async def admit(self, role: str, avoid: Iterable[str] = ()) -> ReplicaReport | None:
        found: ReplicaReport | None = await self.desk.ask.remote("admit", role, list(avoid))
        return found

    async def somebody(self, role: str) -> ReplicaReport | None:
        found: ReplicaReport | None = await self.desk.ask.remote("somebody", role)
        return found

    async def fleet(self) -> list[ReplicaReport]:
        return list(await self.desk.ask.remote("fleet"))

    async def seat(self, seat: Placement) -> None:
        await self.desk.ask.remote("seat", seat)

    async def where(self, session: str) -> tuple[Placement, ReplicaReport] | None:
        found: tuple[Placement, ReplicaReport] | None = await self.desk.ask.remote("where", session)
        return found

    async def keep_key(self, digest: str, session: dict[str, Any], expires_at: float) -> None:
        await self.desk.ask.remote("keep_key", digest, session, expires_at)

    async def key(self, digest: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = await self.desk.ask.remote("key", digest)
        return found
