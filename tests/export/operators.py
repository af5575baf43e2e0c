"""torch lists its ONNX operators anew for every graph, a second each; tests of many small graphs do with one list."""

import functools
from collections.abc import Iterator
from contextlib import suppress

import pytest


@pytest.fixture(scope="module", autouse=True)
def operators_listed_once() -> Iterator[None]:
    """The exporter's list is kept for a module's tests; where torch has it elsewhere, nothing is changed."""
    with pytest.MonkeyPatch.context() as patch:
        with suppress(ImportError, AttributeError):
            from torch.onnx._internal.exporter._registration import ONNXRegistry

            kept = functools.cache(ONNXRegistry.from_torchlib)
            patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(kept))
        yield
