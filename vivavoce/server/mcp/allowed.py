"""Which MCP servers may be reached: addresses and programs that the operator names; clients choose among them."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, urlsplit

from vivavoce.errors import InputError

PROGRAM_SCHEME = "stdio:"
_PROGRAM = re.compile(r"(?P<name>[A-Za-z][\w-]{0,63})=(?P<command>\S.*)", re.DOTALL)


@dataclass(frozen=True)
class Program:
    """A program that speaks MCP over its standard input and output."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class AllowedServers:
    """Addresses, with all paths below them, and programs by name."""

    addresses: tuple[str, ...] = ()
    programs: tuple[Program, ...] = ()

    @classmethod
    def read(cls, values: Sequence[str]) -> "AllowedServers":
        """The servers of `--allow-mcp`: `https://host/path`, or `name=command with arguments`."""
        addresses, programs = list[str](), list[Program]()
        for value in values:
            if value.startswith(("http://", "https://")):
                if not urlsplit(value).hostname:
                    raise InputError(f"--allow-mcp {value!r} names no host")
                addresses.append(value.rstrip("/"))
            elif match := _PROGRAM.fullmatch(value):
                programs.append(Program(match["name"], tuple(shlex.split(match["command"]))))
            else:
                raise InputError(f"--allow-mcp takes an address or name=command, not {value!r}")
        return cls(tuple(addresses), tuple(programs))

    def __bool__(self) -> bool:
        return bool(self.addresses or self.programs)

    def target(self, server_url: str) -> str | Program:
        """What a client's `server_url` stands for; InputError where it is not allowed."""
        if server_url.startswith(PROGRAM_SCHEME):
            name = server_url.removeprefix(PROGRAM_SCHEME)
            for program in self.programs:
                if program.name == name:
                    return program
        elif any(_is_below(server_url, address) for address in self.addresses):
            return server_url
        raise InputError("this MCP server is not allowed here; the operator names servers with --allow-mcp")


def _is_below(url: str, address: str) -> bool:
    """Whether a URL has the origin of an address, and its path or one below it."""
    try:
        parts, allowed = urlsplit(url), urlsplit(address)
        if _origin(parts) != _origin(allowed) or parts.username is not None or parts.fragment:
            return False
    except ValueError:  # not a URL
        return False
    path = unquote(parts.path)
    if ".." in path.split("/") or "\\" in path or "%" in path:  # a server may read them as other paths
        return False
    return path == allowed.path or path.startswith(f"{allowed.path}/")


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, parts.port or default
