"""A KV pool that two processes map: the prototype of a receiver process that writes into the engine's final slots.

The memory is an anonymous file whose descriptor the driver hands to both, which it execs: nothing is forked after gRPC
has threads, and nothing has a name that a dying process could unlink.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pool_file(num_bytes: int) -> Iterator[int]:
    """The descriptor of shared zeros, closed with the block; who maps it keeps the memory."""
    descriptor = os.memfd_create("kvrelay-kv-pool")
    try:
        os.ftruncate(descriptor, num_bytes)
        yield descriptor
    finally:
        os.close(descriptor)


def memory_in(descriptor: int, num_bytes: int, offset: int = 0) -> mmap.mmap:
    """So much of the shared memory, from byte `offset` on, for a PagedKVCache to keep its blocks in."""
    return mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, offset=offset)
