"""The messages of a KV stream: frames back to back, each a fixed header and then raw bytes of a slab (docs/wire.md).

Raw bytes instead of a protobuf field save two copies a block. The header proves itself by a CRC-32, the payload by
the checksum in the header, so that a block is never used on the word of the transport alone. Messages of about 1 MiB
move fastest over gRPC: smaller ones pay for their number, larger ones fall out of the cache between their copies. A
handoff cuts slabs that are longer than one such message into parts, a frame each; a store takes and gives whole slabs.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from kvrelay.errors import CorruptBlockError
from kvrelay.kv.hashing import NO_HASH, Buffer, slab_checksum
from kvrelay.types import BlockHash, Tier

MAGIC = b"KVRF"
VERSION = 3
MAX_CONTROL_BYTES = 65_536  # payload of a BEGIN or END frame, whatever the slab size
# Most that a message of several frames has, in all, and any message of a handoff; a store's frame alone may be longer.
# A power of two of slabs fills 1 MiB with room left for their headers and an END.
MESSAGE_BYTES = 2**20 + 2**16

# magic, version, kind, tier, zero, block_index, num_tokens, payload_bytes, offset_bytes, block_hash, checksum
# | crc32 of these
_FIELDS = struct.Struct("<4sBBBBIIII32s16s")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size  # 76
MAX_PART_BYTES = MESSAGE_BYTES - HEADER_BYTES  # what of a slab one message of a handoff has room for

_TIERS = (Tier.NONE, Tier.MEMORY, Tier.DISK, Tier.DEVICE)
_TIER_CODES = {tier: code for code, tier in enumerate(_TIERS)}


class FrameKind(IntEnum):
    BEGIN = 1  # what follows, and for whom: a protobuf message
    BLOCK = 2  # a full block's slab, or a part of it
    TAIL = 3  # the last, partial block's, likewise: no hash, `num_tokens` valid positions
    END = 4  # count and checksum of what came: a protobuf message; a stream without it never happened


_KINDS = {int(kind): kind for kind in FrameKind}
_CONTROL = (FrameKind.BEGIN, FrameKind.END)


@dataclass(frozen=True, slots=True)
class Frame:
    """`num_tokens` is set in a TAIL only; `block_hash` in a BLOCK only; `tier` in a store's Get replies only.

    `offset_bytes` is where in the slab the payload begins: over 0 only in a part that is not the slab's first.
    """

    kind: FrameKind
    block_index: int
    num_tokens: int
    block_hash: BlockHash
    checksum: bytes
    payload: Buffer
    tier: Tier = Tier.NONE
    offset_bytes: int = 0


def control_frame(kind: FrameKind, payload: bytes) -> Frame:
    """A BEGIN or END frame around a serialized protobuf message."""
    return Frame(kind, 0, 0, NO_HASH, slab_checksum(payload), payload)


def block_frame(
    index: int,
    block_hash: BlockHash,
    payload: Buffer,
    checksum: bytes | None = None,
    tier: Tier = Tier.NONE,
    *,
    offset_bytes: int = 0,
) -> Frame:
    """A full block, or the part of it from `offset_bytes` on. `checksum` is the payload's, where it is known."""
    checksum = checksum or slab_checksum(payload)
    return Frame(FrameKind.BLOCK, index, 0, block_hash, checksum, payload, tier, offset_bytes)


def tail_frame(index: int, num_tokens: int, payload: Buffer, *, offset_bytes: int = 0) -> Frame:
    """A partial block or a part of it; the whole slab travels. Its positions from `num_tokens` on mean nothing, and
    must be zeros (`KVLayout.without_rest`): what lies there in a node's memory may be another tenant's."""
    checksum = slab_checksum(payload)
    return Frame(FrameKind.TAIL, index, num_tokens, NO_HASH, checksum, payload, offset_bytes=offset_bytes)


def frame_bytes(payload_bytes: int) -> int:
    """What a frame takes of a message."""
    return HEADER_BYTES + payload_bytes


def parts_per_slab(slab_bytes: int) -> int:
    """Into how many parts a handoff cuts a slab: as few as messages have room for."""
    return -(-slab_bytes // MAX_PART_BYTES)


def part_bytes(slab_bytes: int) -> int:
    """Length of each of a slab's parts, but of the last, which may be shorter. No message has room for two of them,
    unless they are whole slabs."""
    return -(-slab_bytes // parts_per_slab(slab_bytes))


def frames_per_message(payload_bytes: int) -> int:
    """How many frames of this payload one message holds at most."""
    return max(1, MESSAGE_BYTES // frame_bytes(payload_bytes))


def encode(*frames: Frame) -> bytes:
    """One message of these frames: one of any size, or several of at most MESSAGE_BYTES; one copy of the payloads."""
    parts: list[Buffer] = []
    for frame in frames:
        parts += (_header(frame), frame.payload)
    return b"".join(parts)


class Packer:
    """Fills messages with frames in their order. Keeps the frames, not copies, until their message is made."""

    __slots__ = ("_frames", "_num_bytes")

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._num_bytes = 0

    def add(self, frame: Frame) -> bytes | None:
        """The message of the frames before, if this one has no room in it."""
        size = frame_bytes(_size(frame))
        full = self.rest() if self._num_bytes + size > MESSAGE_BYTES else None
        self._frames.append(frame)
        self._num_bytes += size
        return full

    def rest(self) -> bytes | None:
        """The message of the frames that are in none yet; None if there are none."""
        message = encode(*self._frames) if self._frames else None
        self._frames, self._num_bytes = [], 0
        return message


def pack(frames: Iterable[Frame]) -> Iterator[bytes]:
    """Messages of the frames in order, each as full as it may be."""
    packer = Packer()
    for frame in frames:
        message = packer.add(frame)
        if message is not None:
            yield message
    message = packer.rest()
    if message is not None:
        yield message


def _size(frame: Frame) -> int:
    return memoryview(frame.payload).nbytes


def _header(frame: Frame) -> bytes:
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        frame.kind,
        _TIER_CODES[frame.tier],
        0,
        frame.block_index,
        frame.num_tokens,
        _size(frame),
        frame.offset_bytes,
        frame.block_hash,
        frame.checksum,
    )
    return fields + _CRC.pack(zlib.crc32(fields))


def decode(message: bytes, *, max_payload_bytes: int, parts: bool = False) -> list[Frame]:
    """Reads a message, of one frame at least; payloads become views into `message`, not copies.

    Proves every header and length before it gives any frame, and the payload of control frames; a block's payload is
    proven by `verify`, which the caller may do elsewhere or not at all (a block it already holds). Raises
    CorruptBlockError saying what is wrong; that also refuses parts of slabs, unless the caller takes `parts`.
    """
    frames = [_frame_at(message, 0, max_payload_bytes)]
    end = frame_bytes(len(frames[0].payload))
    if end < len(message) > MESSAGE_BYTES:
        raise CorruptBlockError(f"message of {len(message)} bytes; one of several frames has at most {MESSAGE_BYTES}")
    while end < len(message):
        frames.append(_frame_at(message, end, max_payload_bytes))
        end += frame_bytes(len(frames[-1].payload))
    if not parts:
        _check_whole(frames)
    return frames


def _frame_at(message: bytes, start: int, max_payload_bytes: int) -> Frame:
    present = len(message) - start
    _check_version(message[start : start + len(MAGIC) + 1])
    if present < HEADER_BYTES:
        raise CorruptBlockError(f"frame of {present} bytes is shorter than its header of {HEADER_BYTES}")
    magic, _, kind_code, tier_code, zero, index, num_tokens, payload_bytes, offset_bytes, block_hash, checksum = (
        _FIELDS.unpack_from(message, start)
    )
    if magic != MAGIC:
        raise CorruptBlockError(f"frame starts with {magic!r}, not {MAGIC!r}")
    payload_start = start + HEADER_BYTES
    if _CRC.unpack_from(message, payload_start - _CRC.size)[0] != zlib.crc32(message[start : start + _FIELDS.size]):
        raise CorruptBlockError("frame header fails its CRC-32")
    if kind_code not in _KINDS or tier_code >= len(_TIERS) or zero != 0:
        raise CorruptBlockError(f"frame kind {kind_code}, tier {tier_code}, reserved byte {zero}: not all known")
    kind = _KINDS[kind_code]
    _check_length(kind, payload_bytes, present - HEADER_BYTES, max_payload_bytes)
    payload = memoryview(message)[payload_start : payload_start + payload_bytes]
    tier = _TIERS[tier_code]
    frame = Frame(kind, index, num_tokens, BlockHash(block_hash), checksum, payload, tier, offset_bytes)
    _check_fields(frame)
    if kind in _CONTROL:
        verify(frame)
    return frame


def _check_version(begin: bytes) -> None:
    """Before the header's length, which other versions have another of."""
    if begin.startswith(MAGIC) and begin[len(MAGIC) :] not in (b"", bytes([VERSION])):
        raise CorruptBlockError(f"frame version is {begin[len(MAGIC)]}; this side speaks {VERSION}")


def verify(frame: Frame) -> None:
    """Raises CorruptBlockError when the payload is not what the checksum was made of."""
    if slab_checksum(frame.payload) != frame.checksum:
        raise CorruptBlockError(f"{frame.kind.name} frame, block {frame.block_index}: payload fails its checksum")


def _check_length(kind: FrameKind, announced: int, present: int, max_payload_bytes: int) -> None:
    limit = MAX_CONTROL_BYTES if kind in _CONTROL else max_payload_bytes
    if announced > limit:
        raise CorruptBlockError(f"{kind.name} frame announces {announced} payload bytes; at most {limit} are allowed")
    if announced > present:
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
    if frame.kind in _CONTROL and frame.offset_bytes != 0:
        raise CorruptBlockError(f"{frame.kind.name} frame has offset {frame.offset_bytes}; it must be 0")


def _check_whole(frames: Iterable[Frame]) -> None:
    for frame in frames:
        if frame.offset_bytes != 0:
            raise CorruptBlockError(
                f"{frame.kind.name} frame, block {frame.block_index}: a part from byte {frame.offset_bytes} of the "
                "slab; whole slabs are due here"
            )
