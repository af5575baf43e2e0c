"""Conversion of a model folder to a quantised one.

Matrices are rounded one by one, everything else is copied unchanged. The folder is written under a temporary name and
renamed at the end, so that it is complete or absent.
"""

import errno
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vivavoce.errors import CapacityError, InputError
from vivavoce.hub import free_disk
from vivavoce.models.checkpoint import INDEX_NAME, PICKLED, SINGLE_NAME, Checkpoint, weight_files
from vivavoce.models.quantised import PACKED_SCALE, PACKING, described, low_bit_matrices, tensors_of, whole_numbers
from vivavoce.nn.quantised_weight import InputRange, QuantisedWeight, Scheme, from_integers, quantise
from vivavoce.quant.manifest import Manifest, file_hash, is_quantised
from vivavoce.quant.policy import ModelPart, QuantMethod, QuantPolicy


class ShardWriter:
    """Writes tensors one after another; holds at most one shard in memory.

    `target` is a folder, which gets `model.safetensors` or numbered shards and their index, or one `.safetensors`
    file, which is held in memory whole.
    """

    def __init__(self, target: Path, shard_bytes: int, metadata: Mapping[str, str]) -> None:
        self.is_single = target.suffix == ".safetensors"
        self.folder = target.parent if self.is_single else target
        self.target, self.shard_bytes, self.metadata = target, shard_bytes, dict(metadata)
        self.bytes = 0
        self._held: dict[str, Tensor] = {}
        self._quantised: dict[str, QuantisedWeight] = {}
        self._held_bytes = 0
        self._written: list[tuple[Path, list[str]]] = []
        self.folder.mkdir(parents=True, exist_ok=True)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add unchanged tensors that must be in one file."""
        self._hold(tensors)

    def add_quantised(self, name: str, weight: QuantisedWeight) -> None:
        """Add a quantised matrix."""
        self._hold(tensors_of(name, weight))
        self._quantised[name] = weight.to("meta")

    def finish(self) -> list[Path]:
        """Write the last shard and the index; returns the files."""
        self._flush()
        if self.is_single or len(self._written) == 1:
            name = self.target if self.is_single else self.folder / SINGLE_NAME
            return [self._written[0][0].rename(name)]
        return self._write_index()

    def _hold(self, tensors: Mapping[str, Tensor]) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._held and not self.is_single and self._held_bytes + size > self.shard_bytes:
            self._flush()
        # Cloned, because a view would keep the mapped source in memory, and safetensors refuses tied tensors.
        self._held |= {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
        self._held_bytes += size
        self.bytes += size

    def _flush(self) -> None:
        file = self.folder / f"part-{len(self._written)}.safetensors"
        metadata = self.metadata | (described(self._quantised) if self._quantised else {})
        save_file(self._held, file, metadata=metadata)
        self._written.append((file, list(self._held)))
        self._held, self._quantised, self._held_bytes = {}, {}, 0

    def _write_index(self) -> list[Path]:
        weight_map: dict[str, str] = {}
        files = []
        for number, (file, names) in enumerate(self._written, start=1):
            name = f"model-{number:05d}-of-{len(self._written):05d}.safetensors"
            files.append(file.rename(self.folder / name))
            weight_map |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self.bytes}, "weight_map": weight_map}
        (self.folder / INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf8")
        return files


SHARD_BYTES = 1_000_000_000
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
WEIGHTS = PICKLED | {".safetensors"}
NOT_COPIED = {"model.safetensors.index.json", "pytorch_model.bin.index.json"}


@dataclass(frozen=True)
class Findings:
    """Results of calibration, mixed precision and fine-tuning; keys are `part:tensor`."""

    ranges: Mapping[str, InputRange] = field(default_factory=dict)
    schemes: Mapping[str, Scheme | None] = field(default_factory=dict)
    """Schemes chosen by mixed precision."""
    tuned: Mapping[str, Tensor] = field(default_factory=dict)
    """Fine-tuned matrices."""
    calibration: dict[str, Any] | None = None
    training: dict[str, Any] | None = None


@dataclass(frozen=True)
class Unit:
    """The weights of one checkpoint, a folder or a file."""

    part: ModelPart
    source: Path
    files: tuple[Path, ...]
    target: str  # relative to the model's folder


def units(folder: Path, policy: QuantPolicy) -> list[Unit]:
    """All checkpoints of a model that a policy covers."""
    found = []
    for part in policy.parts:
        if part.weights == ".":
            found.append(Unit(part, folder, tuple(weight_files(folder)), "."))
            continue
        for file in sorted(folder.glob(part.weights)):
            if file.suffix in WEIGHTS:
                target = file.relative_to(folder).with_suffix(".safetensors")
                found.append(Unit(part, file, (file,), str(target)))
    if not found:
        raise InputError(f"{folder} has none of the weights of a {policy.kind} model")
    return found


def quantise_folder(
    source: Path,
    out: Path,
    method: QuantMethod,
    policy: QuantPolicy,
    findings: Findings | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Manifest:
    """Write the quantised model and its `quantisation.json`."""
    findings = findings or Findings()
    if is_quantised(source):
        raise InputError(f"{source} is already quantised; give the float model it was made from")
    if out.exists() and not overwrite:
        raise InputError(f"{out} exists; give another folder, or --overwrite")
    if out.resolve() in (source.resolve(), *source.resolve().parents) or source.resolve() in out.resolve().parents:
        raise InputError(f"{out} would overwrite or be inside its source {source}; give another folder")
    todo = units(source, policy)
    _require_disk_space(todo, method, out)
    with _atomic_folder(out) as temporary:
        converted_units = [_convert(unit, temporary, method, findings, shard_bytes, progress) for unit in todo]
        _copy_other_files(source, temporary, {file for unit in todo for file in unit.files})
        manifest = _manifest(method, policy, findings, source, todo, temporary, converted_units)
        manifest.write(temporary)
    return manifest


@dataclass(frozen=True)
class Converted:
    """Files and matrix counts of a converted unit."""

    files: tuple[Path, ...]
    schemes: Counter[str]


def _convert(
    unit: Unit,
    folder: Path,
    method: QuantMethod,
    findings: Findings,
    shard_bytes: int,
    progress: Callable[[str], None] | None,
) -> Converted:
    schemes: Counter[str] = Counter()
    with Checkpoint(unit.source) as checkpoint, _Raw(unit) as raw:
        if checkpoint.quantised:
            raise InputError(f"{unit.source} already holds quantised matrices; give the float model")
        writer = ShardWriter(folder / unit.target, shard_bytes, raw.metadata)
        for name in checkpoint.names():
            if name in unit.part.unused:
                continue
            rounded = _rounded(unit.part, name, checkpoint, raw, method, findings)
            if rounded is None:
                writer.add(raw.tensors(name, checkpoint))
            else:
                writer.add_quantised(name, rounded)
                schemes[rounded.scheme] += 1
            if progress is not None:
                progress(name)
        return Converted(tuple(writer.finish()), schemes)


def _rounded(
    part: ModelPart, name: str, checkpoint: Checkpoint, raw: "_Raw", method: QuantMethod, findings: Findings
) -> QuantisedWeight | None:
    """The quantised tensor by method, policy and findings; None: unchanged."""
    key = key_of(part, name)
    scheme = part.scheme_of(name, checkpoint.shapes[name], method.scheme)
    if scheme is None or not (tensor := checkpoint.tensor(name)).is_floating_point():
        return None
    scheme = findings.schemes.get(key, scheme)
    if scheme is None:
        return None
    activations, span = method.activations, None
    if activations == "static":
        span = findings.ranges.get(key)
        activations = "dynamic" if span is None else "static"
    activations = activations if scheme == "int8" else "float"
    packed = None if key in findings.tuned else raw.whole_numbers(name)
    reused = None if packed is None else from_integers(*packed, scheme, activations, span)
    if reused is not None:
        return reused
    try:
        weight = findings.tuned.get(key, tensor)
        return quantise(weight, scheme, activations=activations, input_range=span)
    except InputError as error:
        raise InputError(f"{name} in {checkpoint.source}: {error}") from error


def key_of(part: ModelPart, name: str) -> str:
    """Key of a tensor in `Findings`: its part and its name in the module."""
    return f"{part.name}:{part.rename(name)}"


class _Raw:
    """Tensors of a unit as stored in its files, packed or not."""

    def __init__(self, unit: Unit) -> None:
        self.handles: list[Any] = [
            safe_open(str(file), framework="pt") for file in unit.files if file.suffix == ".safetensors"
        ]
        self.metadata: dict[str, str] = {}
        for handle in self.handles:
            self.metadata |= handle.metadata() or {}
        self.formats = low_bit_matrices(self.metadata)
        self.by_name = {name: handle for handle in self.handles for name in handle.keys()}  # noqa: SIM118

    def __enter__(self) -> "_Raw":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.by_name.clear()
        self.handles.clear()

    def tensors(self, name: str, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """Stored tensors of a published name."""
        if name not in self.by_name:
            return {name: checkpoint.tensor(name)}
        stored = [each for each in (name, name + PACKED_SCALE) if each in self.by_name]
        return {each: self.by_name[each].get_tensor(each) for each in stored}

    def whole_numbers(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Integer codes and scales of a packed matrix; None for any other."""
        if PACKING not in self.metadata or name + PACKED_SCALE not in self.by_name:
            return None
        stored, scale = (self.by_name[each].get_tensor(each) for each in (name, name + PACKED_SCALE))
        return whole_numbers(stored, scale, self.formats.get(name))


def _copy_other_files(source: Path, target: Path, weights: set[Path]) -> None:
    for file in sorted(source.rglob("*")):
        relative = file.relative_to(source)
        if file.is_file() and file not in weights and file.name not in NOT_COPIED and ".git" not in relative.parts:
            (target / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target / relative)


def _manifest(
    method: QuantMethod,
    policy: QuantPolicy,
    findings: Findings,
    source: Path,
    todo: list[Unit],
    folder: Path,
    converted_units: list[Converted],
) -> Manifest:
    before = [file for unit in todo for file in unit.files]
    after = [file for converted in converted_units for file in converted.files]
    return Manifest(
        method=method.name,
        kind=policy.kind,
        policy={
            "rounds": {part.name: part.rounds for part in policy.parts},
            "eight_bits": {part.name: part.eight_bits for part in policy.parts},
            "never": policy.never,
            "mixed": {name: scheme or "float" for name, scheme in findings.schemes.items()},
        },
        source={str(file.relative_to(source)): file_hash(file) for file in before},
        files={str(file.relative_to(folder)): file_hash(file) for file in after},
        tensors=dict(sum((converted.schemes for converted in converted_units), Counter[str]())),
        bytes_before=sum(file.stat().st_size for file in before),
        bytes_after=sum(file.stat().st_size for file in after),
        calibration=findings.calibration,
        training=findings.training,
    )


def _require_disk_space(todo: list[Unit], method: QuantMethod, out: Path) -> None:
    """Raise before writing if even the smallest possible output does not fit."""
    min_bytes = sum(file.stat().st_size for unit in todo for file in unit.files) // (
        8 if method.scheme == "int4" else 4
    )
    free = free_disk(out.absolute().parent)
    if free < min_bytes:
        raise CapacityError(
            f"{out} needs at least {min_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there; make room first"
        )


@contextmanager
def _atomic_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `out` on success and removed on failure."""
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if out.exists():
            shutil.rmtree(out)
        temporary.rename(out)
    except (OSError, SafetensorError) as error:
        if getattr(error, "errno", None) in NO_ROOM or "space" in str(error) or "too large" in str(error):
            raise CapacityError(f"not enough disk space to write {out} ({error}); it was removed") from error
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
