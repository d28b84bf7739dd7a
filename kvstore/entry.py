"""What the disk tier writes down of a block beside its record: few bytes, so that a start reads no slab.

Entries lie in a database of their own, under the blocks' keys. A use of a block rewrites its entry alone. Like a
record, an entry proves itself.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvrelay.errors import CorruptBlockError
from kvrelay.kv.hashing import slab_checksum
from kvstore.block import KEY_BYTES, BlockInfo

VERSION = 1
_PROOF_BYTES = 8

# version, parent, chain_index, ttl_s, slab_bytes, last_used_age_s, hits, pinned_until_age_s; the tenant follows
_FIELDS = struct.Struct(f"<B{KEY_BYTES}sIdQdId")


@dataclass(frozen=True, slots=True)
class Entry:
    """Times are ages of the directory (kvstore.clock)."""

    info: BlockInfo
    slab_bytes: int
    last_used_s: float
    hits: int = 0
    pinned_until_s: float = 0.0  # 0: not pinned


def pack(entry: Entry) -> bytes:
    info = entry.info
    fields = _FIELDS.pack(
        VERSION,
        info.parent,
        info.chain_index,
        info.ttl_s,
        entry.slab_bytes,
        entry.last_used_s,
        min(entry.hits, 2**32 - 1),
        entry.pinned_until_s,
    )
    value = fields + info.tenant.encode()
    return _proof(info.key, value) + value


def unpack(key: bytes, value: bytes) -> Entry:
    """Raises CorruptBlockError."""
    proof, body = value[:_PROOF_BYTES], value[_PROOF_BYTES:]
    if len(body) < _FIELDS.size or proof != _proof(key, body):
        raise CorruptBlockError(f"entry of {len(value)} bytes fails its proof")
    version, parent, chain_index, ttl_s, slab_bytes, last_used_s, hits, pinned_until_s = _FIELDS.unpack_from(body)
    if version != VERSION:
        raise CorruptBlockError(f"entry has version {version}, not {VERSION}")
    info = BlockInfo(key, parent, chain_index, body[_FIELDS.size :].decode(), ttl_s)
    return Entry(info, slab_bytes, last_used_s, hits, pinned_until_s)


def _proof(key: bytes, body: bytes) -> bytes:
    return slab_checksum(key + body)[:_PROOF_BYTES]
