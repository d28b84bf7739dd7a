"""Finding KV frames in HTTP/2, wherever the bytes are cut."""

from __future__ import annotations

from kvrelay.kv.frame import FrameKind, block_frame, control_frame, encode, tail_frame
from kvrelay.types import BlockHash
from tests.support.kv_frames_in_http2 import DATA, PREFACE, Http2Frame, Http2Reader, ScanState, scan

HASH = BlockHash(bytes(range(32)))
BLOCK = encode(block_frame(0, HASH, b"KVRF\x02\x04" * 50))  # a slab may hold what looks like a frame
TAIL = encode(tail_frame(2, 5, b"t" * 64))
BEGIN, END = (encode(control_frame(kind, b"words")) for kind in (FrameKind.BEGIN, FrameKind.END))
MESSAGES = [[BEGIN], [b""], [b"KVRF"], [BLOCK], [b"other"], [BLOCK], [BLOCK, BLOCK, TAIL, END], [b"end"]]
KINDS = [FrameKind.BEGIN, *[FrameKind.BLOCK] * 4, FrameKind.TAIL, FrameKind.END]


def prefixed(parts: list[bytes]) -> bytes:
    return b"\0" + sum(map(len, parts)).to_bytes(4, "big") + b"".join(parts)


STREAM = b"".join(map(prefixed, MESSAGES))


def places_of_frames() -> list[int]:
    places, at = [], 0
    for parts in MESSAGES:
        at += 5
        for part in parts:
            if len(part) >= 76:
                places.append(at)
            at += len(part)
    return places


def test_frames_come_out_as_they_went_in_however_the_bytes_arrive() -> None:
    frames = [Http2Frame(kind, 1, 2 * kind + 1, bytes(kind * 7)) for kind in range(6)]
    data = PREFACE + b"".join(frame.encode() for frame in frames)
    for step in (1, 2, 9, 10, 64, len(data)):
        reader, prefix, found = Http2Reader(from_client=True), b"", []
        for at in range(0, len(data), step):
            more_prefix, more = reader.feed(data[at : at + step])
            prefix += more_prefix
            found += more
        assert (prefix, found) == (PREFACE, frames)


def test_every_kv_frame_is_found_once_however_the_messages_are_cut() -> None:
    for step in range(1, 120):
        state, kinds, offsets = ScanState(), [], []
        for at in range(0, len(STREAM), step):
            starts, state = scan(state, STREAM[at : at + step])
            starts = [start for start in starts if start.kv_kind]
            kinds += [start.kv_kind for start in starts]
            offsets += [at + start.offset + 5 * start.is_first for start in starts]
        assert kinds == KINDS, step
        assert offsets == places_of_frames(), step
        assert state == ScanState()


def test_a_scan_that_stops_before_a_frame_finds_it_again() -> None:
    for step in (1, 3, 7, 11, 400):
        payloads = [STREAM[at : at + step] for at in range(0, len(STREAM), step)]
        state, kinds = ScanState(), []
        while payloads:
            payload = payloads.pop(0)
            starts, after = scan(state, payload)
            if starts:
                kinds.append(starts[0].kv_kind)
                (again, *_), _ = scan(starts[0].before, payload[starts[0].cut :])
                assert again.head == starts[0].head
            state = after
        assert kinds[0] is not None
        assert kinds[0] == FrameKind.BEGIN


def test_a_data_frame_splits_into_two_that_say_the_same() -> None:
    first, second = Http2Frame(DATA, 1, 5, b"abcdef").split(2)
    assert (first.payload, first.flags, second.payload, second.flags) == (b"ab", 0, b"cdef", 1)
    assert first.stream_id == second.stream_id == 5
