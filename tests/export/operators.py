"""torch's exporter lists its operators again for every graph, which takes two seconds; here they are listed once."""

import functools
from collections.abc import Iterator
from contextlib import suppress

import pytest


@pytest.fixture(scope="module", autouse=True)
def operators_listed_once() -> Iterator[None]:
    """Cache the exporter's lists of operators for a module's tests; a torch without these functions is left alone."""
    with pytest.MonkeyPatch.context() as patch:
        with suppress(ImportError, AttributeError):
            from torch.onnx._internal.exporter._registration import ONNXRegistry

            patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        with suppress(ImportError, AttributeError):
            from torch._export import utils

            patch.setattr(utils, "_materialize_cpp_cia_ops", functools.cache(utils._materialize_cpp_cia_ops))
        yield
