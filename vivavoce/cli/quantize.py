"""`viva quantize`: quantise a model, scan the sensitivity of its layers, report the loss, and plan memory."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from vivavoce.cli.options import Json, complete_model, gigabytes, made_folder, print_json, progress_to, table
from vivavoce.errors import InputError

if TYPE_CHECKING:
    from vivavoce.quant.plan import Fit


def quantize(
    model: Annotated[
        str | None, typer.Argument(help="Bundled name, folder or hub id.", autocompletion=complete_model)
    ] = None,
    method: Annotated[
        str, typer.Option(help="fp16, bf16, int8-dynamic, int8-static, int8-weight, int4-weight, fp8 or qat.")
    ] = "int8-dynamic",
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for the quantised model.")] = None,
    parts: Annotated[
        list[str] | None, typer.Option(help="A part to quantise, such as lm or flow; may be repeated.")
    ] = None,
    keep: Annotated[
        list[str] | None, typer.Option(help="Pattern of tensors that are not quantised; may be repeated.")
    ] = None,
    also: Annotated[
        list[str] | None, typer.Option(help="Pattern of further tensors to quantise; may be repeated.")
    ] = None,
    eight_bits: Annotated[
        list[str] | None, typer.Option(help="Pattern of tensors with at least 8 bits; may be repeated.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Calibration data: recordings, or a .jsonl of audio and text.")
    ] = None,
    items: Annotated[int, typer.Option(min=1, help="Number of calibration items.")] = 12,
    observer: Annotated[str, typer.Option(help="Observer of int8-static: minmax, percentile or mse.")] = "mse",
    budget: Annotated[
        str | None, typer.Option(help="With int4-weight: mixed precision within this size, such as 9GB.")
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Mixed precision that changes at most this share of sampled tokens."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Fine-tuning steps of qat.")] = 300,
    scan: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            callback=made_folder,
            help="Only measure the sensitivity of the layers, and write it to this folder.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            callback=made_folder,
            help="Compare with the float model, and write the report to this folder.",
        ),
    ] = None,
    moonshine: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Unpacked npm package of Moonshine, to transcribe the audio with."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check a quantised folder against its manifest.")] = False,
    plan: Annotated[
        str | None, typer.Option(help="Only print which methods fit MOSS-Speech into this memory, such as 24GB.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Quantise a model, and report the loss in quality."""
    with progress_to(as_json):
        if plan is not None:
            result: Any = _plan(plan)
        elif model is None:
            raise InputError("name a model to quantise, such as mini-speech, or use --plan 24GB")
        elif verify:
            result = _verify(model)
        else:
            patterns = (parts or (), keep or (), also or (), eight_bits or ())
            options = _options(patterns, calibration, items, observer, budget, max_drop, steps, overwrite)
            result = _quantize(model, method, out, options, scan, report, moonshine)
    if as_json:
        print_json(result)


def _options(
    patterns: tuple[Sequence[str], Sequence[str], Sequence[str], Sequence[str]],
    calibration: Path | None,
    items: int,
    observer: str,
    budget: str | None,
    max_drop: float | None,
    steps: int,
    overwrite: bool,
) -> Any:
    from vivavoce.quant.plan import byte_count
    from vivavoce.quant.qat import FineTuning
    from vivavoce.quant.run import QuantizeOptions

    size = None if budget is None else byte_count(budget)
    return QuantizeOptions(*patterns, calibration, items, observer, size, max_drop, FineTuning(steps), overwrite)


def _quantize(
    model: str,
    method: str,
    out: Path | None,
    options: Any,
    scan: Path | None,
    report: Path | None,
    moonshine: Path | None,
) -> Any:
    """Write the quantised model and, where a folder is given, its report; or only scan the layers."""
    from vivavoce.quant.run import quantize, sensitivity

    if scan is not None:
        costs = sensitivity(model, scan, options)
        _print_costs(costs)
        return costs
    if out is None:
        raise InputError("the quantised model needs a folder: --out FOLDER")
    result = asdict(quantize(model, method, out, options))
    _print_manifest(result, out)
    return result if report is None else result | {"report": _report(model, out, report, options, moonshine)}


def _verify(folder: str) -> dict[str, Any]:
    from vivavoce.quant.manifest import verify as check

    manifest = asdict(check(Path(folder)))
    Console().print(f"[green]complete[/green] {folder}: {manifest['method']} of a {manifest['kind']} model")
    return manifest


def _plan(memory: str) -> list[dict[str, Any]]:
    from vivavoce.quant.plan import byte_count
    from vivavoce.quant.plan import plan as fits

    found = fits(byte_count(memory))
    _print_plan(memory, found)
    return [asdict(fit) for fit in found]


def _report(model: str, out: Path, folder: Path, options: Any, moonshine: Path | None) -> Any:
    from vivavoce import hub
    from vivavoce.quant.manifest import Manifest
    from vivavoce.quant.report import write_report
    from vivavoce.quant.run import speech_for

    speech = speech_for(Manifest.read(out).kind, options)
    figures = write_report(hub.resolve(model), out, folder, speech, moonshine)
    Console(soft_wrap=True, highlight=False).print(f"{figures['verdict']}\n→ {folder / 'report.md'}")
    return figures


def _print_manifest(manifest: dict[str, Any], out: Path) -> None:
    counts = ", ".join(f"{count} as {scheme}" for scheme, count in manifest["tensors"].items())
    before, after = gigabytes(manifest["bytes_before"]), gigabytes(manifest["bytes_after"])
    Console(soft_wrap=True, highlight=False).print(f"{out}: {counts}; {before} → {after}")
    if manifest["training"] is not None:
        training = manifest["training"]
        Console(soft_wrap=True, highlight=False).print(
            f"divergence on held-out replies {training['divergence_before']:.5f} → {training['divergence_after']:.5f}"
        )


def _print_costs(costs: list[dict[str, Any]]) -> None:
    listed = table("Layers that 4 bits hurt most", "layer", "divergence", "choices lost")
    for cost in costs[:20]:
        listed.add_row(cost["layer"], f"{cost['divergence']:.2e}", f"{cost['drop']:.3f}")
    Console().print(listed)


def _print_plan(memory: str, fits: list["Fit"]) -> None:
    head = ("method", "weights", "codec", "workspace", "KV a minute", "minutes that fit")
    listed = table(f"MOSS-Speech on {memory}", *head)
    for fit in fits:
        sizes = [gigabytes(size) for size in (fit.weights, fit.codec, fit.workspace, fit.kv_a_minute)]
        listed.add_row(fit.method, *sizes, f"{fit.minutes:.0f}" if fit.is_possible else "does not fit")
    Console().print(listed)
