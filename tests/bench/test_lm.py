"""`viva bench lm` refuses what would not fit, before it tries."""

from dataclasses import fields

import pytest
import torch

from vivavoce.bench.lm import SHAPES, _bytes_of, _require_memory, _skipped_bytes, _weight_bytes, run
from vivavoce.device import Device, pick
from vivavoce.errors import CapacityError, InputError
from vivavoce.quant.plan import SMALL, random_moss_speech


class SmallDevice(Device):
    def free_memory(self) -> int:
        return 20_000_000_000


def test_a_shape_larger_than_the_memory_is_refused():
    cpu = pick("cpu")
    device = SmallDevice(**{field.name: getattr(cpu, field.name) for field in fields(Device)})
    with pytest.raises(CapacityError, match=r"36 GB of weights .* 20 GB free; try --shape small"):
        _require_memory(SHAPES["true"], device, torch.float32)
    _require_memory(SHAPES["true"], device, torch.bfloat16)
    _require_memory(SHAPES["small"], device, torch.float32)


def test_bytes_are_those_a_step_reads():
    """int8 halves bfloat16's matrices but for the heads, which stay; a speaking step leaves the text head out."""
    wide = random_moss_speech(SMALL, None, "cpu", torch.bfloat16)
    small = random_moss_speech(SMALL, "int8", "cpu", torch.bfloat16)
    heads = _bytes_of(wide.text_lm_head) + _bytes_of(wide.audio_lm_head)
    ratio = (_weight_bytes(small) - heads) / (_weight_bytes(wide) - heads)
    assert 0.5 < ratio < 0.55
    layer = wide.model.text_block.layers[-1]
    assert (
        _skipped_bytes(wide)
        == _bytes_of(wide.text_lm_head) + _bytes_of(layer.mlp) + layer.self_attn.o_proj.weight.nbytes
    )


def test_a_cache_it_does_not_know_is_refused():
    with pytest.raises(InputError, match="kv must be one of float, fp8, not 'int3'"):
        run(kv="int3")


def test_weights_it_does_not_know_are_refused():
    with pytest.raises(InputError, match="weights must be among float, int8, int4, fp8, not 'int3'"):
        run(weights=["int3"])
