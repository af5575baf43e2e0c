"""`viva models …`."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from vivavoce.cli.options import Json, ModelName, Offline, gigabytes, print_json, table
from vivavoce.errors import VivaError

if TYPE_CHECKING:
    from vivavoce.hub import CheckReport

app = typer.Typer(no_args_is_help=True, help="The models that can be run: list, fetch and check them.")


@app.command("list")
def models_list(as_json: Json = False) -> None:
    """The models that are known, which of them are here, and where."""
    from vivavoce import hub

    local = hub.local_models()
    if as_json:
        known = [vars(model) for model in hub.KNOWN]
        print_json({"known": known, "local": [vars(model) for model in local]})
        return
    listed = table("Models", "model", "what", "size", "here")
    for model in hub.KNOWN:
        places = [found for found in local if found.name in (model.name, *model.mirrors)]
        here = "\n".join(f"{found.path}{' (not whole)' if found.missing else ''}" for found in places)
        listed.add_row(model.name, model.what, gigabytes(model.bytes), here or "no")
    for found in local:
        if found.source == "bundled":
            listed.add_row(found.name, "bundled", "", str(found.path))
    console = Console()
    console.print(listed)
    console.print("`viva models fetch NAME` brings one here, `viva models check NAME` tells whether it is whole.")


@app.command("fetch")
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


@app.command("check")
def models_check(name: ModelName, as_json: Json = False) -> None:
    """Whether a model on this machine is whole; nothing is fetched."""
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
                f"[green]whole[/green] {escape(str(report.path))} ({len(report.files)} files, {gigabytes(total)})"
            )
    if not report.ok:
        raise VivaError(
            f"{report.path}: {len(report.problems)} of its files are damaged or missing; fetch {name} again"
        )
