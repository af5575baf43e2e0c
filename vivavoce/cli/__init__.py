"""`viva …`: parses, calls the API, prints. With --json, stdout holds one JSON value and nothing else."""

import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from vivavoce import __version__
from vivavoce.cli import bench, codecs, models, train
from vivavoce.cli.options import DeviceSpec, Json, gigabytes, print_json, table
from vivavoce.errors import VivaError

if TYPE_CHECKING:
    from vivavoce.doctor import DeviceReport, Diagnosis

app = typer.Typer(
    name="viva",
    help="Viva Voce: a real-time speech engine. Start with `viva doctor`, then `viva demo`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(codecs.app)
app.add_typer(models.app, name="models")
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")


def main() -> None:
    """Run the command line; an error a user can act on is one line on stderr and exit code 1."""
    try:
        app()
    except VivaError as error:
        _fail(error, str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        _fail(error, f"{type(error).__name__}: {error} (a fault of viva; VIVA_DEBUG=1 shows where)")


def _fail(error: Exception, line: str) -> None:
    if os.environ.get("VIVA_DEBUG") == "1":
        raise error
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[red]error:[/red] {escape(' '.join(line.split()))}")
    raise SystemExit(1)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"viva {__version__}")
        raise typer.Exit


@app.callback()
def _viva(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def doctor(as_json: Json = False) -> None:
    """Tell what this machine has, and what to do about what is missing."""
    from vivavoce.doctor import examine

    diagnosis = examine()
    if as_json:
        print_json(diagnosis.as_dict())
    else:
        _print_diagnosis(diagnosis)


@app.command()
def demo(
    wav: Annotated[Path | None, typer.Option(dir_okay=False, help="A spoken question of your own.")] = None,
    microphone: Annotated[float | None, typer.Option(min=1.0, max=30.0, help="Record so many seconds.")] = None,
    model: Annotated[str, typer.Option(help="A speech-to-speech model that carries its codec.")] = "mini-speech",
    device: DeviceSpec = "auto",
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for the reply and the figures.")] = None,
    as_json: Json = False,
) -> None:
    """Ask the bundled miniature a spoken question and hear it answer, offline, in real time."""
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        from vivavoce.demo import run

        result = run(device, model, wav, microphone, out)
    if as_json:
        print_json(result)


@app.command()
def serve(
    model: Annotated[
        str, typer.Option(help="Bundled name, folder or hub id of a speech-to-speech model.")
    ] = "mini-speech",
    codec: Annotated[str | None, typer.Option(help="Its codec, where the model does not carry one.")] = None,
    voice: Annotated[Path | None, typer.Option(dir_okay=False, help="A recording of the voice to answer with.")] = None,
    host: Annotated[str, typer.Option(help="Address to bind; other than loopback needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    api_key: Annotated[list[str] | None, typer.Option(envvar="VIVA_API_KEY", help="A key clients must show.")] = None,
    allow_origin: Annotated[list[str] | None, typer.Option(help="A browser origin to admit.")] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="A name this server is called by.")] = None,
    most_sessions: Annotated[int, typer.Option(min=1, help="Conversations at once; more are told to come back.")] = 64,
    device: DeviceSpec = "auto",
) -> None:
    """Serve conversations over the OpenAI Realtime protocol (WebSocket, WebRTC), with a page to speak to."""
    import asyncio

    from vivavoce.server.options import ServerOptions
    from vivavoce.serving import load_host
    from vivavoce.serving import serve as run

    options = ServerOptions(
        host=host,
        port=port,
        api_keys=tuple(api_key or ()),
        allowed_origins=tuple(allow_origin or ()),
        allowed_hosts=tuple(allow_host or ()),
        most_sessions=most_sessions,
    )
    options.check()
    hosted = load_host(model, codec, voice, device)
    Console(highlight=False).print(f"{hosted.name} on http://{host}:{port} — open it in a browser and speak")
    asyncio.run(run(hosted, options))


def _print_diagnosis(found: "Diagnosis") -> None:
    console = Console()
    console.print(
        f"viva {found.version} · Python {found.python} · torch {found.torch} · {found.system}", highlight=False
    )
    devices = table("Devices", "device", "name", "dtypes", "attention", "graphs", "triton", "memory free / total")
    for device in found.devices:
        devices.add_row(*_device_row(device))
    models = table(f"Models in {found.cache} ({gigabytes(found.disk_free)} free)", "model", "size", "here")
    for model in found.models:
        here = "no" if model.path is None else f"{model.path}{' (not whole)' if model.missing else ''}"
        models.add_row(model.name, gigabytes(model.bytes), here)
    extras = table("Extras", "extra", "for", "installed")
    for extra in found.extras:
        extras.add_row(extra.extra, extra.what, escape(f"no: {extra.install}") if extra.missing else "yes")
    for part in (devices, models, extras):
        console.print(part)
    for line in found.advice:
        console.print(f"→ {escape(line)}", highlight=False)


def _device_row(device: "DeviceReport") -> list[str]:
    dtypes = ", ".join([f"[bold]{device.dtype}[/bold]", *(name for name in device.dtypes if name != device.dtype)])
    memory = f"{gigabytes(device.memory_free)} / {gigabytes(device.memory_total)}"
    yes_no = ["yes" if able else "no" for able in (device.graphs, device.triton)]
    return [device.device, device.name, dtypes, device.attention, *yes_no, memory]
