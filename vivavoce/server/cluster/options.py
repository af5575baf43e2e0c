"""Options of a fleet, the same in Python and in the YAML of `serve deploy`, and the autoscaling policy of its pools."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vivavoce.errors import CapacityError, InputError
from vivavoce.server.config import FormerName, ServerOptions, accept_former_names, read_options

HOSTING = "vivavoce.server.hosting"
LOADERS = {  # of each pool: the function that loads its models, and the one that serves them
    "speech": (f"{HOSTING}:load_host", f"{HOSTING}:serve"),
    "asr": (f"{HOSTING}:load_audio", f"{HOSTING}:serve"),
    "tts": (f"{HOSTING}:load_audio", f"{HOSTING}:serve"),
    "codec": (f"{HOSTING}.codec:load_codec", f"{HOSTING}.codec:serve_codec"),
}
POOL = "pool"
PARTS = ("asr", "tts", "codec")


@accept_former_names
@dataclass(frozen=True)
class PoolOptions:
    """Replicas of one kind: what each runs, how many sessions it takes, and how many replicas there are."""

    model: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `load`, such as `{"model": "mini-speech", "device": "cpu"}`."""
    load: str | None = None
    """Loads the host, such as `vivavoce.server.hosting:load_host`. None: the default of the pool."""
    serve: str | None = None
    """Serves a host with `ServerOptions` until cancelled. None: the default of the pool."""
    sessions: int = 16
    """Capacity of a replica; more sessions are refused. In the pools asr and tts a request counts as one."""
    wanted_sessions: float | None = None
    """Target sessions of a replica, by which the pool grows and shrinks. None: three quarters of the capacity."""
    late_share: float = 0.02
    """The pool also grows where more than this share of audio chunks is sent late."""
    min_slack_ms: float = 120.0
    """And where playback was closer than this to an underrun."""
    min_replicas: int = 1
    max_replicas: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    grow_seconds: float = 5.0
    """How long a pool must be too small before it grows."""
    shrink_seconds: float = 300.0
    look_back_seconds: float = 15.0

    least_slack_ms = FormerName[float]("min_slack_ms")
    least = FormerName[int]("min_replicas")
    most = FormerName[int]("max_replicas")

    def check(self, role: str) -> None:
        """Raise InputError for what cannot be deployed."""
        if not 0 < self.min_replicas <= self.max_replicas:
            raise InputError(
                f"{role}: min_replicas {self.min_replicas} and max_replicas {self.max_replicas}; "
                "1 <= min_replicas <= max_replicas is needed"
            )
        if self.sessions < 1:
            raise InputError(f"{role}: sessions is {self.sessions}; a replica must take at least one")
        for name in ("load", "serve"):
            path = getattr(self, name)
            if path is not None and ":" not in path:
                raise InputError(f"{role}.{name} is {path!r}; it must be like package.module:function")

    def with_defaults(self, role: str) -> "PoolOptions":
        """With the loader and the server of such a pool."""
        load, serve = LOADERS[role]
        return replace(self, load=self.load or load, serve=self.serve or serve)

    @property
    def target(self) -> float:
        """Sessions that a replica should have."""
        return self.wanted_sessions or 0.75 * self.sessions


@dataclass(frozen=True)
class FleetOptions:
    """Ingresses and the pools of replicas behind them."""

    pools: Mapping[str, PoolOptions] = field(default_factory=lambda: {"speech": PoolOptions()})
    server: ServerOptions = field(default_factory=ServerOptions)
    ingresses: int = 1
    ingress_cpus: float = 0.5
    drain_seconds: float = 600.0
    """How long a replica that is removed may keep the sessions that cannot be moved."""
    kept_sound_seconds: float = 120.0
    """Audio of the history that the ingress keeps for a failover; older items are restored as text."""

    def check(self) -> None:
        """Raise InputError for what must not be deployed."""
        self.server.check()
        if self.server.tls_cert is not None:
            raise InputError("a fleet is served over plain HTTP; terminate TLS in front of its ingresses")
        if not {"speech", "asr", "tts"} & set(self.pools):
            raise InputError("a fleet needs a pool called speech, asr or tts; one called codec may stand beside speech")
        for role, pool in self.pools.items():
            if role not in LOADERS:
                raise InputError(f"there is no pool called {role!r}; there are {', '.join(LOADERS)}")
            pool.check(role)
            for part in PARTS:
                if pool.model.get(part) == POOL and part not in self.pools:
                    raise InputError(f"{role} uses a pool for {part}, and the fleet has no pool called {part}")
        if self.ingresses < 1:
            raise InputError(f"ingresses is {self.ingresses}; at least one is needed")

    def check_capacity(self, resources: Mapping[str, float]) -> None:
        """Raise CapacityError where a Ray cluster can never hold the smallest fleet: Ray would wait without end."""
        pools = self.pools.values()
        needed = {
            "CPU": self.ingresses * self.ingress_cpus + sum(pool.min_replicas * pool.cpus for pool in pools),
            "GPU": sum(pool.min_replicas * pool.gpus for pool in pools),
        }
        for name, count in needed.items():
            have = resources.get(name, 0.0)
            if count > have:
                what = f"{have:g} {name}s" if have else f"no {name}s"
                raise CapacityError(
                    f"the fleet needs {count:g} {name}s and the cluster has {what}; add nodes or reduce the fleet"
                )

    @classmethod
    def read(cls, args: Mapping[str, Any]) -> "FleetOptions":
        """From the `args` of a Serve config; InputError for an unknown name or a wrong value."""
        pools = {role: _table(PoolOptions, args[role], role) for role in LOADERS if role in args}
        server = _table(ServerOptions, args.get("server"), "server")
        rest = {name: value for name, value in args.items() if name not in (*LOADERS, "server")}
        fleet = replace(read_options(cls, rest, "fleet"), server=server)
        fleet = replace(fleet, pools=pools) if pools else fleet
        fleet.check()
        return fleet


def _table(kind: type[Any], values: Any, where: str) -> Any:
    """Options of a mapping; None, as an empty YAML entry is read, stands for the defaults."""
    if values is not None and not isinstance(values, Mapping):
        raise InputError(f"{where} must be a mapping of options, not {values!r}")
    return read_options(kind, values or {}, where)


class SessionPolicy:
    """Autoscaling: replicas by the target of sessions, and one more while audio is late or close to an underrun."""

    def __init__(self, target: float, late_share: float, min_slack: float) -> None:
        self.target, self.late_share, self.min_slack = target, late_share, min_slack

    def __call__(self, context: Any) -> tuple[int, dict[str, object]]:
        """The number of replicas for the metrics that they report."""
        metrics = context.aggregated_metrics or {}
        sessions = sum((metrics.get("sessions") or {}).values())
        late = max((metrics.get("late_share") or {}).values(), default=0.0)
        slack = min((metrics.get("slack") or {}).values(), default=math.inf)
        return self.replicas_for(sessions, late, slack, context.current_num_replicas), {}

    def replicas_for(self, sessions: float, late_share: float, slack: float, running: int) -> int:
        """The number of replicas for these sessions, the share of late audio chunks and the minimum slack."""
        replicas = max(1, math.ceil(sessions / self.target))
        is_overloaded = late_share > self.late_share or slack < self.min_slack
        return max(replicas, running + 1) if is_overloaded else replicas
