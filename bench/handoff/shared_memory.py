"""A KV pool that two processes map: the prototype of a receiver process that writes into the engine's final slots.

The memory is an anonymous file whose descriptor the driver hands to both, which it execs: nothing is forked after gRPC
has threads, and nothing has a name that a dying process could unlink.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from kvrelay.kv import cache


@contextmanager
def pool_file(num_bytes: int) -> Iterator[int]:
    """The descriptor of shared zeros, closed with the block; who maps it keeps the memory."""
    descriptor = os.memfd_create("kvrelay-kv-pool")
    try:
        os.ftruncate(descriptor, num_bytes)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def caches_in(descriptor: int, offset: int = 0) -> Iterator[None]:
    """A PagedKVCache that is made inside the block has its blocks in the shared memory, from byte `offset` on."""

    def mapped(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, offset=offset)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    with mock.patch.object(cache, "_zeros", mapped):
        yield
