"""`viva bench serve`."""

from typing import Annotated

import typer

from vivavoce.cli.bench import Out, _batches
from vivavoce.cli.options import DeviceSpec, Json, print_json, progress_to


def bench_serve(
    device: DeviceSpec = "auto",
    dtype: Annotated[str, typer.Option(help="Of the language model: auto, float32, bfloat16 or float16.")] = "auto",
    shape: Annotated[
        str,
        typer.Option(help="true: the published shape, random weights; tiny: an untrained one; mini: mini-speech."),
    ] = "true",
    sessions: Annotated[
        str, typer.Option(callback=_batches, help="Sessions at once, level by level, separated by commas.")
    ] = "1,8,32,64,128",
    seconds: Annotated[float, typer.Option(min=0.4, help="How long each reply is; so long takes a level.")] = 60.0,
    question: Annotated[float, typer.Option(min=0.08, help="How long each question is.")] = 2.0,
    spread: Annotated[float, typer.Option(min=0.0, help="Seconds over which the sessions begin.")] = 4.0,
    newcomers: Annotated[int, typer.Option(min=0, help="Sessions that come while all others speak.")] = 8,
    left_chunks: Annotated[int, typer.Option(min=1, help="Chunks the voice looks back.")] = 8,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Go on after a level with a gap.")] = False,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="In virtual time, beside a table of an H200's times; device and shape unused."),
    ] = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Conversations at once on one device until a listener hears a gap: latency, underruns, memory, power."""
    with progress_to(as_json):
        from vivavoce.bench import serve
        from vivavoce.bench import serve_simulation as serve_rehearsal

        counts = [int(part) for part in sessions.split(",")]
        if rehearse:
            script = serve.Script(question, seconds, spread, newcomers)
            result = serve_rehearsal.run(counts, script, keep_going, out=out)
        else:
            result = serve.run(
                device, dtype, shape, counts, seconds, question, spread, newcomers, left_chunks, keep_going, out
            )
    if as_json:
        print_json(result)


def add_to(bench: typer.Typer) -> None:
    """Among the benchmarks."""
    bench.command("serve")(bench_serve)
