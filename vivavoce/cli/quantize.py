"""`viva quantize`."""

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
    parts: Annotated[list[str] | None, typer.Option(help="Parts to round, such as lm or flow.")] = None,
    keep: Annotated[list[str] | None, typer.Option(help="Pattern of tensors to leave as they are.")] = None,
    also: Annotated[list[str] | None, typer.Option(help="Pattern of tensors to round too.")] = None,
    eight_bits: Annotated[list[str] | None, typer.Option(help="Pattern of tensors not to take below 8 bits.")] = None,
    calibration: Annotated[Path | None, typer.Option(help="Recordings, or a .jsonl of audio and text.")] = None,
    items: Annotated[int, typer.Option(min=1, help="Items of it to use.")] = 12,
    observer: Annotated[str, typer.Option(help="minmax, percentile or mse, for int8-static.")] = "mse",
    budget: Annotated[
        str | None, typer.Option(help="With int4-weight: mixed precision that fits, such as 9GB.")
    ] = None,
    max_drop: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Mixed precision that loses at most this share of choices.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Of fine-tuning, for qat.")] = 300,
    scan: Annotated[
        Path | None,
        typer.Option(file_okay=False, callback=made_folder, help="Only tell which layers hurt most, into this folder."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(file_okay=False, callback=made_folder, help="Compare with float into this folder afterwards."),
    ] = None,
    moonshine: Annotated[
        Path | None, typer.Option(file_okay=False, help="Unpacked npm package of Moonshine, to hear sounds with.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check a quantised folder against its manifest.")] = False,
    plan: Annotated[
        str | None, typer.Option(help="Only tell what MOSS-Speech takes on a card of this memory, such as 24GB.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Make a model smaller, and tell in numbers and sounds what that cost."""
    with progress_to(as_json):
        from vivavoce.quant.manifest import verify as check
        from vivavoce.quant.plan import byte_count
        from vivavoce.quant.qat import FineTuning
        from vivavoce.quant.run import Wishes, quantize, sensitivity

        result: Any
        if plan is not None:
            from vivavoce.quant.plan import plan as fits

            found = fits(byte_count(plan))
            _print_plan(plan, found)
            result = [asdict(fit) for fit in found]
        elif model is None:
            raise InputError("name a model to quantise, such as mini-speech, or ask for --plan 24GB")
        elif verify:
            result = asdict(check(Path(model)))
            Console().print(f"[green]whole[/green] {model}: {result['method']} of a {result['kind']} model")
        else:
            wishes = Wishes(
                parts or (), keep or (), also or (), eight_bits or (), calibration, items, observer,
                None if budget is None else byte_count(budget), max_drop, FineTuning(steps), overwrite,
            )  # fmt: skip
            if scan is not None:
                result = sensitivity(model, scan, wishes)
                _print_costs(result)
            else:
                if out is None:
                    raise InputError("say where the quantised model goes: --out FOLDER")
                manifest = quantize(model, method, out, wishes)
                result = asdict(manifest)
                _print_manifest(result, out)
                if report is not None:
                    result |= {"report": _report(model, out, report, wishes, moonshine)}
    if as_json:
        print_json(result)


def _report(model: str, out: Path, folder: Path, wishes: Any, moonshine: Path | None) -> Any:
    from vivavoce import hub
    from vivavoce.quant.manifest import Manifest
    from vivavoce.quant.report import write_report
    from vivavoce.quant.run import speech_for

    speech = speech_for(Manifest.read(out).kind, wishes)
    figures = write_report(hub.resolve(model), out, folder, speech, moonshine)
    Console(soft_wrap=True, highlight=False).print(f"{figures['verdict']}\n→ {folder / 'report.md'}")
    return figures


def _print_manifest(made: dict[str, Any], out: Path) -> None:
    kept = ", ".join(f"{count} as {scheme}" for scheme, count in made["tensors"].items())
    before, after = gigabytes(made["bytes_before"]), gigabytes(made["bytes_after"])
    Console(soft_wrap=True, highlight=False).print(f"{out}: {kept}; {before} → {after}")
    if made["training"] is not None:
        training = made["training"]
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
