"""`viva bench budget` and `viva bench sessions`: what a conversation costs, and what it leaves behind."""

from typing import Annotated

import typer

from vivavoce.cli.bench import Out
from vivavoce.cli.options import Json, print_json, progress_to

Model = Annotated[str, typer.Option(help="A speech-to-speech model that carries its codec.")]


def bench_budget(
    model: Model = "mini-speech",
    sessions: Annotated[int, typer.Option(min=1, help="Conversations at once.")] = 8,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Processor time of every stage of a conversation, and how many conversations this machine has time for."""
    with progress_to(as_json):
        from vivavoce.bench.budget import run

        result = run(model, sessions, out)
    if as_json:
        print_json(result)


def bench_sessions(
    model: Model = "mini-speech",
    count: Annotated[int, typer.Option(min=2, help="Sessions, one after another.")] = 200,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Memory of a server over many sessions that end, some of them in the middle of a reply."""
    with progress_to(as_json):
        from vivavoce.bench.sessions import run

        result = run(model, count, out=out)
    if as_json:
        print_json(result)


def add_to(bench: typer.Typer) -> None:
    """Both among the benchmarks."""
    bench.command("budget")(bench_budget)
    bench.command("sessions")(bench_sessions)
