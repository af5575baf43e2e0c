"""`viva tune`: the fastest kernel tiles for this GPU."""

from typing import TYPE_CHECKING, Annotated

import typer

from vivavoce.cli.options import DeviceSpec, table

if TYPE_CHECKING:
    from vivavoce.quant.tune import Found


def tune(
    device: DeviceSpec = "auto",
    weights: Annotated[
        str, typer.Option(help="Formats to search, comma-separated: bfloat16, int8, float8, int4.")
    ] = "bfloat16,int8,float8,int4",
    rows: Annotated[str, typer.Option(help="Batch sizes to search, comma-separated.")] = "1,8,16,32,64,128,256,512",
) -> None:
    """Search the fastest tiles of the linear kernels on this GPU, and store them for every later run.

    It takes two to five minutes on 16 cores, most of it compilation. Servers that run meanwhile distort the search.
    """
    from rich.console import Console
    from rich.progress import Progress

    from vivavoce.quant.tune import tune as search

    console = Console()
    with Progress(console=console) as progress:
        found, file = search(device, weights.split(","), [_count(part) for part in rows.split(",")], progress)
    shown = table("Microseconds of each layer", "layer", "weights", "rows", "fastest", "tile", "library")
    for best in found:
        shown.add_row(
            best.layer.name,
            best.layer.scheme,
            str(best.rows),
            f"{best.microseconds:.1f}",
            "the library's" if best.tile is None else _text(best),
            "" if best.library is None else f"{best.library:.1f}",
        )
    console.print(shown)
    console.print(f"stored in {file}")


def _text(best: "Found") -> str:
    tile = best.tile
    assert tile is not None
    return f"{tile.outputs} x {tile.inputs}, stages {tile.stages}, warps {tile.warps}, split {max(1, tile.split)}"


def _count(text: str) -> int:
    if not text.strip().isdecimal() or not 1 <= int(text) <= 512:
        raise typer.BadParameter(f"{text!r} is not a batch size from 1 to 512")
    return int(text)
