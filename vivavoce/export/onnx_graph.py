"""Export of one ONNX graph: its module, dynamic axes, and comparison with torch."""

import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vivavoce.errors import CheckpointError, MissingDependencyError, VivaError

OPSET = 23
NEEDED = "exporting to ONNX needs onnx, onnxscript and onnxruntime: pip install 'vivavoce[export]'"

READABLE = re.compile(r"[a-z_]+( \+ [a-z_]+)?|\d+\*[a-z_]+")

Axes = Mapping[int, str]


@dataclass(frozen=True)
class StreamCheck:
    """Consecutive calls of a graph with explicit state.

    `first` holds all inputs of the first call and `following` those of later ones. `state` maps each input of the
    state to the output it is taken from after the first call, and `following` need not hold it. A check on a fresh
    state alone would miss swapped offsets or caches, because they are equal there.
    """

    first: Mapping[str, Tensor]
    following: tuple[Mapping[str, Tensor], ...]
    state: Mapping[str, str]


@dataclass(frozen=True)
class OnnxExport:
    """A module to be exported. Its forward takes the tensors of `example` in order and returns those of `outputs`.

    `axes` names the axes that may change, by input; axes of one name change together, and `8*code` is eight times the
    axis `code`. `checks` are inputs of other sizes than the example's, on which the graph is compared with torch, and
    so is every call of `stream`. A graph with a state has one.
    """

    name: str
    module: nn.Module
    example: Mapping[str, Tensor]
    axes: Mapping[str, Axes]
    outputs: tuple[str, ...]
    checks: tuple[Mapping[str, Tensor], ...] = ()
    tolerance: float = 1e-4
    """The largest difference allowed, as a share of the largest value; of ids, the share that may differ."""
    stream: StreamCheck | None = None

    @property
    def compared_inputs(self) -> tuple[Mapping[str, Tensor], ...]:
        """Inputs of all calls that are compared, without the state of a stream's later calls."""
        streamed = (self.stream.first, *self.stream.following) if self.stream else ()
        return (self.example, *self.checks, *streamed)


@dataclass(frozen=True)
class ExportedGraph:
    """The written file and its largest difference from torch over all outputs and checks."""

    name: str
    file: Path
    opset: int
    bytes: int
    inputs: Mapping[str, list[str | int]]
    outputs: Mapping[str, list[str | int]]
    difference: float | None = None
    tolerance: float = 0.0
    checked: list[dict[str, list[int]]] = field(default_factory=list)


def export_graph(graph: OnnxExport, folder: Path, opset: int = OPSET, check: bool = True) -> ExportedGraph:
    """Write `folder/name.onnx` and compare it with torch; a graph that differs too much is an error and is removed."""
    file = folder / f"{graph.name}.onnx"
    partial = file.with_suffix(".partial.onnx")
    _write(graph, partial, opset)
    try:
        difference = compare(graph, partial) if check else None
        if difference is not None and not difference <= graph.tolerance:
            raise VivaError(
                f"{graph.name}: ONNX differs from torch by {difference:.2g} of the largest value, more than "
                f"{graph.tolerance:.0e}; the file was removed"
            )
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return _describe(graph, file, opset, difference)


@torch.no_grad()
def _write(graph: OnnxExport, file: Path, opset: int) -> None:
    try:
        import onnx
        import onnxscript  # noqa: F401 - torch's exporter needs it, with a less clear error
    except ImportError as error:
        raise MissingDependencyError(NEEDED) from error
    with _quiet_exporter():
        program = torch.onnx.export(
            graph.module.eval(),
            # The exporter merges inputs that are the same tensor object.
            tuple(tensor.clone() for tensor in graph.example.values()),
            input_names=list(graph.example),
            output_names=list(graph.outputs),
            dynamic_shapes=_dynamic_shapes(graph),
            opset_version=opset,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    for output in model.graph.output:
        for axis, size in enumerate(output.type.tensor_type.shape.dim):
            if size.dim_param and not READABLE.fullmatch(size.dim_param):
                size.dim_param = f"{output.name}_{axis}"
    if model.ByteSize() < onnx.checker.MAXIMUM_PROTOBUF:
        onnx.save(model, file)
    else:
        onnx.save(model, file, save_as_external_data=True, location=f"{graph.name}.onnx.data")


def _dynamic_shapes(graph: OnnxExport) -> tuple[Any, ...]:
    names = {size.rpartition("*")[2] for axes in graph.axes.values() for size in axes.values()}
    dims = {name: torch.export.Dim(name) for name in sorted(names)}

    def dim(size: str) -> Any:
        factor, _, name = size.rpartition("*")
        return int(factor) * dims[name] if factor else dims[name]

    shapes = tuple({axis: dim(size) for axis, size in graph.axes.get(name, {}).items()} for name in graph.example)
    parameters = signature(graph.module.forward).parameters.values()
    named = [each for each in parameters if each.kind is not Parameter.VAR_POSITIONAL]
    return shapes if len(named) == len(parameters) else (*shapes[: len(named)], shapes[len(named) :])


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Suppress the exporter's warnings on unused packages and on axes that share a name on purpose."""
    exporter_logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = exporter_logger.level
    exporter_logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        exporter_logger.setLevel(level)


def compare(graph: OnnxExport, file: Path) -> float:
    """Largest difference from torch on the example, all checks and the stream."""
    session = open_session(file)
    largest_difference = 0.0
    for given in (graph.example, *graph.checks):
        expected, actual = _run_torch(graph, given), _run_onnx(graph, session, given)
        largest_difference = max(largest_difference, _max_difference(expected, actual))
    return (
        largest_difference
        if graph.stream is None
        else max(largest_difference, _compare_stream(graph, graph.stream, session))
    )


def _compare_stream(graph: OnnxExport, stream: StreamCheck, session: Any) -> float:
    """Torch and ONNX each continue from their own state."""
    expected, actual = _run_torch(graph, stream.first), _run_onnx(graph, session, stream.first)
    largest_difference = _max_difference(expected, actual)
    for new in stream.following:
        by_torch = dict(zip(graph.outputs, expected, strict=True))
        by_onnx = dict(zip(graph.outputs, actual, strict=True))
        inputs = {name: by_torch[stream.state[name]] if name in stream.state else new[name] for name in stream.first}
        onnx_state = {name: torch.from_numpy(by_onnx[output]) for name, output in stream.state.items()}
        expected, actual = _run_torch(graph, inputs), _run_onnx(graph, session, inputs | onnx_state)
        largest_difference = max(largest_difference, _max_difference(expected, actual))
    return largest_difference


@torch.no_grad()
def _run_torch(graph: OnnxExport, given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    outputs = graph.module(*given.values())
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _run_onnx(graph: OnnxExport, session: Any, given: Mapping[str, Tensor]) -> "list[np.ndarray[Any, Any]]":
    actual: list[np.ndarray[Any, Any]] = session.run(
        list(graph.outputs), {name: tensor.numpy() for name, tensor in given.items()}
    )
    return actual


def _max_difference(expected: tuple[Tensor, ...], actual: "list[np.ndarray[Any, Any]]") -> float:
    return max(difference(ours, theirs) for ours, theirs in zip(expected, actual, strict=True))


def difference(expected: Tensor, actual: "np.ndarray[Any, Any]") -> float:
    """The largest difference over the largest value; of ids, the share that differ; infinite where shapes do."""
    if tuple(expected.shape) != actual.shape:
        return float("inf")
    if not expected.is_floating_point():
        return float((expected.numpy() != actual).mean()) if actual.size else 0.0
    apart = (expected - torch.from_numpy(actual)).abs()
    largest = max(float(expected.abs().max()), 1e-6) if expected.numel() else 1.0
    return float(apart.max()) / largest if apart.numel() else 0.0


def open_session(file: Path) -> Any:
    """An onnxruntime session on the CPU; a damaged file raises `CheckpointError`."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(NEEDED) from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{file} cannot be opened as an ONNX graph ({first}); export it again") from error


def _describe(graph: OnnxExport, file: Path, opset: int, difference: float | None) -> ExportedGraph:
    session = open_session(file)
    data = file.with_name(f"{file.name}.data")
    return ExportedGraph(
        graph.name,
        file,
        opset,
        file.stat().st_size + (data.stat().st_size if data.is_file() else 0),
        {value.name: value.shape for value in session.get_inputs()},
        {value.name: value.shape for value in session.get_outputs()},
        difference,
        graph.tolerance,
        [{name: list(tensor.shape) for name, tensor in given.items()} for given in graph.compared_inputs],
    )
