"""`viva bench lm` refuses what would not fit, before it tries."""

from dataclasses import fields

import pytest
import torch

from vivavoce.bench.lm import SHAPES, _require_room
from vivavoce.device import Device, pick
from vivavoce.errors import CapacityError


class SmallDevice(Device):
    def free_memory(self) -> int:
        return 20_000_000_000


def test_a_shape_larger_than_the_memory_is_refused():
    cpu = pick("cpu")
    device = SmallDevice(**{field.name: getattr(cpu, field.name) for field in fields(Device)})
    with pytest.raises(CapacityError, match=r"36 GB of weights .* 20 GB free; try --shape small"):
        _require_room(SHAPES["true"], device, torch.float32)
    _require_room(SHAPES["true"], device, torch.bfloat16)
    _require_room(SHAPES["small"], device, torch.float32)
