"""Where a part of a pipeline is, when it is not here."""

from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from vivavoce.errors import InputError


@dataclass(frozen=True)
class EndpointRef:
    """An address such as `http://host:8000/v1`, the key it wants, and what its fleet calls it."""

    url: str
    key: str | None = None
    name: str = ""


class Resolver(Protocol):
    """Who is to be asked this time; a pool has several."""

    async def __call__(self, gone: EndpointRef | None = None) -> EndpointRef:
        """A place; `gone` is the one that did not answer. VivaError where there is none."""
        ...


@dataclass(frozen=True)
class Address:
    """Always the same place."""

    url: str
    key: str | None = None

    def __post_init__(self) -> None:
        if not is_address(self.url) or not urlsplit(self.url).hostname:
            raise InputError(f"an address begins with http:// or https://, not {self.url!r}")

    async def __call__(self, gone: EndpointRef | None = None) -> EndpointRef:
        """The address."""
        return EndpointRef(self.url, self.key)


def is_address(name: str) -> bool:
    """Whether a model's name is an address rather than a folder."""
    return name.startswith(("http://", "https://"))
