import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import CorruptBlockError
from kvrelay.kv.frame import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    Frame,
    FrameKind,
    block_frame,
    control_frame,
    decode,
    encode,
    tail_frame,
    verify,
)
from kvrelay.types import BlockHash, Tier

MAX = 4_096
SLAB = bytes(range(256))

slabs = st.binary(max_size=300)
indexes = st.integers(0, 2**32 - 1)
hashes = st.binary(min_size=32, max_size=32).filter(any).map(BlockHash)
frames = st.one_of(
    st.builds(control_frame, st.sampled_from([FrameKind.BEGIN, FrameKind.END]), slabs),
    st.builds(block_frame, indexes, hashes, slabs, tier=st.sampled_from(Tier)),
    st.builds(tail_frame, indexes, st.integers(1, 2**32 - 1), slabs),
)


def read(message: bytes) -> Frame:
    frame = decode(message, max_payload_bytes=MAX)
    verify(frame)
    return frame


def forge(**changes: int) -> bytes:
    """A block frame with fields of a hostile peer's choice and a right CRC-32."""
    fields = {"kind": 2, "tier": 0, "zero": 0, "index": 0, "tokens": 0, "payload_bytes": 256} | changes
    packed = struct.pack("<4sBBBBIII32s16s", b"KVRF", 1, *fields.values(), b"h" * 32, b"c" * 16)
    return packed + struct.pack("<I", zlib.crc32(packed)) + SLAB


def test_header_is_as_documented() -> None:
    """docs/wire.md, byte for byte; the checksum is XXH3-128 of b"abc", the CRC-32 zlib's of the first 68 bytes."""
    message = encode(block_frame(7, BlockHash(b"h" * 32), b"abc", tier=Tier.DISK))
    head = b"KVRF" + bytes([1, 2, 2, 0]) + b"\7\0\0\0" + b"\0\0\0\0" + b"\3\0\0\0" + b"h" * 32
    head += bytes.fromhex("06b05ab6733a618578af5f94892f3950")
    assert message == head + zlib.crc32(head).to_bytes(4, "little") + b"abc"
    assert len(head) + 4 == HEADER_BYTES == 72


@given(frames)
def test_round_trip(frame: Frame) -> None:
    assert read(encode(frame)) == frame


@given(frames, st.data())
def test_any_flipped_bit_is_found(frame: Frame, data: st.DataObject) -> None:
    message = bytearray(encode(frame))
    position = data.draw(st.integers(0, len(message) - 1))
    message[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptBlockError):
        read(bytes(message))


@given(frames, st.data())
def test_any_truncation_or_extension_is_found(frame: Frame, data: st.DataObject) -> None:
    message = encode(frame)
    with pytest.raises(CorruptBlockError):
        decode(message[: data.draw(st.integers(0, len(message) - 1))], max_payload_bytes=MAX)
    with pytest.raises(CorruptBlockError):
        decode(message + data.draw(st.binary(min_size=1, max_size=9)), max_payload_bytes=MAX)


@given(st.binary(max_size=400))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(CorruptBlockError):
        decode(noise, max_payload_bytes=MAX)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (forge(payload_bytes=2**32 - 1), "announces 4294967295 payload bytes; at most 4096"),
        (forge(payload_bytes=257), "announces 257 payload bytes and carries 256"),
        (forge(payload_bytes=0), "announces 0 payload bytes and carries 256"),
        (forge(kind=0), "kind 0"),
        (forge(kind=9), "kind 9"),
        (forge(tier=4), "tier 4"),
        (forge(zero=1), "reserved byte 1"),
        (forge(tokens=3), "num_tokens 3"),
        (forge(kind=3, tokens=3), "it alone, has a hash"),
        (forge(kind=1, index=1), "it alone, has a hash"),
    ],
)
def test_hostile_fields_under_a_right_crc_are_refused(message: bytes, reason: str) -> None:
    with pytest.raises(CorruptBlockError, match=reason):
        decode(message, max_payload_bytes=MAX)


def test_another_version_is_named() -> None:
    message = bytearray(forge())
    message[4] = 2
    with pytest.raises(CorruptBlockError, match="version is 2; this side speaks 1"):
        decode(bytes(message), max_payload_bytes=MAX)


def test_a_block_payload_is_left_to_verify_but_a_control_payload_is_not() -> None:
    broken_block = encode(block_frame(0, BlockHash(b"h" * 32), SLAB))[:-1] + b"!"
    frame = decode(broken_block, max_payload_bytes=MAX)
    with pytest.raises(CorruptBlockError, match="BLOCK frame, block 0: payload fails its checksum"):
        verify(frame)
    broken_end = encode(control_frame(FrameKind.END, SLAB))[:-1] + b"!"
    with pytest.raises(CorruptBlockError, match="END frame"):
        decode(broken_end, max_payload_bytes=MAX)


def test_control_frames_have_a_bound_of_their_own() -> None:
    assert read(encode(control_frame(FrameKind.BEGIN, bytes(MAX + 1)))).payload == bytes(MAX + 1)
    with pytest.raises(CorruptBlockError, match="at most 65536"):
        decode(encode(control_frame(FrameKind.BEGIN, bytes(MAX_CONTROL_BYTES + 1))), max_payload_bytes=2**20)


def test_the_payload_is_a_view_not_a_copy() -> None:
    message = encode(block_frame(0, BlockHash(b"h" * 32), SLAB))
    payload = decode(message, max_payload_bytes=MAX).payload
    assert isinstance(payload, memoryview)
    assert payload.obj is message


def test_a_typed_view_is_counted_in_bytes() -> None:
    typed = memoryview(SLAB).cast("H")
    assert read(encode(block_frame(0, BlockHash(b"h" * 32), typed))).payload == SLAB
