"""One block as a value in Redis: a header that proves it, then the slab.

| offset | bytes | field |
| --- | --- | --- |
| 0 | 4 | magic `KVRR` |
| 4 | 4 | version, 1 (this and all that follow little-endian) |
| 8 | 8 | time to live after the last use, in seconds, as a double; 0: no end |
| 16 | 4 | slab bytes |
| 20 | 32 | block hash |
| 52 | 16 | XXH3-128 of the slab, big-endian |
| 68 | 4 | CRC-32 of bytes 0 to 67 |
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from kvrelay.errors import CorruptBlockError
from kvrelay.kv.hashing import Buffer, slab_checksum
from kvrelay.types import BlockHash

MAGIC = b"KVRR"
VERSION = 1
_FIELDS = struct.Struct("<4sIdI32s16s")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size


@dataclass(frozen=True, slots=True)
class RedisRecord:
    slab: Buffer
    ttl_s: float


def encode(block_hash: BlockHash, slab: bytes, ttl_s: float) -> bytes:
    fields = _FIELDS.pack(MAGIC, VERSION, ttl_s, len(slab), block_hash, slab_checksum(slab))
    return b"".join((fields, _CRC.pack(zlib.crc32(fields)), slab))


def decode(value: bytes, block_hash: BlockHash, slab_bytes: int) -> RedisRecord:
    """Raises CorruptBlockError unless it is that block, whole and right."""
    if len(value) < HEADER_BYTES or value[:4] != MAGIC:
        raise CorruptBlockError(f"a value of {len(value)} bytes in Redis is no block")
    magic_to_checksum = value[: _FIELDS.size]
    if _CRC.unpack_from(value, _FIELDS.size)[0] != zlib.crc32(magic_to_checksum):
        raise CorruptBlockError("the header of a block in Redis fails its checksum")
    _, version, ttl_s, num_bytes, found_hash, checksum = _FIELDS.unpack(magic_to_checksum)
    slab = memoryview(value)[HEADER_BYTES:]
    if version != VERSION:
        raise CorruptBlockError(f"a block in Redis is of version {version}; this release reads {VERSION}")
    if found_hash != block_hash or num_bytes != slab_bytes or len(slab) != num_bytes:
        raise CorruptBlockError("a block in Redis is another one, or not whole")
    if slab_checksum(slab) != checksum:
        raise CorruptBlockError("a block in Redis fails its checksum")
    return RedisRecord(slab, ttl_s)
