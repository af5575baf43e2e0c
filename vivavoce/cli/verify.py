"""`viva verify`."""

from pathlib import Path
from typing import Annotated

import typer

from vivavoce.cli.options import Json, ModelName, made_folder, print_json, progress_to

app = typer.Typer()


def place_for_report(context: typer.Context, out: Path | None) -> Path | None:
    """Where the report goes, its folder made before anything is run."""
    if out is not None and out.suffix == ".json":
        made_folder(context, out.parent)
        if out.is_dir():
            raise typer.BadParameter(f"{out} is a folder; name a file, or a folder without .json at its end")
        return out
    return made_folder(context, out)


@app.command()
def verify(
    model: ModelName,
    devices: Annotated[str, typer.Option(help="Separated by commas: cpu, cuda, cuda:1, npu, mps.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the devices: auto, float32, bfloat16, float16 or int8.")] = "auto",
    text: Annotated[str | None, typer.Option(help="What is said, where the model speaks.")] = None,
    voice: Annotated[str | None, typer.Option(help="A voice by name, or a recording to sound like or hear.")] = None,
    skip_absent: Annotated[bool, typer.Option("--skip-absent", help="Devices that are not here do not fail.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="report.json; a plot goes beside it.", callback=place_for_report),
    ] = None,
    as_json: Json = False,
) -> None:
    """Whether a model does on each device what it does on the CPU in float32; the exit status says so."""
    with progress_to(as_json):
        from vivavoce.bench.verify import run
        from vivavoce.bench.verify_subjects import TEXT, Question

        names = [name.strip() for name in devices.split(",") if name.strip()]
        result = run(model, names, dtype, Question(text or TEXT, voice), skip_absent, out)
    if as_json:
        print_json(result)
    if not result["passed"]:
        raise typer.Exit(1)
