"""An MCP server built with the official package, in a process of its own: over stdio, or over HTTP at a port.

Usage: python mcp_program.py [http PORT [TOKEN] | many | mute]
"""

import asyncio
import sys
import time

COUNT = 10_000


def new_server():
    from mcp.server import MCPServer
    from mcp_types import ToolAnnotations

    app = MCPServer("desk")

    @app.tool(annotations=ToolAnnotations(read_only_hint=True))
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    @app.tool()
    async def wait(seconds: float) -> str:
        """Answers later."""
        await asyncio.sleep(seconds)
        return "waited"

    @app.tool()
    def flood() -> str:
        """Writes ten megabytes."""
        return "x" * 10_000_000

    @app.tool()
    def broken() -> str:
        """Fails."""
        raise ValueError("out of order")

    return app


def main(mode: str = "stdio", *rest: str) -> None:
    if mode == "mute":
        time.sleep(600)
        return
    app = new_server()
    if mode == "many":
        for number in range(COUNT):
            app.add_tool(lambda: "", name=f"tool_{number}", description="One of many.")
    if mode != "http":
        app.run()
        return
    import uvicorn

    inner = app.streamable_http_app()

    async def guarded(scope, receive, send):
        """Refuses requests without the token; redirects `/away` elsewhere."""
        headers = dict(scope.get("headers") or ())
        if scope["type"] == "http" and scope["path"] == "/away":
            location = rest[2].encode()
            await send({"type": "http.response.start", "status": 307, "headers": [(b"location", location)]})
            await send({"type": "http.response.body", "body": b""})
        elif scope["type"] == "http" and headers.get(b"authorization") != f"Bearer {rest[1]}".encode():
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await inner(scope, receive, send)

    uvicorn.run(guarded, host="127.0.0.1", port=int(rest[0]), log_level="error")


if __name__ == "__main__":
    main(*sys.argv[1:])
