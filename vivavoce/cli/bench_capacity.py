"""`viva bench budget`, `rehearsal` and `sessions`: what conversations cost, how many fit, what they leave behind."""

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
    count: Annotated[int, typer.Option(min=2, help="Sessions, a few at a time.")] = 200,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Memory of a server over many sessions that end, some of them in the middle of a reply."""
    with progress_to(as_json):
        from vivavoce.bench.sessions import run

        result = run(model, count, out=out)
    if as_json:
        print_json(result)


def bench_rehearsal(
    model: Model = "mini-speech",
    scene: Annotated[list[str] | None, typer.Option(help="A scene of `viva bench turn`; may be given again.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each scene and call.")] = 3,
    sessions: Annotated[int, typer.Option(min=1, help="Calls at once, besides the scenes.")] = 8,
    silence_ms: Annotated[int, typer.Option(min=0, help="Silence that ends a turn.")] = 200,
    slowdown: Annotated[float, typer.Option(min=0.05, help="How much slower the processor is to be.")] = 1.0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Calls to a server that is this process, in the processor's time: what a machine with nothing else to do would."""
    with progress_to(as_json):
        from vivavoce.bench.simulation import run

        result = run(model, scene, turns, sessions, silence_ms, slowdown, out)
    if as_json:
        print_json(result)


def add_to(bench: typer.Typer) -> None:
    """All of them among the benchmarks."""
    bench.command("budget")(bench_budget)
    bench.command("rehearsal")(bench_rehearsal)
    bench.command("sessions")(bench_sessions)
