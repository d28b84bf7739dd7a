"""What of a file lies in the kernel's page cache, and how to get it out. Linux, no root."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

COLD_SHARE = 0.05  # of a file's pages that may still be there: its first and last are soon read again


def drop(path: Path) -> None:
    """Out of the cache, and on the device before that. Pages that a process has mapped stay: there must be none.

    Raises RuntimeError if they stayed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    share = resident_share(path)
    if share > COLD_SHARE:
        raise RuntimeError(f"{share:.0%} of {path} stayed in the page cache")


def resident_share(path: Path) -> float:
    """0 for an empty file. Raises OSError."""
    size = path.stat().st_size
    if not size:
        return 0.0
    num_pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * num_pages)()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as memory:
        view = (ctypes.c_char * size).from_buffer(memory)
        libc = ctypes.CDLL(None, use_errno=True)
        status = libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), found)
        del view  # it would keep the map open
    if status:
        raise OSError(ctypes.get_errno(), f"mincore of {path}")
    return sum(page & 1 for page in found) / num_pages
