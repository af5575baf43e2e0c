"""`viva export …`: models for other runtimes."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from vivavoce.cli.options import Json, ModelName, gigabytes, print_json, table

app = typer.Typer(no_args_is_help=True, help="Models for other runtimes: ONNX graphs, TensorRT-LLM checkpoints.")

OutFolder = Annotated[Path, typer.Argument(file_okay=False, help="The folder to write.")]


@app.command("onnx")
def export_onnx(
    model: ModelName,
    out: OutFolder,
    part: Annotated[list[str] | None, typer.Option(help="Only this graph; may be given again.")] = None,
    opset: Annotated[int, typer.Option(min=18, max=23, help="Version of the operator set.")] = 23,
    check: Annotated[bool, typer.Option(help="Compare each graph with torch, through onnxruntime.")] = True,
    as_json: Json = False,
) -> None:
    """Write a codec, vocoder, recogniser or small language model as ONNX graphs, each compared with torch."""
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
    part: Annotated[str, typer.Option(help="whole; MOSS-Speech: trunk; Whisper: encoder or decoder.")] = "whole",
    tp: Annotated[int, typer.Option(help="GPUs that share the model: 1, 2, 4 or 8.")] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    quantise: Annotated[str, typer.Option(help="Weights: none, int8, int4 or fp8.")] = "none",
    kv_cache: Annotated[str, typer.Option(help="Keys and values: none, int8 or fp8.")] = "none",
    sm: Annotated[int, typer.Option(help="The GPU's compute capability, for int8 and int4: 80, 86, 89, 90, 120.")] = 90,
    trt_version: Annotated[str, typer.Option(help="TensorRT-LLM to write for, from 0.13 on.")] = "1.2.1",
    calibration: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Sequences of rows (JSON) to learn fp8 and int8 scales on.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a TensorRT-LLM checkpoint and the script that builds its engine; newer versions get a PyTorch folder."""
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
def check_export(folder: Annotated[Path, typer.Argument(file_okay=False, help="What `trtllm` wrote.")]) -> None:
    """Whether an export for TensorRT-LLM is whole; a half-written one is named as such."""
    from vivavoce.export.trtllm.folder import read_manifest

    manifest = read_manifest(folder)
    Console(highlight=False).print(f"whole: {manifest['kind']}, {len(manifest['files'])} files")


def _source(name: str) -> Path:
    """A file as it stands, or the folder of a model."""
    from vivavoce import hub

    return Path(name) if Path(name).is_file() else hub.resolve(name)
