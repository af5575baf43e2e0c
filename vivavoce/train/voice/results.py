"""What a course of the reply voice leaves: weights with their sizes, and curves."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from vivavoce.models.checkpoint import published_tensors
from vivavoce.train.loop import LOG, plot_curves


def write_part(module: nn.Module, sizes: Mapping[str, Any], file: Path) -> None:
    """The weights under their published names, and `sizes.json` beside them."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in published_tensors(module).items()}
    save_file(tensors, file)
    (file.parent / "sizes.json").write_text(json.dumps(sizes, indent=2), encoding="utf8")


def keep_curves(out: Path) -> None:
    """The log and its picture beside the weights; the state of the course, which is large, stays where it is."""
    course = out / "course"
    picture = plot_curves(course)
    for file in (course / LOG, picture):
        if file is not None:
            (out / file.name).write_bytes(file.read_bytes())
