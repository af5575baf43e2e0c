"""A lane of its own on the device: what one thread computes does not stand in a queue behind what another does."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

URGENT, USUAL = -1, 0  # priorities of CUDA's streams; lower goes first


class CudaStream:
    """A CUDA stream to be entered by one thread at a time; on other devices there is nothing to enter.

    Memory goes back to the lane it came from, so leaving waits for all that was given: tensors may then be handed to
    other lanes and forgotten.
    """

    def __init__(self, device: torch.device, urgent: bool = False) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, URGENT if urgent else USUAL) if device.type == "cuda" else None

    @contextmanager
    def __call__(self, waits: bool = True) -> Iterator[None]:
        """Within, all goes to this lane, after what the default stream was given before.

        Whoever hands no tensor on need not wait when leaving: what was begun ahead goes on meanwhile.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            yield
            if waits:
                self._stream.synchronize()

    def wait(self) -> None:
        """Until all that was given to it is done. Do so before reading anything back: a copy into common memory would
        wait within the driver, and with it whoever else wants something of the driver."""
        if self._stream is not None:
            self._stream.synchronize()
