"""One message of a KV stream: a fixed header, then the slab's raw bytes (docs/wire.md).

Raw bytes instead of a protobuf field save two copies a block. The header proves itself by a CRC-32, the payload by
the checksum in the header, so that a block is never used on the word of the transport alone.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from kvrelay.errors import CorruptBlockError
from kvrelay.kv.hashing import NO_HASH, Buffer, slab_checksum
from kvrelay.types import BlockHash, Tier

MAGIC = b"KVRF"
VERSION = 1
MAX_CONTROL_BYTES = 65_536  # payload of a BEGIN or END frame, whatever the slab size

# magic, version, kind, tier, zero, block_index, num_tokens, payload_bytes, block_hash, checksum | crc32 of these
_FIELDS = struct.Struct("<4sBBBBIII32s16s")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size  # 72

_TIERS = (Tier.NONE, Tier.MEMORY, Tier.DISK, Tier.DEVICE)
_TIER_CODES = {tier: code for code, tier in enumerate(_TIERS)}


class FrameKind(IntEnum):
    BEGIN = 1  # what follows, and for whom: a protobuf message
    BLOCK = 2  # a full block's slab
    TAIL = 3  # the last, partial block's slab: no hash, `num_tokens` valid positions
    END = 4  # count and checksum of what came: a protobuf message; a stream without it never happened


_KINDS = {int(kind): kind for kind in FrameKind}
_CONTROL = (FrameKind.BEGIN, FrameKind.END)


@dataclass(frozen=True, slots=True)
class Frame:
    """`num_tokens` is set in a TAIL only; `block_hash` in a BLOCK only; `tier` in a store's Get replies only."""

    kind: FrameKind
    block_index: int
    num_tokens: int
    block_hash: BlockHash
    checksum: bytes
    payload: Buffer
    tier: Tier = Tier.NONE


def control_frame(kind: FrameKind, payload: bytes) -> Frame:
    """A BEGIN or END frame around a serialized protobuf message."""
    return Frame(kind, 0, 0, NO_HASH, slab_checksum(payload), payload)


def block_frame(
    index: int, block_hash: BlockHash, slab: Buffer, checksum: bytes | None = None, tier: Tier = Tier.NONE
) -> Frame:
    """A full block. `checksum` is the slab's, where the caller already has it."""
    return Frame(FrameKind.BLOCK, index, 0, block_hash, checksum or slab_checksum(slab), slab, tier)


def tail_frame(index: int, num_tokens: int, slab: Buffer) -> Frame:
    """A partial block; the whole slab travels. Its positions from `num_tokens` on mean nothing, and must be zeros
    (`KVLayout.without_rest`): what lies there in a node's memory may be another tenant's."""
    return Frame(FrameKind.TAIL, index, num_tokens, NO_HASH, slab_checksum(slab), slab)


def encode(frame: Frame) -> bytes:
    """The message; one copy of the payload."""
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        frame.kind,
        _TIER_CODES[frame.tier],
        0,
        frame.block_index,
        frame.num_tokens,
        memoryview(frame.payload).nbytes,
        frame.block_hash,
        frame.checksum,
    )
    return b"".join((fields, _CRC.pack(zlib.crc32(fields)), frame.payload))


def decode(message: bytes, *, max_payload_bytes: int) -> Frame:
    """Reads a message; its payload becomes a view into `message`, not a copy.

    Proves header and lengths, and the payload of control frames; a block's payload is proven by `verify`, which the
    caller may do elsewhere or not at all (a block it already holds). Raises CorruptBlockError saying what is wrong.
    """
    if len(message) < HEADER_BYTES:
        raise CorruptBlockError(f"frame of {len(message)} bytes is shorter than its header of {HEADER_BYTES}")
    fields = message[: _FIELDS.size]
    magic, version, kind_code, tier_code, zero, index, num_tokens, payload_bytes, block_hash, checksum = _FIELDS.unpack(
        fields
    )
    if magic != MAGIC:
        raise CorruptBlockError(f"frame starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise CorruptBlockError(f"frame version is {version}; this side speaks {VERSION}")
    if _CRC.unpack_from(message, _FIELDS.size)[0] != zlib.crc32(fields):
        raise CorruptBlockError("frame header fails its CRC-32")
    if kind_code not in _KINDS or tier_code >= len(_TIERS) or zero != 0:
        raise CorruptBlockError(f"frame kind {kind_code}, tier {tier_code}, reserved byte {zero}: not all known")
    kind = _KINDS[kind_code]
    _check_length(kind, payload_bytes, len(message) - HEADER_BYTES, max_payload_bytes)
    payload = memoryview(message)[HEADER_BYTES:]
    frame = Frame(kind, index, num_tokens, BlockHash(block_hash), checksum, payload, _TIERS[tier_code])
    _check_fields(frame)
    if kind in _CONTROL:
        verify(frame)
    return frame


def verify(frame: Frame) -> None:
    """Raises CorruptBlockError when the payload is not what the checksum was made of."""
    if slab_checksum(frame.payload) != frame.checksum:
        raise CorruptBlockError(f"{frame.kind.name} frame, block {frame.block_index}: payload fails its checksum")


def _check_length(kind: FrameKind, announced: int, present: int, max_payload_bytes: int) -> None:
    limit = MAX_CONTROL_BYTES if kind in _CONTROL else max_payload_bytes
    if announced > limit:
        raise CorruptBlockError(f"{kind.name} frame announces {announced} payload bytes; at most {limit} are allowed")
    if announced != present:
        raise CorruptBlockError(f"{kind.name} frame announces {announced} payload bytes and carries {present}")


def _check_fields(frame: Frame) -> None:
    """A field that the kind has no use for is zero, one that it needs is not."""
    if (frame.kind is FrameKind.BLOCK) != (frame.block_hash != NO_HASH):
        raise CorruptBlockError(
            f"{frame.kind.name} frame, block {frame.block_index}: a BLOCK, and it alone, has a hash"
        )
    if (frame.kind is FrameKind.TAIL) != (frame.num_tokens != 0):
        raise CorruptBlockError(f"{frame.kind.name} frame has num_tokens {frame.num_tokens}; a TAIL alone has any")
    if frame.kind in _CONTROL and frame.block_index != 0:
        raise CorruptBlockError(f"{frame.kind.name} frame has block index {frame.block_index}; it must be 0")
