"""`viva bench tools` and `tool-calls`."""

from typing import Annotated

import typer

from vivavoce.cli.bench import Out
from vivavoce.cli.options import Json, print_json, progress_to

app = typer.Typer()


Url = Annotated[str, typer.Argument(help="URL of an OpenAI-Realtime server, such as ws://127.0.0.1:8000/v1/realtime.")]
Model = Annotated[str | None, typer.Option(help="The name of the model.")]
ApiKey = Annotated[str | None, typer.Option(envvar="VIVA_API_KEY", help="The server's key.")]


@app.command("tools")
def bench_tools(
    url: Url,
    model: Model = None,
    api_key: ApiKey = None,
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


@app.command("tool-calls")
def bench_tool_calls(
    url: Url,
    model: Model = None,
    api_key: ApiKey = None,
    requests: Annotated[int, typer.Option(min=0, help="Spoken requests that ask for a tool.")] = 200,
    others: Annotated[int, typer.Option(min=0, help="Spoken requests that ask for none.")] = 100,
    kokoro: Annotated[
        bool, typer.Option("--kokoro", help="In Kokoro's held-out voices, not those of flite, espeak-ng and festival.")
    ] = False,
    described: Annotated[
        bool,
        typer.Option(
            "--described", help="Tools with descriptions and lists of values, for models that do not know the desk."
        ),
    ] = False,
    instructions: Annotated[
        str | None, typer.Option(help="System prompt. Default: the desk's; an empty one leaves the server's own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the requests and their voices.")] = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """How many spoken requests to a front desk become the right function call, and how many others none."""
    with progress_to(as_json):
        from vivavoce.bench.tool_requests import run

        result = run(url, model, api_key, requests, others, kokoro, instructions, described, seed, out)
    if as_json:
        print_json(result)
