"""Options and output functions shared by the commands."""

import json
import os
import sys
from contextlib import AbstractContextManager, redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table


class ShapeOption(StrEnum):
    """The size of the model that a benchmark builds."""

    true = "true"
    small = "small"


class Padding(StrEnum):
    """How much of a recogniser's window is computed."""

    full = "full"
    trim = "trim"


def complete_model(typed: str) -> list[str]:
    from vivavoce import hub

    return [name for name in (*hub.bundled(), *(model.name for model in hub.KNOWN)) if name.startswith(typed)]


def complete_device(typed: str) -> list[str]:
    return [name for name in ("auto", "cpu", "cuda", "npu", "mps") if name.startswith(typed)]


def complete_stack(typed: str) -> list[str]:
    from vivavoce.stacks import STACKS

    return [name for name in STACKS if name.startswith(typed)]


Snr = Annotated[float | None, typer.Option(help="Add noise at this signal-to-noise ratio in dB.")]
NoiseFolder = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        file_okay=False,
        help="With --snr: a folder of WAV files, or of ESC-50, whose steady sounds are the noise. Default: synthetic.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
DeviceSpec = Annotated[
    str,
    typer.Option("--device", help="auto, cpu, cuda, cuda:1, npu, npu:0 or mps.", autocompletion=complete_device),
]
StackName = Annotated[
    str | None,
    typer.Option(
        "--stack",
        autocompletion=complete_stack,
        help="The models: mini, desk, assistant or s2s. Default: that of `viva setup`, else mini.",
    ),
]
Offline = Annotated[bool, typer.Option("--offline", help="Never use the network.")]
ModelName = Annotated[
    str,
    typer.Argument(
        help="Bundled name, folder, owner/name, hf:owner/name or ms:owner/name; a hub id may end in @revision.",
        autocompletion=complete_model,
    ),
]


def made_folder(context: typer.Context, folder: Path | None) -> Path | None:
    """Create the folder when options are parsed, so that a long command does not fail at its end."""
    if folder is not None and not context.resilient_parsing:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(f"{folder} cannot be created: {error.strerror}") from error
        if not os.access(folder, os.W_OK):
            raise typer.BadParameter(f"{folder} cannot be written to")
    return folder


def progress_to(as_json: bool) -> AbstractContextManager[object]:
    """Progress goes to stdout, or to stderr where stdout holds only the JSON."""
    return redirect_stdout(sys.stderr if as_json else sys.stdout)


def share_cores() -> None:
    """Let OpenMP's threads sleep while they wait: several models run at once, and spinning threads slow the others.

    To be called before torch is imported; a policy that the user has set is kept.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
