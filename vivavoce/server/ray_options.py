"""What the one who runs a fleet may choose; the same words in Python and in the YAML of `serve deploy`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from vivavoce.errors import InputError
from vivavoce.server.options import ServerOptions

SERVING = "vivavoce.serving"
LOADERS = {  # of each pool: who loads, and who serves what was loaded
    "speech": (f"{SERVING}:load_host", f"{SERVING}:serve"),
    "asr": (f"{SERVING}:load_audio", f"{SERVING}:serve"),
    "tts": (f"{SERVING}:load_audio", f"{SERVING}:serve"),
    "codec": (f"{SERVING}.codec_serving:load_codec", f"{SERVING}.codec_serving:serve_codec"),
}
POOL = "pool"
PARTS = ("asr", "tts", "codec")


@dataclass(frozen=True)
class PoolOptions:
    """Replicas of one kind: what each runs, how many sessions it takes, and how many of them there are."""

    model: Mapping[str, Any] = field(default_factory=dict)
    """What `load` is called with, such as `{"model": "mini-speech", "device": "cpu"}`."""
    load: str | None = None
    """Gives the host, such as `vivavoce.serving:load_host`; may take its time. None: what its pool usually has."""
    serve: str | None = None
    """Serves a host with `ServerOptions`, for ever."""
    sessions: int = 16
    """The most a replica takes; more are refused. In the pools asr and tts a request counts as one."""
    wanted_sessions: float | None = None
    """How many a replica should have; a pool grows beyond, and shrinks below. None: three quarters of the most."""
    late_share: float = 0.02
    """A pool also grows where more than this share of the pieces of sound go out late."""
    least_slack_ms: float = 120.0
    """And where a listener was nearer than this to running dry."""
    least: int = 1
    most: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    grow_seconds: float = 5.0
    """How long it must be too small before it grows."""
    shrink_seconds: float = 300.0
    look_back_seconds: float = 15.0

    def check(self, role: str) -> None:
        """Raise InputError for what cannot be deployed."""
        if not 0 < self.least <= self.most:
            raise InputError(f"{role}: least {self.least} and most {self.most} replicas; 1 <= least <= most is needed")
        if self.sessions < 1:
            raise InputError(f"{role}: sessions is {self.sessions}; a replica must take at least one")
        for name in ("load", "serve"):
            path = getattr(self, name)
            if path is not None and ":" not in path:
                raise InputError(f"{role}.{name} is {path!r}; it must be like package.module:function")

    def of(self, role: str) -> "PoolOptions":
        """With what such a pool usually has."""
        load, serve = LOADERS[role]
        return replace(self, load=self.load or load, serve=self.serve or serve)

    @property
    def target(self) -> float:
        """How many sessions a replica should have."""
        return self.wanted_sessions or 0.75 * self.sessions


@dataclass(frozen=True)
class FleetOptions:
    """An ingress and pools of replicas behind it."""

    pools: Mapping[str, PoolOptions] = field(default_factory=lambda: {"speech": PoolOptions()})
    server: ServerOptions = field(default_factory=ServerOptions)
    ingresses: int = 1
    ingress_cpus: float = 0.5
    drain_seconds: float = 600.0
    """How long a replica that is to go may keep the sessions that cannot be moved."""
    kept_sound_seconds: float = 120.0
    """Sound of the history kept outside the replica, for the day it dies; what is older is kept as words."""

    def check(self) -> None:
        """Raise InputError for what must not be deployed."""
        self.server.check()
        if not {"speech", "asr", "tts"} & set(self.pools):
            raise InputError("a fleet needs a pool called speech, asr or tts; one called codec may stand beside speech")
        for role, pool in self.pools.items():
            if role not in LOADERS:
                raise InputError(f"there is no pool called {role!r}; there are {', '.join(LOADERS)}")
            pool.check(role)
            for part in PARTS:
                if pool.model.get(part) == POOL and part not in self.pools:
                    raise InputError(f"{role} has its {part} in a pool, and the fleet has no pool called {part}")
        if self.ingresses < 1:
            raise InputError(f"ingresses is {self.ingresses}; at least one is needed")

    @classmethod
    def read(cls, wire: Mapping[str, Any]) -> "FleetOptions":
        """From the `args` of a Serve config; a name that is not known is an InputError."""
        rest = dict(wire)
        server = _made(ServerOptions, rest.pop("server", None) or {}, "server")
        server = replace(server, **{name: tuple(getattr(server, name)) for name in _LISTS})
        pools = {role: _made(PoolOptions, rest.pop(role) or {}, role) for role in LOADERS if role in rest}
        fleet = _made(cls, rest | {"server": server} | ({"pools": pools} if pools else {}), "fleet")
        fleet.check()
        return fleet


_LISTS = ("api_keys", "allowed_origins", "allowed_hosts", "ice_servers")


def _made(kind: Any, wire: Any, place: str) -> Any:
    if not isinstance(wire, Mapping):
        raise InputError(f"{place} must be a mapping of options, not {wire!r}")
    known = [each.name for each in fields(kind)]
    strange = [str(name) for name in wire if name not in known]
    if strange:
        raise InputError(f"{place} has no option {', '.join(strange)}; it has {', '.join(known)}")
    return kind(**wire)
