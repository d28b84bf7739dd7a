"""How a block lies in LMDB: a header that repeats its key, the slab, and padding to whole pages.

A record proves itself: a page that was lost, torn or belongs to another record fails key, length or checksum.
"""

from __future__ import annotations

import struct

from kvrelay.errors import CorruptBlockError
from kvrelay.kv.hashing import CHECKSUM_BYTES
from kvstore.block import KEY_BYTES, StoredBlock

MAGIC = b"KVRB"
VERSION = 1
PAGE_BYTES = 4_096
PAGE_HEADER_BYTES = 16  # of LMDB, at the start of a value's first page

_HEADER = struct.Struct(f"<4sIQ{KEY_BYTES}s{CHECKSUM_BYTES}s")


def record_bytes(slab_bytes: int) -> int:
    """Size of the value that holds such a slab: the largest that takes the same number of pages."""
    return record_pages(slab_bytes) * PAGE_BYTES - PAGE_HEADER_BYTES


def record_pages(slab_bytes: int) -> int:
    return -(-(_HEADER.size + slab_bytes + PAGE_HEADER_BYTES) // PAGE_BYTES)


def pack(key: bytes, block: StoredBlock) -> bytes:
    header = _HEADER.pack(MAGIC, VERSION, block.num_bytes, key, block.checksum)
    padding = bytes(record_bytes(block.num_bytes) - _HEADER.size - block.num_bytes)
    return b"".join((header, block.payload, padding))


def unpack(key: bytes, value: memoryview) -> StoredBlock:
    """A view of the slab in `value`, good until its transaction ends. Proves all but the slab's checksum.

    Raises CorruptBlockError; `StoredBlock.verify` does the rest.
    """
    if len(value) < _HEADER.size:
        raise CorruptBlockError(f"record of {len(value)} bytes is shorter than its header")
    magic, version, slab_bytes, stored_key, checksum = _HEADER.unpack_from(value)
    if magic != MAGIC or version != VERSION:
        raise CorruptBlockError(f"record starts with {magic!r} version {version}, not {MAGIC!r} version {VERSION}")
    if stored_key != key:
        raise CorruptBlockError("record belongs to another key")
    if record_bytes(slab_bytes) != len(value):
        raise CorruptBlockError(f"record of {len(value)} bytes says it holds a slab of {slab_bytes}")
    return StoredBlock(value[_HEADER.size : _HEADER.size + slab_bytes], checksum)
