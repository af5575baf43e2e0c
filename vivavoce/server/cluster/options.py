"""What the one who runs a fleet may choose; the same words in Python and in the YAML of `serve deploy`."""

import hashlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from vivavoce.errors import InputError, VivaError
from vivavoce.log import log_failure
from vivavoce.server.app import Answer, Handler
from vivavoce.server.auth import BROWSER_KEY, Identity, Keys, check_place, key_of
from vivavoce.server.cluster.registry import RemoteRegistry
from vivavoce.server.config import OpenRate, ServerOptions
from vivavoce.server.realtime.sessions import RETRY_AFTER_SECONDS
from vivavoce.server.rest.http import error_answer
from vivavoce.server.wire_error import WireError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


SERVING = "vivavoce.server.hosting"
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
    """Makes the host, such as `vivavoce.server.hosting:load_host`. None: the default of its pool."""
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


logger = logging.getLogger(__name__)


class AdmissionGate:
    """Stands before an ingress."""

    def __init__(self, options: ServerOptions, roll: RemoteRegistry) -> None:
        self._options, self._roll = options, roll
        self._keys, self._rate = Keys(options), OpenRate(options.opens_per_minute)

    async def admit(self, headers: Any) -> Identity:
        """Who comes with these headers; WireError 401 or 403 for those who may not."""
        check_place(headers, self._options)
        key = key_of(headers)
        if key is None or not key.startswith(BROWSER_KEY):
            return self._keys.admit(key)
        session = await self._roll.key(digest(key))
        if session is None:
            raise WireError("this browser key is unknown or has expired", "invalid_api_key", status=401)
        return Identity(session, is_browser=True)

    def check_rate(self, client: Any) -> None:
        """WireError 429 for an address that opens too many sessions."""
        address = client.host if client else "unknown"
        if not self._rate.admits(address):
            message = f"{address} opened too many sessions; try again in {RETRY_AFTER_SECONDS} s"
            raise WireError(message, "rate_limit_exceeded", status=429, kind="server_error")

    def answering(self, answer: Handler) -> Answer:
        """The answer, for those who may have it; errors as the protocol says them."""

        async def guarded(request: "Request") -> "Response":
            try:
                return await answer(request, await self.admit(request.headers))
            except WireError as error:
                return error_answer(error)
            except VivaError as error:
                log_failure(logger, error, "a request was refused")
                return error_answer(WireError(str(error)))

        return guarded


def digest(key: str) -> str:
    """What the roll knows of a browser key."""
    return hashlib.sha256(key.encode("utf8", "surrogatepass")).hexdigest()


class SessionPolicy:
    """Enough replicas that each has the sessions it should have, and one more while sound is late or nearly is."""

    def __init__(self, target: float, late_share: float, least_slack: float) -> None:
        self.target, self.late_share, self.least_slack = target, late_share, least_slack

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number of replicas for what they report."""
        told = context.aggregated_metrics or {}
        sessions = sum((told.get("sessions") or {}).values())
        late = max((told.get("late_share") or {}).values(), default=0.0)
        slack = min((told.get("slack") or {}).values(), default=math.inf)
        return self.wanted(sessions, late, slack, context.current_num_replicas), {}

    def wanted(self, sessions: float, late_share: float, slack: float, running: int) -> int:
        """Replicas for so many sessions, of which so many pieces of sound go out late, and all so near to it."""
        wanted = max(1, math.ceil(sessions / self.target))
        is_pressed = late_share > self.late_share or slack < self.least_slack
        return max(wanted, running + 1) if is_pressed else wanted
