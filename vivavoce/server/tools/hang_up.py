"""A tool that ends the conversation, after the user has heard the goodbye."""

from collections.abc import Mapping
from typing import Any

from vivavoce.server.tools.interface import BuiltInTool, CallingSession, object_schema

OUTPUT = "The call ends after your next reply. Say goodbye in a few words."


def hang_up() -> BuiltInTool:
    """The tool `hang_up`."""

    async def run(arguments: Mapping[str, Any], session: CallingSession) -> str:
        session.hang_up()
        return OUTPUT

    description = "Ends the call. Use it when the user says goodbye, or asks to end the call."
    return BuiltInTool("hang_up", description, object_schema({}), run)
