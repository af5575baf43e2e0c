"""The other pools of a fleet, for a replica that has a part elsewhere: `asr: pool` in its model's options."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vivavoce.dialogue.places import EndpointRef
from vivavoce.errors import CapacityError
from vivavoce.server.ray_options import PARTS, POOL
from vivavoce.server.ray_roll import RemoteRegistry

if TYPE_CHECKING:
    from aiohttp import ClientSession

LOOK_SECONDS = 0.25


class InPool:
    """A `Find`: whoever of a pool is least busy."""

    def __init__(self, roll: RemoteRegistry, role: str) -> None:
        self._roll, self.role = roll, role

    async def __call__(self, gone: EndpointRef | None = None) -> EndpointRef:
        """A replica of the pool; CapacityError where there is none."""
        if gone is not None:
            await self._roll.lost(gone.name)
        report = await self._roll.somebody(self.role)
        if report is None:
            raise CapacityError(f"no {self.role} replica is ready")
        return EndpointRef(f"{report.url}/v1", report.key, report.replica)

    async def wait(self) -> EndpointRef:
        """The same, however long its models take to load."""
        while True:
            try:
                return await self()
            except CapacityError:
                await asyncio.sleep(LOOK_SECONDS)

    def __str__(self) -> str:
        return f"the {self.role} pool"


async def with_pools(model: Mapping[str, Any], roll: RemoteRegistry, http: "ClientSession") -> dict[str, Any]:
    """A model's options with its parts that are in other pools, once those are there."""
    options = dict(model)
    for name in PARTS:
        if options.get(name) == POOL:
            find = options[name] = InPool(roll, name)
            place = await find.wait()
            if name == "codec":
                async with http.get(f"{place.url}/codec") as answer:
                    options[name] = (find, await answer.json())
    return options
