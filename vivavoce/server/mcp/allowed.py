"""Which MCP servers may be reached: addresses and programs that the operator names; clients choose among them."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from vivavoce.errors import InputError
from vivavoce.server.allowed_addresses import is_below

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
        elif any(is_below(server_url, address) for address in self.addresses):
            return server_url
        raise InputError("this MCP server is not allowed here; the operator names servers with --allow-mcp")
