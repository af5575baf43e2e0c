"""The command line `viva`. With --json, stdout holds one JSON value and nothing else."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from vivavoce import __version__, log
from vivavoce.cli import (
    bench,
    bench_duplex,
    bench_serve,
    bench_telephone,
    bench_tools,
    call,
    codecs,
    export,
    models,
    plan,
    quantize,
    say,
    serve,
    setup,
    talk,
    train,
    transcribe,
    tune,
)
from vivavoce.cli.options import (
    DeviceSpec,
    Json,
    StackName,
    gigabytes,
    made_folder,
    print_json,
    progress_to,
    share_cores,
    table,
)
from vivavoce.errors import InputError, VivaError, missing_dependency

if TYPE_CHECKING:
    from vivavoce.cli.doctor import DeviceReport, Diagnosis, ModelStages

app = typer.Typer(
    name="viva",
    help="Viva Voce: a real-time speech engine. Start with `viva setup`, then `viva talk`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(codecs.app)
app.add_typer(say.app)
app.add_typer(models.app, name="models")
app.command()(models.verify)
bench.app.add_typer(bench_duplex.app)
bench.app.add_typer(bench_tools.app)
bench.app.add_typer(bench_serve.app)
bench.app.add_typer(bench_telephone.app)
app.add_typer(bench.app, name="bench")
app.add_typer(train.app, name="train")
app.command()(serve.serve)
app.command()(setup.setup)
app.command()(talk.talk)
app.command()(call.call)
app.command()(transcribe.transcribe)
app.command()(plan.plan)
app.command()(quantize.quantize)
app.command()(tune.tune)
app.add_typer(export.app, name="export")


def main() -> None:
    """Run the command line; an error that a user can act on is one line on stderr and exit code 1."""
    if os.environ.get("VIVA_DEBUG") == "1":
        log.configure("debug")
    else:  # a command that fails prints one line; `viva serve` configures its own log
        logging.getLogger("vivavoce").addHandler(logging.NullHandler())
    try:
        app()
    except VivaError as error:
        _fail(error, str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except OSError as error:
        if error.filename is None:
            _fail(error, _fault(error))
        _fail(error, f"cannot use {error.filename}: {error.strerror}")
    except ImportError as error:
        _fail(error, str(missing_dependency(error) or _fault(error)))
    except Exception as error:
        _fail(error, _fault(error))


def _fault(error: Exception) -> str:
    return f"{type(error).__name__}: {error} (internal error; run with VIVA_DEBUG=1 for the traceback, and report it)"


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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Option(help="Show which class runs each stage of this model, and why.", show_default=False)
    ] = None,
    device: DeviceSpec = "auto",
    as_json: Json = False,
) -> None:
    """Show devices, packages and models of this machine, with advice; with --model, which classes would run it."""
    from vivavoce.cli.doctor import ModelStages, examine, examine_model

    found = examine() if model is None else examine_model(model, device)
    if as_json:
        print_json(found.as_dict())
    elif isinstance(found, ModelStages):
        _print_stages(found)
    else:
        _print_diagnosis(found)


@app.command()
def demo(
    wav: Annotated[Path | None, typer.Option(dir_okay=False, help="A recording of your own question.")] = None,
    microphone: Annotated[
        float | None, typer.Option(min=1.0, max=30.0, help="Record a question for this many seconds.")
    ] = None,
    stack: StackName = None,
    model: Annotated[
        str | None, typer.Option(help="A speech-to-speech model with a bundled codec, instead of a stack.")
    ] = None,
    device: DeviceSpec = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, callback=made_folder, help="Write the reply and the measurements to this folder."
        ),
    ] = None,
    cascade: Annotated[
        bool, typer.Option("--cascade", help="Use a cascade of mini-asr, a small chat model and mini-tts.")
    ] = False,
    chat: Annotated[
        str | None,
        typer.Option(help="The cascade's chat model: smollm2, a .gguf file, a folder or a URL. Default: smollm2."),
    ] = None,
    language: Annotated[
        str, typer.Option(help="Language of the bundled question, and of a cascade's instructions: en or zh.")
    ] = "en",
    as_json: Json = False,
) -> None:
    """Ask a spoken question in real time and print the answer, its latency and the cost of each stage."""
    if cascade and model is not None:
        raise InputError(f"--cascade has three models: leave out --model {model}, or --cascade")
    if chat is not None and not cascade:
        raise InputError(f"--chat {chat} needs --cascade")
    if stack is not None and (cascade or model is not None):
        raise InputError(f"--stack {stack} names all models: leave out --model and --cascade")
    share_cores()
    with progress_to(as_json):
        from vivavoce.cascade.parts import CascadeParts
        from vivavoce.cli.demo import run, run_cascade, run_stack

        if cascade:
            result = run_cascade(device, CascadeParts(chat=chat or "smollm2"), wav, microphone, out, language=language)
        elif model is not None:
            result = run(device, model, wav, microphone, out, language)
        else:
            from vivavoce.stacks import choose_stack

            result = run_stack(choose_stack(stack), device, wav, microphone, out, language)
    if as_json:
        print_json(result)


def _print_stages(found: "ModelStages") -> None:
    stages = table(f"{found.model} ({found.family}) on {found.device}", "stage", "class", "dtype", "why")
    for stage in found.stages:
        stages.add_row(stage.stage, stage.implementation, stage.dtype, escape(stage.why))
    Console().print(stages)


def _print_diagnosis(found: "Diagnosis") -> None:
    console = Console()
    console.print(
        f"viva {found.version} · Python {found.python} · torch {found.torch} · {found.system}", highlight=False
    )
    devices = table("Devices", "device", "name", "dtypes", "graphs", "triton", "memory free / total")
    for device in found.devices:
        devices.add_row(*_device_row(device))
    models = table(f"Models in {found.cache} ({gigabytes(found.disk_free)} free)", "model", "size", "location")
    for model in found.models:
        location = "no" if model.path is None else f"{model.path}{' (incomplete)' if model.missing else ''}"
        models.add_row(model.name, gigabytes(model.bytes), location)
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
    return [device.device, device.name, dtypes, *yes_no, memory]
