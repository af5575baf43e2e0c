"""`viva bench telephone`."""

from typing import Annotated

import typer

from vivavoce.cli.bench import Out
from vivavoce.cli.options import DeviceSpec, Json, print_json, progress_to, share_cores

app = typer.Typer()


@app.command("telephone")
def bench_telephone(
    part: Annotated[
        list[str] | None,
        typer.Option(
            help="load, sipp, latency, loss, echo, model, sipp-model or answers; may be repeated. Default: all, those "
            "with sipp where it is installed."
        ),
    ] = None,
    calls: Annotated[int, typer.Option(min=1, help="Calls at once against scripted replies.")] = 32,
    model_calls: Annotated[int, typer.Option(min=1, help="Calls at once against the model.")] = 8,
    turns: Annotated[int, typer.Option(min=1, help="Questions of each call.")] = 3,
    replies: Annotated[int, typer.Option(min=1, help="Replies on a line with echo.")] = 100,
    questions: Annotated[
        int | None, typer.Option(min=1, help="Bundled questions whose answers are scored. Default: all.")
    ] = None,
    model: Annotated[str, typer.Option(help="The speech-to-speech model.")] = "mini-speech",
    device: DeviceSpec = "auto",
    front_end_processes: Annotated[
        int | None,
        typer.Option(min=0, help="Processes for voice activity and echo; 0: in the event loop. Default: as for serve."),
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Calls over SIP on this machine: many at once, latency beside WebSockets, loss and jitter, echo, right answers."""
    share_cores()
    with progress_to(as_json):
        from vivavoce.errors import optional_packages

        with optional_packages():
            from vivavoce.bench.telephone import TelephoneOptions, run

        options = TelephoneOptions(
            parts=tuple(part) if part else None,
            calls=calls,
            model_calls=model_calls,
            turns=turns,
            replies=replies,
            questions=questions,
            model=model,
            device=device,
            front_end_processes=front_end_processes,
        )
        result = run(options, out)
    if as_json:
        print_json(result)
