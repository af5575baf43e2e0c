"""`viva export …`: write models for ONNX Runtime and TensorRT-LLM."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from vivavoce.cli.options import Json, ModelName, gigabytes, print_json, table

app = typer.Typer(no_args_is_help=True, help="Export models as ONNX graphs or TensorRT-LLM checkpoints.")

OutFolder = Annotated[Path, typer.Argument(file_okay=False, help="The folder to write.")]


@app.command("onnx")
def export_onnx(
    model: ModelName,
    out: OutFolder,
    part: Annotated[list[str] | None, typer.Option(help="Export only this graph; may be repeated.")] = None,
    opset: Annotated[int, typer.Option(min=18, max=23, help="ONNX opset version.")] = 23,
    check: Annotated[bool, typer.Option(help="Compare each graph in ONNX Runtime with torch.")] = True,
    as_json: Json = False,
) -> None:
    """Export a codec, vocoder, recogniser or small language model as ONNX graphs, and compare them with torch."""
    from vivavoce.export.onnx import export_onnx

    written = export_onnx(_source(model), out, part or (), opset, check)
    if as_json:
        print_json([vars(graph) for graph in written])
        return
    shown = table(f"ONNX graphs in {out}", "graph", "size", "inputs", "outputs", "difference to torch")
    for graph in written:
        apart = "not checked" if graph.difference is None else f"{graph.difference:.1e} (allowed {graph.tolerance:.0e})"
        sides = (
            " ".join(f"{name}[{', '.join(map(str, shape))}]" for name, shape in side.items())
            for side in (graph.inputs, graph.outputs)
        )
        shown.add_row(graph.name, gigabytes(graph.bytes), *(escape(side) for side in sides), apart)
    Console().print(shown)


@app.command("trtllm")
def export_trtllm(
    model: ModelName,
    out: OutFolder,
    part: Annotated[str, typer.Option(help="whole; trunk of MOSS-Speech; encoder or decoder of Whisper.")] = "whole",
    tp: Annotated[int, typer.Option(help="GPUs that share the model: 1, 2, 4 or 8.")] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    quantise: Annotated[str, typer.Option(help="Weights: none, int8, int4 or fp8.")] = "none",
    kv_cache: Annotated[str, typer.Option(help="KV cache: none, int8 or fp8.")] = "none",
    sm: Annotated[int, typer.Option(help="The GPU's compute capability, for int8 and int4: 80, 86, 89, 90, 120.")] = 90,
    trt_version: Annotated[str, typer.Option(help="Version of TensorRT-LLM, 0.13 or newer.")] = "1.2.1",
    calibration: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Sequences of rows (JSON) that calibrate fp8 and int8 scales.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a TensorRT-LLM checkpoint with a build script, or a PyTorch folder for newer versions."""
    from vivavoce.export.trtllm.export import calibrate, export_trtllm
    from vivavoce.export.trtllm.options import TrtLlmOptions

    source = _source(model)
    peaks = {} if calibration is None else calibrate(source, calibration)
    options = TrtLlmOptions(tp, dtype, quantise, kv_cache, sm, trt_version, peaks)
    manifest = export_trtllm(source, out, options, part)
    if as_json:
        print_json(manifest | {"folder": out})
        return
    shown = table(f"{manifest['kind']} for TensorRT-LLM {trt_version} in {out}", "file", "size")
    for name, size in manifest["files"].items():
        shown.add_row(name, gigabytes(size))
    Console().print(shown)


@app.command("check")
def check_export(
    folder: Annotated[Path, typer.Argument(file_okay=False, help="A folder written by `viva export trtllm`.")],
) -> None:
    """Check whether an export for TensorRT-LLM is complete."""
    from vivavoce.export.trtllm.folder import read_manifest

    manifest = read_manifest(folder)
    Console(highlight=False).print(f"complete: {manifest['kind']}, {len(manifest['files'])} files")


def _source(name: str) -> Path:
    """The path of a file, or the folder of a model."""
    from vivavoce import hub

    return Path(name) if Path(name).is_file() else hub.resolve(name)
