"""Finding KV frames in HTTP/2, wherever the bytes are cut."""

from __future__ import annotations

from kvrelay.kv.frame import FrameKind, block_frame, control_frame, encode, tail_frame
from kvrelay.types import BlockHash
from tests.support.kv_frames_in_http2 import DATA, PREFACE, Http2Frame, Http2Reader, ScanState, scan

HASH = BlockHash(bytes(range(32)))
BLOCK = encode(block_frame(0, HASH, b"KVRF\x01\x04" * 50))  # a slab may hold what looks like a frame
MESSAGES = (encode(control_frame(FrameKind.BEGIN, b"begin")), b"", b"KVRF", BLOCK, b"other", BLOCK)
MESSAGES += (encode(tail_frame(2, 5, b"t" * 64)), encode(control_frame(FrameKind.END, b"")))
KINDS = [FrameKind.BEGIN, FrameKind.BLOCK, FrameKind.BLOCK, FrameKind.TAIL, FrameKind.END]


def prefixed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


STREAM = b"".join(map(prefixed, MESSAGES))


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
    begins = [at for at in range(len(STREAM)) if STREAM[at + 5 : at + 9] == b"KVRF" and STREAM[at] == 0]
    begins = [at for at in begins if int.from_bytes(STREAM[at + 1 : at + 5], "big") >= 72]
    for step in range(1, 120):
        state, kinds, offsets = ScanState(), [], []
        for at in range(0, len(STREAM), step):
            starts, state = scan(state, STREAM[at : at + step])
            kinds += [start.kind for start in starts]
            offsets += [at + start.offset for start in starts]
        assert kinds == KINDS, step
        assert offsets == begins, step
        assert state == ScanState()


def test_a_scan_that_stops_before_a_frame_finds_it_again() -> None:
    for step in (1, 3, 7, 11, 400):
        payloads = [STREAM[at : at + step] for at in range(0, len(STREAM), step)]
        state, kinds = ScanState(), []
        while payloads:
            payload = payloads.pop(0)
            starts, after = scan(state, payload)
            if starts:
                kinds.append(starts[0].kind)
                (again, *_), _ = scan(starts[0].before, payload[starts[0].cut :])
                assert again.kind == starts[0].kind
            state = after
        assert kinds[0] is not None
        assert kinds[0] == FrameKind.BEGIN


def test_a_data_frame_splits_into_two_that_say_the_same() -> None:
    first, second = Http2Frame(DATA, 1, 5, b"abcdef").split(2)
    assert (first.payload, first.flags, second.payload, second.flags) == (b"ab", 0, b"cdef", 1)
    assert first.stream_id == second.stream_id == 5
