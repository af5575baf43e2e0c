"""`viva bench serve`, and what a machine serves: budget, sessions, simulation."""

from typing import Annotated

import typer

from vivavoce.cli.bench import Model, Out, counts_text
from vivavoce.cli.options import DeviceSpec, Json, print_json, progress_to

app = typer.Typer()


@app.command("serve")
def bench_serve(
    device: DeviceSpec = "auto",
    dtype: Annotated[
        str, typer.Option(help="Dtype of the language model: auto, float32, bfloat16 or float16.")
    ] = "auto",
    shape: Annotated[
        str,
        typer.Option(help="true: random weights of the published shape; tiny: a tiny one; mini: mini-speech."),
    ] = "true",
    sessions: Annotated[
        str | None,
        typer.Option(
            callback=lambda text: None if text is None else counts_text(text),
            help="Concurrent sessions of each level, comma-separated. Default: 1,16,32,64,128,192.",
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.4, help="Length of each reply in seconds. Default: 20; in process 60.")
    ] = None,
    question: Annotated[float, typer.Option(min=0.08, help="Length of each question in seconds, about.")] = 2.0,
    spread: Annotated[
        float | None,
        typer.Option(min=0.0, help="A rush: seconds within which the sessions start. Default: 8; in process 4."),
    ] = None,
    steady: Annotated[
        float | None,
        typer.Option(min=1.0, help="A steady stream instead of a rush: Poisson arrivals, measured this many seconds."),
    ] = None,
    interrupt: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the callers who interrupt their first reply.")
    ] = 0.0,
    transport: Annotated[str, typer.Option(help="websocket, webrtc, or binary (Opus frames).")] = "websocket",
    callers: Annotated[
        int | None, typer.Option(min=1, help="Caller processes. Default: three eighths of the cores, at most 6.")
    ] = None,
    max_lateness: Annotated[
        float,
        typer.Option(min=1.0, help="Milliseconds (p99) by which callers may be late before figures are withheld."),
    ] = 20.0,
    url: Annotated[str | None, typer.Option(help="Measure a running server instead of starting one.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="VIVA_API_KEY", help="The key of the server at --url.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at --url.")] = None,
    doors: Annotated[int | None, typer.Option(min=0, help="Door processes of the server. Default: its own.")] = None,
    max_sessions: Annotated[
        int | None, typer.Option(min=1, help="Limit of the server, to measure refusals. Default: above the load.")
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also sample where the server's processes spend host time, by py-spy.")
    ] = False,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Without sockets, voice activity and echo guard, in this process.")
    ] = False,
    newcomers: Annotated[
        int, typer.Option(min=0, help="In process: additional sessions that start during the replies.")
    ] = 8,
    left_chunks: Annotated[int, typer.Option(min=1, help="Left context of the vocoder, in chunks.")] = 8,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Continue after a level that does not hold.")
    ] = False,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", "--rehearse", help="Simulate an H200 in virtual time; ignores device and shape."),
    ] = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """How many concurrent conversations one server holds: latency, underruns, refusals, CPU, memory and power."""
    is_alone = simulate or in_process
    counts = [int(part) for part in (sessions or ("1,8,32,64,128" if is_alone else "1,16,32,64,128,192")).split(",")]
    with progress_to(as_json):
        if is_alone:
            from vivavoce.bench import serve

            script = serve.Script(question, seconds or 60.0, 4.0 if spread is None else spread, newcomers)
            if simulate:
                from vivavoce.bench import serve_simulation  # needs the server's packages

                result = serve_simulation.run(counts, script, keep_going, out=out)
            else:
                result = serve.run(
                    *(device, dtype, shape, counts, script.reply, question, script.spread, newcomers),
                    *(left_chunks, keep_going, out),
                )
        else:
            from vivavoce.errors import optional_packages

            with optional_packages():
                from vivavoce.bench import serve_door

            server = serve_door.ServerChoice(
                url, api_key, model, shape, device, dtype, left_chunks, max_sessions, doors
            )
            options = serve_door.DoorOptions(
                sessions=counts,
                seconds=seconds or 20.0,
                question=question,
                spread=8.0 if spread is None else spread,
                steady=steady,
                interrupt=interrupt,
                transport=transport,
                callers=callers,
                max_lateness_ms=max_lateness,
                keep_going=keep_going,
                profile=profile,
            )
            result = serve_door.run(server, options, out)
    if as_json:
        print_json(result)


@app.command("budget")
def bench_budget(
    model: Model = "mini-speech",
    sessions: Annotated[int, typer.Option(min=1, help="Concurrent conversations.")] = 8,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """CPU time of each stage of a conversation, and how many conversations this machine can serve."""
    with progress_to(as_json):
        from vivavoce.bench.capacity import run_budget

        result = run_budget(model, sessions, out)
    if as_json:
        print_json(result)


@app.command("sessions")
def bench_sessions(
    model: Model = "mini-speech",
    count: Annotated[int, typer.Option(min=2, help="Total number of sessions, of which a few are concurrent.")] = 200,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Memory of a server over many sessions, some of which are cancelled during a reply."""
    with progress_to(as_json):
        from vivavoce.bench.capacity import run_sessions

        result = run_sessions(model, count, out=out)
    if as_json:
        print_json(result)


@app.command("simulate")
@app.command("rehearsal", hidden=True)  # the former name
def bench_simulate(
    model: Model = "mini-speech",
    scene: Annotated[list[str] | None, typer.Option(help="A scene of `viva bench turn`; may be repeated.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns per scene and call.")] = 3,
    sessions: Annotated[int, typer.Option(min=1, help="Concurrent calls of the load test, besides the scenes.")] = 8,
    silence_ms: Annotated[int, typer.Option(min=0, help="Milliseconds of silence that end a turn.")] = 200,
    slowdown: Annotated[float, typer.Option(min=0.05, help="Factor by which the simulated CPU is slower.")] = 1.0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Turn-taking in virtual time that advances with CPU time, independent of other load on this machine."""
    with progress_to(as_json):
        from vivavoce.bench.simulation import run

        result = run(model, scene, turns, sessions, silence_ms, slowdown, out)
    if as_json:
        print_json(result)
