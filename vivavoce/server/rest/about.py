"""`/about`: what the page shows of a server before a session is open."""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from vivavoce.server.auth import Identity
from vivavoce.server.config import ServerOptions
from vivavoce.server.host import Host
from vivavoce.server.rest.http import json_response


class AboutModel(Struct):
    """A model that answers."""

    id: str
    parameters: int | None
    languages: Sequence[str]
    introduction: Mapping[str, str]
    """What it is and may be asked, by the language of the page; empty: anything."""
    examples: Mapping[str, Sequence[str]]
    """Questions that it may be asked, by language as well."""
    stack: str
    """The name of its stack; empty: its models were named one by one."""
    parts: Sequence[str]
    """The models of its stack, in the order in which a turn passes them."""


class About(Struct):
    """The response."""

    models: list[AboutModel]
    voices: list[str]
    is_recorded: bool
    """Whether sessions are recorded, which the page says before they begin."""
    has_telephone: bool
    """Whether telephone calls are served, which the page lists for those who may."""


class AboutApi:
    """`/about`, also for browser keys: they open the sessions that it describes."""

    def __init__(self, host: Host, options: ServerOptions) -> None:
        self._host, self._options = host, options

    async def read(self, request: Request, caller: Identity) -> Response:
        """The models and the voices of conversations."""
        models = [
            AboutModel(
                card.id, card.parameters, card.languages, card.introduction, card.examples, card.stack, card.parts
            )
            for card in self._host.models
        ]
        options = self._options
        has_telephone = bool(options.sip.listen or options.media_streams or options.audiosocket is not None)
        return json_response(About(models, [*self._host.voices], options.record is not None, has_telephone))
