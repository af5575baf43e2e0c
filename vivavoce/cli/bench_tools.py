"""`viva bench tools`."""

from typing import Annotated

import typer

from vivavoce.cli.bench import Out
from vivavoce.cli.options import Json, print_json, progress_to

app = typer.Typer()


@app.command("tools")
def bench_tools(
    url: Annotated[
        str, typer.Argument(help="URL of an OpenAI-Realtime server, such as ws://127.0.0.1:8000/v1/realtime.")
    ],
    model: Annotated[str | None, typer.Option(help="The name of the model.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="VIVA_API_KEY", help="The server's key.")] = None,
    turns: Annotated[int, typer.Option(min=1, max=30, help="Questions, each asked with and without tools.")] = 10,
    tool_seconds: Annotated[float, typer.Option(min=0.0, max=60.0, help="How long the slow tool takes.")] = 3.0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """What tools cost: the first sound with tools set but none called, and silence while a slow tool works."""
    with progress_to(as_json):
        from vivavoce.bench.tools import run

        result = run(url, model, api_key, turns, tool_seconds, out)
    if as_json:
        print_json(result)
