"""Small values between host and device without making the host wait.

A tensor made from a Python list on a CUDA device copies from pageable memory, and that copy waits for all work queued
before it. From pinned memory it does not; torch's host allocator keeps a buffer until the copy from it is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def on_device(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | npt.NDArray[np.bool_],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The values as a tensor, usable by whatever is queued on the device from now on.

    numpy reads lists faster than torch does, which the block tables of a large batch make felt.
    """
    host = torch.from_numpy(np.array(values, dtype=str(dtype).removeprefix("torch.")))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class Arrival:
    """Values on their way to the host, and with them the end of everything queued before: a step's one wait."""

    def __init__(self, values: Tensor) -> None:
        """Starts the copy on the current stream; `values` may be empty."""
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event: torch.cuda.Event | None = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._values, self._event = values, None

    def wait(self) -> Tensor:
        """The values in host memory. Other threads of the process run on meanwhile."""
        if self._event is not None:
            self._event.synchronize()
        return self._values
