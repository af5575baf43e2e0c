"""HTTP of an ingress: admission, and forwarding to the replica that has the call, to one of a pool, or to all."""

from collections.abc import AsyncIterator, Collection, Mapping

import aiohttp
import msgspec
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from starlette.datastructures import Address
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from vivavoce.server.auth import BROWSER_KEY, Identity, Keys, check_origin, key_digest, request_key
from vivavoce.server.cluster.registry import Placement, RegistryClient, ReplicaReport
from vivavoce.server.cluster.router import ReplicaRouter, capacity_error
from vivavoce.server.config import OpenRate, ServerOptions
from vivavoce.server.metrics import ExceptionCounter
from vivavoce.server.realtime.session_types import SessionParams, SessionType
from vivavoce.server.realtime.sessions import RETRY_AFTER_SECONDS
from vivavoce.server.rest.calls import ClientSecret, ClientSecretRequest
from vivavoce.server.rest.http import (
    Endpoint,
    Handler,
    ModelList,
    ModelObject,
    StatusBody,
    authenticated,
    decode_body,
    json_response,
    models_response,
    read_body,
    readiness_response,
)
from vivavoce.server.wire import WireError

HOP_BY_HOP = {"connection", "content-length", "date", "host", "keep-alive", "server", "transfer-encoding", "upgrade"}
POOL_OF_PATH = {
    "/v1/audio/transcriptions": "asr",
    "/v1/audio/translations": "asr",
    "/v1/audio/speech": "tts",
}
REPLICA_HEADER = "x-viva-replica"
REPLICA_GAUGES = {
    "sessions": "Sessions of a replica.",
    "capacity": "Sessions that a replica takes.",
    "late_share": "Share of the audio chunks that were sent late.",
    "slack": "Minimum seconds by which audio was ahead of an underrun.",
    "is_draining": "Whether a replica is being removed.",
}


class AdmissionGate:
    """Authentication and rate limit of an ingress."""

    def __init__(self, options: ServerOptions, registry: RegistryClient) -> None:
        self._options, self._registry = options, registry
        self._keys, self._rate = Keys(options), OpenRate(options.opens_per_minute)

    async def admit(self, headers: Mapping[str, str]) -> Identity:
        """The caller with these headers; WireError 401 or 403 where it is not admitted."""
        check_origin(headers, self._options)
        key = request_key(headers)
        if key is None or not key.startswith(BROWSER_KEY):
            return self._keys.admit(key)
        session = await self._registry.session_of_key(key_digest(key).hex())
        if session is None:
            raise WireError("this browser key is unknown or has expired", "invalid_api_key", status=401)
        return Identity(session, key_digest(key))

    def check_rate(self, client: Address | None) -> None:
        """WireError 429 for an address that opens too many sessions."""
        address = client.host if client else "unknown"
        if not self._rate.admits(address):
            message = f"{address} opened too many sessions; try again in {RETRY_AFTER_SECONDS} s"
            raise WireError(message, "rate_limit_exceeded", status=429, kind="server_error")

    def endpoint(self, handler: Handler, takes_browser_keys: bool = False) -> Endpoint:
        """A route's endpoint for admitted callers."""
        return authenticated(handler, self._admit_request, takes_browser_keys)

    async def _admit_request(self, request: Request) -> Identity:
        return await self.admit(request.headers)


class RequestForwarder:
    """The HTTP handlers of an ingress."""

    def __init__(
        self,
        registry: RegistryClient,
        router: ReplicaRouter,
        gate: AdmissionGate,
        pools: Collection[str],
        max_bytes: int,
        exceptions: ExceptionCounter,
    ) -> None:
        self._registry, self._router, self._gate, self._pools = registry, router, gate, pools
        self._max_bytes, self._exceptions = (
            max_bytes,
            exceptions,
        )  # `max_bytes`: of bodies sent to all replicas

    async def create_call(self, request: Request, caller: Identity) -> Response:
        """Open a WebRTC call; its audio goes directly to the replica."""
        self._gate.check_rate(request.client)
        replica = await self._registry.admit("speech")
        if replica is None:
            raise capacity_error(await self._registry.replicas(), "speech")
        response = await self._forward(request, replica, caller.session)
        call = response.headers.get("location", "").rpartition("/")[2]
        if call:
            await self._registry.place(Placement(call, "", replica.replica, call, ""))
        return response

    async def forward_to_call(self, request: Request, caller: Identity) -> Response:
        """Forward to the replica of a call: a later offer, or its end."""
        call = request.path_params["call_id"]
        found = await self._registry.locate(call)
        if found is None:
            raise WireError(f"there is no call {call}", "call_not_found", status=404)
        return await self._forward(request, found[1])

    async def create_browser_key(self, request: Request, caller: Identity) -> Response:
        """A replica validates the session and mints the key; the registry makes it known to all ingresses."""
        data = await read_body(request)
        response = await self._forward(request, await self._pick(self._main_pool), data=data)
        if response.status_code == 200:
            is_legacy = not request.url.path.endswith("/client_secrets")
            secret, params, session = _minted_key(data, bytes(response.body), is_legacy)
            bound = msgspec.structs.replace(params, type=session.type, model=session.model)
            await self._registry.store_key(key_digest(secret.value).hex(), bound, float(secret.expires_at))
        return response

    async def forward_to_one(self, request: Request, caller: Identity) -> Response:
        """Forward to a replica of the right pool; a separate pool admits requests up to its capacity."""
        role = POOL_OF_PATH.get(request.url.path, "speech")
        if role not in self._pools:
            return await self._forward(request, await self._pick(self._main_pool))
        replica = await self._registry.admit(role)
        if replica is None:
            self._router.counters["refused"] += 1
            raise capacity_error(await self._registry.replicas(), role)
        return await self._forward(request, replica)

    async def forward_to_all(self, request: Request, caller: Identity) -> Response:
        """Forward a change, as of voices, to all replicas of a pool; the first failure is the response."""
        data, role = await read_body(request, self._max_bytes), "tts" if "tts" in self._pools else "speech"
        response = await self._forward(request, await self._pick(role), data=data)
        done = {response.headers.get(REPLICA_HEADER)}
        for replica in await self._registry.replicas():
            if response.status_code < 400 and replica.role == role and replica.replica not in done:
                response = await self._forward(request, replica, data=data)
        return response

    async def models(self, request: Request, caller: Identity) -> Response:
        """`/v1/models` of all pools."""
        models: list[ModelObject] = []
        for role in (role for role in self._pools if role != "codec"):
            replica = await self._pick(role)
            headers = {"Authorization": f"Bearer {replica.key}"}
            async with self._router.http.get(f"{replica.url}/v1/models", headers=headers) as response:
                models += msgspec.json.decode(await response.read(), type=ModelList).data
        return models_response(models, request.path_params.get("id"))

    async def healthy(self, request: Request) -> Response:
        """Whether this ingress is alive."""
        return json_response(StatusBody("ok"))

    async def ready(self, request: Request) -> Response:
        """Whether there is a replica for clients."""
        return readiness_response(await self._registry.pick(self._main_pool) is not None)

    async def metrics(self, request: Request, caller: Identity) -> Response:
        """The fleet for Prometheus; every replica has its metrics at its private port."""
        page = fleet_metrics(await self._registry.replicas(), self._router.counters, self._exceptions)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    @property
    def _main_pool(self) -> str:
        return "speech" if "speech" in self._pools else next(iter(self._pools))

    async def _pick(self, role: str) -> ReplicaReport:
        replica = await self._registry.pick(role)
        if replica is None:
            raise capacity_error([], role)
        return replica

    async def _forward(
        self,
        request: Request,
        replica: ReplicaReport,
        bound_session: SessionParams | None = None,
        data: bytes | None = None,
    ) -> Response:
        """The response of a replica to the request; a stream is streamed."""
        router = self._router
        key = replica.key if bound_session is None else await router.mint_bound_key(replica, bound_session)
        dropped = HOP_BY_HOP | {"origin", "authorization"}
        headers = {name: value for name, value in request.headers.items() if name not in dropped}
        try:
            response = await router.http.request(
                request.method,
                f"{replica.url}{request.url.path}",
                params=dict(request.query_params),
                headers=headers | {"Authorization": f"Bearer {key}"},
                data=request.stream() if data is None else data,
            )
        except aiohttp.ClientError as error:
            await router.mark_lost(replica)
            message = f"the replica does not respond: {error}"
            raise WireError(message, "replica_lost", None, 503, "server_error") from error
        passed = {name: value for name, value in response.headers.items() if name.lower() not in HOP_BY_HOP}
        passed[REPLICA_HEADER] = replica.replica
        if response.content_length is not None:
            return Response(await response.read(), response.status, passed)
        return StreamingResponse(_chunks(response), response.status, passed)


class MintedSession(Struct):
    """The fields of a minted session that the key is bound to."""

    type: SessionType
    model: str


class MintedResponse(Struct):
    """A replica's response to a request for a browser key."""

    session: MintedSession


class LegacyMintedResponse(Struct):
    """The same by the beta protocol, where the key is a field of the session."""

    client_secret: ClientSecret


def _minted_key(request: bytes, response: bytes, is_legacy: bool) -> tuple[ClientSecret, SessionParams, MintedSession]:
    """The key that a replica minted, the session parameters of the request, and the session of the response."""
    if is_legacy:
        secret = msgspec.json.decode(response, type=LegacyMintedResponse).client_secret
        return secret, decode_body(request, SessionParams), msgspec.json.decode(response, type=MintedSession)
    secret = msgspec.json.decode(response, type=ClientSecret)
    params = decode_body(request, ClientSecretRequest).session or SessionParams()
    return secret, params, msgspec.json.decode(response, type=MintedResponse).session


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """A streamed body; where the client disconnects, the replica's response is closed and its work cancelled."""
    try:
        async for chunk in response.content.iter_any():
            yield chunk
    finally:
        response.close()


def fleet_metrics(replicas: list[ReplicaReport], counters: Mapping[str, int], exceptions: ExceptionCounter) -> bytes:
    """Gauges of every replica and counters of this ingress, in Prometheus' text format."""
    registry = CollectorRegistry()
    for name, meaning in REPLICA_GAUGES.items():
        gauge = Gauge(f"viva_fleet_{name}", meaning, ["role", "replica"], registry=registry)
        for replica in (replica for replica in replicas if getattr(replica, name) is not None):
            gauge.labels(replica.role, replica.replica).set(float(getattr(replica, name)))
    for name, count in counters.items():
        Gauge(f"viva_ingress_{name}", f"Sessions {name}, or replicas, by this ingress.", registry=registry).set(count)
    registry.register(exceptions.metric)
    return generate_latest(registry)
