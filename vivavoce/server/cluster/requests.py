"""HTTP at an ingress: each request goes to the replica that has the call, to any of the right kind, or to all."""

from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vivavoce.server.auth import Identity
from vivavoce.server.cluster.options import AdmissionGate, digest
from vivavoce.server.cluster.registry import Placement, RemoteRegistry, ReplicaReport
from vivavoce.server.cluster.router import ReplicaRouter, no_room
from vivavoce.server.rest.http import body, json_answer, json_object
from vivavoce.server.wire_error import WireError

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from starlette.requests import Request
    from starlette.responses import Response

Wire = dict[str, Any]
HOP_BY_HOP = {"connection", "content-length", "date", "host", "keep-alive", "server", "transfer-encoding", "upgrade"}
ELSEWHERE = {
    "/v1/audio/transcriptions": "asr",
    "/v1/audio/translations": "asr",
    "/v1/audio/speech": "tts",
}
ANSWERED_BY = "x-viva-replica"


@dataclass
class Requests:
    """What an ingress answers over HTTP."""

    roll: RemoteRegistry
    doors: ReplicaRouter
    gate: AdmissionGate
    pools: Collection[str]
    most_bytes: int
    """Of a body that is kept to be sent on more than once."""

    async def call(self, request: "Request", caller: Identity) -> "Response":
        """A WebRTC call: its sound goes straight to the replica that takes it."""
        self.gate.check_rate(request.client)
        replica = await self.roll.admit("speech")
        if replica is None:
            raise no_room(await self.roll.fleet(), "speech")
        answer = await self._forward(request, replica, caller.session)
        call = answer.headers.get("location", "").rpartition("/")[2]
        if call:
            await self.roll.seat(Placement(call, "", replica.replica, call, ""))
        return answer

    async def hang_up(self, request: "Request", caller: Identity) -> "Response":
        """End a call, where it is."""
        call = request.path_params["call_id"]
        found = await self.roll.where(call)
        if found is None:
            raise WireError(f"there is no call {call}", "call_not_found", status=404)
        return await self._forward(request, found[1])

    async def browser_key(self, request: "Request", caller: Identity) -> "Response":
        """A replica checks the session and makes the key; all ingresses know it."""
        if caller.is_browser:
            raise WireError("a browser key cannot make others; use an API key", "invalid_api_key", status=403)
        data = await body(request)
        asked = json_object(data.decode("utf8", "replace")) if data.strip() else {}
        answer = await self._forward(request, await self._somebody(self._first_pool), data=data)
        if answer.status_code == 200:
            made = json_object(bytes(answer.body).decode())
            secret = made.get("client_secret") or made
            session = made.get("session") or made
            wanted = asked.get("session") or {name: value for name, value in asked.items() if name != "client_secret"}
            bound = wanted | {"type": session["type"], "model": session.get("model")}
            await self.roll.keep_key(digest(secret["value"]), bound, float(secret["expires_at"]))
        return answer

    async def anywhere(self, request: "Request", caller: Identity) -> "Response":
        """A request that any replica of the right kind can answer; a pool of its own takes as many as it has places."""
        role = ELSEWHERE.get(request.url.path, "speech")
        if role not in self.pools:
            return await self._forward(request, await self._somebody(self._first_pool))
        replica = await self.roll.admit(role)
        if replica is None:
            self.doors.figures["refused"] += 1
            raise no_room(await self.roll.fleet(), role)
        return await self._forward(request, replica)

    async def everywhere(self, request: "Request", caller: Identity) -> "Response":
        """A change that all who speak must make, as of their voices; the answer of one that could not is the answer."""
        if caller.is_browser:
            raise WireError("a browser key cannot change this; use an API key", "invalid_api_key", status=403)
        data, role = await body(request, self.most_bytes), "tts" if "tts" in self.pools else "speech"
        answer = await self._forward(request, await self._somebody(role), data=data)
        done = {answer.headers.get(ANSWERED_BY)}
        for replica in await self.roll.fleet():
            if answer.status_code < 400 and replica.role == role and replica.replica not in done:
                answer = await self._forward(request, replica, data=data)
        return answer

    async def models(self, request: "Request", caller: Identity) -> "Response":
        """The models of all pools."""
        cards: dict[str, Wire] = {}
        for role in (role for role in self.pools if role != "codec"):
            replica = await self._somebody(role)
            headers = {"Authorization": f"Bearer {replica.key}"}
            async with self.doors.http.get(f"{replica.url}/v1/models", headers=headers) as answer:
                cards |= {card["id"]: card for card in (await answer.json())["data"]}
        id = request.path_params.get("id")
        if id is None:
            return json_answer({"object": "list", "data": list(cards.values())})
        if id not in cards:
            raise WireError(f"there is no model {id!r} here", "model_not_found", "model", 404)
        return json_answer(cards[id])

    async def healthy(self, request: "Request") -> "Response":
        """Whether this ingress is alive."""
        return json_answer({"status": "ok"})

    async def ready(self, request: "Request") -> "Response":
        """Whether there is a replica for clients."""
        is_ready = await self.roll.somebody(self._first_pool) is not None
        return json_answer({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    async def figures(self, request: "Request", caller: Identity) -> "Response":
        """The fleet for Prometheus; each replica has its own figures at its private port."""
        from prometheus_client import CONTENT_TYPE_LATEST
        from starlette.responses import Response

        return Response(fleet_figures(await self.roll.fleet(), self.doors.figures), media_type=CONTENT_TYPE_LATEST)

    @property
    def _first_pool(self) -> str:
        return "speech" if "speech" in self.pools else next(iter(self.pools))

    async def _somebody(self, role: str) -> ReplicaReport:
        replica = await self.roll.somebody(role)
        if replica is None:
            raise no_room([], role)
        return replica

    async def _forward(
        self, request: "Request", replica: ReplicaReport, bound: Wire | None = None, data: bytes | None = None
    ) -> "Response":
        """The request at a replica, and its answer; what streams is streamed."""
        import aiohttp
        from starlette.responses import Response, StreamingResponse

        key = replica.key if bound is None else await self.doors.bound_key(replica, bound)
        headers = {name: value for name, value in request.headers.items() if name not in HOP_BY_HOP}
        headers = {name: value for name, value in headers.items() if name not in ("origin", "authorization")}
        try:
            answer = await self.doors.http.request(
                request.method,
                f"{replica.url}{request.url.path}",
                params=dict(request.query_params),
                headers=headers | {"Authorization": f"Bearer {key}"},
                data=request.stream() if data is None else data,
            )
        except aiohttp.ClientError as error:
            await self.doors.lost(replica)
            raise WireError(
                f"the replica does not answer: {error}", "replica_lost", None, 503, "server_error"
            ) from error
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
        kept[ANSWERED_BY] = replica.replica
        if answer.content_length is not None:
            return Response(await answer.read(), answer.status, kept)
        return StreamingResponse(_pieces(answer), answer.status, kept)


async def _pieces(answer: "ClientResponse") -> AsyncIterator[bytes]:
    """What streams, as it comes; a client that goes ends the making."""
    try:
        async for piece in answer.content.iter_any():
            yield piece
    finally:
        answer.close()


def fleet_figures(fleet: list[ReplicaReport], counts: Mapping[str, int]) -> bytes:
    """Gauges of every replica and counters of this ingress, as Prometheus reads them."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()
    what = {
        "sessions": "Sessions that a replica has.",
        "capacity": "Sessions that a replica takes.",
        "late_share": "Share of the pieces of sound that went out late.",
        "slack": "Seconds by which the last sound came before its listener ran dry, at worst.",
        "is_draining": "Whether a replica is to go.",
    }
    for name, meaning in what.items():
        gauge = Gauge(f"viva_fleet_{name}", meaning, ["role", "replica"], registry=registry)
        for each in (each for each in fleet if getattr(each, name) is not None):
            gauge.labels(each.role, each.replica).set(float(getattr(each, name)))
    for name, count in counts.items():
        Gauge(f"viva_ingress_{name}", f"Sessions {name}, or replicas, by this ingress.", registry=registry).set(count)
    return generate_latest(registry)
