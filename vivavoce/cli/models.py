"""`viva models …` and `viva verify`: list, fetch, check and verify models."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vivavoce.cli.options import Json, ModelName, Offline, gigabytes, made_folder, print_json, progress_to
from vivavoce.errors import VivaError

if TYPE_CHECKING:
    from vivavoce.hub import CheckReport

MIN_LICENCE_WIDTH = 80  # columns of a terminal below which licences are left out of the table

app = typer.Typer(help="List, fetch and check models.")


@app.callback(invoke_without_command=True)
def models(context: typer.Context) -> None:
    """List, fetch and check models; without a command, list them."""
    if context.invoked_subcommand is None:
        models_list()


@app.command("list")
def models_list(as_json: Json = False) -> None:
    """List the known models: what for, size, licence, and whether they are on this machine."""
    from vivavoce import hub

    local = hub.local_models()
    if as_json:
        known = [asdict(model) for model in hub.KNOWN]
        print_json({"known": known, "local": [vars(model) for model in local]})
        return
    console = Console()
    has_licences = console.width >= MIN_LICENCE_WIDTH
    listed = Table(box=SIMPLE_HEAD, title="Models", title_justify="left", pad_edge=False)
    listed.add_column("model", overflow="fold")
    listed.add_column("size", justify="right", no_wrap=True)
    if has_licences:
        listed.add_column("licence", no_wrap=True)
    listed.add_column("here", no_wrap=True)
    for model in hub.KNOWN:
        copies = [found for found in local if found.name in (model.name, *model.mirrors)]
        presence = "yes" if any(not found.missing for found in copies) else "partly" if copies else "no"
        languages = f"; {model.languages}" if model.languages else ""
        licence = [model.licence or "not named"] if has_licences else []
        listed.add_row(_entry(model.name, model.what + languages), gigabytes(model.bytes), *licence, presence)
    for found in local:
        if found.source == "bundled":
            listed.add_row(_entry(found.name, "bundled"), "", *([""] if has_licences else []), "yes")
    console.print(listed)
    console.print("`viva models fetch NAME` downloads a model, `viva models check NAME` checks its files.")


def _entry(name: str, what: str) -> str:
    return f"[bold]{escape(name)}[/bold]\n[dim]{escape(what)}[/dim]"


@app.command("fetch")
def models_fetch(
    name: ModelName,
    revision: Annotated[
        str | None, typer.Option(help="Tag, branch or commit. Default: the tested one of known models.")
    ] = None,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Download a model, or resume an interrupted download, and check its files."""
    from vivavoce import hub

    model = hub.known(name)
    if model is not None and model.listed and revision is None and not Path(name).is_dir():
        path = hub.fetch(model, offline or None, verify=True)
    else:
        path = hub.resolve(name, revision, offline=offline or None)
    _report_check(name, hub.check(path, hub.known(name)), as_json)


@app.command("check")
def models_check(name: ModelName, as_json: Json = False) -> None:
    """Check whether the files of a model on this machine are complete, without downloading."""
    from vivavoce import hub

    path = hub.resolve(name, offline=True)
    _report_check(name, hub.check(path, hub.known(name)), as_json)


def _report_check(name: str, report: "CheckReport", as_json: bool) -> None:
    if as_json:
        files = [vars(file) for file in report.files]
        print_json({"name": name, "path": report.path, "ok": report.ok, "problems": report.problems, "files": files})
    else:
        for problem in report.problems:
            Console(soft_wrap=True, highlight=False).print(f"[red]damaged[/red] {escape(problem)}")
        if report.ok:
            total = sum(file.bytes for file in report.files)
            Console(soft_wrap=True, highlight=False).print(
                f"[green]complete[/green] {escape(str(report.path))} ({len(report.files)} files, {gigabytes(total)})"
            )
    if not report.ok:
        raise VivaError(
            f"{report.path}: {len(report.problems)} of its files are damaged or missing; fetch {name} again"
        )


def report_path(context: typer.Context, out: Path | None) -> Path | None:
    """The path of the report; its folder is created before anything is run."""
    if out is not None and out.suffix == ".json":
        made_folder(context, out.parent)
        if out.is_dir():
            raise typer.BadParameter(f"{out} is a folder; name a file, or a folder without .json at its end")
        return out
    return made_folder(context, out)


def verify(
    model: ModelName,
    devices: Annotated[str, typer.Option(help="Comma-separated: cpu, cuda, cuda:1, npu, mps.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="On the devices: auto, float32, bfloat16, float16 or int8.")] = "auto",
    text: Annotated[str | None, typer.Option(help="The text for a TTS model.")] = None,
    voice: Annotated[
        str | None, typer.Option(help="The name of a voice, a recording of one, or a recording to transcribe.")
    ] = None,
    skip_absent: Annotated[
        bool, typer.Option("--skip-absent", help="Skip devices that this machine does not have, instead of failing.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write report.json, with a plot beside it.", callback=report_path),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare a model on each device with the CPU in float32; the exit status is 0 if they agree."""
    with progress_to(as_json):
        from vivavoce.bench.verify import run
        from vivavoce.bench.verify_subjects import TEXT, Question

        names = [name.strip() for name in devices.split(",") if name.strip()]
        result = run(model, names, dtype, Question(text or TEXT, voice), skip_absent, out)
    if as_json:
        print_json(result)
    if not result["passed"]:
        raise typer.Exit(1)
