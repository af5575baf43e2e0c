"""`viva …`: parses, calls the API, prints. With --json, stdout holds one JSON value and nothing else."""

import json
import os
import sys
from contextlib import redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vivavoce import __version__
from vivavoce.errors import VivaError

if TYPE_CHECKING:
    from vivavoce.codecs import Codec
    from vivavoce.doctor import DeviceReport, Diagnosis
    from vivavoce.hub import CheckReport

app = typer.Typer(
    name="viva",
    help="Viva Voce: a real-time speech engine. Start with `viva doctor`, then `viva demo`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models_app = typer.Typer(no_args_is_help=True, help="The models that can be run: list, fetch and check them.")
bench_app = typer.Typer(
    no_args_is_help=True, help="Measure this machine; every figure in the docs names such a command."
)
app.add_typer(models_app, name="models")
app.add_typer(bench_app, name="bench")


class Shape(StrEnum):
    """How large a model a benchmark builds."""

    true = "true"
    small = "small"


def _batches(text: str) -> str:
    if not all(part.strip().isdecimal() and int(part) > 0 for part in text.split(",")):
        raise typer.BadParameter(f"{text!r} is not a list of positive numbers such as 1,8,32")
    return text


def _complete_model(typed: str) -> list[str]:
    from vivavoce import hub

    return [name for name in (*hub.bundled(), *(model.name for model in hub.KNOWN)) if name.startswith(typed)]


def _complete_device(typed: str) -> list[str]:
    return [name for name in ("auto", "cpu", "cuda", "npu", "mps") if name.startswith(typed)]


Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for programs.")]
DeviceSpec = Annotated[
    str,
    typer.Option("--device", help="auto, cpu, cuda, cuda:1, npu, npu:0 or mps.", autocompletion=_complete_device),
]
Offline = Annotated[bool, typer.Option("--offline", help="Never use the network.")]
ModelName = Annotated[
    str,
    typer.Argument(
        help="Bundled name, folder, owner/name, hf:owner/name or ms:owner/name; a hub id may end in @revision.",
        autocompletion=_complete_model,
    ),
]


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
        _print_json(diagnosis.as_dict())
    else:
        _print_diagnosis(diagnosis)


@app.command()
def demo(
    device: DeviceSpec = "auto",
    seed: Annotated[int, typer.Option(help="The same seed gives the same run.")] = 0,
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for the replies as WAV files.")] = None,
    as_json: Json = False,
) -> None:
    """The smallest true run from end to end, on whatever this machine has."""
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        from vivavoce.demo import run

        result = run(device=device, seed=seed, out=out)
    if as_json:
        _print_json(result)


@bench_app.command("lm")
def bench_lm(
    device: DeviceSpec = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    shape: Annotated[
        Shape, typer.Option(help="The published shape, or a small one that fits any machine.")
    ] = Shape.true,
    batch: Annotated[str, typer.Option(callback=_batches, help="Batch sizes, separated by commas.")] = "1,8,32,64,128",
    context: Annotated[int, typer.Option(min=1, help="Rows already in the cache at each measured step.")] = 1024,
    prefill: Annotated[int, typer.Option(min=1, help="Rows of the measured prefill.")] = 512,
    peer: Annotated[bool, typer.Option("--peer/--no-peer", help="Measure the eager transformers layers too.")] = True,
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for the JSON and the plot.")] = None,
    as_json: Json = False,
) -> None:
    """Step and prefill time of the language model, beside this machine's memory floor and an eager peer."""
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        from vivavoce.bench.lm import run

        batches = [int(part) for part in batch.split(",")]
        result = run(
            device=device,
            dtype=dtype,
            shape=shape.value,
            batches=batches,
            context=context,
            prefill=prefill,
            peer=peer,
            out=out,
        )
    if as_json:
        _print_json(result)


@bench_app.command("codec")
def bench_codec(
    device: DeviceSpec = "auto",
    dtype: Annotated[str, typer.Option(help="Of the flow decoder: auto, float32, bfloat16 or float16.")] = "auto",
    shape: Annotated[
        Shape, typer.Option(help="The published shape, or a small one that fits any machine.")
    ] = Shape.true,
    sessions: Annotated[str, typer.Option(callback=_batches, help="Sessions at once, separated by commas.")] = "1,8,32",
    hops: Annotated[int, typer.Option(min=10, help="Hops of the long reply.")] = 200,
    left_chunks: Annotated[int, typer.Option(min=0, help="Chunks the flow looks back.")] = 8,
    speech: Annotated[Path | None, typer.Option(dir_okay=False, help="A recording to measure the ear with.")] = None,
    pace: Annotated[float, typer.Option(min=0.1, help="Milliseconds in which the language model makes a code.")] = 7.0,
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for the JSON and the plot.")] = None,
    as_json: Json = False,
) -> None:
    """MOSS-Speech's voice: time to first sound, cost per hop over a long reply, sessions at once, chunk policies."""
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        from vivavoce.bench.codec import run

        result = run(
            device=device,
            dtype=dtype,
            shape=shape.value,
            sessions=[int(part) for part in sessions.split(",")],
            hops=hops,
            left_chunks=left_chunks,
            seconds_per_code=pace / 1000,
            speech=speech,
            out=out,
        )
    if as_json:
        _print_json(result)


CodecFolder = Annotated[
    str, typer.Option("--codec", help="MOSS-Speech-Codec, XY-Tokenizer or BigVGAN: a folder or a hub id.")
]
OutFile = Annotated[Path, typer.Option("--out", "-o", dir_okay=False, help="Where the result goes.")]
VoiceFile = Annotated[
    Path | None, typer.Option("--voice", help="A recording of the voice to speak with, at most 30 s; MOSS-Speech only.")
]


@app.command()
def encode(sound: Path, out: OutFile, codec: CodecFolder, device: DeviceSpec = "auto") -> None:
    """Turn a sound file into codes (JSON)."""
    from vivavoce.audio.files import read
    from vivavoce.codecs import CodeFile

    opened = _open_codec(codec, device)
    codes = opened.encode(read(sound))
    CodeFile(opened.name, codes.cpu()).write(out)
    Console().print(f"{codes.shape[1]} frames of {codes.shape[0]} code(s) in {out}", highlight=False)


@app.command("speak-codes")
def speak_codes(
    codes: Path, out: OutFile, codec: CodecFolder, voice: VoiceFile = None, device: DeviceSpec = "auto"
) -> None:
    """Turn codes (JSON of `viva encode`) into a sound file."""
    from vivavoce.audio.files import read, write
    from vivavoce.codecs import CodeFile

    given = CodeFile.read(codes)
    opened = _open_codec(codec, device)
    if given.codec != opened.name:
        raise VivaError(f"{codes} was made by {given.codec}, {codec} is {opened.name}")
    sound = opened.decode(given.codes, None if voice is None else read(voice))
    write(out, sound)
    Console().print(f"{sound.seconds:.2f} s at {sound.rate} Hz in {out}", highlight=False)


@app.command()
def resynthesise(
    sound: Path,
    out: OutFile,
    codec: CodecFolder,
    voice: VoiceFile = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="A picture: spectrograms before and after.")] = None,
    device: DeviceSpec = "auto",
) -> None:
    """Hear what a codec does to a sound: encode and decode it."""
    from vivavoce.audio.files import read, write

    original = read(sound)
    opened = _open_codec(codec, device)
    decoded = opened.resynthesise(original, None if voice is None else read(voice))
    write(out, decoded)
    if plot is not None:
        from vivavoce.bench.spectrogram import plot_spectrograms

        plot_spectrograms(original, decoded, opened.name, plot)
    Console().print(f"{decoded.seconds:.2f} s at {decoded.rate} Hz in {out}", highlight=False)


def _open_codec(name: str, device: str) -> "Codec":
    from vivavoce import hub
    from vivavoce.codecs import open_codec
    from vivavoce.device import pick

    folder = Path(name) if Path(name).is_file() else hub.resolve(name)  # one XY-Tokenizer is published as a file
    return open_codec(folder, pick(device).torch_device)


@models_app.command("list")
def models_list(as_json: Json = False) -> None:
    """The models that are known, which of them are here, and where."""
    from vivavoce import hub

    local = hub.local_models()
    if as_json:
        known = [vars(model) for model in hub.KNOWN]
        _print_json({"known": known, "local": [vars(model) for model in local]})
        return
    table = _table("Models", "model", "what", "size", "here")
    for model in hub.KNOWN:
        places = [found for found in local if found.name in (model.name, *model.mirrors)]
        here = "\n".join(f"{found.path}{' (not whole)' if found.missing else ''}" for found in places)
        table.add_row(model.name, model.what, _gigabytes(model.bytes), here or "no")
    for found in local:
        if found.source == "bundled":
            table.add_row(found.name, "bundled", "", str(found.path))
    console = Console()
    console.print(table)
    console.print("`viva models fetch NAME` brings one here, `viva models check NAME` tells whether it is whole.")


@models_app.command("fetch")
def models_fetch(
    name: ModelName,
    revision: Annotated[str | None, typer.Option(help="Tag, branch or commit; known models have theirs.")] = None,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Fetch a model, or go on with a fetch that was cut short, and check it."""
    from vivavoce import hub

    path = hub.resolve(name, revision, offline=offline or None)
    _report_check(name, hub.check(path, hub.known(name)), as_json)


@models_app.command("check")
def models_check(name: ModelName, as_json: Json = False) -> None:
    """Whether a model on this machine is whole; nothing is fetched."""
    from vivavoce import hub

    path = hub.resolve(name, offline=True)
    _report_check(name, hub.check(path, hub.known(name)), as_json)


def _report_check(name: str, report: "CheckReport", as_json: bool) -> None:
    if as_json:
        files = [vars(file) for file in report.files]
        _print_json({"name": name, "path": report.path, "ok": report.ok, "problems": report.problems, "files": files})
    else:
        for problem in report.problems:
            Console(soft_wrap=True, highlight=False).print(f"[red]damaged[/red] {escape(problem)}")
        if report.ok:
            total = sum(file.bytes for file in report.files)
            Console(soft_wrap=True, highlight=False).print(
                f"[green]whole[/green] {escape(str(report.path))} ({len(report.files)} files, {_gigabytes(total)})"
            )
    if not report.ok:
        raise VivaError(
            f"{report.path}: {len(report.problems)} of its files are damaged or missing; fetch {name} again"
        )


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def _print_diagnosis(found: "Diagnosis") -> None:
    console = Console()
    console.print(
        f"viva {found.version} · Python {found.python} · torch {found.torch} · {found.system}", highlight=False
    )
    devices = _table("Devices", "device", "name", "dtypes", "attention", "graphs", "triton", "memory free / total")
    for device in found.devices:
        devices.add_row(*_device_row(device))
    models = _table(f"Models in {found.cache} ({_gigabytes(found.disk_free)} free)", "model", "size", "here")
    for model in found.models:
        here = "no" if model.path is None else f"{model.path}{' (not whole)' if model.missing else ''}"
        models.add_row(model.name, _gigabytes(model.bytes), here)
    extras = _table("Extras", "extra", "for", "installed")
    for extra in found.extras:
        extras.add_row(extra.extra, extra.what, escape(f"no: {extra.install}") if extra.missing else "yes")
    for table in (devices, models, extras):
        console.print(table)
    for line in found.advice:
        console.print(f"→ {escape(line)}", highlight=False)


def _device_row(device: "DeviceReport") -> list[str]:
    dtypes = ", ".join([f"[bold]{device.dtype}[/bold]", *(name for name in device.dtypes if name != device.dtype)])
    memory = f"{_gigabytes(device.memory_free)} / {_gigabytes(device.memory_total)}"
    yes_no = ["yes" if able else "no" for able in (device.graphs, device.triton)]
    return [device.device, device.name, dtypes, device.attention, *yes_no, memory]


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


if __name__ == "__main__":
    main()
