import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import CorruptBlockError
from kvrelay.kv.frame import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    MESSAGE_BYTES,
    Frame,
    FrameKind,
    Packer,
    block_frame,
    control_frame,
    decode,
    encode,
    frames_per_message,
    pack,
    part_bytes,
    parts_per_slab,
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
    st.builds(block_frame, indexes, hashes, slabs, tier=st.sampled_from(Tier), offset_bytes=indexes),
    st.builds(tail_frame, indexes, st.integers(1, 2**32 - 1), slabs, offset_bytes=indexes),
)


messages = st.lists(frames, min_size=1, max_size=5)


def read_all(message: bytes) -> list[Frame]:
    found = decode(message, max_payload_bytes=MAX, parts=True)
    for frame in found:
        verify(frame)
    return found


def read(message: bytes) -> Frame:
    (frame,) = read_all(message)
    return frame


def forge(**changes: int) -> bytes:
    """A block frame with fields of a hostile peer's choice and a right CRC-32."""
    fields = {"kind": 2, "tier": 0, "zero": 0, "index": 0, "tokens": 0, "payload_bytes": 256, "offset": 0} | changes
    packed = struct.pack("<4sBBBBIIII32s16s", b"KVRF", 3, *fields.values(), b"h" * 32, b"c" * 16)
    return packed + struct.pack("<I", zlib.crc32(packed)) + SLAB


def test_header_is_as_documented() -> None:
    """docs/wire.md, byte for byte; the checksum is XXH3-128 of b"abc", the CRC-32 zlib's of the first 72 bytes."""
    message = encode(block_frame(7, BlockHash(b"h" * 32), b"abc", tier=Tier.DISK, offset_bytes=513))
    head = b"KVRF" + bytes([3, 2, 2, 0]) + b"\7\0\0\0" + b"\0\0\0\0" + b"\3\0\0\0" + b"\1\2\0\0" + b"h" * 32
    head += bytes.fromhex("06b05ab6733a618578af5f94892f3950")
    assert message == head + zlib.crc32(head).to_bytes(4, "little") + b"abc"
    assert len(head) + 4 == HEADER_BYTES == 76


@given(messages)
def test_round_trip(sent: list[Frame]) -> None:
    """Frames of mixed kinds in one message come out as they went in, in order."""
    assert read_all(encode(*sent)) == sent


@given(messages, st.data())
def test_any_flipped_bit_is_found(sent: list[Frame], data: st.DataObject) -> None:
    message = bytearray(encode(*sent))
    position = data.draw(st.integers(0, len(message) - 1))
    message[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptBlockError):
        read_all(bytes(message))


THREE = [
    block_frame(4, BlockHash(b"h" * 32), SLAB),
    tail_frame(5, 3, SLAB[:7]),
    control_frame(FrameKind.END, b"the end"),
]
STARTS = [0, 76 + 256, 2 * 76 + 256 + 7, 3 * 76 + 256 + 7 + 7]  # of the three frames, and where they end


def test_every_flipped_bit_of_every_header_is_found() -> None:
    """Before any frame of the message is given: also what was whole in front of it is not used."""
    message = encode(*THREE)
    assert len(message) == STARTS[-1]
    for start in STARTS[:-1]:
        for bit in range(8 * HEADER_BYTES):
            flipped = bytearray(message)
            flipped[start + bit // 8] ^= 1 << bit % 8
            with pytest.raises(CorruptBlockError):
                decode(bytes(flipped), max_payload_bytes=MAX)


def test_a_message_cut_anywhere_but_between_frames_is_refused_whole() -> None:
    message = encode(*THREE)
    for end in range(len(message)):
        if end in STARTS[1:]:
            assert read_all(message[:end]) == THREE[: STARTS.index(end)]
        else:
            with pytest.raises(CorruptBlockError):
                decode(message[:end], max_payload_bytes=MAX)


@given(messages, st.binary(min_size=1, max_size=90))
def test_any_extension_is_found(sent: list[Frame], more: bytes) -> None:
    with pytest.raises(CorruptBlockError):
        decode(encode(*sent) + more, max_payload_bytes=MAX)


def sized(num_bytes: int, index: int = 0) -> Frame:
    """A frame that takes so many bytes of a message."""
    return block_frame(index, BlockHash(b"h" * 32), bytes(num_bytes - HEADER_BYTES))


def test_several_frames_have_at_most_1088_kib_and_one_alone_may_be_longer() -> None:
    assert MESSAGE_BYTES == 1_114_112
    half = MESSAGE_BYTES // 2
    assert len(decode(encode(sized(half), sized(half)), max_payload_bytes=2**21)) == 2
    with pytest.raises(CorruptBlockError, match="message of 1114113 bytes; one of several frames has at most 1114112"):
        decode(encode(sized(half), sized(half + 1)), max_payload_bytes=2**21)
    assert len(decode(encode(sized(2**21)), max_payload_bytes=2**21)) == 1


@pytest.mark.parametrize(
    ("slab_bytes", "num_frames"),
    [(2**21, 1), (2**20, 1), (2**20 + 65_460, 1), (2**19, 2), (368_640, 3), (2**18, 4), (2**16, 16), (512, 1_894)],
)
def test_blocks_a_message_holds(slab_bytes: int, num_frames: int) -> None:
    """368,640 is the demo model's slab in bfloat16, 2 MiB one of a model of eight billion parameters."""
    assert frames_per_message(slab_bytes) == num_frames


@given(st.lists(st.integers(HEADER_BYTES, 900_000), max_size=12))
def test_packed_messages_hold_every_frame_in_order_and_are_as_full_as_may_be(sizes: list[int]) -> None:
    sent = [sized(size, index) for index, size in enumerate(sizes)]
    packed = list(pack(sent))
    received = [decode(message, max_payload_bytes=2**21) for message in packed]
    assert [frame for message in received for frame in message] == sent
    for message, following in zip(packed, received[1:], strict=False):
        assert len(message) <= MESSAGE_BYTES < len(message) + HEADER_BYTES + len(following[0].payload)


def test_a_packer_with_nothing_in_it_has_no_message() -> None:
    packer = Packer()
    assert packer.rest() is None
    assert packer.add(sized(100)) is None
    assert packer.rest() == encode(sized(100))
    assert packer.rest() is None


@given(st.binary(max_size=400))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(CorruptBlockError):
        decode(noise, max_payload_bytes=MAX)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (forge(payload_bytes=2**32 - 1), "announces 4294967295 payload bytes; at most 4096"),
        (forge(payload_bytes=257), "announces 257 payload bytes and carries 256"),
        (forge(payload_bytes=0), r"frame starts with b'\\x00\\x01\\x02\\x03', not b'KVRF'"),
        (forge(kind=0), "kind 0"),
        (forge(kind=9), "kind 9"),
        (forge(tier=4), "tier 4"),
        (forge(zero=1), "reserved byte 1"),
        (forge(tokens=3), "num_tokens 3"),
        (forge(kind=3, tokens=3), "it alone, has a hash"),
        (forge(kind=1, index=1), "it alone, has a hash"),
        (forge(offset=256), "BLOCK frame, block 0: a part from byte 256 of the slab; whole slabs are due here"),
    ],
)
def test_hostile_fields_under_a_right_crc_are_refused(message: bytes, reason: str) -> None:
    with pytest.raises(CorruptBlockError, match=reason):
        decode(message, max_payload_bytes=MAX)


def test_another_version_is_named() -> None:
    message = bytearray(forge())
    message[4] = 2
    with pytest.raises(CorruptBlockError, match="version is 2; this side speaks 3"):
        decode(bytes(message), max_payload_bytes=MAX)


def test_a_frame_of_the_version_before_is_refused_by_its_name() -> None:
    """Whose header had no offset: 72 bytes."""
    packed = struct.pack("<4sBBBBIII32s16s", b"KVRF", 2, 2, 0, 0, 0, 0, 256, b"h" * 32, b"c" * 16)
    message = packed + struct.pack("<I", zlib.crc32(packed)) + SLAB
    with pytest.raises(CorruptBlockError, match="version is 2; this side speaks 3"):
        decode(message, max_payload_bytes=MAX)


def test_a_short_frame_of_the_version_before_is_refused_by_its_name_too() -> None:
    """A BEGIN that is shorter than this version's longer header."""
    packed = struct.pack("<4sBBBBIII32s16s", b"KVRF", 2, 1, 0, 0, 0, 0, 0, bytes(32), b"c" * 16)
    with pytest.raises(CorruptBlockError, match="version is 2; this side speaks 3"):
        decode(packed + struct.pack("<I", zlib.crc32(packed)), max_payload_bytes=MAX)


def test_a_control_frame_has_no_offset() -> None:
    packed = struct.pack("<4sBBBBIIII32s16s", b"KVRF", 3, 4, 0, 0, 0, 0, 0, 1, bytes(32), b"c" * 16)
    with pytest.raises(CorruptBlockError, match="END frame has offset 1; it must be 0"):
        decode(packed + struct.pack("<I", zlib.crc32(packed)), max_payload_bytes=MAX, parts=True)


def test_parts_are_refused_unless_they_are_asked_for() -> None:
    """Also behind a whole slab in the same message."""
    whole = block_frame(0, BlockHash(b"h" * 32), SLAB)
    part = block_frame(1, BlockHash(b"i" * 32), SLAB, offset_bytes=9)
    assert decode(encode(whole, part), max_payload_bytes=MAX, parts=True) == [whole, part]
    with pytest.raises(CorruptBlockError, match="block 1: a part from byte 9 of the slab; whole slabs are due here"):
        decode(encode(whole, part), max_payload_bytes=MAX)


@pytest.mark.parametrize(
    ("slab_bytes", "num_parts", "longest"),
    [
        (256, 1, 256),
        (720 * 2**10, 1, 737_280),
        (1_114_036, 1, 1_114_036),  # as much as a message has room for
        (1_114_037, 2, 557_019),
        (2 * 2**20, 2, 2**20),
        (5 * 2**20, 5, 2**20),
    ],
)
def test_a_slab_is_cut_into_as_few_parts_as_messages_have_room_for(
    slab_bytes: int, num_parts: int, longest: int
) -> None:
    """2 MiB are of a model of eight billion parameters, 5 MiB of one of seventy, 720 KiB of the demo's in float32."""
    assert (parts_per_slab(slab_bytes), part_bytes(slab_bytes)) == (num_parts, longest)


@given(st.integers(1, 64 * 2**20))
def test_every_part_fits_a_message_and_no_two_of_a_slab_do(slab_bytes: int) -> None:
    num_parts, longest = parts_per_slab(slab_bytes), part_bytes(slab_bytes)
    assert longest + HEADER_BYTES <= MESSAGE_BYTES
    assert (num_parts - 1) * longest < slab_bytes <= num_parts * longest
    if num_parts > 1:
        assert frames_per_message(longest) == 1


def test_a_block_payload_is_left_to_verify_but_a_control_payload_is_not() -> None:
    broken_block = encode(block_frame(0, BlockHash(b"h" * 32), SLAB))[:-1] + b"!"
    (frame,) = decode(broken_block, max_payload_bytes=MAX)
    with pytest.raises(CorruptBlockError, match="BLOCK frame, block 0: payload fails its checksum"):
        verify(frame)
    broken_end = encode(control_frame(FrameKind.END, SLAB))[:-1] + b"!"
    with pytest.raises(CorruptBlockError, match="END frame"):
        decode(broken_end, max_payload_bytes=MAX)


def test_control_frames_have_a_bound_of_their_own() -> None:
    assert read(encode(control_frame(FrameKind.BEGIN, bytes(MAX + 1)))).payload == bytes(MAX + 1)
    with pytest.raises(CorruptBlockError, match="at most 65536"):
        decode(encode(control_frame(FrameKind.BEGIN, bytes(MAX_CONTROL_BYTES + 1))), max_payload_bytes=2**20)


def test_payloads_are_views_not_copies() -> None:
    message = encode(*THREE)
    for frame in decode(message, max_payload_bytes=MAX):
        assert isinstance(frame.payload, memoryview)
        assert frame.payload.obj is message


def test_a_typed_view_is_counted_in_bytes() -> None:
    typed = memoryview(SLAB).cast("H")
    assert read(encode(block_frame(0, BlockHash(b"h" * 32), typed))).payload == SLAB
